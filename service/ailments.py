"""What can ail a cache, a function each: it looks at what is true now and yields signs. docs/reference/failures.md lists them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiercache.service.lateness import LAG_SECONDS, TOLD_SECONDS
from tiercache.service.stack import BATCHES, Stack
from tiercache.sizes import format_size, parse_size
from tiercache.storage.troubles import COPY, Trouble
from tiercache.storage.workers import Lane
from tiercache.types import Tier

if TYPE_CHECKING:
    from tiercache.service.inprocess import TierCache

SLOW_SECONDS = 5.0
"""A call that has been running for longer is told, and a look at the file system that does not come back."""
DEATH_SECONDS = 60.0
"""How long the death of a thread is told, as another has taken its place by then."""
WATERMARK_SECONDS = 10.0
"""How long a tier may stay below its low watermark."""
MUCH_APART = 0.05
"""The fraction of a tier in quarantine from which on it is told."""
_WHAT = {
    Lane.COPY: "a copy between memories",
    Lane.READ: "a read from SSD",
    Lane.WRITE: "a write to SSD",
    Lane.DOWN: "a copy out of the device",
    Lane.UP: "a copy into the device",
    Lane.RUNNER: "a runner's stream on the device",
}


class Code(enum.StrEnum):
    """All codes that there are."""

    DISK_FULL = "disk_full"
    DISK_LOW = "disk_low"
    DISK_SLOW = "disk_slow"
    DISK_FAILING = "disk_failing"
    MAP_FULL = "map_full"
    DEVICE_FAILING = "device_failing"
    SSD_UNAVAILABLE = "ssd_unavailable"
    DATA_SET_ASIDE = "data_set_aside"
    RECONCILE_FAILED = "reconcile_failed"
    WORKER_DIED = "worker_died"
    COPY_SLOW = "copy_slow"
    PAGEABLE = "pageable"
    MOVE_DIED = "move_died"
    QUARANTINE = "quarantine"
    WATERMARK = "watermark"
    LOOP_LAG = "loop_lag"


_FULL_CODES = {
    "disk": Code.DISK_FULL,
    "map": Code.MAP_FULL,
    "transaction": Code.MAP_FULL,
    "busy": Code.DISK_SLOW,  # the map can't grow under a read that hangs
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """One thing seen. `where` tells it from others of its code, `since` is when it began by the clock (None: when first seen).

    It counts when it has lasted for `after` seconds.
    """

    code: Code
    message: str
    where: str = ""
    since: float | None = None
    after: float = 0.0

    @property
    def key(self) -> tuple[Code, str]:
        """What makes it the same sign the next time."""
        return self.code, self.where


def quarantined(stack: Stack) -> list[int]:
    """Return how many slots of each tier are in quarantine."""
    counts = [0] * len(stack.cache.tiers)
    for kept in stack.cache.quarantines:
        for position, _ in kept.places:
            counts[position] += 1
    return counts


# --- threads --------------------------------------------------------------------------------------------------------------


def _slow_calls(cache: TierCache, now: float) -> Iterator[Sign]:
    for lane in cache.lanes():
        if lane.lane is Lane.WATCH or lane.longest is None or lane.longest < SLOW_SECONDS:
            continue
        code = Code.DISK_SLOW if lane.lane in (Lane.READ, Lane.WRITE) else Code.COPY_SLOW
        text = f"{_WHAT[lane.lane]} has been running for {lane.longest:.0f} s (limit {SLOW_SECONDS:.0f} s)"
        behind = f"; {lane.queued} more wait for a thread" if lane.queued else ""
        yield Sign(code=code, message=text + behind, where=lane.lane.value, since=now - lane.longest)


def _dead_workers(cache: TierCache, now: float) -> Iterator[Sign]:
    for lane in cache.lanes():
        name = lane.lane.value
        if lane.alive < lane.threads:
            text = f"{lane.alive} of {lane.threads} threads of the lane {name} are alive; more are started as soon as that goes"
            yield Sign(code=Code.WORKER_DIED, message=text, where=name)
        elif lane.last_death is not None and lane.last_death < DEATH_SECONDS:
            text = (
                f"a thread of the lane {name} died {lane.last_death:.0f} s ago of {lane.cause} and was replaced "
                f"({lane.deaths} since the start); told for {DEATH_SECONDS:.0f} s"
            )
            yield Sign(code=Code.WORKER_DIED, message=text, where=name, since=now - lane.last_death)


def _late_loop(cache: TierCache, now: float) -> Iterator[Sign]:
    late = cache.examiner.lateness.recent()
    if late is not None:
        text = (
            f"the event loop was late by up to {late.worst:.2f} s (limit {LAG_SECONDS} s), last {now - late.last:.0f} s ago; told "
            f"for {TOLD_SECONDS:.0f} s"
        )
        yield Sign(code=Code.LOOP_LAG, message=text, since=late.since)


# --- the disk -------------------------------------------------------------------------------------------------------------


def _refusals(cache: TierCache, now: float) -> Iterator[Sign]:
    for stack in cache.stacks:
        for (position, act), trouble in stack.troubles.rows.items():
            if act == COPY:
                continue
            tier = stack.cache.tiers[position]
            code = Code.DISK_FAILING if trouble.full is None else _FULL_CODES.get(trouble.full, Code.DISK_FULL)
            where = f"{stack.geometry.block_bytes}/{position}/{trouble.act}"
            yield Sign(code=code, message=_refusal(str(tier), trouble, now), where=where, since=trouble.since)


def _refusal(tier: str, trouble: Trouble, now: float) -> str:
    many = "copies" if trouble.act == COPY else f"{trouble.act}s"
    failed = f"a {trouble.act} failed" if trouble.count == 1 else f"{trouble.count} {many} in a row failed, the last"
    text = f"{tier}: {failed} {now - trouble.last:.0f} s ago, {trouble.error}: {trouble.text}"
    if trouble.next_try is None:
        return text
    left = trouble.next_try - now
    return f"{text}; tried again {f'in {left:.0f} s' if left >= 1 else 'with the next block that goes there'}"


def _room(cache: TierCache, now: float) -> Iterator[Sign]:
    watch = cache.disk_watch
    if watch is None:
        return
    if watch.asked_for >= SLOW_SECONDS:
        known = "it was never known" if watch.age is None else f"what is known is {watch.age:.0f} s old"
        text = f"the file system of {watch.directory} has not said for {watch.asked_for:.0f} s how much room it has; {known}"
        yield Sign(code=Code.DISK_SLOW, message=text, where="room", since=now - watch.asked_for)
    if watch.error is not None:
        text = f"the file system of {watch.directory} can't say how much room it has: {watch.error}"
        yield Sign(code=Code.DISK_FAILING, message=text, where="room")
    if watch.room is None:
        return
    limit = next(tier.bytes for tier in cache.config.tiers if tier.place is Tier.SSD)
    need = min(BATCHES * parse_size(cache.config.batch_bytes), max(0, limit - watch.room.data))
    if watch.room.free < need:
        text = f"{format_size(watch.room.free)} are free where {watch.directory} lies; the next writes may want {format_size(need)}"
        yield Sign(code=Code.DISK_LOW, message=text)


def _no_ssd(cache: TierCache, now: float) -> Iterator[Sign]:
    for what, why in cache.ssd_faults.items():
        text = f"there is no SSD tier for {what} until the next start: {why}"
        yield Sign(code=Code.SSD_UNAVAILABLE, message=text, where=what)


def _set_aside(cache: TierCache, now: float) -> Iterator[Sign]:
    aside = cache.aside
    if aside is not None and not (cache.disk_watch is not None and cache.disk_watch.has_lost(aside.name)):
        text = f"files that could not be read were moved to {aside}, and SSD began without them; told until that folder is gone"
        yield Sign(code=Code.DATA_SET_ASIDE, message=text)


def _unreconciled(cache: TierCache, now: float) -> Iterator[Sign]:
    for stack in cache.stacks:
        if stack.sweep_fault is not None:
            text = f"comparing what SSD names with what it holds does not go on, and is tried again: {stack.sweep_fault}"
            yield Sign(code=Code.RECONCILE_FAILED, message=text, where=str(stack.geometry.block_bytes))


# --- the device ------------------------------------------------------------------------------------------------------------


def _failing_device(cache: TierCache, now: float) -> Iterator[Sign]:
    for stack in cache.stacks:
        trouble = stack.troubles.rows.get((0, COPY))
        # A reader's copy that succeeds is not noted, so a failure can't stand until the next success alone.
        if trouble is not None and now - trouble.last < TOLD_SECONDS:
            text = f"{_refusal(str(stack.cache.tiers[0]), trouble, now)}; told for {TOLD_SECONDS:.0f} s"
            where = str(stack.geometry.block_bytes)
            yield Sign(code=Code.DEVICE_FAILING, message=text, where=where, since=trouble.since)


def _pageable(cache: TierCache, now: float) -> Iterator[Sign]:
    for stack in cache.stacks:
        if stack.bus is not None and stack.bus.pageable is not None:
            size, device = format_size(stack.bus.below_bytes), stack.bus.device.name
            text = (
                f"{size} of DRAM are not pinned for {device}, and copies between the two take longer until the next start: "
                f"{stack.bus.pageable}"
            )
            yield Sign(code=Code.PAGEABLE, message=text, where=str(stack.geometry.block_bytes))


# --- slots ----------------------------------------------------------------------------------------------------------------


def _dead_moves(cache: TierCache, now: float) -> Iterator[Sign]:
    for stack in cache.stacks:
        death = stack.troubles.death
        if death is not None:
            kept = ", ".join(f"{count} slots of {stack.cache.tiers[position]}" for position, count in sorted(death.slots.items()))
            moves = "a move" if death.count == 1 else f"{death.count} moves"
            text = f"{moves} died, the last of {death.text}: {kept} are kept from use until the next start"
            yield Sign(code=Code.MOVE_DIED, message=text, where=str(stack.geometry.block_bytes), since=death.since)


def _apart(cache: TierCache, now: float) -> Iterator[Sign]:
    for stack in cache.stacks:
        for position, apart in enumerate(quarantined(stack)):
            tier, capacity = stack.cache.tiers[position], stack.cache.residency.slots[position].capacity
            if apart > MUCH_APART * capacity:
                text = (
                    f"{apart} of {capacity} slots of {tier} (limit {MUCH_APART:.0%}) are kept from use: processes may still "
                    f"write them"
                )
                yield Sign(code=Code.QUARANTINE, message=text, where=f"{stack.geometry.block_bytes}/{tier}")


def _watermarks(cache: TierCache, now: float) -> Iterator[Sign]:
    for stack in cache.stacks:
        for position, free, low in stack.traffic.unkept():
            tier = stack.cache.tiers[position]
            text = f"{free} slots of {tier} are free, {low} are to be; nothing more can go: it is leased, or refused below"
            where = f"{stack.geometry.block_bytes}/{tier}"
            yield Sign(code=Code.WATERMARK, message=text, where=where, after=WATERMARK_SECONDS)


CHECKS: tuple[Callable[[TierCache, float], Iterator[Sign]], ...] = (
    _refusals,
    _room,
    _no_ssd,
    _set_aside,
    _unreconciled,
    _slow_calls,
    _dead_workers,
    _failing_device,
    _pageable,
    _dead_moves,
    _apart,
    _watermarks,
    _late_loop,
)
"""What is looked at, in the order in which it is told."""
