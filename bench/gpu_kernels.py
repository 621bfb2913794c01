"""Part of `bench gpu`: every kernel against the exact reference, on fresh random shapes, slots and bytes, every byte compared."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tiercache.bench.gpu_bench import Bench
from tiercache.bench.gpu_rig import Slots, random_bytes
from tiercache.kernels import host
from tiercache.kernels.device import Pool
from tiercache.kernels.host import Bytes, empty_bytes

POISON = 0xA5
MARGIN = 256
"""Bytes behind what a kernel may write, which keep their poison."""
_FAR = 36 << 30
"""Bytes of a pool that needs offsets of more than 31 bits, also in vectors of 16 bytes."""


class Shape(NamedTuple):
    """A pool and a list of slots. A unit is `block_size` tokens of all heads of one tensor, or of one latent vector."""

    layers: int
    parts: int
    unit: int
    slots: int
    chosen: list[int]

    @property
    def planes(self) -> int:
        """Rows a block."""
        return self.layers * self.parts


def measure(bench: Bench) -> None:
    """Compare."""
    for name, check in (("gather", _gather), ("scatter", _scatter), ("fork", _fork), ("rows", _rows)):
        _each(bench, name, check)
    _far(bench)
    _each(bench, "mapped", _mapped)


def _each(bench: Bench, name: str, check: Callable[[Bench, Shape], bool]) -> None:
    shapes = _shapes(bench.seed, bench.pick(8, 120), whole=name == "mapped")
    wrong = [str(shape) for shape in shapes if not check(bench, shape)]
    bench.check(f"{name} is the reference's, byte for byte", not wrong, wrong[0] if wrong else f"{len(shapes)} shapes")


def _shapes(seed: int, count: int, *, whole: bool) -> list[Shape]:
    """Draw shapes: items of 1, 2 and 4 bytes, head_dim a multiple of 8, block_size from 1, K and V or one latent tensor.

    Slot lists are neighbours, scattered, or with repeats (of a gather alone). With `whole`, rows are whole vectors of 16 bytes.
    """
    draw = random.Random(seed)
    shapes: list[Shape] = []
    while len(shapes) < count:
        parts, item, block_size = draw.choice([1, 2]), draw.choice([1, 2, 4]), draw.choice([1, 1, 2, 3, 16, 64])
        heads, dim = (1, 8 * draw.randrange(1, 80)) if parts == 1 else (draw.choice([1, 2, 3, 8]), 8 * draw.randrange(1, 33))
        unit = item * block_size * heads * dim
        if (whole and unit % 16) or unit > 1 << 18:
            continue
        slots, layers = draw.randrange(1, 40), draw.randrange(1, 9)
        size = draw.randrange(1, slots + 1)
        first = draw.randrange(slots - size + 1)
        chosen = draw.choice([list(range(first, first + size)), draw.sample(range(slots), size)])
        shapes.append(Shape(layers, parts, unit, slots, chosen))
    return shapes


def _pool(bench: Bench, shape: Shape) -> tuple[Pool, Bytes]:
    """Return a pool and what it holds."""
    memory = bench.rig.device.allocate(shape.planes * shape.slots * shape.unit + MARGIN)
    content = np.full(memory.size, POISON, np.uint8)
    content[: memory.size - MARGIN] = random_bytes(bench.draw, memory.size - MARGIN)
    bench.rig.poke(content, memory)
    known = content[: memory.size - MARGIN].reshape(shape.planes, shape.slots, shape.unit)
    return Pool(memory, shape.planes, shape.slots, shape.unit), known


def _holds(bench: Bench, pool: Pool, known: Bytes) -> bool:
    """Return whether a pool holds exactly that, and its margin its poison."""
    found = bench.rig.peek(pool.memory)
    return np.array_equal(found[: known.size].reshape(known.shape), known) and bool((found[known.size :] == POISON).all())


def _gather(bench: Bench, shape: Shape) -> bool:
    pool, known = _pool(bench, shape)
    slots = shape.chosen + [bench.seed % shape.slots] * (len(shape.chosen) % 3)
    expected = empty_bytes(len(slots), shape.planes, shape.unit)
    host.gather(known, slots, expected)
    into = bench.rig.device.allocate(expected.size + MARGIN)
    bench.rig.poke(np.full(into.size, POISON, np.uint8), into)
    stream = bench.rig.device.stream()
    stream.gather(pool, slots, into)
    stream.record().wait()
    found = bench.rig.peek(into)
    exact = np.array_equal(found[: expected.size].reshape(expected.shape), expected) and bool(
        (found[expected.size :] == POISON).all()
    )
    return exact and _holds(bench, pool, known)


def _scatter(bench: Bench, shape: Shape) -> bool:
    pool, known = _pool(bench, shape)
    draw = random.Random(bench.seed + shape.unit)
    first = draw.randrange(shape.planes)
    planes = draw.randrange(1, shape.planes - first + 1)
    rows = random_bytes(bench.draw, len(shape.chosen), planes, shape.unit)
    source = bench.rig.device.allocate(rows.size)
    bench.rig.poke(rows, source)
    stream = bench.rig.device.stream()
    stream.scatter(source, pool, shape.chosen, first=first, planes=planes)
    stream.record().wait()
    for place, slot in enumerate(shape.chosen):
        known[first : first + planes, slot] = rows[place]
    return _holds(bench, pool, known)


def _fork(bench: Bench, shape: Shape) -> bool:
    pool, known = _pool(bench, shape)
    others = [slot for slot in range(shape.slots) if slot not in set(shape.chosen)]
    if not others:
        return True
    origins = [others[place % len(others)] for place in range(len(shape.chosen))]
    stream = bench.rig.device.stream()
    stream.copy(pool, origins, shape.chosen)
    stream.record().wait()
    known[:, shape.chosen] = known[:, origins].copy()
    return _holds(bench, pool, known)


def _rows(bench: Bench, shape: Shape) -> bool:
    """Rows with gaps in pinned memory go to the device together and come back apart, and the gaps keep their poison."""
    device = bench.rig.device
    count, gap = len(shape.chosen) + 1, 64 * (shape.layers % 3)
    there, back = device.pinned(count, shape.unit + gap), device.pinned(count, shape.unit + gap)
    there[:] = random_bytes(bench.draw, *there.shape)
    back[:] = POISON
    memory = device.allocate(count * shape.unit + 16)
    stream = device.stream()
    stream.write(there[:, : shape.unit], memory, 16)
    stream.read(memory, 16, back[:, : shape.unit])
    stream.record().wait()
    together = bench.rig.peek(memory)[16:].reshape(count, shape.unit)
    exact = np.array_equal(back[:, : shape.unit], there[:, : shape.unit]) and np.array_equal(together, there[:, : shape.unit])
    return exact and bool((back[:, shape.unit :] == POISON).all())


def _mapped(bench: Bench, shape: Shape) -> bool:
    """What writes to pinned memory by itself, and reads it."""
    pool, known = _pool(bench, shape)
    block = shape.planes * shape.unit
    pinned = bench.rig.device.pinned(shape.slots + 2, -(-block // 4096) * 4096)
    pinned[:] = POISON
    blocks = pinned[:, :block].reshape(shape.slots + 2, shape.planes, shape.unit)
    numbers = random.Random(bench.seed).sample(range(shape.slots + 2), len(shape.chosen))
    stream = bench.rig.device.stream()
    bench.rig.mapped(stream, pool, shape.chosen, Slots(blocks, numbers), up=False)
    stream.record().wait()
    untouched = [number for number in range(shape.slots + 2) if number not in set(numbers)]
    exact = bool((pinned[untouched] == POISON).all() and (pinned[:, block:] == POISON).all())
    for slot, number in zip(shape.chosen, numbers, strict=True):
        exact = exact and np.array_equal(blocks[number], known[:, slot])
        blocks[number] = random_bytes(bench.draw, shape.planes, shape.unit)
        known[:, slot] = blocks[number]
    bench.rig.mapped(stream, pool, shape.chosen, Slots(blocks, numbers), up=True)
    stream.record().wait()
    return exact and _holds(bench, pool, known)


def _far(bench: Bench) -> None:
    """Slots of a pool so large that offsets in vectors need more than 31 bits: both ends, and what 32 bits would make of them."""
    device, unit, planes = bench.rig.device, 32768, 64
    size = bench.pick(16 << 20, _FAR)
    if bench.rig.free() < size + (4 << 30):
        bench.note(f"the device has no {size >> 30} GiB free: offsets of more than 31 bits were not tried")
        return
    slots = size // (unit * planes)
    pool = Pool(device.allocate(size), planes, slots, unit)
    chosen = [0, slots - 1, slots // 2, 1, slots - 2]
    rows = random_bytes(bench.draw, len(chosen), planes, unit)
    source, into = device.allocate(rows.size), device.allocate(rows.size)
    bench.rig.poke(rows, source)
    stream = device.stream()
    stream.scatter(source, pool, chosen, first=0, planes=planes)
    stream.gather(pool, chosen, into)
    there = device.pinned(planes, unit)
    for plane in range(planes):
        stream.read(pool.memory, (plane * slots + slots - 1) * unit, there[plane])
    stream.record().wait()
    exact = np.array_equal(bench.rig.peek(into).reshape(rows.shape), rows) and np.array_equal(there, rows[1])
    bench.check("a pool of more than 2^31 vectors is reached at both ends", exact, f"{size >> 30} GiB")
