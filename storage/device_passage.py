"""Copies on a runner's own stream: between slots and its tensors on the same device, in the order of what it enqueues itself.

* Nothing here waits. What a call enqueues reads and writes when the runner's stream comes to it. So the runner's next kernel finds
  the bytes, and what its last one wrote is what is taken, without an event between them.
* A slot belongs to what is enqueued until an event that is recorded after it has happened: whoever holds the slot waits for that.
* Between a slot and a tensor lies a stage, since both are layer-first and their blocks lie far apart. Stages are few, and runners
  may have many streams: each has a stage of its own as long as there are enough, and whoever has it next begins after its event.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tiercache.kernels.device import Device, Event, Memory, Pool, Stream
from tiercache.kernels.host import Bytes
from tiercache.storage.checksum import checksum
from tiercache.storage.contract import Store
from tiercache.storage.neighbours import Run, neighbours
from tiercache.storage.reader import Place

T = TypeVar("T")


class Runner(NamedTuple):
    """A runner's stream, and the driver's pointer to it, by which it is told from others."""

    pointer: int
    stream: Stream


Sheet = Sequence[Pool]
"""A tensor's blocks in place: pools each of which has the next planes of all of them, one pool or one a plane."""


@dataclass(slots=True, eq=False)
class _Stage:
    """Device memory that one stream after the other uses; `turn` is for who enqueues."""

    memory: Memory
    turn: threading.Lock
    after: Event | None = None


class Passage:
    """Between the tiers of `stores`, of which `pool()` is the first, and tensors of runners on `device`.

    Each of the `stages` holds a block at least. `together` is how many slots of host memory were pinned by one call. `pool` raises
    Closed. Where a call raises, a part of its copies may have been enqueued.
    """

    def __init__(
        self, device: Device, pool: Callable[[], Pool], stores: Sequence[Store], stages: Sequence[Memory], *, together: int | None
    ) -> None:
        self._device = device
        self._pool = pool
        self._stores = stores
        self._together = together
        self._stages = [_Stage(memory, threading.Lock()) for memory in stages]
        self._homes: dict[int, int] = {}
        """By a stream's pointer, the number of its stage."""
        self.own = Runner(-1, device.stream())
        """A stream for what would hold up a runner's: ways over the bus."""

    def check(self, places: Sequence[Place]) -> int:
        """Verify blocks that the host can see, where they lie, and return how many leading ones are good; for a worker thread.

        What lies on the device was verified on its way there.
        """
        for number, place in enumerate(places):
            view = self._stores[place.position].view(place.slot)
            if view is not None and checksum(view) != place.checksum:
                return number
        return len(places)

    @staticmethod
    def after(runner: Runner, events: Sequence[Event], call: Callable[..., T], *args: object) -> T:
        """Have what `call(runner, *args)` enqueues begin after some events."""
        for event in events:
            runner.stream.wait(event)
        return call(runner, *args)

    def gather(self, runner: Runner, places: Sequence[Place], into: Sheet) -> int:
        """Check blocks and enqueue the copies of the leading good ones into a tensor; return how many that are."""
        good = self.check(places)
        self.fill(runner, places[:good], into)
        return good

    def fill(self, runner: Runner, places: Sequence[Place], into: Sheet, first: int = 0) -> None:
        """Enqueue the copies of blocks into the leading blocks of a tensor: their planes from `first` on, as many as it has."""
        with self._stage_of(runner) as memory:
            for target in into:
                step = max(1, memory.size // (target.planes * target.unit_bytes))
                for low in range(0, len(places), step):
                    part = places[low : low + step]
                    self._from_device(runner.stream, memory, part, target, low, first)
                    self._from_host(runner.stream, memory, part, target, low, first)
                first += target.planes

    def take(self, runner: Runner, source: Sheet, begin: int, slots: Sequence[int]) -> None:
        """Enqueue the copies of blocks `begin` and on of a tensor into slots of the device."""
        first = 0
        with self._stage_of(runner) as memory:
            for origin in source:
                step = max(1, memory.size // (origin.planes * origin.unit_bytes))
                for low in range(0, len(slots), step):
                    part = slots[low : low + step]
                    runner.stream.gather(origin, range(begin + low, begin + low + len(part)), memory)
                    runner.stream.scatter(memory, self._pool(), part, first=first, planes=origin.planes)
                first += origin.planes

    def lower(self, runner: Runner, source: Sheet, begin: int, places: Sequence[Place]) -> None:
        """Enqueue the copies of blocks `begin` and on of a tensor into slots of host memory."""
        order, runs = neighbours([place.position for place in places], [place.slot for place in places], together=self._together)
        first = 0
        with self._stage_of(runner) as memory:
            for origin in source:
                step = max(1, memory.size // (origin.planes * origin.unit_bytes))
                at = 0
                for run in runs:
                    for low in range(0, run.length, step):
                        count = min(step, run.length - low)
                        blocks = [begin + number for number in order[at : at + count]]
                        runner.stream.gather(origin, blocks, memory)
                        runner.stream.read(
                            memory, 0, self._rows(run._replace(first=run.first + low, length=count), first, origin.planes)
                        )
                        at += count
                first += origin.planes

    # --- inside -----------------------------------------------------------------------------------------------------------

    @contextmanager
    def _stage_of(self, runner: Runner) -> Iterator[Memory]:
        """Lend the stream's stage to who enqueues; what the device still does with it is in `after` by the end."""
        stage = self._stages[self._homes.setdefault(runner.pointer, len(self._homes) % len(self._stages))]
        with stage.turn:
            if stage.after is not None:
                runner.stream.wait(stage.after)
            try:
                yield stage.memory
            finally:
                stage.after = runner.stream.record()

    def _from_device(self, stream: Stream, memory: Memory, places: Sequence[Place], into: Pool, at: int, first: int) -> None:
        found = [number for number, place in enumerate(places) if place.position == 0]
        if found:
            stream.gather(self._planes(first, into.planes), [places[number].slot for number in found], memory)
            stream.scatter(memory, into, [at + number for number in found], first=0, planes=into.planes)

    def _from_host(self, stream: Stream, memory: Memory, places: Sequence[Place], into: Pool, at: int, first: int) -> None:
        found = [number for number, place in enumerate(places) if place.position != 0]
        if not found:
            return
        positions, slots = [places[number].position for number in found], [places[number].slot for number in found]
        order, runs = neighbours(positions, slots, together=self._together)
        begin = 0
        for run in runs:
            rows = self._rows(run, first, into.planes)
            stream.write(rows, memory, begin)
            begin += rows.size
        stream.scatter(memory, into, [at + found[number] for number in order], first=0, planes=into.planes)

    def _rows(self, run: Run, first: int, planes: int) -> Bytes:
        """Return planes of neighbouring slots in host memory in place, a row a block, `[blocks, bytes]`."""
        blocks = self._stores[run.position].views(run.first, run.length)
        assert blocks is not None and blocks[0].flags.c_contiguous, "the tiers below are block-first memory"
        return blocks[:, first : first + planes].reshape(run.length, -1)

    def _planes(self, first: int, count: int) -> Pool:
        """Return some planes of all slots, in place: they lie together."""
        pool = self._pool()
        if count == pool.planes:
            return pool
        size = pool.slots * pool.unit_bytes
        return Pool(self._device.part(pool.memory, first * size, count * size), count, pool.slots, pool.unit_bytes)
