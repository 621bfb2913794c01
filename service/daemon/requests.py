"""What a client may ask for in a session, one function a request; `WAYS` leads from a frame's type to its function.

A function returns the reply, or a coroutine of it where it has to wait. What it raises becomes an error reply.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tiercache.checks import seconds
from tiercache.errors import AuditFailed, DeviceRefused, InvalidInput, InvalidSpec, InvalidStart, LimitReached, UnknownHandle
from tiercache.prefetch import PrefetchPolicy
from tiercache.service import wire
from tiercache.service.daemon.claims import Held, lost
from tiercache.service.daemon.house import House
from tiercache.service.desk import Desk
from tiercache.service.invalidation import chosen_by, selection_of
from tiercache.service.stack import Stack
from tiercache.spec import KVSpec, Namespace, Selection
from tiercache.storage.arenas import HostArena
from tiercache.types import Tier

if TYPE_CHECKING:
    from tiercache.service.daemon.session import Session

Answer = wire.Reply | Coroutine[Any, Any, wire.Reply]


def hello(session: Session, frame: wire.Hello) -> wire.Reply:
    """Begin the session."""
    return session.greet(frame)


async def open_space(session: Session, frame: wire.Open) -> wire.Reply:
    """Open a namespace."""
    try:
        space, spec = Namespace(**frame.namespace), KVSpec(**frame.spec)
    except TypeError as error:
        raise InvalidSpec(str(error).partition("__init__() ")[2] or str(error)) from error
    cache = session.house.cache
    stack, place = await cache.locate(space, spec, shard=frame.shard)
    if stack.bus is not None:
        raise DeviceRefused(f"the HBM tier of this daemon lies on {stack.bus.device.name}, whose slots it can't hand out yet")
    desk = Desk(stack, place, spec, session.holdings.account(stack), require_open=cache.require_open)
    return wire.Opened(
        id=frame.id,
        kv=session.add_desk(desk),
        tiers=[str(tier) for tier in stack.cache.tiers],
        arenas=_arenas(stack, session.house),
    )


# --- reading --------------------------------------------------------------------------------------------------------------


def match(session: Session, frame: wire.Match, desk: Desk, key: bytes) -> wire.Reply:
    """Take a lease."""
    session.holdings.require_lease()
    claim = desk.match(key, frame.request)
    held = session.holdings.holder(claim) if claim.users > 1 else session.holdings.hold(session.house.number(), desk, claim)
    places = held.places()
    readable = len(places) == claim.lease.blocks * wire.PLACE_BYTES
    lifting = not readable and not claim.promotion.readable.is_set()
    if lifting and claim.users == 1:
        session.announce(held)
    return wire.Leased(
        id=frame.id,
        lease=held.number,
        blocks=claim.lease.blocks,
        tiers={str(tier): blocks for tier, blocks in claim.tiers.items()},
        lifting=lifting,
        places=places if readable else None,
    )


def ready(session: Session, frame: wire.Ready) -> Answer:
    """Say where blocks lie, when they are there."""
    held = session.holdings.lease(frame.lease)
    within = None if frame.within is None else seconds(frame.within, "within")
    if held.claim.promotion.readable.is_set():
        held.desk.carry_on(held.claim)
        return wire.Places(id=frame.id, places=held.places())
    return _when_ready(frame, held, PrefetchPolicy(within))


async def _when_ready(frame: wire.Ready, held: Held, policy: PrefetchPolicy) -> wire.Reply:
    await held.desk.settle(held.claim, policy)
    if held.lost:
        raise lost("lease", frame.lease)
    if held.ended:
        raise UnknownHandle(f"lease {frame.lease} was released while it was waited for", number=frame.lease)
    return wire.Places(id=frame.id, places=held.places())


def in_place(session: Session, frame: wire.InPlace) -> wire.Reply:
    """Note that slots are read where they lie."""
    session.holdings.read_in_place(frame.lease)
    return wire.Done(id=frame.id)


def take(session: Session, frame: wire.Take) -> wire.Reply:
    """Shorten a lease."""
    held = session.holdings.lease(frame.lease)
    lease = held.claim.lease
    if frame.blocks < 0:
        raise InvalidInput(f"a lease can't cover {frame.blocks} blocks", value=frame.blocks)
    if held.claim.users == 1:
        held.desk.stack.cache.shorten(lease, frame.blocks)
    return wire.Count(id=frame.id, count=min(frame.blocks, lease.blocks))


def release(session: Session, frame: wire.Release) -> wire.Reply:
    """End a lease."""
    session.holdings.release(frame.lease)
    return wire.Done(id=frame.id)


def renew(session: Session, frame: wire.Renew) -> wire.Reply:
    """Let all that the session holds stand for another term."""
    session.holdings.renew()
    return wire.Done(id=frame.id)


def distrust(session: Session, frame: wire.Distrust) -> Answer:
    """Look at a block that failed its check somewhere else."""
    held = session.holdings.lease(frame.lease)
    if not 0 <= frame.block < held.claim.lease.blocks:
        raise InvalidInput(f"lease {frame.lease} covers {held.claim.lease.blocks} blocks; there is no block {frame.block}")
    return _recheck(session, frame, held)


async def _recheck(session: Session, frame: wire.Distrust, held: Held) -> wire.Reply:
    sound = await held.desk.stack.recheck(held.claim.lease, frame.block)
    session.house.counts.distrusted[sound] += 1
    return wire.Done(id=frame.id)


# --- writing --------------------------------------------------------------------------------------------------------------


def reserve(session: Session, frame: wire.Reserve, desk: Desk, key: bytes) -> Answer:
    """Take slots."""
    after = session.holdings.lease(frame.after).claim.lease if frame.after is not None else None
    if after is not None and (after.space is not desk.space or not key.startswith(after.key[: after.blocks * desk.stride])):
        raise InvalidStart(f"the {after.blocks} blocks of lease {frame.after} are not how this prompt begins")
    if frame.tier is not None and frame.tier not in Tier.__members__:
        raise InvalidInput(f"tier {frame.tier!r:.40} is none of {', '.join(Tier.__members__)}", field="tier")
    position = desk.position(Tier[frame.tier] if frame.tier is not None else None)
    session.holdings.require_reservation()

    async def reserve_when_there_is_room() -> wire.Reply:
        reservation = await desk.reserve(key, after, position, wait=frame.wait)
        try:
            session.holdings.require_reservation()
        except LimitReached:
            desk.close(reservation)
            raise
        return session.holdings.rent(session.house.number(), desk, reservation).reserved(frame.id)

    return reserve_when_there_is_room()


def use(session: Session, frame: wire.Use) -> wire.Reply:
    """Take part in a reservation of the joined session."""
    return session.holdings.take_part(frame.reservation).reserved(frame.id)


def commit(session: Session, frame: wire.Commit) -> wire.Reply:
    """Hand blocks over. Their checksums are the writer's word; every copy that leaves a slot is compared with it."""
    tenancy = session.holdings.tenancy(frame.reservation)
    reservation = tenancy.reservation
    done, most = reservation.committed, len(reservation.blocks)
    if not done <= frame.upto <= most:
        raise InvalidStart(
            f"upto is {frame.upto}; reservation {frame.reservation} has {most} blocks, and {done} of them are committed",
            value=frame.upto,
        )
    if len(frame.checksums) != 8 * (frame.upto - done):
        raise InvalidInput(f"{len(frame.checksums)} bytes of checksums for {frame.upto - done} blocks; each takes 8")
    sums = np.frombuffer(frame.checksums, "<u8").tolist()
    return wire.Count(id=frame.id, count=tenancy.desk.commit(reservation, frame.upto, sums))


def close(session: Session, frame: wire.Close) -> wire.Reply:
    """Give back what was not committed."""
    session.holdings.give_back(frame.reservation)
    return wire.Done(id=frame.id)


# --- the rest -------------------------------------------------------------------------------------------------------------


def covered(session: Session, frame: wire.Covered, desk: Desk, key: bytes) -> wire.Reply:
    """Count cached blocks."""
    return wire.Count(id=frame.id, count=desk.covered(key))


async def flush(session: Session, frame: wire.Flush, desk: Desk, key: bytes) -> wire.Reply:
    """Make blocks durable."""
    return wire.Count(id=frame.id, count=await desk.flush(key))


async def prefetch(session: Session, frame: wire.Prefetch, desk: Desk, key: bytes) -> wire.Reply:
    """Bring blocks up."""
    return wire.Count(id=frame.id, count=await desk.prefetch(key))


def pin(session: Session, frame: wire.Pin, desk: Desk, key: bytes) -> wire.Reply:
    """Keep blocks where they are, till the time is up or the session ends."""
    if frame.ttl:
        session.holdings.require_lease()
    return wire.Count(id=frame.id, count=desk.pin(key, frame.ttl))


async def delete(session: Session, frame: wire.Delete, desk: Desk, key: bytes) -> wire.Reply:
    """Remove a prompt."""
    return wire.Count(id=frame.id, count=await desk.delete(key))


async def clear(session: Session, frame: wire.Clear) -> wire.Reply:
    """Remove everything of a namespace."""
    return wire.Count(id=frame.id, count=await session.desk(frame.kv).clear())


def invalidate(session: Session, frame: wire.Invalidate) -> Answer:
    """Remove everything of the namespaces that a selection covers."""
    return _invalidate(session, frame, selection_of(frame.fields))


async def _invalidate(session: Session, frame: wire.Invalidate, selection: Selection) -> wire.Reply:
    gone = await session.house.cache.forget(chosen_by(selection))
    extents = [
        wire.ExtentOf(asdict(extent.namespace), asdict(extent.spec), extent.blocks)
        for extent in gone
        if extent.namespace is not None and extent.spec is not None
    ]
    return wire.Invalidated(id=frame.id, extents=extents)


async def check(session: Session, frame: wire.Check) -> wire.Reply:
    """Audit the books."""
    try:
        return wire.Audited(id=frame.id, counts=await session.house.cache.check(), faults=[])
    except AuditFailed as error:
        return wire.Audited(id=frame.id, counts={}, faults=[str(fault) for fault in error.fields["faults"]])


def _arenas(stack: Stack, house: House) -> list[wire.ArenaAt]:
    return [
        wire.ArenaAt(
            tier=str(store.tier),
            layout=store.layout,
            memory=house.memory_number(store.tier),
            offset=store.offset,
            length=store.length,
            slots=store.capacity,
            generations=stack.generations_at[store.tier],
        )
        for store in stack.stores
        if isinstance(store, HostArena)
    ]


class Way(NamedTuple):
    """How a request is answered: by `call(session, frame)`, or `call(session, frame, desk, key)` where it names a prompt."""

    call: Callable[..., Answer]
    prompted: bool = False


WAYS: dict[type[wire.Request], Way] = {
    wire.Hello: Way(hello),
    wire.Open: Way(open_space),
    wire.Match: Way(match, prompted=True),
    wire.Ready: Way(ready),
    wire.InPlace: Way(in_place),
    wire.Take: Way(take),
    wire.Release: Way(release),
    wire.Renew: Way(renew),
    wire.Distrust: Way(distrust),
    wire.Reserve: Way(reserve, prompted=True),
    wire.Commit: Way(commit),
    wire.Close: Way(close),
    wire.Use: Way(use),
    wire.Covered: Way(covered, prompted=True),
    wire.Flush: Way(flush, prompted=True),
    wire.Prefetch: Way(prefetch, prompted=True),
    wire.Pin: Way(pin, prompted=True),
    wire.Delete: Way(delete, prompted=True),
    wire.Clear: Way(clear),
    wire.Invalidate: Way(invalidate),
    wire.Check: Way(check),
}
