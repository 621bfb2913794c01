"""M3 and rot on the way up to a device, which goes layer by layer: stopped at each of its steps, and with bytes that change on it.

The device is `tiercache.kernels.lazy`'s. Whole blocks, between memories of the host, are in `test_3_movement_cancel`.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.device_rig import GEOMETRY, DeviceHouse, device_house, is_exact, keys_of
from tests.seams import Copies
from tiercache.errors import StoreError
from tiercache.kernels.lazy import LazyDevice
from tiercache.leases import Lease

HBM, DRAM = 0, 1
BLOCKS = 4


class Point(NamedTuple):
    """A step of the promotion: before or after the check of its sources, or a layer of all of them."""

    kind: str
    number: int
    after: bool

    def __str__(self) -> str:
        return f"{'after' if self.after else 'before'} {self.kind} {self.number}"


POINTS = [
    Point(kind, number, after)
    for kind, number in (("verify", 0), *(("layer", layer) for layer in range(GEOMETRY.layers)), ("verify", 1))
    for after in (False, True)
]
each_point = pytest.mark.parametrize("point", POINTS, ids=str)


async def lowered(house: DeviceHouse[LazyDevice], key: bytes) -> None:
    """Put a prompt into DRAM alone."""
    house.insert(key)
    house.demote(house.arena.capacity)
    await house.stack.traffic.settle()
    assert placed(house, key) == [DRAM] * BLOCKS


def placed(house: DeviceHouse[LazyDevice], key: bytes) -> list[int]:
    """Return the tier position of each cached block, all of which are exact."""
    found = house.found(key)
    assert is_exact(found, key)
    return [tier for tier, _ in found]


def turn_a_bit(house: DeviceHouse[LazyDevice], lease: Lease, block: int) -> None:
    """Change the bytes of a leased block where it lies in memory of the host."""
    stack = house.stack
    stack.reader.view(stack.readable(lease)[block])[3, 5] ^= 1


async def test_m3_these_are_all_steps_into_a_device(tmp_path: Path, seed: int) -> None:
    """The points above are what an undisturbed promotion passes by, one after the other, and nothing is missing from them."""
    copies, [key] = Copies(), keys_of(seed, 1, BLOCKS)
    async with device_house(tmp_path, seed, hbm=BLOCKS, dram=BLOCKS, copies=copies) as house:
        await lowered(house, key)
        copies.seen.clear()
        await house.promote(house.lease(key))

        assert [Point(step.kind, step.number, step.after) for step in copies.seen] == POINTS
        assert placed(house, key) == [HBM] * BLOCKS


@each_point
async def test_m3_a_layer_that_fails_leaves_all_blocks_below(tmp_path: Path, seed: int, point: Point) -> None:
    """A promotion tries twice. Nothing half-filled is found, no slot of the device is lost, and the next one succeeds, exact."""
    copies, [key] = Copies(), keys_of(seed, 1, BLOCKS)
    async with device_house(tmp_path, seed, hbm=BLOCKS, dram=BLOCKS, copies=copies) as house:
        await lowered(house, key)
        copies.fail(point.kind, StoreError("injected"), number=point.number, after=point.after, times=2)
        lease = house.lease(key)
        await house.promote(lease)
        await house.stack.traffic.settle()

        assert placed(house, key) == [DRAM] * BLOCKS
        assert house.cache.stats.failures == {"StoreError": 2}
        assert house.cache.residency.slots[HBM].free == BLOCKS
        await house.promote(lease)
        assert placed(house, key) == [HBM] * BLOCKS
        house.cache.release(lease)
        house.stack.check()


@each_point
async def test_m3_a_reader_that_goes_away_between_layers_leaves_a_whole_copy(tmp_path: Path, seed: int, point: Point) -> None:
    """Until the last layer the blocks are found below, whose slots stay theirs; then above, exact, and no claim is left."""
    copies, [key] = Copies(), keys_of(seed, 1, BLOCKS)
    async with device_house(tmp_path, seed, hbm=BLOCKS, dram=BLOCKS, copies=copies) as house:
        await lowered(house, key)
        hold = copies.hold(point.kind, number=point.number, after=point.after)
        lease = house.lease(key)
        promotion = house.stack.traffic.promote(lease)
        await hold.reached()
        house.cache.release(lease)
        house.stack.mover.start(house.cache.moves.make_room(DRAM, BLOCKS, drop=True))

        assert placed(house, key) == [DRAM] * BLOCKS
        hold.release()
        await promotion.done.wait()
        await house.stack.traffic.settle()
        assert placed(house, key) == [HBM] * BLOCKS
        assert house.stack.check()["leases"] == 0


async def test_rot_in_the_source_of_layers_ends_the_promotion_before_it(tmp_path: Path, seed: int) -> None:
    """The blocks before the rotten one come up, and it is gone with what follows it."""
    [key] = keys_of(seed, 1, BLOCKS)
    async with device_house(tmp_path, seed, hbm=BLOCKS, dram=BLOCKS) as house:
        await lowered(house, key)
        lease = house.lease(key)
        turn_a_bit(house, lease, 2)
        await house.promote(lease)
        house.cache.release(lease)
        await house.stack.traffic.settle()

        assert placed(house, key) == [HBM] * 2
        assert house.cache.stats.failures == {"checksum": 1}
        house.stack.check()


@pytest.mark.parametrize("layer", range(GEOMETRY.layers))
async def test_rot_that_comes_between_layers_is_found_after_the_last(tmp_path: Path, seed: int, layer: int) -> None:
    """The source was sound before the first layer and is not after the last: what lies before it is up, and it is gone."""
    copies, [key] = Copies(), keys_of(seed, 1, BLOCKS)
    async with device_house(tmp_path, seed, hbm=BLOCKS, dram=BLOCKS, copies=copies) as house:
        await lowered(house, key)
        hold = copies.hold("layer", number=layer)
        lease = house.lease(key)
        promotion = house.stack.traffic.promote(lease)
        await hold.reached()
        turn_a_bit(house, lease, 2)
        hold.release()
        await promotion.done.wait()
        house.cache.release(lease)
        await house.stack.traffic.settle()

        assert placed(house, key) == [HBM] * 2
        assert house.cache.stats.failures == {"checksum": 1}
        house.stack.check()
