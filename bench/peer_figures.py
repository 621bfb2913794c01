"""Figures of sides that are compared: each one's own, and ours beside the peer's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tiercache.bench.figures import Goal, Reference, Spread
from tiercache.bench.peer_link import CHUNKS
from tiercache.bench.peer_sides import Prompt
from tiercache.bench.run import Run

Samples = Mapping[str, Sequence[float]]
"""Seconds of one call, by the side that was called."""


def rates(prompt: Prompt, samples: Iterable[float]) -> list[float]:
    """Return seconds of one prompt as bytes per second."""
    return [prompt.bytes / sample for sample in samples]


def add_rates(run: Run, name: str, prompt: Prompt, samples: Samples, limit: Reference | None) -> None:
    """Add the rate of each side, beside what the machine can do at best."""
    for side, times in samples.items():
        run.add(name, rates(prompt, times), "B/s", at=_at(prompt, by=side), reference=limit)


def add_times(run: Run, name: str, prompt: Prompt, samples: Samples) -> None:
    """Add the seconds of each side."""
    for side, times in samples.items():
        run.add(name, times, "s", at=_at(prompt, by=side))


def add_ratio(run: Run, name: str, prompt: Prompt, samples: Samples, pair: tuple[str, str], goal: Goal | None = None) -> None:
    """Add the rate of the first of a pair of sides with that of the second as its reference, if both were measured."""
    ours, theirs = pair
    if ours in samples and theirs in samples:
        reference = Reference(theirs, Spread.of(rates(prompt, samples[theirs])))
        run.add(name, rates(prompt, samples[ours]), "B/s", at=_at(prompt, by=ours), reference=reference, goal=goal)


def _at(prompt: Prompt, *, by: str) -> dict[str, str | int | float]:
    return {"chunk bytes": prompt.bytes // CHUNKS, "by": by}
