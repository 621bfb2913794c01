"""Copies between slots of block-first host memory and the KV memory of an engine, on the host or on its device.

Nothing is verified here: who calls looks at the slots before and after, as at every copy. An engine's blocks are copied a layer at
once, whatever their number: an interpreter that the engine keeps busy lets go of its lock now and then, and a loop over blocks and
layers would wait for it each time.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from tiercache.errors import InvalidTensor
from tiercache.kernels.device import Device, Event, Memory, Pool, Stream
from tiercache.kernels.host import Bytes
from tiercache.spec import Geometry
from tiercache.storage.checksum import checksum
from tiercache.storage.device_way import Way
from tiercache.storage.engine_memory import LayerRows, Numbers, put, take
from tiercache.storage.layouts import SlotPlanes
from tiercache.storage.neighbours import neighbours
from tiercache.storage.staging import Ring, Stage
from tiercache.storage.workers import Lane, Workers, in_parts, outlive

SHARE = 4 << 20
"""Bytes; below it one thread is done before a second one would begin."""
AT_ONCE = 8 << 20
"""Bytes that one call of numpy's gathers before it scatters them: little enough for a processor's cache, more than many blocks."""
GATHERED = 32 << 20
"""Bytes of blocks that are gathered layer by layer before they are brought together in their slots."""

Arrived = Callable[[int, Event | None], None]
"""Called on the event loop with a layer that is where it belongs, or the event after which it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Blocks in host memory: `memory` by tier position, and the position and slot of each block.

    `together` is how many slots of a position one call has pinned (`Pinning.together`).
    """

    memory: Mapping[int, SlotPlanes]
    positions: Numbers
    slots: Numbers
    together: int | None = None


class EngineMemory(Protocol):
    """An engine's KV memory, where a layer is one of the blocks' layers, and a block a number from 0 to `blocks - 1`."""

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        ...

    def now(self) -> Event | None:
        """Return the point that the engine has reached in this thread, after which its memory may be read and written."""
        ...

    def follow(self, event: Event | None) -> None:
        """Let what the engine does from now on in this thread come after an event of `load`'s."""
        ...

    async def load(self, origin: Origin, blocks: Numbers, after: Event | None, arrived: Arrived | None) -> None:
        """Copy every layer of `origin`'s blocks into `blocks`, the first one first; all have happened when this returns or raises.

        Without `arrived` nobody waits for a layer. Raises StoreError when a device fails: then nothing is to be believed. Both this
        and `store` are for tasks that nobody cancels: the copies go on whatever becomes of who waits for them.
        """
        ...

    async def store(self, blocks: Numbers, slots: Sequence[Bytes], after: Event | None) -> list[int]:
        """Copy `blocks` into slots, each `[planes, unit_bytes]`; return the checksums of what lies there then.

        All copies have happened when this returns or raises; raises as `load` does.
        """
        ...


class HostEngine:
    """An engine's tensors in host memory: a layer's bytes from its first to its last, and its rows."""

    def __init__(
        self, geometry: Geometry, layers: Sequence[tuple[Bytes, LayerRows]], workers: Workers, *, threads: int = 1
    ) -> None:
        self._geometry = geometry
        self._layers = layers
        self._workers = workers
        self._threads = threads
        self.blocks = min(rows.blocks for _, rows in layers)

    def now(self) -> None:
        """Return None: what the engine has done on the host is done."""

    def follow(self, event: Event | None) -> None:
        """Do nothing: a layer has been copied when it is told of."""

    async def load(self, origin: Origin, blocks: Numbers, after: Event | None, arrived: Arrived | None) -> None:
        """Copy on worker threads: a call a layer where somebody waits for layers, else a call a thread."""
        step = self._geometry.layers if arrived is None else 1
        for first in range(0, self._geometry.layers, step):
            layers = range(first, first + step)

            async def part(low: int, high: int, layers: range = layers) -> None:
                await self._workers.run(Lane.COPY, self._load, origin, blocks, layers, low, high)

            await _all_of(len(blocks), self._parts(len(blocks), step), part)
            if arrived is not None:
                arrived(first, None)

    async def store(self, blocks: Numbers, slots: Sequence[Bytes], after: Event | None) -> list[int]:
        """Copy on worker threads."""
        sums = [0] * len(slots)

        async def part(low: int, high: int) -> None:
            sums[low:high] = await self._workers.run(Lane.COPY, self._store, blocks[low:high], slots[low:high])

        await _all_of(len(slots), self._parts(len(slots), self._geometry.layers), part)
        return sums

    def _parts(self, blocks: int, layers: int) -> int:
        return min(self._threads, blocks * layers * self._geometry.parts * self._geometry.unit_bytes // SHARE)

    # --- on worker threads ------------------------------------------------------------------------------------------------

    def _load(self, origin: Origin, blocks: Numbers, layers: range, low: int, high: int) -> None:
        parts = self._geometry.parts
        step = max(1, AT_ONCE // (parts * self._geometry.unit_bytes))
        for layer in layers:
            memory, rows = self._layers[layer]
            for start in range(low, high, step):
                some = slice(start, min(start + step, high))
                put(memory, rows, blocks[some], _planes(origin, some, layer * parts, (layer + 1) * parts))

    def _store(self, blocks: Numbers, slots: Sequence[Bytes]) -> list[int]:
        """Gather a layer of several blocks at once, then bring each block together in its slot: two calls a block, not a layer."""
        layers, parts, unit = self._geometry.layers, self._geometry.parts, self._geometry.unit_bytes
        step = max(1, GATHERED // self._geometry.block_bytes)
        gathered = np.empty((layers, min(step, len(slots)), parts, unit), np.uint8)
        sums: list[int] = []
        for low in range(0, len(slots), step):
            some = blocks[low : low + step]
            for (memory, rows), into in zip(self._layers, gathered, strict=True):
                take(memory, rows, some, into[: len(some)])
            sums += _settle(gathered[:, : len(some)], slots[low : low + step])
        return sums


class DeviceEngine:
    """An engine's tensors on a device, each layer a pool of rows. `runner` returns the stream that the calling thread works on.

    Copies into it and out of it have a stream and a lane of waiting each, and the stages of `ring`. On the way in, a layer of
    neighbouring slots crosses the bus at once, is scattered from a stage, and has an event. On the way out, whole blocks are
    gathered into a stage, cross into its pinned half in one copy, and are brought into their slots by threads: slots are mapped
    anew for every writer, and to pin them each time costs more than the copy.
    """

    def __init__(
        self,
        device: Device,
        geometry: Geometry,
        layers: Sequence[tuple[Memory, LayerRows]],
        ring: Ring,
        workers: Workers,
        *,
        runner: Callable[[], Stream],
    ) -> None:
        self._device = device
        self._geometry = geometry
        self._pools = [(Pool(memory, 1, rows.rows, rows.row_bytes), rows) for memory, rows in layers]
        self._ring = ring
        self._workers = workers
        self._runner = runner
        self.blocks = min(rows.blocks for _, rows in layers)
        self._up = Way(device, Lane.UP)
        self._down = Way(device, Lane.DOWN)

    def now(self) -> Event:
        """Record an event on the stream that this thread works on."""
        return self._runner().record()

    def follow(self, event: Event | None) -> None:
        """Let that stream wait for the event; the thread does not."""
        if event is not None:
            self._runner().wait(event)

    async def load(self, origin: Origin, blocks: Numbers, after: Event | None, arrived: Arrived | None) -> None:
        """Enqueue all layers, then wait for the last event: copies of one stream happen in order."""
        step = self._ring.blocks * self._geometry.layers
        last: Event | None = None
        try:
            for layer in range(self._geometry.layers):
                for low in range(0, len(blocks), step):
                    copy = partial(self._layer_up, origin, blocks, layer, slice(low, low + step), after)
                    async with self._ring.lend(Lane.UP) as stage:
                        last = await self._enqueued(self._up, stage, copy)
                if arrived is not None:
                    arrived(layer, last)
        finally:
            if last is not None:
                try:
                    if after is not None:  # an engine takes its time; who waits for the bus does not stand behind it
                        await outlive(self._workers, Lane.RUNNER, after.wait)
                finally:
                    await outlive(self._workers, Lane.UP, last.wait)

    async def store(self, blocks: Numbers, slots: Sequence[Bytes], after: Event | None) -> list[int]:
        """Wait until the engine has computed the blocks, then bring them by way of stages."""
        if after is not None:
            await outlive(self._workers, Lane.RUNNER, after.wait)
        sums: list[int] = []
        for low in range(0, len(slots), self._ring.blocks):
            some, into = blocks[low : low + self._ring.blocks], slots[low : low + self._ring.blocks]
            async with self._ring.lend(Lane.DOWN) as stage:
                event = await self._enqueued(self._down, stage, partial(self._gather, some))
                await outlive(self._workers, Lane.DOWN, event.wait)
                sums += await self._workers.run(Lane.COPY, _settle, self._layers_of(stage, len(some)), into)
        return sums

    async def _enqueued(self, way: Way, stage: Stage, copy: Callable[[Stage, Stream], None]) -> Event:
        return await self._workers.run(Lane.COPY, way.enqueue, stage, partial(copy, stage))

    def _layers_of(self, stage: Stage, blocks: int) -> Bytes:
        """Return the stage's host memory as `_gather` fills it, `[layers, blocks, parts, unit_bytes]`."""
        layers, parts, unit = self._geometry.layers, self._geometry.parts, self._geometry.unit_bytes
        return stage.host.reshape(-1)[: layers * blocks * parts * unit].reshape(layers, blocks, parts, unit)

    # --- on worker threads ------------------------------------------------------------------------------------------------

    def _layer_up(
        self, origin: Origin, blocks: Numbers, layer: int, some: slice, after: Event | None, stage: Stage, stream: Stream
    ) -> None:
        """Enqueue the way of one layer from slots to the engine's blocks."""
        if after is not None:
            stream.wait(after)
        parts, at = self._geometry.parts, 0
        order, runs = neighbours(origin.positions[some].tolist(), origin.slots[some].tolist(), together=origin.together)
        for run in runs:
            rows = origin.memory[run.position][run.first : run.first + run.length, layer * parts : (layer + 1) * parts]
            source = rows.reshape(run.length, -1)
            assert np.shares_memory(source, rows), "only block-first memory is handed to a device"
            stream.write(source, stage.memory, at)
            at += source.size
        pool, rows_of = self._pools[layer]
        stream.scatter(stage.memory, pool, rows_of.of(blocks[some][order]).tolist(), first=0, planes=1)

    def _gather(self, blocks: Numbers, stage: Stage, stream: Stream) -> None:
        """Enqueue the way of whole blocks into the stage's host memory, layer after layer."""
        size = len(blocks) * self._geometry.parts * self._geometry.unit_bytes
        for layer, (pool, rows) in enumerate(self._pools):
            stream.gather(pool, rows.of(blocks).tolist(), self._device.part(stage.memory, layer * size, size))
        stream.read(stage.memory, 0, self._layers_of(stage, len(blocks)).reshape(-1))


def require_aligned(rows: LayerRows, address: int) -> None:
    """Raise InvalidTensor where a device's kernels can't copy a layer's rows: they move vectors of 8 bytes at least."""
    if rows.row_bytes % 8 or address % 8:
        raise InvalidTensor(
            f"on a device the runs of bytes that lie together must be a whole number of 8 bytes: they are {rows.row_bytes} at "
            f"{address:#x}",
            value=rows.row_bytes,
            limit=8,
        )


async def _all_of(count: int, parts: int, work: Callable[[int, int], Awaitable[None]]) -> None:
    """Have `work` done in parts, and raise the first error when all have ended."""
    for _, found in await in_parts(count, parts, work):
        if isinstance(found, BaseException):
            raise found


def _planes(origin: Origin, some: slice, first: int, last: int) -> Bytes:
    """Return planes of blocks, `[blocks, planes, unit_bytes]`, brought together by one call a tier."""
    positions, slots = origin.positions[some], origin.slots[some]
    if (positions == positions[0]).all():
        found: Bytes = origin.memory[int(positions[0])][slots, first:last]
        return found
    tiers = np.unique(positions).tolist()
    found = np.empty((len(slots), last - first, origin.memory[tiers[0]].shape[-1]), np.uint8)
    for position in tiers:
        there = positions == position
        found[there] = origin.memory[position][slots[there], first:last]
    return found


def _settle(gathered: Bytes, slots: Sequence[Bytes]) -> list[int]:
    """Copy blocks gathered layer by layer, `[layers, blocks, parts, unit_bytes]`, into slots; return the checksums there."""
    layers, _, parts, unit = gathered.shape
    sums: list[int] = []
    for number, slot in enumerate(slots):
        np.copyto(slot.reshape(layers, parts, unit), gathered[:, number])
        sums.append(checksum(slot))
    return sums
