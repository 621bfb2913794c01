"""A daemon's slots that lie on a device, opened in this process by its own device.

A device copies when its turn comes. So whoever has something copied out of slots or into them holds them, and with them what the
session was handed, until that is over: when its connection for descriptors ends, the daemon takes it that nothing comes any more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tiercache.errors import DeviceRefused, InvalidConfig, MemoryRefused, StaleHandle
from tiercache.kernels.device import Pool
from tiercache.service import wire
from tiercache.service.client.mapping import Grip, Memory
from tiercache.service.client.own_device import OwnDevice
from tiercache.service.device_tensors import DeviceTensors
from tiercache.spec import Geometry, KVSpec
from tiercache.storage.device_port import DevicePort
from tiercache.storage.workers import Workers

if TYPE_CHECKING:
    import torch


class Opened:
    """The pool of a daemon, opened in one session. The end of the session lets go of it: the next daemon needs the card's room.

    Copies under way and tensors in place keep it.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool: Pool | None = pool

    def pool(self) -> Pool:
        """Return it. Raises StaleHandle after the end of the session."""
        pool = self._pool
        if pool is None:
            raise StaleHandle("the session that opened the daemon's memory on the device has ended")
        return pool

    def end(self) -> None:
        """Let go of it."""
        self._pool = None


class DeviceSlots:
    """One tier's slots on a device, made by `open_slots`; copied by way of `port`."""

    def __init__(self, memory: Memory, at: wire.ArenaAt, opened: Opened, port: DevicePort, tensors: DeviceTensors) -> None:
        self._memory = memory
        self._opened = opened
        self.port = port
        self.tensors = tensors
        self.capacity = at.slots
        self.unit_bytes = opened.pool().unit_bytes
        self.generations = memory.generations(at)
        memory.tell_end(opened)

    @property
    def memory(self) -> Memory:
        """What the session was handed."""
        return self._memory

    def in_place(self, slot: int, spec: KVSpec, grip: Grip) -> torch.Tensor:
        """Return a block in place, `[layers, parts, block_size, kv_heads, head_dim]`. Raises StaleHandle.

        What is made of the tensor keeps `grip` and the memory alive.
        """
        pool = self._opened.pool()
        # What another library makes of memory holds its owner, through every slice; no attribute of a tensor would be held so.
        size = pool.planes * pool.slots * pool.unit_bytes
        held = self.tensors.device.borrow(self.tensors.address(pool.memory), size, (grip, self._memory, pool.memory))
        return self.tensors.block(replace(pool, memory=held), slot, spec)


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
        opened = await own.memory(workers, memory.boot, at.handle, at.length)
        ring = await own.ring(workers, geometry)
    except (InvalidConfig, MemoryRefused) as error:
        raise DeviceRefused(f"the daemon's {at.tier} tier lies on a device, and can't be opened: {error}") from error
    pool = Opened(Pool(opened, geometry.planes, at.slots, geometry.unit_bytes))
    return DeviceSlots(memory, at, pool, DevicePort(device, pool.pool, geometry, ring, workers), own.tensors(device))
