"""Plots of figures, as PNG and SVG, by matplotlib (extra `bench`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from tiercache.bench.figures import Figure, Result, Unit
from tiercache.bench.plot import Plot
from tiercache.bench.show import quantity
from tiercache.sizes import format_size

_LABELS: dict[Unit, str] = {"s": "time", "B/s": "rate", "B": "bytes", "1/s": "per second", "1": ""}
_MARKERS = "osD^vPX*"
_LEGEND_WIDTH = 110
"""Letters that fit below the axes, side by side; a column takes some more than its longest label."""


def draw(result: Result, plots: Sequence[Plot], folder: Path) -> list[Path]:
    """Draw the plots for which there are figures, and return the SVG files. The same result gives the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn: list[Path] = []
    with mpl.rc_context({"svg.hashsalt": "tiercache", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        for plot in plots:
            figures = [each for each in result.figures if each.name in plot.figures and plot.x in each.at and plot.chosen(each)]
            if plot.of == "ratio":
                figures = [figure for figure in figures if figure.ratio is not None]
            if figures:
                drawn.append(_draw(result, plot, figures, folder))
    return drawn


def _draw(result: Result, plot: Plot, figures: Sequence[Figure], folder: Path) -> Path:
    canvas = Canvas(figsize=(7.2, 4.6), layout="constrained")
    axes = canvas.add_subplot()
    numeric = all(isinstance(figure.at[plot.x], (int, float)) for figure in figures)
    for number, (label, line) in enumerate(_lines(plot, figures).items()):
        style = {"marker": _MARKERS[number % len(_MARKERS)], "label": label, "markersize": 4.5, "linewidth": 1.3, "capsize": 2.5}
        if not numeric:
            style["linestyle"] = "none"  # nothing lies between names
        middle, low, high = zip(*(_heights(plot, figure) for figure in line), strict=True)
        below = [max(0.0, at - end) for at, end in zip(middle, low, strict=True)]
        above = [max(0.0, end - at) for at, end in zip(middle, high, strict=True)]
        places = [figure.at[plot.x] if numeric else fill(str(figure.at[plot.x]), 14) for figure in line]
        axes.errorbar(places, middle, yerr=[below, above], **style)  # type: ignore[arg-type]
    if plot.limit is not None:
        axes.axhline(plot.limit, color="0.4", linestyle="--", linewidth=1, label="goal")
    if numeric and plot.log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
    if numeric:
        axes.set_xticks(sorted({float(figure.at[plot.x]) for figure in figures}))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(plot.x, value)))
    _scale_heights(axes, plot, figures[0].unit)
    axes.set_xlabel(plot.x)
    axes.set_title(plot.title, loc="left", fontsize=10, fontweight="bold")
    axes.grid(visible=True, which="major", color="0.9")
    # Below the axes: above them it lies on some line sooner or later.
    under = -0.12 if numeric else -0.24
    longest = max(len(text) for text in axes.get_legend_handles_labels()[1])
    columns = max(1, min(3, _LEGEND_WIDTH // (longest + 6)))
    legend = axes.legend(loc="upper center", bbox_to_anchor=(0.5, under), ncols=columns, frameon=False, fontsize=8)
    machine = result.machine
    where = f"{machine['processor']}, {machine['cpus']} cores · {result.date[:10]} · {result.commit}" + " · quick" * result.quick
    # Above all the rest, and no part of the layout, which would keep the title away from it.
    head = canvas.text(0.995, 1.0, where, ha="right", va="bottom", fontsize=6.5, color="0.45")
    head.set_in_layout(False)
    path = folder / f"{plot.stem}.svg"
    for file, metadata in ((path.with_suffix(".png"), {"Software": None}), (path, {"Date": None})):
        canvas.savefig(file, dpi=130, metadata=metadata, bbox_inches="tight", bbox_extra_artists=[head, legend])
    return path


def _lines(plot: Plot, figures: Sequence[Figure]) -> dict[str, list[Figure]]:
    lines: dict[str, list[Figure]] = {}
    for figure in figures:
        known = {"name": figure.name, **figure.at}
        lines.setdefault(", ".join(_named(key, known[key]) for key in plot.series if key in known), []).append(figure)
    return lines


def _heights(plot: Plot, figure: Figure) -> tuple[float, float, float]:
    value = figure.value
    if plot.of == "value":
        return value.median, value.low, value.high
    assert figure.reference is not None
    by = figure.reference.value.median
    return value.median / by, value.low / by, value.high / by


def _scale_heights(axes: Axes, plot: Plot, unit: Unit) -> None:
    if plot.log and plot.of == "value":
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # powers of ten alone may lie outside the axis
    else:
        axes.set_ylim(bottom=0)
    if plot.of == "value":
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: quantity(value, unit)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(plot.label or (_LABELS[unit] if plot.of == "value" else "ratio to the reference"))


def _named(key: str, value: str | int | float) -> str:
    return value if isinstance(value, str) else f"{key} {_tick(key, float(value))}"


def _tick(key: str, value: float) -> str:
    if key.endswith("bytes"):
        return format_size(int(value)).replace(".0 ", " ")
    for scale, name in ((1 << 20, "M"), (1 << 10, "k")):
        if value >= scale and value % scale == 0:
            return f"{value / scale:g}{name}"
    for scale, name in ((1_000_000, "M"), (1_000, "k")):
        if value >= scale and value * 10 % scale == 0:
            return f"{value / scale:g}{name}"
    return f"{value:g}"
