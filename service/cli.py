"""The command line's first step: `tiercache`. What it can do is in `tiercache.service.commands`."""

from __future__ import annotations

import importlib
import signal
import sys
from io import TextIOWrapper
from typing import NoReturn

INTERRUPTED = 130


def main() -> NoReturn:
    """Run the command line and end the process. Ctrl-C, whatever it meets, says one line and exits with status 130."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows no arrows shows question marks
    try:
        # By name and in here: imports take a second on a busy machine, and a Ctrl-C may fall into it.
        # The daemon, whose start is waited for, is spared the modules of the other commands.
        serves = sys.argv[1:2] == ["serve"]
        importlib.import_module(f"tiercache.service.{'cli_serve' if serves else 'commands'}").app()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever presses twice means the same
        print("interrupted", file=sys.stderr)  # noqa: T201 - rich may be what was being imported
        sys.exit(INTERRUPTED)
    sys.exit(0)


if __name__ == "__main__":
    main()
