"""Figures for people: quantities with their units, tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from tiercache.bench.figures import Figure, Spread, Unit
from tiercache.sizes import format_size

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def quantity(value: float, unit: Unit) -> str:
    """Return a value with three digits and a unit that suits it."""
    if unit == "s":
        scale, name = next(((scale, name) for scale, name in _TIMES if abs(value) >= scale), _TIMES[-1])
        return f"{_digits(value / scale)} {name}" if value else "0 s"
    if unit == "B/s":
        return f"{_digits(value / 1e9)} GB/s" if value >= 1e9 else f"{_digits(value / 1e6)} MB/s"
    if unit == "B":
        return f"{_digits(value)} B" if value < 1024 else format_size(int(value))
    if unit == "1/s":
        return f"{_digits(value)}/s"
    return _digits(value)


def spread(value: Spread, unit: Unit) -> str:
    """Return a median, and the quartiles in brackets if they differ."""
    middle = quantity(value.median, unit)
    if value.count == 1 or value.low == value.high:
        return middle
    return f"{middle} [{quantity(value.low, unit)}, {quantity(value.high, unit)}]"


def conditions(figure: Figure) -> str:
    """Return the conditions of a figure in one line."""
    return ", ".join(f"{name} {_condition(name, value)}" for name, value in figure.at.items())


def verdict(figure: Figure) -> str:
    """Return what became of a figure's goal."""
    return {None: "", True: "reached", False: "missed"}[figure.reached]


def kinds(figures: Sequence[Figure]) -> dict[tuple[str, tuple[str, ...]], list[Figure]]:
    """Return the figures by name and by the names of their conditions, each kind where it came first."""
    found: dict[tuple[str, tuple[str, ...]], list[Figure]] = {}
    for figure in figures:
        found.setdefault((figure.name, tuple(figure.at)), []).append(figure)
    return found


def tables(program: str, figures: Sequence[Figure]) -> list[Table]:
    """Return a table for each kind of figure."""
    made: list[Table] = []
    for (name, keys), group in kinds(figures).items():
        table = Table(title=f"{program}: {name}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
        for key in keys:
            table.add_column(key, justify="right")
        for heading in ("median", "quartiles", "p99", "reference", "ratio"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("goal")
        for figure in group:
            table.add_row(*(_condition(key, value) for key, value in figure.at.items()), *_cells(figure))
        made.append(table)
    return made


def _cells(figure: Figure) -> list[str]:
    value, unit = figure.value, figure.unit
    quartiles = f"{quantity(value.low, unit)} to {quantity(value.high, unit)}" if value.count > 1 else ""
    reference = f"{quantity(figure.reference.value.median, unit)} {figure.reference.name}" if figure.reference else ""
    ratio = "" if figure.ratio is None else _digits(figure.ratio)
    p99 = quantity(value.p99, unit) if value.count >= 100 else ""
    return [quantity(value.median, unit), quartiles, p99, reference, ratio, verdict(figure)]


def _condition(name: str, value: str | int | float) -> str:
    if isinstance(value, int) and name.endswith("bytes"):
        return format_size(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def _digits(value: float) -> str:
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}"
