"""Layers on their way into a device: enqueued one behind the other, waited for once, and their slots theirs until all is over."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.device_rig import GEOMETRY, DeviceHouse, device_house, is_exact, keys_of, truth
from tests.seam_copies import Copies
from tiercache.errors import StoreError, WorkerDied
from tiercache.kernels.lazy import PATIENCE, LazyDevice, LazyEvent, LazyStream, pool_array
from tiercache.storage.mover import Flight
from tiercache.transfer import Transfer

HBM, DRAM = 0, 1
BLOCKS = 4


async def until(true: Callable[[], bool]) -> None:
    """Wait until `true()`; threads make it so."""
    async with asyncio.timeout(PATIENCE):
        while not true():  # noqa: ASYNC110 - threads of the device's side know no event loop
            await asyncio.sleep(0)


async def turns(count: int = 50) -> None:
    """Let everything run that can run without a thread's answer."""
    for _ in range(count):
        await asyncio.sleep(0)


async def lowered(house: DeviceHouse[LazyDevice], *keys: bytes) -> None:
    """Put prompts into DRAM alone, and overwrite what they left on the device."""
    for key in keys:
        house.insert(key)
    house.demote(house.arena.capacity)
    await house.stack.traffic.settle()
    pool_array(house.arena.pool)[...] = 0xEE


def placed(house: DeviceHouse[LazyDevice], key: bytes) -> list[int]:
    """Return the tier position of each cached block, all of which are exact."""
    found = house.found(key)
    assert is_exact(found, key)
    return [tier for tier, _ in found]


def events(flight: Flight) -> list[LazyEvent]:
    """Return the events of all layers that are on their way."""
    return [layer.event for layer in flight.layers if isinstance(layer.event, LazyEvent)]


async def test_layers_are_enqueued_back_to_back_and_waited_for_once(tmp_path: Path, seed: int) -> None:
    """All are enqueued before any copy has run, in pieces of a third of a layer; one thread waits once, for the last."""
    [key] = keys_of(seed, 1, 18)
    async with device_house(tmp_path, seed, hbm=18, dram=18) as house:
        await lowered(house, key)
        lease = house.lease(key)
        house.device.held = True
        house.device.recorded = house.device.waited = 0
        promotion = house.stack.traffic.promote(lease)
        await until(lambda: house.device.recorded == 3 * GEOMETRY.layers and house.device.waited == 1)
        [flight] = promotion.flights
        known, happened = [layer.known.is_set() for layer in flight.layers], [event.happened for event in events(flight)]
        house.device.run()
        await promotion.done.wait()

        assert known == [True] * GEOMETRY.layers and happened == [False] * GEOMETRY.layers
        assert house.device.waited == 1
        assert placed(house, key) == [HBM] * 18
        house.cache.release(lease)


async def test_a_layer_has_arrived_when_its_event_has_happened(tmp_path: Path, seed: int) -> None:
    """Step by step: with each event all blocks' bytes of that layer are in the pool, in the order of the layers."""
    [key] = keys_of(seed, 1, 9)
    async with device_house(tmp_path, seed, hbm=9, dram=9) as house:
        await lowered(house, key)
        lease = house.lease(key)
        house.device.held = True
        promotion = house.stack.traffic.promote(lease)
        await until(lambda: bool(promotion.flights) and len(events(promotion.flights[0])) == GEOMETRY.layers)
        [flight] = promotion.flights
        assert isinstance(flight.work, Transfer)
        slots, pool = flight.work.slots_to, pool_array(house.arena.pool)
        for layer, event in enumerate(events(flight)):
            while not event.happened:
                assert house.device.step()
            first, last = layer * GEOMETRY.parts, (layer + 1) * GEOMETRY.parts
            for place, slot in enumerate(slots):
                assert (pool[first:last, slot] == truth(key, place)[first:last]).all()
        house.device.run()
        await promotion.done.wait()

        assert placed(house, key) == [HBM] * 9
        house.cache.release(lease)


@pytest.mark.parametrize("layer", range(1, GEOMETRY.layers))
async def test_what_was_enqueued_before_a_failure_owns_its_slots(tmp_path: Path, seed: int, layer: int) -> None:
    """A layer fails while those before it stand in their stream: no slot is anybody else's before they have run."""
    copies, [key, other] = Copies(), keys_of(seed, 2, BLOCKS)
    async with device_house(tmp_path, seed, hbm=BLOCKS, dram=BLOCKS, copies=copies) as house:
        await lowered(house, key)
        copies.fail("layer", StoreError("injected"), number=layer, times=2)
        lease = house.lease(key)
        house.device.held = True
        house.device.recorded = 0
        promotion = house.stack.traffic.promote(lease)
        await until(lambda: house.device.recorded == layer)
        await turns()
        pool = house.cache.residency.slots[HBM]
        free = pool.free

        house.device.held = False
        house.device.run()
        await promotion.done.wait()
        await house.stack.traffic.settle()
        assert free == 0 and pool.free == BLOCKS
        assert placed(house, key) == [DRAM] * BLOCKS
        house.cache.release(lease)
        house.insert(other)
        assert placed(house, other) == [HBM] * BLOCKS
        house.stack.check()


async def test_a_thread_that_dies_waiting_ends_no_copy(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for the last layer dies: another one waits for it, and until then the slots are the transfer's."""
    [key] = keys_of(seed, 1, BLOCKS)
    async with device_house(tmp_path, seed, hbm=BLOCKS, dram=BLOCKS) as house:
        await lowered(house, key)
        lease = house.lease(key)
        died, wait = threading.Event(), LazyEvent.wait

        def dying(event: LazyEvent) -> None:
            if not died.is_set():
                died.set()
                raise WorkerDied("killed by the test")
            wait(event)

        monkeypatch.setattr(LazyEvent, "wait", dying)
        house.device.held = True
        promotion = house.stack.traffic.promote(lease)
        await until(died.is_set)
        await turns()
        over, free = promotion.done.is_set(), house.cache.residency.slots[HBM].free
        house.device.held = False
        house.device.run()
        await promotion.done.wait()

        assert (over, free) == (False, 0)
        assert placed(house, key) == [HBM] * BLOCKS
        house.cache.release(lease)
        house.stack.check()


async def test_a_way_down_does_not_stand_behind_all_layers_on_their_way_up(tmp_path: Path, seed: int) -> None:
    """With everything that leads up standing still, and more of it than there are stages, blocks go down to their end."""
    up, down = keys_of(seed, 1, 18)[0], keys_of(seed + 1, 1, 6)[0]
    async with device_house(tmp_path, seed, hbm=24, dram=24) as house:
        await lowered(house, up)
        house.insert(down)
        lease = house.lease(up)
        house.device.held = True
        house.device.recorded = 0
        promotion = house.stack.traffic.promote(lease)
        await until(lambda: house.device.recorded == 3 * GEOMETRY.layers)
        busy = [stream for stream in house.device.streams if stream.work]
        demoted = house.demote(6)
        await run_alone(house, busy, lambda: not house.cache.moves.inflight.flying.keys() & {move.number for move in demoted})

        assert not promotion.done.is_set()
        assert placed(house, down) == [DRAM] * 6
        house.device.held = False
        house.device.run()
        await promotion.done.wait()
        assert placed(house, up) == [HBM] * 18
        house.cache.release(lease)


async def run_alone(house: DeviceHouse[LazyDevice], still: list[LazyStream], over: Callable[[], bool]) -> None:
    """Do the work of all streams but those that stand still, until it is over."""
    waiting = [(stream, stream.work) for stream in still]
    async with asyncio.timeout(PATIENCE):
        for stream, _ in waiting:
            stream.work = deque()
        while not over():
            house.device.step()
            await asyncio.sleep(0)
    for stream, work in waiting:
        assert not stream.work
        stream.work = work
