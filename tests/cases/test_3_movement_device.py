"""Kind 3, tier movement across a device's bus: M7, and what M1, M2 and M3 say of it, with copies that happen late.

The device is `tiercache.kernels.lazy`'s: a copy reads its source when its stream comes to it, streams run in an order drawn from
the seed, and memory that was given back before its copy is a fault. M7 on a real stream is in `test_9_cuda`.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.device_rig import GEOMETRY, DeviceHouse, device_house, is_exact, keys_of, truth
from tiercache.kernels.lazy import PATIENCE, LazyDevice, LazyStream, pool_array
from tiercache.transfer import Transfer
from tiercache.tree import path

HBM, DRAM = 0, 1


async def until(true: Callable[[], bool]) -> None:
    """Wait until `true()`; threads make it so."""
    async with asyncio.timeout(PATIENCE):
        while not true():  # noqa: ASYNC110 - threads of the device's side know no event loop
            await asyncio.sleep(0)


async def test_m7_sixty_four_demotions_through_two_stages_before_any_copy_ran(tmp_path: Path, seed: int) -> None:
    """All 64 are enqueued through a ring of two, nothing is held on to, then the device runs: every block is its own."""
    keys = keys_of(seed, 64, 1)
    async with device_house(tmp_path, seed, hbm=64, dram=64, stages=2, stage_blocks=1) as house:
        for key in keys:
            house.insert(key)
        house.device.held = True
        house.device.enqueued = 0
        house.demote(64)
        await until(lambda: house.device.enqueued == 2 * 64)
        gc.collect()

        house.device.run()
        await house.stack.traffic.settle()

        for key in keys:
            found = house.found(key)
            assert [tier for tier, _ in found] == [DRAM] and is_exact(found, key)
        house.stack.check()


async def test_m7_a_stage_in_host_memory_is_refilled_after_its_copy(tmp_path: Path, seed: int) -> None:
    """Prompts of several blocks go to disk and come back through two stages in host memory: exact in every order of streams."""
    keys = keys_of(seed, 12, 5)
    async with device_house(tmp_path, seed, hbm=60, dram=None) as house:
        for key in keys:
            house.insert(key)
        house.demote(60)
        await house.stack.traffic.settle()
        poison(house)
        leases = [house.lease(key) for key in keys]
        await asyncio.gather(*(house.promote(lease) for lease in leases))
        await house.stack.traffic.settle()

        for key, lease in zip(keys, leases, strict=True):
            found = house.found(key)
            assert len(found) == 5 and is_exact(found, key)
            assert all(tier == HBM for tier, _ in found)
            house.cache.release(lease)
        house.stack.check()


@pytest.mark.parametrize("order", ["in turn", "drawn"])
async def test_m7_both_ways_share_the_stages(tmp_path: Path, seed: int, order: str) -> None:
    """Demotions and promotions stand in their streams, through the same two stages: every block is its own."""
    up, down = keys_of(seed, 6, 3), keys_of(seed + 1, 6, 3)
    async with device_house(tmp_path, seed, hbm=54, dram=54) as house:
        for key in up:
            house.insert(key)
        house.demote(54)
        await house.stack.traffic.settle()
        for key in down:
            house.insert(key)
        leases = [house.lease(key) for key in up]
        if order == "in turn":
            house.device.choose = Turns()
        house.device.held = True
        house.device.recorded = 0
        promotions = [house.stack.traffic.promote(lease) for lease in leases]
        assert sum(transfer.count for transfer in house.demote(18)) == 18
        await until(lambda: house.device.recorded == 6 * GEOMETRY.layers + 6 * 2)  # each layer up, two stages of each down

        house.device.held = False
        house.device.run()
        for promotion in promotions:
            await promotion.done.wait()
        await house.stack.traffic.settle()

        for key, tier in [*((key, HBM) for key in up), *((key, DRAM) for key in down)]:
            found = house.found(key)
            assert [where for where, _ in found] == [tier] * 3 and is_exact(found, key)
        for lease in leases:
            house.cache.release(lease)
        house.stack.check()


async def test_m1_a_slot_of_the_device_is_reused_after_the_copy_that_reads_it(tmp_path: Path, seed: int) -> None:
    """While a demotion stands in its stream its slot is nobody's: a writer that wants it gets none, and both are exact."""
    first, second = keys_of(seed, 2, 1)
    async with device_house(tmp_path, seed, hbm=1, dram=4) as house:
        house.insert(first)
        house.device.held = True
        house.device.enqueued = 0
        house.demote(1)
        await until(lambda: house.device.enqueued == 2)

        reservation = house.cache.reserve(house.session, house.space, second, after=None, position=HBM)
        assert all(position != HBM for position, _ in reservation.places)
        house.cache.close(reservation)
        house.device.held = False
        house.device.run()
        await house.stack.traffic.settle()
        house.insert(second)

        assert is_exact(house.found(first), first) and is_exact(house.found(second), second)
        house.stack.check()


async def test_m2_a_promotion_reads_its_source_when_its_stream_comes_to_it(tmp_path: Path, seed: int) -> None:
    """While the copies up stand in their stream, room made in DRAM does not take their source."""
    key, other = keys_of(seed, 2, 4)
    async with device_house(tmp_path, seed, hbm=8, dram=8) as house:
        house.insert(key)
        house.demote(8)
        await house.stack.traffic.settle()
        lease = house.lease(key)
        house.device.held = True
        house.device.recorded = 0
        promotion = house.stack.traffic.promote(lease)
        await until(lambda: house.device.recorded == GEOMETRY.layers)
        house.cache.release(lease)
        pool = house.cache.residency.slots[DRAM]
        house.stack.mover.start(house.cache.moves.make_room(DRAM, pool.capacity, drop=True))
        reservation = house.cache.reserve(house.session, house.space, other, after=None, position=DRAM)
        for _, slot in reservation.places:
            view = house.stack.stores[DRAM].view(slot)
            assert view is not None
            view[...] = 0
        house.cache.close(reservation)
        house.device.held = False
        house.device.run()
        await promotion.done.wait()
        await house.stack.traffic.settle()

        assert is_exact(house.found(key), key)
        house.stack.check()


@pytest.mark.parametrize("fails_after", range(9))
async def test_m3_a_device_that_takes_no_more_work_half_way(tmp_path: Path, seed: int, fails_after: int) -> None:
    """Whatever part of a move was enqueued ends before its slots are free; nothing half-filled is found, and it works later."""
    key, other = keys_of(seed, 2, 4)
    async with device_house(tmp_path, seed, hbm=4, dram=8) as house:
        house.insert(key)
        house.device.enqueued = 0
        house.device.fails_after = fails_after
        house.demote(4)
        await house.stack.traffic.settle()
        house.stack.check()
        assert is_exact(house.found(key), key) and len(house.found(key)) == 4

        house.device.fails_after = None
        house.demote(4)
        await house.stack.traffic.settle()
        house.insert(other)
        assert is_exact(house.found(key), key) and len(house.found(key)) == 4
        assert is_exact(house.found(other), other)

        house.device.enqueued = 0
        house.device.fails_after = fails_after
        lease = house.lease(key)
        await house.promote(lease)
        await house.stack.traffic.settle()
        house.device.fails_after = None
        house.cache.release(lease)
        house.stack.check()
        assert is_exact(house.found(key), key) and len(house.found(key)) == 4


async def test_m3_what_failed_half_way_writes_no_slot_of_another(tmp_path: Path, seed: int) -> None:
    """A copy that was enqueued before the device refused the next one has run when the slots are given to somebody else."""
    [key] = keys_of(seed, 1, 4)
    async with device_house(tmp_path, seed, hbm=4, dram=4, stage_blocks=4, together=1) as house:
        house.insert(key)
        house.device.held = True
        house.device.enqueued = 0
        house.device.fails_after = 3
        house.demote(4)
        await until(lambda: house.device.enqueued > 3)
        pool = house.cache.residency.slots[DRAM]
        for _ in range(50):
            await asyncio.sleep(0)
        assert pool.free == 0  # what was enqueued may still write them

        house.device.fails_after = None
        house.device.run()
        await house.stack.traffic.settle()
        assert pool.free == 4
        assert is_exact(house.found(key), key)
        house.stack.check()


@pytest.mark.parametrize("together", [None, 3])
async def test_m7_neighbours_cross_together_and_arrive_apart(tmp_path: Path, seed: int, together: int | None) -> None:
    """Slots of DRAM that were freed in any order take a prompt, whose neighbours cross in one copy: each block is its own."""
    draw = random.Random(seed)
    first, second = keys_of(seed, 8, 1), keys_of(seed + 1, 2, 5)
    async with device_house(tmp_path, seed, hbm=10, dram=10, stages=2, stage_blocks=5, together=together) as house:
        for key in first:
            house.insert(key)
        house.demote(10)
        await house.stack.traffic.settle()
        for key in draw.sample(first, len(first)):
            house.cache.delete(house.space, key)
        house.stack.sweep_waste()
        await house.stack.traffic.settle()
        for key in second:
            house.insert(key)
        poison(house)
        house.demote(10)
        await house.stack.traffic.settle()
        for key in second:
            found = house.found(key)
            assert [tier for tier, _ in found] == [DRAM] * 5 and is_exact(found, key)
        poison(house)
        for key in second:
            lease = house.lease(key)
            await house.promote(lease)
            house.cache.release(lease)

        for key in second:
            found = house.found(key)
            assert [tier for tier, _ in found] == [HBM] * 5 and is_exact(found, key)
        house.stack.check()


async def test_neighbours_cost_one_copy(tmp_path: Path, seed: int) -> None:
    """Eight blocks in neighbouring slots go down by a gather and one copy, and each layer up by one copy and a scatter."""
    [key] = keys_of(seed, 1, 8)
    async with device_house(tmp_path, seed, hbm=8, dram=8, stages=1, stage_blocks=8) as house:
        house.insert(key)
        house.device.enqueued = 0
        house.demote(8)
        await house.stack.traffic.settle()
        down, house.device.enqueued = house.device.enqueued, 0
        lease = house.lease(key)
        await house.promote(lease)
        house.cache.release(lease)

        assert (down, house.device.enqueued) == (2, 2 * GEOMETRY.layers)
        assert is_exact(house.found(key), key)


async def test_w4_layers_come_up_in_order_and_whole(tmp_path: Path, seed: int) -> None:
    """A layer counts as arrived when its bytes are in the pool for all blocks, and no sooner."""
    [key] = keys_of(seed, 1, 7)
    async with device_house(tmp_path, seed, hbm=8, dram=8) as house:
        house.insert(key)
        house.demote(8)
        await house.stack.traffic.settle()
        poison(house)
        lease = house.lease(key)
        promotion = house.stack.traffic.promote(lease)
        await until(lambda: bool(promotion.flights))
        [flight] = promotion.flights
        assert isinstance(flight.work, Transfer)
        slots = flight.work.slots_to
        for layer in range(GEOMETRY.layers):
            await flight.layers[layer].known.wait()
            event = flight.layers[layer].event
            assert event is not None
            event.wait()
            pool = pool_array(house.arena.pool)
            first, last = layer * GEOMETRY.parts, (layer + 1) * GEOMETRY.parts
            for place, slot in enumerate(slots):
                assert (pool[first:last, slot] == truth(key, place)[first:last]).all()
        await promotion.done.wait()

        assert [node.tag for node in path(lease.node)] == [HBM]
        house.cache.release(lease)


def poison(house: DeviceHouse[LazyDevice]) -> None:
    """Overwrite every free slot of the device."""
    used = {
        slot
        for node in house.cache.residency.nodes
        if node is not None and node.copies & 1
        for slot in house.cache.residency.table.slots(node.blocks, HBM)
    }
    pool = pool_array(house.arena.pool)
    for slot in range(house.arena.capacity):
        if slot not in used:
            pool[:, slot] = 0xEE


class Turns:
    """Lets streams go on in turn."""

    def __init__(self) -> None:
        self._last: LazyStream | None = None

    def __call__(self, ready: list[LazyStream]) -> LazyStream:
        self._last = next((stream for stream in ready if stream is not self._last), ready[0])
        return self._last
