"""`tiercache bench gpu`: the GPU half on a card, in a few minutes; `python bench/gpu.py` does it from a plain checkout.

Each part is a process of its own: a fault that ends a context ends one part, and what it had found is kept. This module is the
door, and imports the rest by name, so that as a script it can say first where that is found.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = {
    "kernels": "every kernel against the exact reference",
    "order": "copies behind slow streams, order by events, a computation beside a promotion",
    "ipc": "two processes, one killed",
    "rates": "bytes a second over the bus and within the device",
    "promote": "a hit of 1k, 8k and 32k tokens brought up",
}
NEEDED = ("numpy", "msgspec", "rich", "xxhash")
"""What must be installed beside CuPy. torch is used where it is there."""


def main(arguments: Sequence[str]) -> int:
    """Run the parts and return the exit status: 0, 1 if a check failed, 2 without a card."""
    listed = "\n".join(f"  {name:<10}{what}" for name, what in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="tiercache bench gpu",
        description="Check the copies of a CUDA device and measure them: a card is needed, or --dry-run.",
        epilog=f"parts:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    parser.add_argument("--dry-run", action="store_true", help="run all of it small on a device that needs no card; no figure")
    parser.add_argument("--parts", nargs="+", choices=[*PARTS], default=[*PARTS], help="default: all")
    parser.add_argument("--seed", type=int, help="of shapes, slots and bytes; default: a new one")
    parser.add_argument("--part", choices=[*PARTS], help=argparse.SUPPRESS)
    parser.add_argument("--lines", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    lacking = [name for name in (*NEEDED, *(() if options.dry_run else ("cupy",))) if importlib.util.find_spec(name) is None]
    if lacking:
        print(f"bench gpu needs {', '.join(lacking)}: not installed here", file=sys.stderr)
        return 2
    parts = importlib.import_module("tiercache.bench.gpu_parts")
    if options.part is not None:
        return int(parts.run_part(options.part, options.lines, options.seed, dry=options.dry_run))
    return int(parts.run_all(options, arguments))


def _from_a_checkout() -> None:
    """Let the package of this checkout be found: last, since its folders bear names that published packages have, too."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).resolve().parent]
    if importlib.util.find_spec("tiercache") is None:
        sys.path.append(str(ROOT))


if __name__ == "__main__":
    _from_a_checkout()
    sys.exit(main(sys.argv[1:]))
