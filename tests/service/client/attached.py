"""An engine's memory attached to a fake daemon's namespace."""

from __future__ import annotations

from typing import Any

from tests.engines import Engine
from tests.service.client.fake import SIZE, SPACE, SPEC, FakeDaemon
from tiercache.service import wire
from tiercache.service.client.client import Client
from tiercache.service.client.engine import PagedKV
from tiercache.service.client.remote_kv import RemoteKV

TOKENS = list(range(4 * SIZE))
LAYOUT = "kv block token head dim"
IDS = [5, 0, 7, 2]


def engine_of(layout: str = LAYOUT, blocks: int = 8) -> Engine:
    return Engine(SPEC, blocks, layout)


async def attached(client: Client, engine: Engine) -> tuple[RemoteKV, PagedKV]:
    """Open the namespace and attach an engine's memory."""
    kv = await client.open(SPACE, SPEC)
    return kv, await kv.attach(engine.tensors, layout=engine.layout)


def gives_room(fake: FakeDaemon, slots: list[int], *, present: int = 0) -> None:
    """Answer the next reservation with these slots, later ones with none, and count commits."""

    def room(asked: wire.Reserve) -> wire.Reserved:
        first = fake.count(wire.Reserve) == 1
        there = present if first else present + len(slots)
        return wire.Reserved(
            id=asked.id, reservation=asked.id, present=there, pending=0, places=fake.places(slots if first else [])
        )

    fake.answers[wire.Reserve] = room
    fake.answers[wire.Commit] = lambda asked: wire.Count(id=asked.id, count=asked.upto)


def committed(fake: FakeDaemon) -> list[wire.Commit]:
    return [frame for frame in fake.asked if isinstance(frame, wire.Commit)]


async def outcome(loading: Any) -> Any:
    return await loading
