"""The lazy device against the host reference: rows, forks, order by events alone, and what it must refuse as a driver would."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from tiercache.errors import InvalidTensor, StoreError
from tiercache.kernels.device import Pool, rows_of
from tiercache.kernels.host import Bytes, empty_bytes
from tiercache.kernels.lazy import POISON, LazyDevice, LazyStream, pool_array


def drawn(seed: int, *shape: int) -> Bytes:
    memory = empty_bytes(*shape)
    memory[...] = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return memory


def filled_pool(device: LazyDevice, seed: int) -> Pool:
    pool = Pool(device.allocate(3 * 6 * 16), 3, 6, 16)
    pool_array(pool)[...] = drawn(seed, 3, 6, 16)
    return pool


@pytest.mark.parametrize("distance", [24, 25, 40])
def test_rows_go_and_come_one_behind_the_other(seed: int, distance: int) -> None:
    """Rows of 24 bytes, side by side or with gaps, lie together on the device, come back to their places, and gaps stay."""
    device = LazyDevice(seed)
    stream, memory = device.stream(), device.allocate(200)
    there, back = drawn(seed, 5, distance), np.full((5, distance), POISON, np.uint8)
    stream.write(there[:, :24], memory, 8)
    stream.read(memory, 8, back[:, :24])
    stream.record().wait()

    assert memory.bytes[8:128].tobytes() == there[:, :24].tobytes()
    assert back[:, :24].tobytes() == there[:, :24].tobytes()
    assert (memory.bytes[:8] == POISON).all() and (memory.bytes[128:] == POISON).all() and (back[:, 24:] == POISON).all()


def test_rows_are_measured() -> None:
    """Rows that touch are one; what is no rows of bytes is refused."""
    memory = empty_bytes(4, 32)

    assert rows_of(memory) == rows_of(memory.reshape(-1)) == (1, 128, 128)
    assert rows_of(memory[:, :8]) == (4, 8, 32)
    assert rows_of(memory[1:2, :8]) == (1, 8, 8)
    for wrong in (memory[:, ::2], memory[::-1], memory.reshape(2, 2, 32), memory[:, :8].T):
        with pytest.raises(InvalidTensor):
            rows_of(wrong)


def test_a_fork_happens_late_and_whole(seed: int) -> None:
    """Blocks become their origins when the stream comes to them, and nothing else changes."""
    device = LazyDevice(seed)
    pool, stream = filled_pool(device, seed), device.stream()
    before = pool_array(pool).copy()
    stream.copy(pool, [4, 4, 1], [0, 5, 2])
    assert (pool_array(pool) == before).all()

    stream.record().wait()
    before[:, [0, 5, 2]] = before[:, [4, 4, 1]]
    assert (pool_array(pool) == before).all()


@pytest.mark.parametrize(
    ("origins", "targets"), [([1], [1]), ([1, 2], [2, 3]), ([1, 2], [3, 3]), ([1], [2, 3]), ([6], [1]), ([1], [-1])]
)
def test_a_fork_that_has_an_order_is_refused(origins: list[int], targets: list[int], seed: int) -> None:
    """A slot in both lists, a target named twice, lists of different length, and slots that are not there."""
    device = LazyDevice(seed)

    with pytest.raises(InvalidTensor):
        device.stream().copy(filled_pool(device, seed), origins, targets)
    assert device.enqueued == 0


def test_only_events_order_two_streams(seed: int) -> None:
    """A copy that waits for no event may come first; one that waits comes after, in both directions."""
    device = LazyDevice(seed)
    one, other = device.stream(), device.stream()
    memory, source = device.allocate(8), drawn(seed, 8)
    early, late, down = np.zeros(8, np.uint8), np.zeros(8, np.uint8), np.zeros(8, np.uint8)
    device.choose = lambda ready: other if other in ready else ready[0]
    one.write(source, memory, 0)
    written = one.record()
    other.read(memory, 0, early)
    other.wait(written)
    other.read(memory, 0, late)
    read = other.record()
    one.wait(read)
    one.write(down, memory, 0)
    one.record().wait()

    assert (early == POISON).all()
    assert (late == source).all()
    assert not memory.bytes.any()


def test_memory_that_is_gone_before_its_copy_is_a_fault(seed: int) -> None:
    """A copy holds nothing: who gives its memory back early is told."""
    device = LazyDevice(seed)
    stream, source = device.stream(), drawn(seed, 8)
    stream.write(source, device.allocate(8), 0)
    del source
    gc.collect()

    with pytest.raises(StoreError, match="given back before the copy"):
        stream.record().wait()


@pytest.mark.parametrize(("at", "size"), [(0, 4097), (4095, 2), (100, 8000)])
def test_a_copy_over_the_end_of_what_was_pinned_is_refused(seed: int, at: int, size: int) -> None:
    """Half pinned is neither; pinned whole by one call, or not at all, is well."""
    device = LazyDevice(seed)
    stream, memory, source = device.stream(), device.allocate(16384), drawn(seed, 12288)
    device.register(source[:4096])
    device.register(source[4096:8192])

    with pytest.raises(StoreError, match="over the end"):
        stream.write(source[at : at + size], memory, 0)
    for whole in (source[:4096], source[4096:8192], source[8192:]):
        stream.write(whole, memory, 0)
        stream.read(memory, 0, whole)
    stream.record().wait()


def test_what_does_not_fit_the_device_is_refused(seed: int) -> None:
    """Neither end of its memory is gone over, and no plane or slot is made up."""
    device = LazyDevice(seed)
    stream: LazyStream = device.stream()
    memory, host, pool = device.allocate(16), drawn(seed, 8), filled_pool(device, seed)

    for at in (-1, 9):
        with pytest.raises(InvalidTensor):
            stream.write(host, memory, at)
        with pytest.raises(InvalidTensor):
            stream.read(memory, at, host)
    with pytest.raises(InvalidTensor):
        stream.gather(pool, [1], memory)
    with pytest.raises(InvalidTensor, match="slot 6"):
        stream.scatter(memory, pool, [6], first=0, planes=1)
    with pytest.raises(InvalidTensor, match="planes 2 to 4"):
        stream.scatter(device.allocate(32), pool, [0], first=2, planes=2)
