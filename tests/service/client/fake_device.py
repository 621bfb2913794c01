"""A fake daemon whose slots lie on a lazy device, and a client's own device beside it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np

from tests.seams import PATIENCE
from tests.service.client.fake import SLOTS, SPACE, SPEC, FakeDaemon, until
from tiercache.kernels.device import LEAST_EXPORT, Device, Pool
from tiercache.kernels.lazy import LazyDevice, LazyMemory, pool_array
from tiercache.service import wire
from tiercache.service.client.client import BackOff, Client, connect
from tiercache.service.client.remote_kv import RemoteKV


class CountingDevice(LazyDevice):
    """A client's device; `opened` refers to what it has opened of other processes."""

    def __init__(self, seed: int, *, uuid: bytes = LazyDevice.uuid) -> None:
        super().__init__(seed)
        self.uuid = uuid
        self.opened: list[weakref.ref[LazyMemory]] = []

    def open(self, handle: bytes, size: int) -> LazyMemory:
        """Map another process's memory, and note it."""
        memory = super().open(handle, size)
        self.opened.append(weakref.ref(memory))
        return memory

    @property
    def open_now(self) -> int:
        """How many are still open."""
        gc.collect()
        return sum(memory() is not None for memory in self.opened)

    async def holds_work(self) -> None:
        """Wait until a copy and the event after it are enqueued, while the device is held."""
        await until(lambda: any(len(stream.work) > 1 for stream in self.streams))


class DeviceDaemon(FakeDaemon):
    """One arena of `SLOTS` slots of `SPEC` in the memory of a device; `slots` are they, as the owner's device has them."""

    def __init__(self, directory: Path) -> None:
        self.device = LazyDevice(1)
        self.pool = Pool(self.device.allocate(LEAST_EXPORT), SPEC.geometry.planes, SLOTS, SPEC.geometry.unit_bytes)
        self.changes: dict[str, object] = {}
        """Fields of the arena that are said otherwise than they are."""
        super().__init__(directory)

    def lay_out(self, layout: str) -> None:
        """Have the slots in the device's memory."""
        self.layout = wire.DEVICE_LAYOUT
        self.slots = pool_array(self.pool).transpose(1, 0, 2)

    def arena(self) -> wire.ArenaAt:
        """Return where the slots lie."""
        at = wire.ArenaAt(
            tier="HBM",
            layout=wire.DEVICE_LAYOUT,
            memory=-1,
            offset=0,
            length=SLOTS * SPEC.geometry.block_bytes,
            slots=SLOTS,
            generations=0,
            handle=self.device.export(self.pool.memory),
            device=self.device.uuid,
        )
        return msgspec.structs.replace(at, **self.changes)

    def close(self) -> None:
        """Let go of the memory."""
        super().close()
        del self.pool


@asynccontextmanager
async def opened(daemon: DeviceDaemon, own: Device | str | None) -> AsyncIterator[tuple[Client, RemoteKV]]:
    """A client and its namespace; all of it ends in time."""
    async with asyncio.timeout(PATIENCE), connect(daemon.address, device=own, back_off=BackOff(first=0.001, most=0.002)) as client:
        yield client, await client.open(SPACE, SPEC)


def lets_reserve(daemon: DeviceDaemon, slots: list[int]) -> None:
    """Answer every reserve with these slots, and every commit with all of them."""
    daemon.answers[wire.Reserve] = lambda asked: wire.Reserved(
        id=asked.id, reservation=asked.id, present=0, pending=0, places=daemon.places(slots)
    )
    daemon.answers[wire.Commit] = lambda asked: wire.Count(id=asked.id, count=asked.upto)


def committed(daemon: DeviceDaemon) -> list[int]:
    """Return the checksums of the one commit."""
    [commit] = [asked for asked in daemon.asked if isinstance(asked, wire.Commit)]
    return [int(one) for one in np.frombuffer(commit.checksums, "<u8")]
