"""Neighbouring slots, brought together: what lies side by side in a tier crosses a bus in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """`length` neighbouring slots of the tier at `position`, from slot `first` on."""

    position: int
    first: int
    length: int


def neighbours(positions: Sequence[int], slots: Sequence[int], *, together: int | None = None) -> tuple[list[int], list[Run]]:
    """Return the places of `slots` in the order of tier and slot, and the runs of neighbours that they make in that order.

    The first `length` places of the order are the slots of the first run, and so on. No run goes over a multiple of `together`.
    Which of the transfer's blocks a slot belongs to does not matter: a pool gives free slots in any order, so that a prompt's
    slots are more often neighbours as a set than one after the other.
    """
    order = sorted(range(len(slots)), key=lambda place: (positions[place], slots[place]))
    runs: list[Run] = []
    for place in order:
        position, slot = positions[place], slots[place]
        last = runs[-1] if runs else None
        if last and last.position == position and last.first + last.length == slot and (together is None or slot % together):
            runs[-1] = Run(position, last.first, last.length + 1)
        else:
            runs.append(Run(position, slot, 1))
    return order, runs
