"""One run of one program: its conditions, what it found so far, and the calibrations around its measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tiercache.bench.figures import Figure, Goal, Reference, Spread, Unit
from tiercache.bench.goals import KEYS

T = TypeVar("T")
Sampler = Callable[[], Sequence[float]]
"""Takes a few samples of a reference."""


class Beside:
    """A reference that is taken before and after what is measured beside it; `reference` is there after the end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._before: Sequence[float] = ()
        self._after: Sequence[float] = ()

    @property
    def reference(self) -> Reference:
        """Both samples as one, and how far the second is from the first."""
        before, after = Spread.of(self._before), Spread.of(self._after)
        drift = after.median / before.median if before.median else 1.0
        return Reference(self.name, Spread.of([*self._before, *self._after]), drift)


@dataclass(slots=True)
class Run:
    """What a program is given. `folder` lies on the disk to be measured, and is empty at the start."""

    folder: Path
    quick: bool
    console: Console = field(default_factory=lambda: Console(stderr=True))
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def pick(self, quick: T, full: T) -> T:
        """Return the one that belongs to this run."""
        return quick if self.quick else full

    def note(self, text: str) -> None:
        """Say what a reader must know: what was not measured, and why."""
        self.notes.append(text)
        self.console.print(f"note: {text}", highlight=False)

    def add(
        self,
        name: str,
        samples: Sequence[float],
        unit: Unit,
        *,
        at: dict[str, str | int | float] | None = None,
        reference: Reference | None = None,
        goal: Goal | None = None,
    ) -> Figure:
        """Add a figure and return it."""
        assert goal is None or goal.key in KEYS, f"no goal has the key {goal.key!r}"
        figure = Figure(name=name, at=at or {}, unit=unit, value=Spread.of(samples), reference=reference, goal=goal)
        self.figures.append(figure)
        return figure

    def reference(self, name: str, samples: Sequence[float]) -> Reference:
        """Return a reference of samples that were taken in turns with what is compared with it, in the order of their taking."""
        half = max(1, len(samples) // 2)
        before, after = Spread.of(samples[:half]), Spread.of(samples[-half:])
        return Reference(name, Spread.of(samples), after.median / before.median if before.median else 1.0)

    @contextmanager
    def beside(self, name: str, sampler: Sampler) -> Iterator[Beside]:
        """Take samples of a reference before and after the block."""
        beside = Beside(name)
        beside._before = sampler()
        yield beside
        beside._after = sampler()

    def track(self, items: Iterable[T], what: str, *, total: int | None = None) -> Iterator[T]:
        """Go through `items` beside a progress bar."""
        with self._progress() as progress:
            yield from progress.track(items, description=what, total=total)

    def _progress(self) -> Progress:
        steps = TextColumn("{task.completed}/{task.total}")
        columns = (TextColumn("{task.description:<40}"), BarColumn(), steps, TimeElapsedColumn())
        return Progress(*columns, console=self.console, transient=True)
