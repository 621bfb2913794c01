"""Copies between slots of a device's pool and memory of this host, by way of stages, checked where the host sees the bytes.

* Every call ends when its copies are over, and no sooner: neither a failure nor a caller that is cancelled ends it while the device
  still reads a slot, writes one, or uses a stage's host memory. So a lease or a reservation around the call lasts long enough.
* What came out of a slot is checked in the stage, where nothing changes it any more, and copied on from there.
* Each way has a stream of its own, so that it stands neither behind the other way nor behind the transfers of `DeviceCopier`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import numpy as np

from tiercache.errors import InvalidTensor
from tiercache.kernels.device import Device, Event, Pool, Stream
from tiercache.kernels.host import Bytes, copy_run
from tiercache.spec import Geometry
from tiercache.storage.checksum import checksum
from tiercache.storage.device_way import Way
from tiercache.storage.finishing import Finishing
from tiercache.storage.staging import Ring, Stage
from tiercache.storage.workers import Lane, Workers, in_parts, outlive

T = TypeVar("T")

_AT_ONCE = 2
"""Stages that one call uses at once: while the bus fills one the host empties the other, and more would keep others waiting."""


class DevicePort:
    """What a host reads of a device's slots and writes to them. `pool` returns the slots, or raises Closed.

    It works in the lanes COPY, DOWN and UP of `workers`. The caller holds a lease on what it reads and a reservation on what it
    writes. Each call raises InvalidTensor for memory that does not fit the slots or a slot that does not exist, WorkerDied when a
    thread that copied died, and StoreError when the device failed a copy: what was read is then undefined.
    """

    def __init__(self, device: Device, pool: Callable[[], Pool], geometry: Geometry, ring: Ring, workers: Workers) -> None:
        self._device = device
        self._pool = pool
        self._geometry = geometry
        self._ring = ring
        self._workers = workers
        self._down = Way(device, Lane.DOWN)
        self._up = Way(device, Lane.UP)
        self._finishing = Finishing("tiercache-device-port")

    async def read(self, slots: Sequence[int], into: Bytes, *, after: Event | None = None) -> list[int]:
        """Copy blocks one after the other into `into`, `[planes, len(slots) * unit_bytes]`; return the checksums of what arrived.

        The device begins after `after`. A checksum is that of the bytes that were then copied to `into`.
        """
        self._require(into, self._geometry.planes, len(slots))
        unit = self._geometry.unit_bytes

        async def piece(stage: Stage, low: int, high: int) -> list[int]:
            await self._fetched(stage, self._pool(), slots[low:high], after)
            return await self._workers.run(Lane.COPY, _copy_out, stage.host[: high - low], into[:, low * unit : high * unit])

        return _joined(await self._finishing.outlast(self._in_pieces(Lane.DOWN, len(slots), self._ring.blocks, piece)))

    async def sums(self, slots: Sequence[int], *, after: Event | None = None) -> list[int]:
        """Return the checksums of what lies in slots, where the device begins to read after `after`."""

        async def piece(stage: Stage, low: int, high: int) -> list[int]:
            await self._fetched(stage, self._pool(), slots[low:high], after)
            return await self._workers.run(Lane.COPY, _sums, stage.host[: high - low])

        return _joined(await self._finishing.outlast(self._in_pieces(Lane.DOWN, len(slots), self._ring.blocks, piece)))

    async def layer(self, slots: Sequence[int], layer: int, into: Bytes, *, after: Event | None = None) -> None:
        """Copy one layer of blocks into `into`, `[parts, len(slots) * unit_bytes]`. Nothing is verified: checksums are blocks'."""
        geometry = self._geometry
        parts, unit = geometry.parts, geometry.unit_bytes
        self._require(into, parts, len(slots))

        async def piece(stage: Stage, low: int, high: int) -> None:
            await self._fetched(stage, self._layer_of(layer), slots[low:high], after)
            blocks = stage.host.reshape(-1)[: (high - low) * parts * unit].reshape(high - low, parts, unit)
            await self._workers.run(Lane.COPY, copy_run, blocks, into[:, low * unit : high * unit])

        await self._finishing.outlast(self._in_pieces(Lane.DOWN, len(slots), self._ring.blocks * geometry.layers, piece))

    async def write(self, source: Bytes, slots: Sequence[int]) -> list[int]:
        """Copy `source`, `[planes, len(slots) * unit_bytes]`, into slots, a block each; return the checksums of what was sent.

        What the device made of it is not looked at.
        """
        self._require(source, self._geometry.planes, len(slots))
        unit = self._geometry.unit_bytes

        async def piece(stage: Stage, low: int, high: int) -> list[int]:
            blocks = stage.host[: high - low]
            found = await self._workers.run(Lane.COPY, _copy_in, source[:, low * unit : high * unit], blocks)

            pool = self._pool()

            def send(stream: Stream) -> None:
                stream.write(blocks.reshape(-1), stage.memory, 0)
                stream.scatter(stage.memory, pool, slots[low:high], first=0, planes=pool.planes)

            await self._over(self._up, await self._workers.run(Lane.COPY, self._up.enqueue, stage, send))
            return found

        return _joined(await self._finishing.outlast(self._in_pieces(Lane.UP, len(slots), self._ring.blocks, piece)))

    async def settle(self) -> None:
        """Wait until all copies are over. Nobody begins another one."""
        await self._finishing.wait()

    # --- inside -----------------------------------------------------------------------------------------------------------

    async def _in_pieces(self, lane: Lane, count: int, most: int, piece: Callable[[Stage, int, int], Awaitable[T]]) -> list[T]:
        """Await `piece(stage, low, high)` for pieces of at most `most` blocks; all are over when this returns or raises."""

        async def part(low: int, high: int) -> list[T]:
            found: list[T] = []
            for start in range(low, high, most):
                async with self._ring.lend(lane) as stage:
                    found.append(await piece(stage, start, min(start + most, high)))
            return found

        whole: list[T] = []
        for _, found in await in_parts(count, min(_AT_ONCE, -(-count // most)), part):
            if isinstance(found, BaseException):
                raise found
            whole += found
        return whole

    async def _fetched(self, stage: Stage, pool: Pool, slots: Sequence[int], after: Event | None) -> None:
        """Bring blocks of `pool` into the stage's host memory, from its beginning on."""
        size = len(slots) * pool.planes * pool.unit_bytes
        into = stage.host.reshape(-1)[:size]

        def fetch(stream: Stream) -> None:
            if after is not None:
                stream.wait(after)
            stream.gather(pool, slots, stage.memory)
            stream.read(stage.memory, 0, into)

        await self._over(self._down, await self._workers.run(Lane.COPY, self._down.enqueue, stage, fetch))

    async def _over(self, way: Way, event: Event) -> None:
        """Wait until a copy is over, also when a thread that waits for it dies."""
        await outlive(self._workers, way.lane, event.wait)

    def _layer_of(self, layer: int) -> Pool:
        """Return one layer of the pool in place: its planes lie together."""
        pool, parts = self._pool(), self._geometry.parts
        size = parts * pool.slots * pool.unit_bytes
        return Pool(self._device.part(pool.memory, layer * size, size), parts, pool.slots, pool.unit_bytes)

    def _require(self, memory: Bytes, planes: int, blocks: int) -> None:
        shape = (planes, blocks * self._geometry.unit_bytes)
        if memory.shape != shape or memory.dtype != np.uint8:
            raise InvalidTensor(f"{blocks} blocks are bytes {shape}, not {memory.dtype} {memory.shape}", value=memory.shape)


# --- on worker threads ----------------------------------------------------------------------------------------------------


def _copy_out(blocks: Bytes, into: Bytes) -> list[int]:
    found = _sums(blocks)
    copy_run(blocks, into)
    return found


def _copy_in(source: Bytes, blocks: Bytes) -> list[int]:
    count, planes, unit = blocks.shape
    np.copyto(blocks, source.reshape(planes, count, unit).transpose(1, 0, 2))
    return _sums(blocks)


def _sums(blocks: Bytes) -> list[int]:
    return [checksum(block) for block in blocks]


def _joined(parts: Sequence[list[int]]) -> list[int]:
    return [one for part in parts for one in part]
