"""The staging ring: a fixed number of buffers between a device's pool and the rest, which the tree never owns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tiercache.kernels.device import Device, Event, Memory
from tiercache.kernels.host import Bytes
from tiercache.spec import Geometry


@dataclass(slots=True, eq=False)
class Stage:
    """Room for some blocks on the device, and for the same blocks in pinned host memory, `[blocks, planes, unit_bytes]`."""

    memory: Memory
    host: Bytes
    after: Event | None = None
    """When the device has done with `memory`: who has it next orders the stream after this, and need not wait.

    For `host` there is no such thing. It is read and written by threads, so who lends it waits before it gives it back.
    """


class Ring:
    """Stages that are lent in turn; who finds none free waits, holding nothing, in the order of asking."""

    def __init__(self, device: Device, geometry: Geometry, *, stages: int, blocks: int) -> None:
        self.blocks = blocks
        """How many blocks a stage holds."""
        self.size = stages * blocks * geometry.block_bytes
        """Bytes of all stages on the device, and as many of pinned host memory."""
        self._free: deque[Stage] = deque(
            Stage(device.allocate(blocks * geometry.block_bytes), device.pinned(blocks, geometry.planes, geometry.unit_bytes))
            for _ in range(stages)
        )
        self._left = asyncio.Semaphore(stages)

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Stage]:
        """Lend a stage for the length of a block. What the device still does with it is in `after` by the end."""
        async with self._left:
            stage = self._free.popleft()
            try:
                yield stage
            finally:
                self._free.append(stage)

    def close(self) -> None:
        """Let go of the stages; nobody has one, and nobody asks for one any more. May be called twice."""
        self._free.clear()
