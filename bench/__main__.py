"""`tiercache bench` and `python -m tiercache.bench`: measure this machine and what the cache makes of it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiercache.bench import tiers, tree


def main(arguments: Sequence[str]) -> int:
    """Run the benchmarks that `arguments` name and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="tiercache bench", description="Measure this machine and what the cache makes of it: times and rates, not a test."
    )
    parser.add_argument("what", nargs="?", choices=("tiers", "tree", "all"), default="all", help="default: all")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, less of each; for a first look")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file")
    parser.add_argument("--directory", type=Path, help="a folder on the disk to be measured; default: the temporary one")
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {
        "machine": {"python": platform.python_version(), "system": platform.platform(), "cpus": os.cpu_count()},
        "quick": options.quick,
    }
    if options.what in ("tiers", "all"):
        figures, capacities = tiers.measure(options.directory, quick=options.quick)
        print(tiers.table(figures), end="\n\n")
        found["tiers"] = [figure.to_json() for figure in figures]
        found["capacity"] = [dataclasses.asdict(capacity) for capacity in capacities]
    if options.what in ("tree", "all"):
        rows = tree.measure(quick=options.quick)
        print(tree.table(rows), end="\n\n")
        found["tree"] = [row.to_json() for row in rows]
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
