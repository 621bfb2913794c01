"""Part of `bench gpu`: bytes a second over the bus and within the device, at block sizes, beside what the card can do at best."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from tiercache.bench.figures import Goal
from tiercache.bench.gpu_bench import Bench
from tiercache.bench.gpu_rig import Slots, random_bytes
from tiercache.kernels import host
from tiercache.kernels.device import Memory, Pool
from tiercache.kernels.host import Bytes, empty_bytes
from tiercache.storage.memory import HostMemory
from tiercache.storage.neighbours import neighbours
from tiercache.storage.pinning import Pinning

LAYERS, PLANES = 32, 64
SIZES = tuple(1 << power for power in range(16, 23))
"""Bytes of a block, 64 KiB to 4 MiB."""
DECIDED = 256 << 10
"""Bytes of a block from which on there is a goal."""
STAGES = 4


class _Field:
    """A pool, host memory of as many slots, and stages between them, for blocks of one size."""

    def __init__(self, bench: Bench, block_bytes: int, total: int, pinned: Bytes, stages: list[Memory], pool: Memory) -> None:
        self.bench = bench
        self.blocks = total // block_bytes
        self.block_bytes = block_bytes
        self.pool = Pool(pool, PLANES, self.blocks, block_bytes // PLANES)
        self.host = pinned.reshape(self.blocks, PLANES, block_bytes // PLANES)
        self.stages = stages
        self.stream = bench.rig.device.stream()
        self.order = [int(slot) for slot in bench.draw.permutation(self.blocks)]
        """Slots of the pool: scattered, which is the harder case, and costs the kernels nothing."""
        self.apart = [*range(0, self.blocks, 2), *range(1, self.blocks, 2)]
        """Slots of the host of which no two neighbours are in one stage."""

    def down(self, slots: list[int]) -> None:
        """Enqueue the product's way down: gather into a stage, and from there to the host, neighbours together."""
        self._stages(slots, self._stage_down)

    def up(self, slots: list[int]) -> None:
        """Enqueue the way up, whole blocks."""
        self._stages(slots, self._stage_up)

    def layers(self) -> None:
        """Enqueue the product's way up layer by layer: one layer of many blocks through a stage, blocks being neighbours."""
        parts, unit = PLANES // LAYERS, self.block_bytes // PLANES
        step = max(1, self.stages[0].size // (parts * unit))
        number = 0
        for layer in range(LAYERS):
            for low in range(0, self.blocks, step):
                high = min(low + step, self.blocks)
                stage = self.stages[number % STAGES]
                number += 1
                rows = self.host[low:high, layer * parts : (layer + 1) * parts].reshape(high - low, -1)
                self.stream.write(rows, stage, 0)
                self.stream.scatter(stage, self.pool, self.order[low:high], first=layer * parts, planes=parts)

    def mapped(self, *, up: bool) -> None:
        """Enqueue the way without a stage."""
        self.bench.rig.mapped(self.stream, self.pool, self.order, Slots(self.host, list(range(self.blocks))), up=up)

    def _stages(self, slots: list[int], through: Callable[[Memory, list[int], list[int]], None]) -> None:
        step = self.stages[0].size // self.block_bytes
        for number, low in enumerate(range(0, self.blocks, step)):
            through(self.stages[number % STAGES], self.order[low : low + step], slots[low : low + step])

    def _stage_down(self, stage: Memory, pool: list[int], slots: list[int]) -> None:
        order, runs = neighbours([0] * len(slots), slots)
        self.stream.gather(self.pool, [pool[place] for place in order], stage)
        at = 0
        for run in runs:
            into = self.host[run.first : run.first + run.length].reshape(-1)
            self.stream.read(stage, at, into)
            at += into.size

    def _stage_up(self, stage: Memory, pool: list[int], slots: list[int]) -> None:
        order, runs = neighbours([0] * len(slots), slots)
        at = 0
        for run in runs:
            source = self.host[run.first : run.first + run.length].reshape(-1)
            self.stream.write(source, stage, at)
            at += source.size
        self.stream.scatter(stage, self.pool, [pool[place] for place in order], first=0, planes=PLANES)


def measure(bench: Bench) -> None:
    """Measure; before each figure the bytes are compared."""
    total = bench.pick(4 << 20, 512 << 20)
    device = bench.rig.device
    with ExitStack() as ending:
        memory = HostMemory(total)
        ending.callback(memory.close)
        pinning = Pinning(device, memory.array, slot_bytes=max(SIZES))
        ending.callback(pinning.close)
        bench.check("host memory can be pinned", pinning.refused is None, pinning.refused or "")
        if pinning.refused is not None:
            return
        stages = [device.allocate(bench.pick(4 << 20, 32 << 20)) for _ in range(STAGES)]
        pool, other = device.allocate(total), device.allocate(total)
        for block_bytes in SIZES:
            field = _Field(bench, block_bytes, total, memory.array, stages, pool)
            _over_the_bus(bench, field, other, _staged(field))
            _within(bench, field, other)
        # Last: where registered memory has another address on the device, these kernels end the context.
        for block_bytes in SIZES:
            field = _Field(bench, block_bytes, total, memory.array, stages, pool)
            _over_the_bus(bench, field, other, _mapped(field))


Ways = dict[str, tuple[str, Callable[[], None]]]
"""By name: `down` or `up`, and what enqueues it."""


def _staged(field: _Field) -> Ways:
    return {
        "gather and copy down": ("down", lambda: field.down(list(range(field.blocks)))),
        "gather and copy down, no neighbours": ("down", lambda: field.down(field.apart)),
        "copy up and scatter": ("up", lambda: field.up(list(range(field.blocks)))),
        "copy up and scatter, no neighbours": ("up", lambda: field.up(field.apart)),
        "layer by layer up": ("up", field.layers),
    }


def _mapped(field: _Field) -> Ways:
    return {
        "mapped down": ("down", lambda: field.mapped(up=False)),
        "mapped up": ("up", lambda: field.mapped(up=True)),
    }


def _over_the_bus(bench: Bench, field: _Field, flat: Memory, ways: Ways) -> None:
    host_bytes = field.host.reshape(-1)
    ceilings: Ways = {
        "down": ("pinned copy to the host", lambda: field.stream.read(flat, 0, host_bytes)),
        "up": ("pinned copy to the device", lambda: field.stream.write(host_bytes, flat, 0)),
    }
    size = field.pool.memory.size
    for name, (way, enqueue) in ways.items():
        slots = field.apart if "no neighbours" in name else list(range(field.blocks))
        exact = _down_is_exact(field, enqueue, slots) if way == "down" else _up_is_exact(field, enqueue, slots)
        bench.check(f"{name} of blocks of {field.block_bytes >> 10} KiB is exact", exact)
        reference, best = ceilings[way]
        with bench.run.beside(reference, lambda best=best: _rates(bench, field, best, size)) as beside:  # type: ignore[misc]
            rates = _rates(bench, field, enqueue, size)
        product = name in {"gather and copy down", "copy up and scatter", "layer by layer up"}
        goal = Goal(key=f"gpu-{way}", at_least=0.9) if product and field.block_bytes >= DECIDED else None
        bench.add(name, rates, "B/s", at={"block bytes": field.block_bytes}, reference=beside.reference, goal=goal)


def _rates(bench: Bench, field: _Field, enqueue: Callable[[], None], size: int) -> list[float]:
    return bench.samples(lambda: bench.rig.wall(field.stream, enqueue), size=size)


def _down_is_exact(field: _Field, enqueue: Callable[[], None], slots: list[int]) -> bool:
    content = random_bytes(field.bench.draw, *_shape(field.pool))
    field.bench.rig.poke(content, field.pool.memory)
    field.host[:] = 0xA5
    enqueue()
    field.stream.record().wait()
    return all(np.array_equal(field.host[slot], content[:, place]) for place, slot in zip(field.order, slots, strict=True))


def _up_is_exact(field: _Field, enqueue: Callable[[], None], slots: list[int]) -> bool:
    field.host[:] = random_bytes(field.bench.draw, *field.host.shape)
    field.bench.rig.poke(np.full(field.pool.memory.size, 0xA5, np.uint8), field.pool.memory)
    enqueue()
    field.stream.record().wait()
    found = field.bench.rig.peek(field.pool.memory).reshape(_shape(field.pool))
    return all(np.array_equal(field.host[slot], found[:, place]) for place, slot in zip(field.order, slots, strict=True))


def _within(bench: Bench, field: _Field, flat: Memory) -> None:
    """Gather and scatter within the device, timed by the device: what they read and write counts once, as in the driver's copy."""
    pool, stream, size = field.pool, field.stream, field.pool.memory.size
    gathered = _gathered(field, flat)
    kernels: dict[str, Callable[[], None]] = {
        "gather": lambda: stream.gather(pool, field.order, flat),
        "scatter": lambda: stream.scatter(flat, pool, field.order, first=0, planes=PLANES),
    }
    for name, enqueue in kernels.items():
        bench.check(f"{name} of blocks of {field.block_bytes >> 10} KiB is exact", gathered)

        def best() -> list[float]:
            return bench.samples(lambda: bench.rig.seconds(stream, lambda: bench.rig.clone(stream, pool.memory, flat)), size=size)

        with bench.run.beside("the driver's copy within the device", best) as beside:
            rates = bench.samples(lambda enqueue=enqueue: bench.rig.seconds(stream, enqueue), size=size)  # type: ignore[misc]
        goal = Goal(key=f"gpu-{name}", at_least=0.8)
        bench.add(name, rates, "B/s", at={"block bytes": field.block_bytes}, reference=beside.reference, goal=goal)


def _gathered(field: _Field, flat: Memory) -> bool:
    """Return whether a gather of all blocks is the reference's, and a scatter of it the pool."""
    rig, pool = field.bench.rig, field.pool
    content = random_bytes(field.bench.draw, *_shape(pool))
    rig.poke(content, pool.memory)
    field.stream.gather(pool, field.order, flat)
    field.stream.record().wait()
    expected = empty_bytes(field.blocks, PLANES, pool.unit_bytes)
    host.gather(content, field.order, expected)
    exact = np.array_equal(rig.peek(flat), expected.reshape(-1))
    rig.poke(np.full(pool.memory.size, 0xA5, np.uint8), pool.memory)
    field.stream.scatter(flat, pool, field.order, first=0, planes=PLANES)
    field.stream.record().wait()
    return exact and np.array_equal(rig.peek(pool.memory), content.reshape(-1))


def _shape(pool: Pool) -> tuple[int, int, int]:
    return pool.planes, pool.slots, pool.unit_bytes
