"""The lazy device against the host reference: rows, forks, order by events alone, and what it must refuse as a driver would."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from tiercache.errors import InvalidTensor, MemoryRefused, StoreError
from tiercache.kernels.device import LEAST_EXPORT, Pool, rows_of
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


def test_memory_is_opened_by_its_handle(seed: int) -> None:
    """What another device opens is the same memory and outlives its owner; other memory, and handles to nothing, are refused."""
    device, other = LazyDevice(seed), LazyDevice(seed + 1)
    memory = device.allocate(LEAST_EXPORT)
    handle = device.export(memory)
    opened = other.open(handle, LEAST_EXPORT)
    there = drawn(seed, LEAST_EXPORT)
    stream = device.stream()
    stream.write(there, memory, 0)
    stream.record().wait()
    assert opened.bytes.tobytes() == there.tobytes()
    del memory
    gc.collect()
    assert device.allocated == 0 and opened.bytes.tobytes() == there.tobytes()

    with pytest.raises(MemoryRefused):
        other.open(handle, LEAST_EXPORT)
    for small in (device.allocate(LEAST_EXPORT - 1), other.part(opened, 0, 64)):
        with pytest.raises(InvalidTensor):
            device.export(small)


def test_borrowed_memory_is_in_place_and_held(seed: int) -> None:
    """Parts, arrays and other libraries' memory are the same bytes, and keep their owner as long as somebody looks into them."""
    device = LazyDevice(seed)
    tensor = drawn(seed, 64)
    borrowed = device.borrow(tensor.ctypes.data, 64, tensor)
    part = device.part(borrowed, 16, 32)
    found = device.array(part, 4, 8)
    expected = tensor[16:48].copy()
    watched = weakref.ref(tensor)
    del tensor, borrowed, part
    gc.collect()
    assert watched() is not None and found.tobytes() == expected.tobytes()
    found[:] = 1
    held = watched()
    assert held is not None and (held[16:48] == 1).all()
    del found, held
    gc.collect()
    assert watched() is None

    memory = device.allocate(16)
    for at, size in ((8, 9), (-1, 4)):
        with pytest.raises(InvalidTensor):
            device.part(memory, at, size)
    with pytest.raises(InvalidTensor):
        device.array(memory, 17)


def test_a_stream_that_is_adopted_is_one(seed: int) -> None:
    """One pointer is one stream, in order with itself; what is only read can be pinned when that is said."""
    device = LazyDevice(seed)
    assert device.adopt(7) is device.adopt(7) and device.adopt(7) is not device.adopt(8)
    memory = drawn(seed, 4096)
    memory.flags.writeable = False
    with pytest.raises(MemoryRefused):
        device.register(memory)
    device.register(memory, readonly=True)
    device.unregister(memory)
    event = device.event()
    event.record(device.stream())
    again = device.event(event.handle())
    device.stream().wait(again)
    again.wait()
