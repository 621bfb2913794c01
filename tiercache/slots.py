"""What the core needs of the slots of one tier: a Protocol, the states of a slot, and what a count of them says."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

SlotNumbers = Sequence[int] | NDArray[np.integer]
"""Slot numbers, each at most once."""


class SlotState(enum.IntEnum):
    """Who has a slot. Each slot is in exactly one state.

    ::

                  take               own
        FREE ────────────► HELD ◄──────────► OWNED
         ▲  ▲     give      │       hold       ▲
         │  └───────────────┤                  │ claim, from FREE
         │     restore      ▼ quarantine
         └──────────── QUARANTINED
    """

    FREE = 0
    """Nobody; may be taken."""
    HELD = 1
    """One transfer or reservation, which writes it, or still reads it after its block has left."""
    OWNED = 2
    """One block."""
    QUARANTINED = 3
    """One dead or silent process that may still touch it."""


class Census(NamedTuple):
    """The slots of one pool, counted anew one by one: how many in each state, and the units charged.

    `faults` says in words where the recount differs from the pool's own books; empty when they agree.
    """

    free: int
    held: int
    owned: int
    quarantined: int
    used: int
    budget: int
    faults: tuple[str, ...]


class Slots(Protocol):
    """The slots of one tier for blocks of one geometry: who has which.

    A call with a slot that is not in the state it needs, that does not exist or is named twice raises AuditFailed naming slot,
    state and expected state, and changes nothing. Calls come from one thread, the one that decides.
    """

    @property
    def capacity(self) -> int:
        """How many slots there are; slots are numbered from 0."""
        ...

    @property
    def budget(self) -> int:
        """Units that the slots in use may cost together."""
        ...

    @property
    def used(self) -> int:
        """Units that the slots in use cost; never above `budget`."""
        ...

    @property
    def free(self) -> int:
        """How many slots `take` would give now."""
        ...

    @property
    def generations(self) -> NDArray[np.uint32]:
        """One generation a slot, read-only; it grows by one, modulo 2**32, each time the slot becomes FREE."""
        ...

    def take(self, count: int) -> list[int]:
        """Move up to `count` slots from FREE to HELD at full charge and return them; fewer, or none, when there are no more."""
        ...

    def own(self, slots: SlotNumbers) -> None:
        """Move `slots` from HELD to OWNED: what was written is a block's now."""
        ...

    def hold(self, slots: SlotNumbers) -> None:
        """Move `slots` from OWNED to HELD: their block has left, or a transfer reads them as it leaves."""
        ...

    def give(self, slots: SlotNumbers) -> None:
        """Move `slots` from HELD to FREE, give their charge back and start their next generation."""
        ...

    def quarantine(self, slots: SlotNumbers) -> None:
        """Move `slots` from HELD to QUARANTINED: a process that is gone or silent may still touch them."""
        ...

    def restore(self, slots: SlotNumbers) -> None:
        """Move `slots` from QUARANTINED to FREE, give their charge back and start their next generation."""
        ...

    def claim(self, slots: SlotNumbers, charges: Sequence[int] | None = None) -> None:
        """Move `slots` from FREE to OWNED at `charges` (full when None): recovery finds them in use."""
        ...

    def settle(self, slot: int, charge: int) -> None:
        """Change what `slot`, HELD or OWNED, costs to `charge` units: a compressed record costs less than it was taken for."""
        ...

    def generation(self, slot: int) -> int:
        """Return the slot's generation."""
        ...

    def state(self, slot: int) -> SlotState:
        """Return who has the slot."""
        ...

    def listed(self, state: SlotState) -> NDArray[np.int64]:
        """Return the numbers of all slots in `state`, ascending."""
        ...

    def census(self) -> Census:
        """Count all slots anew. Costs a pass over all of them: for audits."""
        ...
