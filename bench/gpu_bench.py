"""What a part of `bench gpu` is given, and what it leaves: checks that held or did not, figures, notes, line by line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tiercache.bench.figures import Figure, Goal, Reference, Unit
from tiercache.bench.gpu_rig import Rig
from tiercache.bench.run import Run
from tiercache.bench.timing import quiet

DRY = "dry run: no figure"


class Check(msgspec.Struct, frozen=True, tag=True):
    """Something that holds or does not."""

    what: str
    passed: bool
    detail: str = ""


class Measured(msgspec.Struct, frozen=True, tag=True):
    """A figure."""

    figure: Figure


class Note(msgspec.Struct, frozen=True, tag=True):
    """What a reader must know."""

    text: str


class Card(msgspec.Struct, frozen=True, tag=True):
    """What it ran on."""

    properties: dict[str, str | int | float]


Line = Check | Measured | Note | Card
"""One line of a part's output: what was found is kept, also when the part does not come to its end."""


class Bench:
    """One part's dealings: the rig, random numbers, and where its lines go. In a dry run a figure leaves its name alone."""

    def __init__(self, rig: Rig, seed: int, out: Path) -> None:
        self.rig = rig
        self.seed = seed
        self.draw = np.random.Generator(np.random.SFC64(seed))
        self.run = Run(folder=out.parent, quick=rig.dry)
        self._out = out.open("ab")

    def pick(self, dry: Any, card: Any) -> Any:
        """Return the one that belongs to this run."""
        return dry if self.rig.dry else card

    def check(self, what: str, passed: bool, detail: str = "") -> None:
        """Say whether something held."""
        self._say(Check(what, bool(passed), detail))

    def note(self, text: str) -> None:
        """Say what a reader must know."""
        self._say(Note(text))

    def card(self) -> None:
        """Say what this runs on."""
        self._say(Card(self.rig.properties()))

    def add(
        self,
        name: str,
        samples: Sequence[float],
        unit: Unit,
        *,
        at: dict[str, str | int | float],
        reference: Reference | None = None,
        goal: Goal | None = None,
    ) -> None:
        """Add a figure; in a dry run, that it was reached."""
        if self.rig.dry:
            where = ", ".join(f"{key} {value}" for key, value in at.items())
            self._say(Check(f"{name} ({where})", True, DRY))
        else:
            self._say(Measured(self.run.add(name, samples, unit, at=at, reference=reference, goal=goal)))

    def samples(self, call: Callable[[], float], *, size: int | None = None) -> list[float]:
        """Return what a few calls say: seconds, or bytes a second for `size` bytes each. The first call is not counted."""
        call()
        with quiet():
            times = [call() for _ in range(self.pick(1, 7))]
        return times if size is None else [size / max(seconds, 1e-9) for seconds in times]

    def close(self) -> None:
        """End the output."""
        self._out.close()

    def _say(self, line: Line) -> None:
        self._out.write(msgspec.json.encode(line) + b"\n")
        self._out.flush()


def lines(path: Path) -> list[Line]:
    """Return the lines that a part has left."""
    decoder = msgspec.json.Decoder(Line)
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [decoder.decode(line) for line in whole]
