"""A daemon's slots that lie on a device, opened in this process by its own device.

What the host maps can be read by whoever likes, and a copy that came too late is only a copy that is thrown away. A device writes
when its turn comes. So what is copied into slots, or reads them, holds them, and the session's memory with them, until that is over.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tiercache.errors import DeviceRefused, InvalidConfig, MemoryRefused, StaleHandle
from tiercache.kernels.device import Device, Pool
from tiercache.kernels.device import Memory as DeviceMemory
from tiercache.service import wire
from tiercache.service.client.mapping import Grip, Memory
from tiercache.service.client.own_device import OwnDevice
from tiercache.spec import Geometry, KVSpec
from tiercache.storage.device_port import DevicePort
from tiercache.storage.staging import Ring
from tiercache.storage.workers import Workers

if TYPE_CHECKING:
    import torch


class DeviceSlots:
    """One tier's slots on a device, made by `open_slots`; copied by way of `port`."""

    def __init__(
        self,
        memory: Memory,
        at: wire.ArenaAt,
        geometry: Geometry,
        device: Device,
        opened: DeviceMemory,
        ring: Ring,
        workers: Workers,
    ) -> None:
        self._memory = memory
        self._device = device
        self._pool: Pool | None = Pool(opened, geometry.planes, at.slots, geometry.unit_bytes)
        self.capacity = at.slots
        self.unit_bytes = geometry.unit_bytes
        self.generations = memory.generations(at)
        self.port = DevicePort(device, self.pool, geometry, ring, workers)
        memory.tell_end(self)

    @property
    def memory(self) -> Memory:
        """What the session was handed."""
        return self._memory

    def pool(self) -> Pool:
        """Return all slots. Raises StaleHandle after the end of the session."""
        pool = self._pool
        if pool is None:
            raise StaleHandle("the session that opened the daemon's memory on the device has ended")
        return pool

    def end(self) -> None:
        """Let go of the device's memory: a daemon that begins anew needs the room that the last one had.

        Tensors in place and copies under way keep it.
        """
        self._pool = None

    def in_place(self, slot: int, spec: KVSpec, grip: Grip) -> torch.Tensor:
        """Return a block in place, `[layers, parts, block_size, kv_heads, head_dim]`; what is made of it keeps `grip` and the memory.

        Raises StaleHandle.
        """
        pool = self.pool()
        lib = importlib.import_module("torch")
        start = lib.from_dlpack(self._device.array(pool.memory, 1)).data_ptr()
        size = pool.planes * pool.slots * pool.unit_bytes
        # What another library makes of memory holds its owner, through every slice; no attribute of a tensor would be held so.
        held = self._device.borrow(start, size, (grip, self._memory, pool.memory))
        whole = lib.from_dlpack(self._device.array(held, pool.planes, pool.slots, pool.unit_bytes))
        typed = whole[:, slot].view(getattr(lib, spec.dtype))
        return typed.unflatten(0, (-1, spec.parts)).unflatten(2, (spec.block_size, spec.kv_heads, spec.head_dim))  # type: ignore[no-any-return]


async def open_slots(memory: Memory, at: wire.ArenaAt, geometry: Geometry, own: OwnDevice, workers: Workers) -> DeviceSlots:
    """Open one tier's slots with the client's own device.

    Raises DeviceRefused where there is none, where it is another one than the daemon's, and where it can't open that memory, and
    ValueError if what the daemon says of them can't be.
    """
    if at.handle is None or at.device is None or at.offset or not 0 < at.slots <= at.length // geometry.block_bytes:
        raise ValueError(f"{at.slots} slots of {geometry.block_bytes} bytes are no memory of a device: {at}")
    try:
        device = await own.opened(workers)
        if device.uuid != at.device:
            raise DeviceRefused(
                f"the daemon's {at.tier} tier lies on the device {at.device.hex()}, and {device.name} is {device.uuid.hex()}",
                expected=at.device,
                found=device.uuid,
            )
        opened = await own.memory(workers, at.handle, at.length)
        ring = await own.ring(workers, geometry)
    except (InvalidConfig, MemoryRefused) as error:
        raise DeviceRefused(f"the daemon's {at.tier} tier lies on a device, and can't be opened: {error}") from error
    return DeviceSlots(memory, at, geometry, device, opened, ring, workers)
