"""The kernels' own source, run on the host against the reference: random shapes, dtypes, strides and slots, every byte checked."""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.kernels.host_kernels import HostKernels, compiled, compiler
from tiercache.kernels import host
from tiercache.kernels.host import Bytes

POISON = 0xA5
PAGE = mmap.PAGESIZE
_PROT_NONE = 0


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    if compiler() is None:
        pytest.skip("there is no C++ compiler to run the kernels on the host with")
    return HostKernels(compiled(tmp_path_factory.mktemp("kernels")))


class Guarded:
    """Memory that ends, or begins, at a page that can't be touched: an access outside is a signal."""

    def __init__(self, size: int, *, at_end: bool) -> None:
        pages = -(-size // PAGE) * PAGE
        self._map = mmap.mmap(-1, pages + 2 * PAGE)
        whole = np.frombuffer(self._map, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        for start in (0, PAGE + pages):
            assert libc.mprotect(ctypes.c_void_p(whole.ctypes.data + start), PAGE, _PROT_NONE) == 0
        start = PAGE + (pages - size if at_end else 0)
        self.bytes: Bytes = whole[start : start + size]
        self.bytes[:] = POISON


class Shape(NamedTuple):
    """A pool and a list of slots."""

    layers: int
    parts: int
    unit: int
    slots: int
    chosen: list[int]

    @property
    def planes(self) -> int:
        return self.layers * self.parts


def shapes(seed: int, count: int) -> Iterator[Shape]:
    """Draw shapes: head_dim a multiple of 8, block_size from 1, items of 1, 2 and 4 bytes, K and V or one latent tensor."""
    draw = random.Random(seed)
    for _ in range(count):
        unit = draw.choice([1, 1, 2, 16, 3]) * draw.choice([1, 2, 5]) * 8 * draw.choice([1, 1, 2, 9]) * draw.choice([1, 2, 4])
        slots = draw.randrange(1, 9)
        yield Shape(draw.randrange(1, 5), draw.choice([1, 2]), unit, slots, draw.sample(range(slots), draw.randrange(1, slots + 1)))


def filled(shape: tuple[int, ...], draw: np.random.Generator, *, at_end: bool) -> tuple[Guarded, Bytes]:
    memory = Guarded(int(np.prod(shape)), at_end=at_end)
    memory.bytes[:] = draw.integers(0, 256, memory.bytes.size, np.uint8)
    return memory, memory.bytes.reshape(shape)


@pytest.mark.parametrize("at_end", [False, True])
def test_gather_and_scatter_agree_with_the_reference(kernels: HostKernels, seed: int, at_end: bool) -> None:
    """All layers: what is gathered is the reference's, what is scattered back too, and no byte beside it changes."""
    draw = np.random.default_rng(seed)
    for number, shape in enumerate(shapes(seed, 60)):
        keep, pool = filled((shape.planes, shape.slots, shape.unit), draw, at_end=at_end)
        into = Guarded(len(shape.chosen) * shape.planes * shape.unit, at_end=at_end)
        gathered = into.bytes.reshape(len(shape.chosen), shape.planes, shape.unit)
        expected = np.empty_like(gathered)
        host.gather(pool, shape.chosen, expected)
        before = pool.copy()

        kernels.gather(pool, shape.chosen, gathered, first=0, planes=shape.planes, seed=number)
        assert np.array_equal(gathered, expected), shape
        assert np.array_equal(pool, before)

        _other, source = filled(gathered.shape, draw, at_end=at_end)
        host.scatter(source, before, shape.chosen)
        kernels.scatter(source, pool, shape.chosen, first=0, planes=shape.planes, seed=number)
        assert np.array_equal(pool, before), shape
        del keep


@pytest.mark.parametrize("at_end", [False, True])
def test_one_layer_is_scattered_and_gathered_alone(kernels: HostKernels, seed: int, at_end: bool) -> None:
    """Planes of one layer: they alone change, and they alone come back."""
    draw = np.random.default_rng(seed)
    for number, shape in enumerate(shapes(seed + 1, 40)):
        keep, pool = filled((shape.planes, shape.slots, shape.unit), draw, at_end=at_end)
        layer = number % shape.layers
        first, last = layer * shape.parts, (layer + 1) * shape.parts
        _source, rows = filled((len(shape.chosen), shape.parts, shape.unit), draw, at_end=at_end)
        expected = pool.copy()
        for place, slot in enumerate(shape.chosen):
            expected[first:last, slot] = rows[place]

        kernels.scatter(rows, pool, shape.chosen, first=first, planes=shape.parts, seed=number)
        assert np.array_equal(pool, expected), shape
        back = Guarded(rows.size, at_end=at_end)
        kernels.gather(pool, shape.chosen, back.bytes.reshape(rows.shape), first=first, planes=shape.parts, seed=number)
        assert np.array_equal(back.bytes.reshape(rows.shape), rows), shape
        del keep


def test_a_fork_copies_whole_blocks(kernels: HostKernels, seed: int) -> None:
    """Targets become their origins, everything else stays."""
    draw = np.random.default_rng(seed)
    choose = random.Random(seed)
    for number, shape in enumerate(shapes(seed + 2, 40)):
        slots = shape.slots + 2
        keep, pool = filled((shape.planes, slots, shape.unit), draw, at_end=bool(number % 2))
        order = choose.sample(range(slots), slots)
        targets = order[: slots // 2]
        origins = [choose.choice(order[slots // 2 :]) for _ in targets]
        expected = pool.copy()
        expected[:, targets] = pool[:, origins]

        kernels.copy(pool, origins, targets, seed=number)
        assert np.array_equal(pool, expected), (shape, origins, targets)
        del keep


def test_many_rows_go_over_few_blocks_of_threads(kernels: HostKernels, seed: int) -> None:
    """More rows than one grid has places for: each is copied once."""
    draw = np.random.default_rng(seed)
    _keep, pool = filled((64, 70, 8), draw, at_end=True)
    slots = [int(slot) for slot in draw.integers(0, 70, 300)]
    into = Guarded(300 * 64 * 8, at_end=True)

    how = kernels.gather(pool, slots, into.bytes.reshape(300, 64, 8), first=0, planes=64, seed=1)
    expected = np.empty((300, 64, 8), np.uint8)
    host.gather(pool, slots, expected)

    assert np.array_equal(into.bytes.reshape(expected.shape), expected)
    assert how.grid * how.block[1] <= 300 * 64


def test_both_widths_are_used(kernels: HostKernels, seed: int) -> None:
    """Sixteen bytes where rows and addresses allow it, else eight."""
    draw = np.random.default_rng(seed)
    widths = set()
    for unit in (8, 16, 24, 32, 4096):
        _keep, pool = filled((2, 3, unit), draw, at_end=False)
        into = Guarded(2 * unit, at_end=False)
        widths.add((unit, kernels.gather(pool, [1], into.bytes.reshape(1, 2, unit), first=0, planes=2, seed=1).width))

    assert widths == {(8, 8), (16, 16), (24, 8), (32, 16), (4096, 16)}


def test_guard_pages_are_there(tmp_path: Path) -> None:
    """What lies before and behind guarded memory can't be read: the pages have no rights."""
    memory = Guarded(100, at_end=True)
    start = memory.bytes.ctypes.data + 100

    with open("/proc/self/maps", encoding="ascii") as maps:
        rights = next(
            line.split()[1] for line in maps if int(line.split("-")[0], 16) <= start < int(line.split("-")[1].split()[0], 16)
        )
    assert rights in {"---p", "---s"}
