"""The staging ring: a fixed number of buffers between a device's pool and the rest, which the tree never owns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tiercache.kernels.device import Device, Event, Memory
from tiercache.kernels.host import Bytes
from tiercache.spec import Geometry
from tiercache.storage.workers import Lane


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
    """Stages that are lent in turn; who finds none free waits, holding nothing, in the order of asking.

    Out of the device and into it there are stages of their own, if there are two at least: a stream that has much enqueued, such as
    all layers of a long prompt, would else hold up the other way by every stage that it has had.
    """

    def __init__(self, device: Device, geometry: Geometry, *, stages: int, blocks: int) -> None:
        self.blocks = blocks
        """How many blocks a stage holds."""
        self.size = stages * blocks * geometry.block_bytes
        """Bytes of all stages on the device, and as many of pinned host memory."""
        made = [
            Stage(device.allocate(blocks * geometry.block_bytes), device.pinned(blocks, geometry.planes, geometry.unit_bytes))
            for _ in range(stages)
        ]
        self._stages = made
        """Those that are lent, too: what the device still copies stays where it is as long as somebody holds the ring."""
        up = _Row(made[::2])
        self._rows = {Lane.UP: up, Lane.DOWN: _Row(made[1::2]) if stages > 1 else up}

    @asynccontextmanager
    async def lend(self, lane: Lane) -> AsyncIterator[Stage]:
        """Lend a stage to the way of a lane, `UP` or `DOWN`, for the length of a block.

        What the device still does with it is in `after` by the end. A borrower who is cancelled does not know what becomes of his
        stage, which a thread may be about to use: nobody has it any more.
        """
        row = self._rows[lane]
        await row.left.acquire()
        stage = row.free.popleft()
        try:
            yield stage
        except asyncio.CancelledError:
            raise
        except BaseException:
            row.take_back(stage)
            raise
        else:
            row.take_back(stage)

    def close(self) -> None:
        """Let go of the stages; nobody has one, and nobody asks for one any more. May be called twice."""
        self._stages = []
        for row in self._rows.values():
            row.free.clear()


class _Row:
    """Stages of one way."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.free = deque(stages)
        self.left = asyncio.Semaphore(len(stages))

    def take_back(self, stage: Stage) -> None:
        """Let the next one have a stage."""
        self.free.append(stage)
        self.left.release()
