"""What a daemon says of itself: health, statistics, namespaces, as plain values."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from tiercache.service.ailments import quarantined
from tiercache.service.daemon.heartbeat import EDGES, INTERVAL, Heartbeat
from tiercache.service.health import LOOK_SECONDS
from tiercache.service.stack import Stack
from tiercache.slots import SlotState
from tiercache.spec import Namespace
from tiercache.storage.contract import FULL_CHARGE
from tiercache.storage.device_bus import Bus
from tiercache.storage.disk_room import DiskWatch
from tiercache.storage.workers import LaneState

if TYPE_CHECKING:
    from tiercache.service.daemon.daemon import Daemon


async def health(daemon: Daemon) -> dict[str, Any]:
    """Return `status` (starting, ok, degraded, draining, stopped, failed) and, where it is degraded, the `reasons`.

    Waits for the disk for a fifth of a second at most.
    """
    if daemon.state == "serving" and daemon.cache.disk_watch is not None:
        await daemon.cache.disk_watch.look(LOOK_SECONDS)
    return judged(daemon)


def judged(daemon: Daemon) -> dict[str, Any]:
    """Return the same by what is known now."""
    if daemon.state != "serving":
        return {"status": daemon.state, "reasons": []}
    found = daemon.cache.examiner.judge()
    reasons = [{"code": one.code, "message": one.message, "since_seconds": one.since_seconds} for one in found.ailments]
    return {"status": found.status, "reasons": reasons}


def stats(daemon: Daemon) -> dict[str, Any]:
    """Return all counts, as /v1/stats shows them; blocks and slots are counted, not bytes."""
    house = daemon.house
    counts = house.counts
    return {
        "status": daemon.state,
        "health": judged(daemon),
        "boot": house.boot.hex(),
        "seconds": time.monotonic() - daemon.began,
        "sessions": [
            {"session": one.number, "pid": one.pid, "leases": one.holdings.leases, "reservations": one.holdings.reservations}
            for one in house.sessions
        ],
        "connections": house.connections.standing,
        "kept_back": house.kept_back,
        "counts": {
            "sessions": counts.sessions,
            "requests": dict(counts.requests),
            "failures": dict(counts.failures),
            "distrusted": {"sound": counts.distrusted[True], "unsound": counts.distrusted[False]},
            "overrun": counts.overrun,
            "stalled": counts.stalled,
            "lost": {"leases": counts.lost["lease"], "reservations": counts.lost["reservation"]},
            "refused_connections": house.connections.refused,
        },
        "loop": _loop(daemon.heartbeat),
        "workers": [_lane(lane) for lane in daemon.cache.lanes()],
        "disk": _disk(daemon.cache.disk_watch, daemon.cache.ssd_limit),
        "stacks": [figures(stack) for stack in daemon.cache.stacks],
    }


def _lane(lane: LaneState) -> dict[str, Any]:
    return {
        "lane": lane.lane.value,
        "threads": lane.threads,
        "alive": lane.alive,
        "busy": lane.busy,
        "queued": lane.queued,
        "longest_seconds": lane.longest,
        "deaths": lane.deaths,
    }


def _disk(watch: DiskWatch | None, limit: int) -> dict[str, Any] | None:
    if watch is None or watch.room is None:
        return None
    room = watch.room
    return {
        "free_bytes": room.free,
        "size_bytes": room.size,
        "data_bytes": room.data,
        "limit_bytes": limit,
        "metadata_bytes": room.metadata,
        "age_seconds": watch.age,
    }


def _loop(heart: Heartbeat) -> dict[str, Any]:
    """Return how late the loop was, in seconds: each figure is too small by at most `interval`."""
    ends: list[float | None] = [*EDGES, None]
    return {
        "interval": INTERVAL,
        "ticks": heart.ticks,
        "lag_max": heart.longest,
        "lag_sum": heart.total,
        "lags": [{"upto": end, "ticks": count} for end, count in zip(ends, heart.counts, strict=True)],
    }


def figures(stack: Stack) -> dict[str, Any]:
    """Return the counts of one block size; `blocks` of a tier have a copy there, `capacity` of them fit when none is compressed."""
    cache, counted = stack.cache, stack.cache.stats
    now = stack.troubles.now()
    apart = quarantined(stack)
    return {
        "block_bytes": stack.geometry.block_bytes,
        "block_size": stack.block_size,
        "tiers": [
            {
                "tier": str(tier),
                "slots": pool.capacity,
                "free": pool.free,
                "quarantined": apart[position],
                "blocks": len(pool.listed(SlotState.OWNED)),
                "capacity": pool.budget // FULL_CHARGE,
                "queries": counted.queries[position],
                "hits": counted.hits[position],
            }
            for position, (tier, pool) in enumerate(zip(cache.tiers, cache.residency.slots, strict=True))
        ],
        "device": _device(stack.bus),
        "matches": counted.matches,
        "asked": counted.asked,
        "missed": counted.missed,
        "clipped": counted.clips,
        "moved": [
            {"from": _name(before), "to": _name(after), "reason": reason.value, "blocks": blocks}
            for (before, after, reason), blocks in counted.moved.items()
        ],
        "copied": [{"from": str(one), "to": str(other), "blocks": blocks} for (one, other), blocks in counted.copied.items()],
        "failures": dict(counted.failures),
        "troubles": [
            {
                "tier": str(cache.tiers[position]),
                "act": trouble.act,
                "count": trouble.count,
                "error": trouble.error,
                "since_seconds": now - trouble.since,
                "next_try_seconds": None if trouble.next_try is None else max(0.0, trouble.next_try - now),
            }
            for (position, _), trouble in stack.troubles.rows.items()
        ],
        "blocks": cache.residency.table.live,
        "leases": sum(len(session.leases) for session in cache.sessions),
        "reservations": sum(len(session.reservations) for session in cache.sessions),
        "in_flight": len(cache.inflight.flying),
    }


def _device(bus: Bus | None) -> dict[str, Any] | None:
    """Return what the HBM tier takes of a device, and of host memory for it; None where it lies on none."""
    if bus is None:
        return None
    return {
        "name": bus.device.name,
        "slot_bytes": bus.slot_bytes,
        "stage_bytes": bus.stage_bytes,
        "stage_host_bytes": bus.stage_host_bytes,
        "pinned_bytes": bus.pinned_bytes,
        "pageable_bytes": bus.below_bytes - bus.pinned_bytes,
        "pageable": bus.pageable,
    }


def _name(tier: object) -> str | None:
    return None if tier is None else str(tier)


async def namespaces(daemon: Daemon) -> list[dict[str, Any]]:
    """Return the namespaces that hold blocks or were opened: digest, blocks, and who they are where that is known.

    Of a salt, which is a tenant's secret, only that there is one.
    """
    cache = daemon.cache
    known = await cache.known_spaces()
    found = []
    for stack in cache.stacks:
        for space in stack.cache.residency.spaces.values():
            who = known.get(space.digest)
            found.append(
                {
                    "digest": space.digest.hex(),
                    "block_bytes": stack.geometry.block_bytes,
                    "blocks": stack.cache.blocks_of(space),
                    "namespace": None if who is None else _named(who[0]),
                    "spec": None if who is None else _fields(who[1]),
                }
            )
    return found


def _named(namespace: Namespace) -> dict[str, Any]:
    fields = _fields(namespace)
    salted = fields.pop("salt") is not None
    return {**fields, "salted": salted}


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
