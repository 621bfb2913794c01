"""What a daemon says of itself: health, statistics, namespaces, as plain values."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tiercache.service.daemon.heartbeat import EDGES, INTERVAL, Heartbeat
from tiercache.service.stack import Stack
from tiercache.slots import SlotState
from tiercache.storage.contract import FULL_CHARGE

if TYPE_CHECKING:
    from tiercache.service.daemon.daemon import Daemon

_MUCH_APART = 0.05
"""The fraction of a tier in quarantine from which on the daemon is not well."""


def health(daemon: Daemon) -> dict[str, Any]:
    """Return `status` (starting, ok, degraded, draining, stopped) and, where it is degraded, the `reasons`."""
    if daemon.state != "serving":
        return {"status": daemon.state, "reasons": []}
    reasons = [reason for stack in daemon.cache.stacks for reason in _ailments(stack)]
    return {"status": "degraded" if reasons else "ok", "reasons": reasons}


def _ailments(stack: Stack) -> Iterator[str]:
    cache = stack.cache
    for position in sorted(cache.moves.refusing):
        yield f"{cache.tiers[position]} refuses blocks; it is tried again"
    for position, apart in enumerate(quarantined(stack)):
        capacity = cache.residency.slots[position].capacity
        if apart > _MUCH_APART * capacity:
            yield f"{apart} of {capacity} slots of {cache.tiers[position]} are kept from use: processes may still write them"


def quarantined(stack: Stack) -> list[int]:
    """Return how many slots of each tier are in quarantine."""
    counts = [0] * len(stack.cache.tiers)
    for kept in stack.cache.quarantines:
        for position, _ in kept.places:
            counts[position] += 1
    return counts


def stats(daemon: Daemon) -> dict[str, Any]:
    """Return all counts, as /v1/stats shows them; blocks and slots are counted, not bytes."""
    house = daemon.house
    counts = house.counts
    return {
        "status": daemon.state,
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
        "stacks": [figures(stack) for stack in daemon.cache.stacks],
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
        "blocks": cache.residency.table.live,
        "leases": sum(len(session.leases) for session in cache.sessions),
        "reservations": sum(len(session.reservations) for session in cache.sessions),
        "in_flight": len(cache.inflight.flying),
    }


def _name(tier: object) -> str | None:
    return None if tier is None else str(tier)


async def namespaces(daemon: Daemon) -> list[dict[str, Any]]:
    """Return the namespaces that hold blocks or were opened: digest, blocks, and who they are where that is known."""
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
                    "namespace": None if who is None else _fields(who[0]),
                    "spec": None if who is None else _fields(who[1]),
                }
            )
    return found


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}
