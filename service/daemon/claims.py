"""Claims of sessions: leases, and reservations with those who may write them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from tiercache.errors import LeaseLost, UnknownHandle
from tiercache.leases import Quarantine, Reservation
from tiercache.service import wire
from tiercache.service.desk import Claim, Desk


class Writer(Protocol):
    """Who may write reserved slots."""

    @property
    def renewed(self) -> float:
        """When it last said that it lives."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class Held:
    """A lease of a session, taken at `since`.

    `in_place`: its slots are read where they lie, and not used again while that may go on. `lost`: it was not renewed in time.
    """

    number: int
    desk: Desk
    claim: Claim
    since: float
    in_place: bool = False
    lost: bool = False

    @property
    def ended(self) -> bool:
        """Whether the lease has ended."""
        return self.claim.lease.released

    def places(self) -> bytes:
        """Return where the readable blocks lie, packed."""
        return self.desk.stack.whereabouts(self.claim.lease, wire.pack_places)


@dataclass(slots=True, eq=False, kw_only=True)
class Tenancy:
    """Reserved slots and who may write them: the session that reserved them, and those that joined it and take part.

    When the owner leaves, nothing more can be committed. Slots that were not committed then go back at once, or, while another
    writer is left, into quarantine until the last of them has left, too. When none of them has renewed in time, it is `lost`: the
    same, but the owner, too, may still be writing.
    """

    number: int
    desk: Desk
    reservation: Reservation
    owner: Writer
    since: float
    writers: set[Writer] = field(default_factory=set)
    kept: Quarantine | None = None
    lost: bool = False

    @property
    def vouched(self) -> float:
        """When it was last known that somebody who may write the slots lives."""
        return max([self.since, *(writer.renewed for writer in self.writers)])

    def reserved(self, request: int) -> wire.Reserved:
        """Return the reply that says which slots these are."""
        reservation = self.reservation
        # As columns: one by one, the places of a million tokens hold the loop for a tenth of a second.
        positions, slots = np.array(reservation.places, np.int64).reshape(-1, 2).T
        generations = np.zeros(len(slots), np.uint32)
        for position, pool in enumerate(self.desk.stack.cache.residency.slots):
            here = positions == position
            generations[here] = pool.generations[slots[here]]
        return wire.Reserved(
            id=request,
            reservation=self.number,
            present=reservation.present,
            pending=reservation.pending,
            places=wire.pack_places(positions, slots, generations, np.zeros(len(slots), np.uint64)),
            refusal=reservation.refusal,
        )

    @property
    def may_be_written(self) -> bool:
        """Whether there are slots that are not the cache's and that a writer may still touch."""
        return not self.reservation.closed or (self.kept is not None and bool(self.kept.places))

    def leave(self, writer: Writer) -> None:
        """Note that `writer` touches the slots no more. Leaving twice does nothing."""
        self.writers.discard(writer)
        if writer is self.owner:
            self.end()
        if self.kept is not None and not self.writers:
            self.desk.stack.cache.restore(self.kept)

    def end(self) -> None:
        """End the reservation: what is not committed never will be."""
        if self.reservation.closed:
            return
        if self.writers:
            self.kept = self.desk.stack.cache.quarantine(self.reservation)
            self.desk.stack.sweep_waste()
            self.desk.stack.traffic.drain()
        else:
            self.desk.close(self.reservation)


def unknown(what: str, number: int) -> UnknownHandle:
    """Return the error for a number that is none of a session's."""
    return UnknownHandle(f"{what} {number} is none of this session's: never given out, at its end, or another's", number=number)


def lost(what: str, number: int) -> LeaseLost:
    """Return the error for a claim that was not renewed in time."""
    return LeaseLost(f"{what} {number} was not renewed in time and has ended", number=number)
