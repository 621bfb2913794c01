"""Claims on blocks: leases of readers, reservations of writers, the session that owns both, and what outlives it."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from tiercache.residency import Space
from tiercache.tree import Node


class Session:
    """Who holds leases and reservations; when it ends, they end.

    `leased[position]` is how many blocks of a tier its leases claim, a block once for each lease. Its claims stand in the order in
    which they were taken, and end in it: the order of use that they leave says which prompts were wanted last.
    """

    __slots__ = ("leased", "leases", "number", "reservations")

    def __init__(self, number: int, tiers: int) -> None:
        self.number = number
        self.leased = [0] * tiers
        self.leases: dict[Lease, None] = {}
        self.reservations: dict[Reservation, None] = {}


@dataclass(slots=True, eq=False)
class Lease:
    """A reader's claim on the path from the root to the end of `node`: none of its copies goes away.

    It covers the first `blocks` blocks of the packed key `key`. `charge[position]` is what the session is charged for it; a
    lease that only lasts as long as one of the house's own steps (`charged` is False) costs nothing.
    """

    session: Session
    space: Space
    node: Node
    key: bytes
    blocks: int
    charge: list[int]
    charged: bool = True
    released: bool = False
    edition: int = 0
    """The namespace's edition when it was taken."""

    @property
    def stale(self) -> bool:
        """Whether the namespace was cleared since: the bytes stay readable, and nothing that follows from them is stored."""
        return self.edition != self.space.edition

    def ended(self) -> bool:
        """Return whether it has ended."""
        return self.released


class Refusal(enum.StrEnum):
    """Why blocks that were given to be stored are not cached."""

    TOO_LARGE = "too large"
    """All tiers in memory that may take them are smaller, were they empty."""
    LEASED = "leased"
    """There is no room, and leases hold other blocks in memory: readers, pins."""
    NO_ROOM = "no room"
    """There is no room: what else is there is being written or moved."""
    PENDING = "pending"
    """Another writer holds them, and has not ended in time."""
    NOT_ADMITTED = "not admitted"
    """The policy does not want them."""
    DROPPED = "dropped"
    """What they follow, or they themselves, have left again: deleted, given up for room, or lost with a daemon."""
    UNREACHED = "unreached"
    """There was no daemon that could be asked, or used; the client's `misses` say why."""


@dataclass(slots=True, eq=False)
class Reservation:
    """Slots for new blocks that come after a lease's path; they are the writer's until they are committed or given back.

    `key` is the packed key of the new blocks, `runs` tier position and slots of each run of them in one tier, `present` how many
    blocks of the prompt were already cached, `pending` how many of those after them another session is writing now.
    """

    lease: Lease
    key: bytes
    blocks: array[int]
    runs: list[tuple[int, list[int]]]
    present: int
    pending: int = 0
    committed: int = 0
    closed: bool = False
    refusal: Refusal | None = None
    """Why there are fewer blocks than were asked for."""
    other: Reservation | None = field(default=None, repr=False)
    """The reservation that holds the pending blocks."""
    on_close: list[Callable[[], None]] = field(default_factory=list, repr=False)
    """Called when it ends, for those who wait for its blocks."""

    @property
    def places(self) -> list[tuple[int, int]]:
        """Tier position and slot of each block."""
        return [(position, slot) for position, slots in self.runs for slot in slots]


@dataclass(frozen=True, slots=True, eq=False)
class Quarantine:
    """Slots that a reservation left behind and that a process may still write: nobody's, and not to be used before it is gone.

    `places` are tier position and slot of each.
    """

    places: tuple[tuple[int, int], ...]
