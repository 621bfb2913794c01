"""A fake daemon whose slots lie on a lazy device, and a client's own device beside it."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import msgspec

from tests.service.client.fake import SLOTS, SPEC, FakeDaemon, until
from tiercache.kernels.device import LEAST_EXPORT, Pool
from tiercache.kernels.lazy import LazyDevice, LazyMemory, pool_array
from tiercache.service import wire


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
