"""What sessions hold: leases and reservations by number, also where several sessions and a process that is gone have a part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from tiercache.config import Limits
from tiercache.errors import LimitReached
from tiercache.leases import Reservation
from tiercache.leases import Session as Account
from tiercache.service.daemon.claims import Held, Tenancy, lost, unknown
from tiercache.service.daemon.terms import Terms
from tiercache.service.desk import Claim, Desk
from tiercache.service.stack import Stack


class Holdings:
    """The leases and reservations of one session, and, once it has joined another one, its part in that one's.

    Everything is leased in accounts of its own, one a stack, so that the end of the accounts is the end of all of it. Numbers are
    unique in the daemon: one that is another session's is none here.

    What is neither renewed nor given back within `limits.lease_seconds` is lost, and `on_lost` is called with its number and
    `lease` or `reservation`: the client is stopped, or hangs. It finds out by the slots' generations or by LeaseLost, so no lease
    that is read in place is lost, and no slot that may still be written is anybody else's.
    """

    def __init__(self, limits: Limits, terms: Terms, on_lost: Callable[[int, str], None]) -> None:
        self._limits = limits
        self._terms = terms
        self._on_lost = on_lost
        self.renewed = terms.now()
        """When the client last said that it lives."""
        self._copying: OrderedDict[int, Held] = OrderedDict()
        """Leases that may be lost, the oldest first."""
        self._lost: OrderedDict[int, None] = OrderedDict()
        """Numbers of lost leases, for an answer that says so."""
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
        count = len(self._leases)
        for desk in self._desks:
            count += desk.pins
        if count >= self._limits.leases:
            raise LimitReached(f"this session has {count} leases and pins; the limit is {self._limits.leases}")

    def hold(self, number: int, desk: Desk, claim: Claim) -> Held:
        """Note a new lease."""
        held = self._leases[number] = Held(number=number, desk=desk, claim=claim, since=self._terms.now())
        self._copying[number] = held
        self._terms.watch(self)
        return held

    def holder(self, claim: Claim) -> Held:
        """Return the lease that has this claim."""
        return next(held for held in self._leases.values() if held.claim is claim)

    def lease(self, number: int) -> Held:
        """Return a lease of this session; for one of the session that it joined, a lease of its own on the same blocks.

        Raises UnknownHandle for another number, LeaseLost for one that was not renewed.
        """
        held = self._leases.get(number)
        if held is not None:
            return held
        shared = self._joined._leases.get(number) if self._joined is not None else None
        if shared is None:
            if number in self._lost or (self._joined is not None and number in self._joined._lost):
                raise lost("lease", number)
            raise unknown("lease", number)
        self.require_lease()
        stack, claim = shared.desk.stack, shared.claim
        lease = stack.cache.share(claim.lease, self.account(stack))
        return self.hold(number, shared.desk, Claim(lease=lease, promotion=claim.promotion, tiers=claim.tiers))

    def read_in_place(self, number: int) -> None:
        """Note that a lease is read in place: it is not lost any more. Raises as `lease` does."""
        self.lease(number).in_place = True
        self._copying.pop(number, None)

    def release(self, number: int) -> None:
        """End a lease of this session, or one use of it; one that was lost has ended already. Raises UnknownHandle."""
        held = self._leases.get(number)
        if held is None:
            if number in self._lost:
                return
            raise unknown("lease", number)
        if held.desk.leave(held.claim):
            del self._leases[number]
            self._copying.pop(number, None)

    # --- reservations -------------------------------------------------------------------------------------------------------

    def require_reservation(self) -> None:
        """Raise LimitReached when there are as many open reservations as there may be."""
        if len(self._tenancies) >= self._limits.reservations:
            raise LimitReached(f"this session has {len(self._tenancies)} reservations; the limit is {self._limits.reservations}")

    def rent(self, number: int, desk: Desk, reservation: Reservation) -> Tenancy:
        """Note a new reservation."""
        tenancy = Tenancy(number=number, desk=desk, reservation=reservation, owner=self, since=self._terms.now(), writers={self})
        self._tenancies[number] = tenancy
        self._terms.watch(self)
        return tenancy

    def tenancy(self, number: int) -> Tenancy:
        """Return an open reservation of this session, or of the one that it joined.

        Raises UnknownHandle for another number, LeaseLost for one that was not renewed.
        """
        found = self._tenancies.get(number)
        if found is None and self._joined is not None:
            found = self._joined._tenancies.get(number)
        if found is not None and found.lost:
            raise lost("reservation", number)
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

    # --- time -------------------------------------------------------------------------------------------------------------

    def renew(self) -> None:
        """Note that the client lives."""
        self.renewed = self._terms.now()

    def due(self) -> float | None:
        """Return when the first claim is lost unless it is renewed; None when there is nothing to lose."""
        vouched = [tenancy.vouched for tenancy in self._risked()]
        oldest = next(iter(self._copying.values()), None)
        if oldest is not None:
            vouched.append(max(oldest.since, self.renewed))
        return min(vouched) + self._limits.lease_seconds if vouched else None

    def expire(self, now: float) -> None:
        """End what nobody has renewed in time."""
        latest = now - self._limits.lease_seconds
        while self.renewed <= latest and self._copying and next(iter(self._copying.values())).since <= latest:
            number, held = self._copying.popitem(last=False)
            del self._leases[number]
            self._lost[number] = None
            while len(self._lost) > self._limits.leases:
                self._lost.popitem(last=False)
            held.lost = True
            held.claim.users = 1  # all of its uses, where several matches share it
            held.desk.leave(held.claim)
            held.desk.stack.traffic.drain()
            self._on_lost(number, "lease")
        for tenancy in self._risked():
            if tenancy.vouched <= latest:
                tenancy.lost = True
                tenancy.end()
                self._on_lost(tenancy.number, "reservation")

    def _risked(self) -> list[Tenancy]:
        return [one for one in self._tenancies.values() if one.owner is self and not one.reservation.closed]

    # --- the end ----------------------------------------------------------------------------------------------------------

    def end(self) -> list[Callable[[], None]]:
        """End copying leases, pins and accounts; return the calls that end the rest, for when nobody can touch it any more."""
        self._terms.forget(self)
        # Not one of no blocks: a match that found nothing may have said that it would be read in place.
        calls = [_kept_back(held) for held in self._leases.values() if held.in_place and not held.ended and held.claim.lease.blocks]
        for tenancy in self._tenancies.values():
            if tenancy.owner is self:
                tenancy.end()
            if tenancy.may_be_written:
                calls.append(_leaver(tenancy, self))
        self._leases.clear()
        self._copying.clear()
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


def _leaver(tenancy: Tenancy, writer: Holdings) -> Callable[[], None]:
    return lambda: tenancy.leave(writer)
