"""Kind 6, resources: the part of Q3 that is a device's, on a lazy one; on a real one in `test_9_cuda`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tests.device_rig import GEOMETRY, device_house, is_exact, keys_of, pinned_house
from tiercache.kernels.lazy import LazyDevice, pool_array
from tiercache.storage.memory import HostMemory
from tiercache.storage.pinning import Pinning

CHUNK = 1 << 16


@pytest.mark.parametrize("chunks", [0, 3, 5])
def test_q3_pinning_that_is_refused_gives_back_what_it_had(chunks: int) -> None:
    """Refused at the first chunk, in the middle or at the last: nothing stays pinned, the memory is pageable, and it is said."""
    device = LazyDevice(1)
    device.most_registered = chunks
    with closing(HostMemory(5 * CHUNK + 4096)) as memory:
        pinning = Pinning(device, memory.array, slot_bytes=4096, chunk=CHUNK)

        assert device.registered == []
        assert pinning.refused == f"{CHUNK if chunks < 5 else 4096} bytes can't be pinned"
        pinning.close()


def test_q3_pinned_memory_is_pinned_whole_and_unpinned_at_the_end() -> None:
    """Every byte is registered once, in chunks; closing, also twice, gives all of it back."""
    device = LazyDevice(1)
    with closing(HostMemory(5 * CHUNK + 4096)) as memory:
        pinning = Pinning(device, memory.array, slot_bytes=4096, chunk=CHUNK)

        start = memory.array.__array_interface__["data"][0]
        assert pinning.refused is None
        assert device.registered == [
            (start + place, min(CHUNK, 5 * CHUNK + 4096 - place)) for place in range(0, 5 * CHUNK + 4096, CHUNK)
        ]
        pinning.close()
        pinning.close()
        assert device.registered == []


@pytest.mark.parametrize("slot", [64, 2080, 4096, 6144])
def test_q3_no_page_is_pinned_by_two_calls(slot: int) -> None:
    """Also where a slot is no whole number of pages: a driver may refuse a page that is pinned already."""
    device = LazyDevice(1)
    with closing(HostMemory(40 * CHUNK)) as memory:
        pinning = Pinning(device, memory.array[: 40 * CHUNK // slot * slot], slot_bytes=slot, chunk=10 * CHUNK)

        assert len(device.registered) > 1 and pinning.refused is None
        assert {at % 4096 for at, _ in device.registered} == {0}
        assert {length % slot for _, length in device.registered} == {0} and pinning.together * slot <= 10 * CHUNK
        assert sum(length for _, length in device.registered) == 40 * CHUNK // slot * slot
        pinning.close()


@pytest.mark.parametrize("slots", [1, 3, 8])
async def test_q3_no_copy_goes_over_what_one_call_pinned(tmp_path: Path, seed: int, slots: int) -> None:
    """A chunk holds whole slots, and neighbours cross together within a chunk alone: a driver refuses what goes over its end."""
    [key] = keys_of(seed, 1, 8)
    device = LazyDevice(seed)
    size = slots * GEOMETRY.block_bytes + 4096
    async with pinned_house(device, tmp_path, hbm=8, dram=8, pool_of=pool_array, chunk=size, stage_blocks=8) as house:
        assert {length for _, length in device.registered} <= {GEOMETRY.block_bytes * count for count in (slots, 8 % slots)}
        house.insert(key)
        house.demote(8)
        await house.stack.traffic.settle()
        assert [tier for tier, _ in house.found(key)] == [1] * 8 and is_exact(house.found(key), key)
        lease = house.lease(key)
        await house.promote(lease)
        house.cache.release(lease)

        assert [tier for tier, _ in house.found(key)] == [0] * 8 and is_exact(house.found(key), key)
    assert device.registered == []


async def test_q3_after_a_refused_pinning_copies_work(tmp_path: Path, seed: int) -> None:
    """The next operation of the device is as good as any."""
    [key] = keys_of(seed, 1, 4)
    async with device_house(tmp_path, seed, hbm=4, dram=4) as house:
        house.device.most_registered = 0
        with closing(HostMemory(CHUNK)) as memory:
            assert Pinning(house.device, memory.array, slot_bytes=4096).refused is not None
        house.insert(key)
        house.demote(4)
        await house.stack.traffic.settle()

        assert len(house.found(key)) == 4 and is_exact(house.found(key), key)
