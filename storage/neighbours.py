"""Neighbouring slots, brought together: what lies side by side in a tier crosses a bus in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Run(NamedTuple):
    """`length` neighbouring slots of the tier at `position`, from slot `first` on."""

    position: int
    first: int
    length: int


def neighbours(positions: Sequence[int], slots: Sequence[int], *, together: int | None = None) -> tuple[list[int], list[Run]]:
    """Return the places of `slots` in the order of tier and slot, and the runs of neighbours that they make in that order.

    The first `length` places of the order are the slots of the first run, and so on. No run goes over a multiple of `together`.
    Which of the transfer's blocks a slot belongs to does not matter: a pool gives free slots in any order, so that a prompt's
    slots are more often neighbours as a set than one after the other. In numpy, since one layer of a long prompt is hundreds of
    slots and less than a millisecond of the bus: 512 neighbours take 40 µs, and a loop over them took six times as long.
    """
    where, numbers = np.asarray(positions, np.int64), np.asarray(slots, np.int64)
    order = np.lexsort((numbers, where))
    where, numbers = where[order], numbers[order]
    begins = np.ones(len(numbers), np.bool_)
    begins[1:] = (where[1:] != where[:-1]) | (numbers[1:] != numbers[:-1] + 1)
    if together is not None:
        begins |= numbers % together == 0
    [at] = begins.nonzero()
    lengths = np.diff(at, append=len(numbers))
    return order.tolist(), [Run(*run) for run in zip(where[at].tolist(), numbers[at].tolist(), lengths.tolist(), strict=True)]
