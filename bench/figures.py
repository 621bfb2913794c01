"""What a benchmark found: figures, each with its spread and, where there is one, the reference of the same run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal, Self

import msgspec

Unit = Literal["s", "B/s", "B", "1/s", "1"]
LEAST_SAMPLES = 5
"""Of a figure in a full run; a quick one takes fewer."""


class Spread(msgspec.Struct, frozen=True):
    """Samples of one quantity: their median, their quartiles, and how slow the slowest hundredth is."""

    median: float
    low: float
    """A quarter of the samples are lower."""
    high: float
    """A quarter of the samples are higher."""
    p99: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Self:
        """Return the spread of `samples`, at least one."""
        ordered = sorted(samples)
        return cls(
            statistics.median(ordered), _quantile(ordered, 0.25), _quantile(ordered, 0.75), _quantile(ordered, 0.99), len(ordered)
        )


class Reference(msgspec.Struct, frozen=True):
    """What a figure is compared with, taken just before and just after it, or in turns with it."""

    name: str
    value: Spread
    drift: float = 1.0
    """The median after, as a fraction of the one before: far from 1, the machine changed under the measurement."""


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """What a figure, or its ratio to the reference, is to reach. One of the limits is given."""

    key: str
    """Which row of `goals.GOALS` this belongs to."""
    of: Literal["ratio", "value"] = "ratio"
    at_most: float | None = None
    at_least: float | None = None

    def reached(self, found: float) -> bool:
        """Return whether `found` is within the limits."""
        return (self.at_most is None or found <= self.at_most) and (self.at_least is None or found >= self.at_least)


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity under the conditions `at`."""

    name: str
    at: dict[str, str | int | float]
    unit: Unit
    value: Spread
    reference: Reference | None = None
    goal: Goal | None = None

    @property
    def ratio(self) -> float | None:
        """The median as a fraction of the reference's."""
        return self.value.median / self.reference.value.median if self.reference and self.reference.value.median else None

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; None where there is none, or no reference to judge by."""
        if self.goal is None:
            return None
        found = self.value.median if self.goal.of == "value" else self.ratio
        return None if found is None else self.goal.reached(found)


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one program found in one run."""

    program: str
    quick: bool
    command: str
    date: str
    seconds: float
    """How long the run took."""
    commit: str
    machine: dict[str, str | int | float]
    figures: list[Figure]
    notes: list[str] = []
    """What could not be measured, and why; what a reader must know of the run."""


def _quantile(ordered: Sequence[float], share: float) -> float:
    # Nearest rank: a quantile is a sample that was measured.
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
