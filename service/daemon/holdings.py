"""What sessions hold: leases and reservations by number, also where several sessions and a process that is gone have a part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tiercache.config import Limits
from tiercache.errors import LimitReached, UnknownHandle
from tiercache.leases import Quarantine, Reservation
from tiercache.leases import Session as Account
from tiercache.service import wire
from tiercache.service.desk import Claim, Desk
from tiercache.service.stack import Stack


@dataclass(slots=True, eq=False, kw_only=True)
class Held:
    """A lease of a session. `in_place`: its slots are read where they lie, and not used again while that may go on."""

    number: int
    desk: Desk
    claim: Claim
    in_place: bool = False

    @property
    def ended(self) -> bool:
        """Whether the lease has ended."""
        return self.claim.lease.released

    def places(self) -> bytes:
        """Return where the readable blocks lie, packed."""
        where = self.desk.stack.whereabouts(self.claim.lease)
        return wire.pack_places(where.positions, where.slots, where.generations, where.checksums)


@dataclass(slots=True, eq=False, kw_only=True)
class Tenancy:
    """Reserved slots and who may write them: the session that reserved them, and those that joined it and take part.

    When the owner leaves, nothing more can be committed. Slots that were not committed then go back at once, or, while another
    writer is left, into quarantine until the last of them has left, too.
    """

    number: int
    desk: Desk
    reservation: Reservation
    owner: object
    writers: set[object] = field(default_factory=set)
    kept: Quarantine | None = None

    def reserved(self, request: int) -> wire.Reserved:
        """Return the reply that says which slots these are."""
        reservation = self.reservation
        pages = [pool.generations.data for pool in self.desk.stack.cache.residency.slots]
        positions = [position for position, _ in reservation.places]
        slots = [slot for _, slot in reservation.places]
        generations = [pages[position][slot] for position, slot in reservation.places]
        return wire.Reserved(
            id=request,
            reservation=self.number,
            present=reservation.present,
            pending=reservation.pending,
            places=wire.pack_places(positions, slots, generations, [0] * len(slots)),
            refusal=reservation.refusal,
        )

    @property
    def may_be_written(self) -> bool:
        """Whether there are slots that are not the cache's and that a writer may still touch."""
        return not self.reservation.closed or (self.kept is not None and bool(self.kept.places))

    def leave(self, writer: object) -> None:
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


class Holdings:
    """The leases and reservations of one session, and, once it has joined another one, its part in that one's.

    Everything is leased in accounts of its own, one a stack, so that the end of the accounts is the end of all of it. Numbers are
    unique in the daemon: one that is another session's is none here.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._joined: Holdings | None = None
        self._accounts: dict[Stack, Account] = {}
        self._desks: list[Desk] = []
        self._leases: dict[int, Held] = {}
        self._tenancies: dict[int, Tenancy] = {}

    @property
    def leases(self) -> int:
        """How many leases are held."""
        return len(self._leases)

    @property
    def reservations(self) -> int:
        """How many reservations are open, those of a joined session that this one writes, too."""
        return len(self._tenancies)

    def join(self, other: Holdings) -> None:
        """Take part in what `other` holds."""
        self._joined = other

    def account(self, stack: Stack) -> Account:
        """Return the account of a stack, made when it is new."""
        if stack not in self._accounts:
            self._accounts[stack] = stack.cache.begin_session()
        return self._accounts[stack]

    def add_desk(self, desk: Desk) -> None:
        """Note a desk, whose pins end with the rest."""
        self._desks.append(desk)

    # --- leases -----------------------------------------------------------------------------------------------------------

    def require_lease(self) -> None:
        """Raise LimitReached when there are as many leases and pins as there may be."""
        count = len(self._leases) + sum(desk.pins for desk in self._desks)
        if count >= self._limits.leases:
            raise LimitReached(f"this session has {count} leases and pins; the limit is {self._limits.leases}")

    def hold(self, number: int, desk: Desk, claim: Claim) -> Held:
        """Note a new lease."""
        held = self._leases[number] = Held(number=number, desk=desk, claim=claim)
        return held

    def holder(self, claim: Claim) -> Held:
        """Return the lease that has this claim."""
        return next(held for held in self._leases.values() if held.claim is claim)

    def lease(self, number: int) -> Held:
        """Return a lease of this session; for one of the session that it joined, a lease of its own on the same blocks.

        Raises UnknownHandle for another number.
        """
        held = self._leases.get(number)
        if held is not None:
            return held
        shared = self._joined._leases.get(number) if self._joined is not None else None
        if shared is None:
            raise unknown("lease", number)
        self.require_lease()
        stack, claim = shared.desk.stack, shared.claim
        lease = stack.cache.share(claim.lease, self.account(stack))
        return self.hold(number, shared.desk, Claim(lease=lease, promotion=claim.promotion, tiers=claim.tiers))

    def release(self, number: int) -> None:
        """End a lease of this session, or one use of it. Raises UnknownHandle."""
        held = self._leases.get(number)
        if held is None:
            raise unknown("lease", number)
        if held.desk.leave(held.claim):
            del self._leases[number]

    # --- reservations -------------------------------------------------------------------------------------------------------

    def require_reservation(self) -> None:
        """Raise LimitReached when there are as many open reservations as there may be."""
        if len(self._tenancies) >= self._limits.reservations:
            raise LimitReached(f"this session has {len(self._tenancies)} reservations; the limit is {self._limits.reservations}")

    def rent(self, number: int, desk: Desk, reservation: Reservation) -> Tenancy:
        """Note a new reservation."""
        tenancy = Tenancy(number=number, desk=desk, reservation=reservation, owner=self, writers={self})
        self._tenancies[number] = tenancy
        return tenancy

    def tenancy(self, number: int) -> Tenancy:
        """Return an open reservation of this session, or of the one that it joined. Raises UnknownHandle for another number."""
        found = self._tenancies.get(number)
        if found is None and self._joined is not None:
            found = self._joined._tenancies.get(number)
        if found is None or found.reservation.closed:
            raise unknown("reservation", number)
        return found

    def take_part(self, number: int) -> Tenancy:
        """Become a writer of a reservation of the joined session; from now on it waits for this one, too."""
        tenancy = self.tenancy(number)
        if number not in self._tenancies:
            self.require_reservation()
            tenancy.writers.add(self)
            self._tenancies[number] = tenancy
        return tenancy

    def give_back(self, number: int) -> None:
        """Leave a reservation. Raises UnknownHandle when it is none of this session's."""
        tenancy = self._tenancies.pop(number, None)
        if tenancy is None:
            raise unknown("reservation", number)
        tenancy.leave(self)

    # --- the end ----------------------------------------------------------------------------------------------------------

    def end(self) -> list[Callable[[], None]]:
        """End copying leases, pins and accounts; return the calls that end the rest, for when nobody can touch it any more."""
        calls = [_kept_back(held) for held in self._leases.values() if held.in_place and not held.ended]
        for tenancy in self._tenancies.values():
            if tenancy.owner is self:
                tenancy.end()
            if tenancy.may_be_written:
                calls.append(_leaver(tenancy, self))
        self._leases.clear()
        self._tenancies.clear()
        self._joined = None
        for desk in self._desks:
            desk.end()
        for stack, account in self._accounts.items():
            stack.cache.end_session(account)
            stack.sweep_waste()
            stack.traffic.drain()
        self._accounts.clear()
        return calls


def unknown(what: str, number: int) -> UnknownHandle:
    """Return the error for a number that is none of a session's."""
    return UnknownHandle(f"{what} {number} is none of this session's: never given out, at its end, or another's", number=number)


def _kept_back(held: Held) -> Callable[[], None]:
    """Let a lease outlive its session; the call that is returned ends it."""
    stack = held.desk.stack
    ghost = stack.cache.begin_session()
    stack.cache.hand_over(held.claim.lease, ghost)

    def end() -> None:
        stack.cache.end_session(ghost)
        stack.sweep_waste()
        stack.traffic.drain()

    return end


def _leaver(tenancy: Tenancy, writer: object) -> Callable[[], None]:
    return lambda: tenancy.leave(writer)
