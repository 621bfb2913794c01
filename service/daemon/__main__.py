"""Runs a daemon: `python -m tiercache.service.daemon --config FILE [--socket PATH]`."""

from __future__ import annotations

import sys

import typer

from tiercache.service.cli_serve import serve

if __name__ == "__main__":
    typer.run(serve)
    sys.exit(0)
