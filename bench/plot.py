"""What is to be drawn, as values. Drawing needs matplotlib; saying what to draw doesn't."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from tiercache.bench.figures import Figure


class Plot(NamedTuple):
    """One picture: the figures called `figures` over their condition `x`, a line for each value of `series`.

    `series` are names of conditions, or `name` for the figure's own. `of` draws the ratio to the reference instead of the value,
    and `limit` a line at a goal.
    """

    stem: str
    title: str
    figures: tuple[str, ...]
    x: str
    series: tuple[str, ...] = ("name",)
    of: Literal["value", "ratio"] = "value"
    label: str = ""
    """What the y axis shows; from the unit where it is empty."""
    limit: float | None = None
    chosen: Callable[[Figure], bool] = lambda _: True
    """Which of these figures are drawn."""
    log: bool = True
    """Both axes in powers, for values over several magnitudes."""
