"""The client's own device: what opens memory that a daemon has on the same card, and copies out of it and into it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakValueDictionary

from tiercache.devices import CPU, require_name
from tiercache.errors import DeviceRefused
from tiercache.kernels.device import Device, Memory
from tiercache.kernels.opening import open_device
from tiercache.service.device_tensors import DeviceTensors
from tiercache.spec import Geometry
from tiercache.storage.staging import Ring
from tiercache.storage.workers import Lane, Workers

DEVICE_LANES = {Lane.UP: 1, Lane.DOWN: 1, Lane.RUNNER: 1}
"""Threads that wait for a device, where a client has one."""
_STAGES = 4
_STAGE_BYTES = 16 << 20
"""Two stages each way, for one call at a time. Every client on a card has these, on both sides of the bus."""


class OwnDevice:
    """A device by its name, opened when something is first asked of it; or one that is open; or none, also by the name `cpu`.

    `opener` and `tensors` are for tests. Raises InvalidConfig for a name that can't be a device's.
    """

    def __init__(
        self,
        given: str | Device | None = None,
        *,
        opener: Callable[[str], Device] = open_device,
        tensors: Callable[[Device], DeviceTensors] = DeviceTensors,
    ) -> None:
        if given is not None and (isinstance(given, str) or not hasattr(given, "allocate")):
            given = require_name(given)
        self._given = None if given == CPU else given
        self._opener = opener
        self.tensors = tensors
        """What torch and an open device know of each other."""
        self._opening = asyncio.Lock()
        self._memory: WeakValueDictionary[tuple[bytes, bytes], Memory] = WeakValueDictionary()
        self._rings: WeakValueDictionary[Geometry, Ring] = WeakValueDictionary()

    @property
    def is_given(self) -> bool:
        """Whether there is one, or its name. The client's workers have lanes for it then."""
        return self._given is not None

    async def opened(self, workers: Workers) -> Device:
        """Return it, opened by a worker if it is not yet: that imports a library, and makes a context on the card.

        Raises DeviceRefused where the client was given none; InvalidConfig and MemoryRefused as `open_device` does, at every
        call anew.
        """
        if self._given is None:
            raise DeviceRefused("this client has no device: the daemon's HBM tier lies on one; use connect(device='cuda:0')")
        if not isinstance(self._given, str):
            return self._given
        async with self._opening:
            if isinstance(self._given, str):
                self._given = await workers.run(Lane.UP, self._opener, self._given)
            return self._given

    async def memory(self, workers: Workers, boot: bytes, handle: bytes, size: int) -> Memory:
        """Return the memory that `handle` names in a run of a daemon, the same to all that hold it.

        The next run may give its memory the handle that this one's had. Raises as `opened`, and MemoryRefused.
        """
        device = await self.opened(workers)
        async with self._opening:
            found = self._memory.get((boot, handle))
            if found is None:
                self._memory[boot, handle] = found = await workers.run(Lane.UP, device.open, handle, size)
            return found

    async def ring(self, workers: Workers, geometry: Geometry) -> Ring:
        """Return the stages for blocks of `geometry`, the same for all that hold them. Raises as `opened`, and MemoryRefused."""
        device = await self.opened(workers)
        blocks = max(1, _STAGE_BYTES // geometry.block_bytes)
        async with self._opening:
            found = self._rings.get(geometry)
            if found is None:
                found = await workers.run(Lane.UP, lambda: Ring(device, geometry, stages=_STAGES, blocks=blocks))
                self._rings[geometry] = found
            return found
