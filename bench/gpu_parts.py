"""The parts of `bench gpu`, each in a process of its own, and what is made of their lines: a document and a short table."""

from __future__ import annotations

import argparse
import datetime
import importlib
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from tiercache.bench.figures import Figure, Result
from tiercache.bench.gpu_bench import DRY, Bench, Card, Check, Line, Measured, Note, lines
from tiercache.bench.gpu_rig import CudaRig, LazyRig, Rig
from tiercache.bench.machine import commit, machine
from tiercache.bench.show import conditions, quantity
from tiercache.errors import MemoryRefused
from tiercache.sizes import format_size

NO_CARD = 2
LIMIT = 150.0
"""Seconds after which a part is given up."""
_START = "import sys; sys.path[:] = sys.argv[1].split(':'); from tiercache.bench.gpu import main; sys.exit(main(sys.argv[2:]))"


class GpuResult(Result, frozen=True, kw_only=True):
    """What was found: figures as of every program, and what held."""

    dry_run: bool
    seed: int
    card: dict[str, str | int | float]
    checks: list[Check]


def run_part(name: str, out: Path, seed: int, *, dry: bool) -> int:
    """Run one part in this process; its lines go to `out`."""
    try:
        rig: Rig = LazyRig(seed) if dry else CudaRig()
    except MemoryRefused as error:
        print(error, file=sys.stderr)
        return NO_CARD
    bench = Bench(rig, seed, out)
    bench.card()
    importlib.import_module(f"tiercache.bench.gpu_{name}").measure(bench)
    bench.close()
    return 0


def run_all(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the chosen parts, write the document, print the table, and return the exit status."""
    console = Console(highlight=False, emoji=False, markup=False, width=None if sys.stdout.isatty() else 120)
    seed = secrets.randbits(31) if options.seed is None else options.seed
    began = time.monotonic()
    found: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="tiercache-bench-") as folder:
        known = machine(Path(folder))
        for name in options.parts:
            status, said, seconds = _part(name, Path(folder) / name, seed, dry=options.dry_run)
            if status == NO_CARD and not lines(Path(folder) / name):
                print("bench gpu needs a CUDA device, and there is none: --dry-run shows the programs without one", file=sys.stderr)
                return NO_CARD
            found += lines(Path(folder) / name)
            found.append(Check(f"part {name} came to its end", status == 0, f"{seconds:.0f} s" if status == 0 else said))
            console.print(f"{name}: {seconds:.0f} s", style="dim")
    result = GpuResult(
        program="gpu",
        quick=options.dry_run,
        command=shlex.join(["tiercache", "bench", "gpu", *arguments]),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        seconds=time.monotonic() - began,
        commit=commit(),
        machine=known,
        figures=[line.figure for line in found if isinstance(line, Measured)],
        notes=[*([DRY] if options.dry_run else []), *dict.fromkeys(line.text for line in found if isinstance(line, Note))],
        dry_run=options.dry_run,
        seed=seed,
        card=next((line.properties for line in found if isinstance(line, Card)), {}),
        checks=[line for line in found if isinstance(line, Check)],
    )
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    show(console, result)
    return 0 if all(check.passed for check in result.checks) else 1


def _part(name: str, out: Path, seed: int, *, dry: bool) -> tuple[int, str, float]:
    """Run a part; return its status, the end of what it said, and how long it took."""
    words = ["--part", name, "--lines", str(out), "--seed", str(seed), *(["--dry-run"] if dry else [])]
    began = time.monotonic()
    try:
        # The path is handed on whole: as a script this was found by it alone.
        command = [sys.executable, "-c", _START, ":".join(sys.path), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return 1, f"not done after {LIMIT:.0f} s", time.monotonic() - began
    return done.returncode, done.stderr[-2000:] or f"status {done.returncode}", time.monotonic() - began


def show(console: Console, result: GpuResult) -> None:
    """Print a short table."""
    if result.figures:
        console.print(_shares(result.figures))
    for figure in result.figures:
        if "block bytes" not in figure.at:
            beside = "" if figure.reference is None else f", {figure.ratio:.2f} of {figure.reference.name}"
            console.print(f"{figure.name} ({conditions(figure)}): {quantity(figure.value.median, figure.unit)}{beside}")
    for note in result.notes:
        console.print(f"note: {note}")
    failed = [check for check in result.checks if not check.passed]
    for check in failed:
        console.print(f"FAILED: {check.what}: {check.detail}")
    judged = [figure for figure in result.figures if figure.reached is not None]
    console.print(f"{result.card.get('card', 'no card')}, {result.date}, {result.seconds:.0f} s, seed {result.seed}")
    console.print(f"{len(result.checks) - len(failed)} of {len(result.checks)} checks held")
    if judged:
        console.print(f"{sum(map(_reached, judged))} of {len(judged)} goals reached")


def _shares(figures: Sequence[Figure]) -> Table:
    """Return a row a way: the share of the card's own rate at each size of a block; what misses its goal is marked."""
    sizes = sorted({size for figure in figures if isinstance(size := figure.at.get("block bytes"), int)})
    table = Table(title="share of the card's own rate, by bytes of a block", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for size in sizes:
        table.add_column(format_size(size), justify="right")
    for name in dict.fromkeys(figure.name for figure in figures if "block bytes" in figure.at):
        row = {figure.at["block bytes"]: figure for figure in figures if figure.name == name}
        table.add_row(name, *(_share(row.get(size)) for size in sizes))
    return table


def _share(figure: Figure | None) -> str:
    if figure is None or figure.ratio is None:
        return ""
    return f"{figure.ratio:.2f}{'' if figure.reached is None or figure.reached else ' !'}"


def _reached(figure: Figure) -> bool:
    return bool(figure.reached)
