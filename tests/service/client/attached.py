"""An engine's memory attached to a fake daemon's namespace."""

from __future__ import annotations

from typing import Any

import torch

from tests.engines import Engine
from tests.service.client.fake import SIZE, SPACE, SPEC, FakeDaemon
from tiercache.kernels.device import Device
from tiercache.kernels.lazy import LazyDevice, LazyStream
from tiercache.service import wire
from tiercache.service.client.blocking import BlockingClient
from tiercache.service.client.client import Client, connect
from tiercache.service.client.engine import PagedKV
from tiercache.service.client.own_device import OwnDevice
from tiercache.service.client.remote_kv import RemoteKV
from tiercache.service.device_tensors import DeviceTensors

TOKENS = list(range(4 * SIZE))
LAYOUT = "kv block token head dim"
IDS = [5, 0, 7, 2]


class OnDevice(DeviceTensors):
    """Has all tensors on the device, and one stream that works on them."""

    def holds(self, tensor: Any) -> bool:
        """Say so of every tensor."""
        return isinstance(tensor, torch.Tensor)

    def pointer(self) -> int:
        """Return the one there is."""
        return 0


def beside(address: str, device: Device | None, **named: Any) -> Client:
    """Return a client of a process whose tensors lie on `device`, or in host memory where there is none."""
    client = connect(address, **named)
    if device is not None:
        client._device = OwnDevice(device, tensors=OnDevice)
    return client


def blocking_beside(address: str, device: Device | None) -> BlockingClient:
    """Return the same without a loop."""
    client = BlockingClient(address)
    client._client = beside(address, device)
    return client


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


def runs_last(lazy: LazyDevice, stream: LazyStream) -> None:
    """Have a stream's work done only when no other stream can go on."""
    lazy.choose = lambda ready: next((one for one in ready if one is not stream), ready[0])
