"""`tiercache bench` and `python -m tiercache.bench`: measure this machine and what the cache makes of it."""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from tiercache.bench.figures import Result
from tiercache.bench.machine import commit, file_system, machine
from tiercache.bench.page import page
from tiercache.bench.programs import NAMES, ON_DISK, load
from tiercache.bench.run import Run
from tiercache.bench.show import tables
from tiercache.bench.store import read_all, write

_IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files can't be read from anywhere else than memory."""


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark that `arguments` name and return the exit status."""
    if arguments[:1] == ["gpu"]:
        return int(importlib.import_module("tiercache.bench.gpu").main(arguments[1:]))
    listed = "\n".join(f"  {name:<10}{what}" for name, what in NAMES.items())
    parser = argparse.ArgumentParser(
        prog="tiercache bench",
        description="Measure this machine and what the cache makes of it: times and rates, not a test.",
        epilog=f"programs:\n{listed}\n\n  gpu       copies of a CUDA device, apart from all: `gpu --help`",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("program", nargs="?", choices=(*NAMES, "all"), default="all", help="default: all, a process each")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, less of each; for a first look")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write JSON and plots there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write a page there, of all results in --out")
    parser.add_argument("--directory", type=Path, help="a folder on the disk to be measured; default: the temporary one")
    options = parser.parse_args(arguments)
    if options.page is not None and options.out is None:
        parser.error("--page is made from the results in --out, which is not given")
    if options.out is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--out draws plots by matplotlib, which is not installed: pip install 'tiercache[bench]'")
    _require_folders(parser, options)
    before = signal.signal(signal.SIGTERM, _end)  # as an interrupt does: in order, so that nothing stays in the folder
    try:
        status = _all(options) if options.program == "all" else _one(options, arguments)
    finally:
        signal.signal(signal.SIGTERM, before)
    if options.page is not None:
        write_page(options.page, options.out)
    return status


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _require_folders(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with status 2 if a folder can't be what it is named for: before minutes of measuring, not after them."""
    if options.directory is not None and not options.directory.is_dir():
        parser.error(f"--directory {options.directory} is no folder")
    where = Path(tempfile.gettempdir()) if options.directory is None else options.directory
    if options.program in (*ON_DISK, "all") and (kind := file_system(where)) in _IN_MEMORY:
        parser.error(f"{where} lies in memory ({kind}); name a folder on the disk to be measured with --directory")
    if options.out is not None and options.out.exists() and not options.out.is_dir():
        parser.error(f"--out {options.out} is no folder")
    if options.page is not None and (options.page.is_dir() or not options.page.resolve().parent.is_dir()):
        parser.error(f"--page {options.page} is no file in a folder that is there")
    if options.page is not None:
        try:
            read_all(options.out)
        except (OSError, msgspec.ValidationError, msgspec.DecodeError) as error:
            parser.error(f"--page is made of all results in {options.out}, of which one can't be read: {error}")


def _one(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    program = load(options.program)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tiercache-bench-", dir=options.directory) as scratch:
        run = Run(folder=Path(scratch), quick=options.quick)
        known = machine(run.folder)
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        program.measure(run)
    result = Result(
        program=program.name,
        quick=options.quick,
        command=shlex.join(["tiercache", "bench", *arguments]),
        date=date,
        seconds=time.monotonic() - began,
        commit=commit(),
        machine=known,
        figures=run.figures,
        notes=run.notes,
    )
    console = Console(highlight=False, emoji=False, markup=False, width=None if sys.stdout.isatty() else 120)
    for table in tables(program.name, run.figures):
        console.print(table)
    if options.out is not None:
        write(result, options.out)
        # By name: matplotlib is an extra, and takes a second to load.
        importlib.import_module("tiercache.bench.draw").draw(result, program.plots, options.out)
    return 0


def _all(options: argparse.Namespace) -> int:
    """Run every program in a process of its own: what one leaves in memory is not the next one's. The first failure is returned."""
    shared = ["--quick"] * options.quick
    for name in ("out", "directory"):
        value = getattr(options, name)
        shared += [f"--{name}", str(value)] if value is not None else []
    statuses = [_wait(subprocess.Popen([sys.executable, "-m", "tiercache.bench", name, *shared])) for name in NAMES]
    return next((status for status in statuses if status), 0)


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Return the status of a program; when this process is to end, that one ends first, in order."""
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


def write_page(path: Path, folder: Path, *, pictures: str | None = None) -> None:
    """Write the page of all results in `folder` to `path`; `pictures` is where the page finds their plots."""
    results = read_all(folder)
    ordered = {name: results[name] for name in NAMES if name in results}
    plots = {name: [plot.stem for plot in load(name).plots if (folder / f"{plot.stem}.svg").exists()] for name in ordered}
    where = os.path.relpath(folder, path.parent) if pictures is None else pictures
    path.write_text(page(ordered, plots, pictures=where), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
