"""What the demo shows: one line a request, the tiers after each scene, tables and the verdict at the end.

Made for 80 columns; more are used for longer texts. Without a terminal there is no progress bar, and every line is plain.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from tiercache.config import Config
from tiercache.service.demo.places import Places
from tiercache.service.demo.result import Life, Outcome, Result
from tiercache.service.report import Report, TierReport
from tiercache.sizes import format_size
from tiercache.spec import KVSpec
from tiercache.types import Tier

if TYPE_CHECKING:
    from tiercache.service.runners import Loaded

TIERS = sorted(Tier, reverse=True)
COLOURS = {Tier.HBM: "green", Tier.DRAM: "cyan", Tier.SSD: "magenta"}
_HEAD = f"  {'':<12}{'prompt':>7}{'HBM':>5}{'DRAM':>5}{'SSD':>5}{'new':>5}{'first':>8}{'without':>8}   text"
_BEFORE_TEXT = len(_HEAD) - len("text")


class Screen:
    """A console with a progress bar below; a context manager that leaves the terminal as it was."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = Progress(
            TextColumn("{task.description}", table_column=None),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, count="")
        self._stage = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    # --- while it runs ----------------------------------------------------------------------------------------------------

    def stage(self, name: str, fraction: float | None) -> None:
        """Say what is being prepared, and how far it is."""
        if name != self._stage:
            self._stage = name
            self.console.print(f"{name} ...", style="dim")
        if fraction is None:
            self._bar.update(self._task, description=name, total=None, completed=0, count="")
        else:
            self._bar.update(self._task, description=name, total=1.0, completed=fraction, count=f"{fraction:.0%}")

    def begin(self, loaded: Loaded, spec: KVSpec, config: Config, places: Places, requests: int) -> None:
        """Say which model runs in which tiers, and where."""
        sizes = ", ".join(f"{tier.tier} {format_size(tier.bytes)}" for tier in config.tiers)
        block = f"a block of {spec.block_size} tokens takes {format_size(spec.block_bytes)}"
        self.console.print()
        self.console.print(f"Model:  {loaded.namespace.model}, {spec.dtype}; {block}", markup=False)
        self.console.print(f"Tiers:  {sizes}")
        self.console.print(f"Files:  {places.directory}", style="dim", overflow="fold", markup=False)
        self._bar.update(self._task, total=requests, completed=0, description="", count=f"0 of {requests}")

    def serving(self, pid: int, life: Life, places: Places) -> None:
        """Say that the daemon is there, beside the demo's own process `pid`."""
        self.console.print(f"Demo:   process {pid} runs the model and maps the daemon's memory")
        self.console.print(f"Daemon: process {life.pid}, {_boot(life)}, served {_ms(life.started_seconds)} after its start")
        self.console.print(f"Socket: {places.socket}", style="dim", overflow="fold", markup=False)
        self.console.print()
        self.console.print("Prompt tokens by where their KV was found, and `new` ones, which were computed;")
        self.console.print("time to the first new token with the cache and without.")

    def scene(self, title: str) -> None:
        """Begin a scene."""
        self.console.print()
        self.console.print(title, style="bold")
        self.console.print(_HEAD, style="dim")

    def asking(self, label: str) -> None:
        """Say what is being asked."""
        self._bar.update(self._task, description=label)

    def outcome(self, outcome: Outcome) -> None:
        """Show what became of one request."""
        line = Text(f"  {outcome.request.label:<12}{outcome.tokens:>7}")
        for tier in TIERS:
            tokens = outcome.hit.get(tier, 0)
            line.append(f"{tokens or '·':>5}", style=COLOURS[tier] if tokens else "dim")
        line.append(f"{outcome.computed:>5}{_ms(outcome.first_token):>8}")
        line.append(f"{_ms(outcome.first_token_without):>8}", style="dim")
        line.append(" = " if outcome.same else " ≠ ", style="green" if outcome.same else "bold red")
        line.append(_fitted(outcome.texts, max(10, self.console.width - _BEFORE_TEXT)), style="italic")
        self.console.print(line, no_wrap=True, overflow="crop", soft_wrap=True)
        task = self._bar.tasks[0]
        self._bar.update(self._task, advance=1, count=f"{int(task.completed) + 1} of {int(task.total or 0)}")

    def tiers(self, report: Report) -> None:
        """Show how full the tiers are, and what has been copied since the daemon was started."""
        use = ", ".join(f"{tier.tier} {tier.used} of {tier.capacity}" for tier in report.tiers)
        moves = ", ".join(f"{source}→{target} {count}" for source, target, count in report.moves())
        self.console.print(f"  blocks held:  {use}", style="dim")
        self.console.print(f"  blocks moved: {moves}", style="dim")

    def stopping(self) -> None:
        """Say that the daemon is being stopped."""
        self._bar.update(self._task, description="stopping")

    def stopped(self, life: Life, seconds: float) -> None:
        """Say that the daemon has ended."""
        self.console.print()
        self.console.print("Restart: the daemon gets SIGTERM, and is started again", style="bold")
        self.console.print(f"  daemon: process {life.pid}, {_boot(life)}, ended {_ms(seconds)} later")

    def restarted(self, life: Life, drained: int) -> None:
        """Say that it is there again, and that it found `drained` more blocks on SSD than there were before it stopped."""
        self.console.print(f"  daemon: process {life.pid}, {_boot(life)}, started again in {_ms(life.started_seconds)}")
        self.console.print(f"  written down at the stop: {drained} blocks", style="dim")

    # --- the end ----------------------------------------------------------------------------------------------------------

    def log(self, lines: Iterable[str]) -> None:
        """Show the end of the daemon's log."""
        show_log(self.console, lines)

    def summary(self, result: Result, seconds: float) -> bool:
        """Show the tables and the verdict, and return whether it is yes."""
        report = result.report
        tables = [_scenes(result)] if result.outcomes else []
        if report is not None:
            tables += [_tiers(report.tiers), _moves(report, result.drained)]
        for table in tables:
            self.console.print()
            self.console.print(table)
        self.console.print()
        if result.outcomes:
            self._figures(result, seconds)
        reasons = result.reasons()
        if reasons:
            text, style = f"No: {'; '.join(reasons)}.", "bold red"
        else:
            ways = len(report.moves()) if report is not None else 0
            text = f"Yes: all {result.texts} texts are the same with the cache, and blocks moved all {ways} ways."
            style = "bold green"
        self.console.print(text, style=style, markup=False)
        return not reasons

    def _figures(self, result: Result, seconds: float) -> None:
        outcomes = [outcome for _, outcome in result.outcomes]
        prompt, computed = sum(outcome.tokens for outcome in outcomes), sum(outcome.computed for outcome in outcomes)
        drift = max(outcome.drift for outcome in outcomes)
        restart = ""
        if len(result.daemons) > 1:
            restart = f" The daemon was stopped, and started again in {_ms(result.daemons[-1].started_seconds)}."
        self.console.print(f"{len(outcomes)} requests in {seconds:.0f} s.{restart}")
        self.console.print(f"Of {prompt} prompt tokens {prompt - computed} came from the cache and {computed} were computed.")
        if client := result.client:
            socket = client.sent + client.received
            ratio = f", 1 byte for {client.read // socket} bytes of KV read" if socket else ""
            read, written = format_size(client.read), format_size(client.written)
            self.console.print(f"Through shared memory: {read} of KV read, {written} written.")
            self.console.print(f"Over the socket: {format_size(socket)}{ratio}.")
        self.console.print(f"Logits of first tokens differ by up to {drift:.0e}: floats are added in another order.")
        self.console.print()


def _scenes(result: Result) -> Table:
    table = _table("scene", "requests", "prompt", "computed", "first token", "without", "ratio")
    names = list(dict.fromkeys(scene for scene, _ in result.outcomes))
    for name in names:
        _add_outcomes(table, name.partition(":")[0], [outcome for scene, outcome in result.outcomes if scene == name])
    table.add_section()
    _add_outcomes(table, "all", [outcome for _, outcome in result.outcomes])
    return table


def _add_outcomes(table: Table, name: str, outcomes: list[Outcome]) -> None:
    with_cache = statistics.mean(outcome.first_token for outcome in outcomes)
    without = statistics.mean(outcome.first_token_without for outcome in outcomes)
    table.add_row(
        name,
        str(len(outcomes)),
        str(sum(outcome.tokens for outcome in outcomes)),
        str(sum(outcome.computed for outcome in outcomes)),
        _ms(with_cache),
        _ms(without),
        f"{without / with_cache:.1f}x",
    )


def _tiers(tiers: Iterable[TierReport]) -> Table:
    table = _table("tier", "blocks", "of", "KV", "tokens", "asked for", "found", "tokens per GiB")
    for tier in tiers:
        table.add_row(
            Text(str(tier.tier), style=COLOURS[tier.tier]),
            str(tier.used),
            str(tier.capacity),
            format_size(tier.used_bytes),
            str(tier.tokens),
            str(tier.queries),
            str(tier.hits),
            str(tier.tokens_per_gib),
        )
    return table


def _moves(report: Report, drained: int) -> Table:
    moves = report.moves() + report.leaps()
    table = _table("blocks moved", *(f"{source}→{target}" for source, target, _ in moves), "at stop", "evicted")
    table.add_row("", *(str(count) for *_, count in moves), str(drained), str(report.evicted))
    return table


def _table(first: str, *rest: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(first, no_wrap=True)
    for name in rest:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def show_log(console: Console, lines: Iterable[str]) -> None:
    """Show the end of the daemon's log, if there is any."""
    shown = list(lines)
    if shown:
        console.print("The end of the daemon's log:", style="dim")
    for line in shown:
        console.print(f"  {line}", style="dim", markup=False)


def _boot(life: Life) -> str:
    return f"boot {life.boot[:8]}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def _fitted(texts: Iterable[str], width: int) -> str:
    """Return texts in one line of at most `width` characters."""
    lines = [" ".join(text.split()) for text in texts]
    more = f" +{len(lines) - 1}" if len(lines) > 1 else ""
    first = lines[0]
    if len(first) + len(more) > width:
        first = first[: max(1, width - len(more) - 1)] + "…"
    return first + more
