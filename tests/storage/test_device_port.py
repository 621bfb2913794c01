"""What a port reads of a device's slots, and writes to them, is exact in every order of streams, and over when the call is."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

from tests.seams import HeldWorkers, Threads
from tiercache.errors import Closed, InvalidTensor, StoreError, WorkerDied
from tiercache.kernels.host import Bytes
from tiercache.kernels.lazy import PATIENCE, POISON, LazyDevice, LazyMemory, pool_array
from tiercache.spec import Geometry
from tiercache.storage.checksum import checksum
from tiercache.storage.device_arena import DeviceArena
from tiercache.storage.device_port import DevicePort
from tiercache.storage.staging import Ring
from tiercache.storage.workers import Lane, ThreadWorkers

GEOMETRY = Geometry(layers=3, parts=2, unit_bytes=96, symbol_bytes=64)
SLOTS = 24
STAGE_BLOCKS = 3


class House(NamedTuple):
    """A device, its slots, a port, its ring, and what may befall the port's threads."""

    device: LazyDevice
    arena: DeviceArena
    port: DevicePort
    ring: Ring
    threads: Threads

    @property
    def pool(self) -> Bytes:
        """What lies in the slots, `[planes, slots, unit_bytes]`, in place."""
        return pool_array(self.arena.pool)

    def sums(self, slots: Sequence[int]) -> list[int]:
        """The checksums of what lies there."""
        return [checksum(self.pool[:, slot]) for slot in slots]

    def expected(self, slots: Sequence[int]) -> Bytes:
        """What a reader of slots gets."""
        return np.concatenate([self.pool[:, slot] for slot in slots], axis=1)


@pytest.fixture
async def house(seed: int) -> AsyncIterator[House]:
    device, threads = LazyDevice(seed), Threads()
    arena = DeviceArena(device, GEOMETRY, device.allocate(SLOTS * GEOMETRY.block_bytes))
    pool_array(arena.pool)[...] = drawn(seed, GEOMETRY.planes, SLOTS, GEOMETRY.unit_bytes)
    ring = Ring(device, GEOMETRY, stages=8, blocks=STAGE_BLOCKS)
    workers = HeldWorkers(ThreadWorkers({Lane.COPY: 2, Lane.DOWN: 1, Lane.UP: 1}), threads)
    port = DevicePort(device, lambda: arena.pool, GEOMETRY, ring, workers)
    yield House(device, arena, port, ring, threads)
    device.held = False
    device.run()
    await port.settle()
    threads.release()
    workers.close()


def drawn(seed: int, *shape: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def chosen(seed: int, count: int) -> list[int]:
    return random.Random(seed).sample(range(SLOTS), count)


def target(count: int, planes: int = GEOMETRY.planes) -> tuple[Bytes, Bytes]:
    """Return room for blocks, `[planes, count * unit_bytes]`, and the memory around it."""
    around = np.full((planes, (count + 2) * GEOMETRY.unit_bytes), POISON, np.uint8)
    return around[:, GEOMETRY.unit_bytes : -GEOMETRY.unit_bytes], around


def is_untouched(around: Bytes) -> bool:
    """Return whether what lies beside the room is as it was."""
    unit = GEOMETRY.unit_bytes
    return bool((around[:, :unit] == POISON).all() and (around[:, -unit:] == POISON).all())


async def until(true: Callable[[], bool]) -> None:
    """Wait until `true()`; threads make it so."""
    async with asyncio.timeout(PATIENCE):
        while not true():  # noqa: ASYNC110 - threads of the device's side know no event loop
            await asyncio.sleep(0)


COUNTS = [0, 1, STAGE_BLOCKS, STAGE_BLOCKS + 1, 13, SLOTS]


@pytest.mark.parametrize("count", COUNTS)
async def test_what_is_read_is_what_lies_in_the_slots(house: House, seed: int, count: int) -> None:
    """In one piece or several, slots in any order; the checksums are the blocks', and nothing beside the target is written."""
    slots = chosen(seed, count)
    into, around = target(count)

    found = await house.port.read(slots, into)

    assert found == house.sums(slots) == await house.port.sums(slots)
    assert np.array_equal(into, house.expected(slots) if slots else into[:, :0]) and is_untouched(around)


@pytest.mark.parametrize("count", COUNTS)
async def test_what_is_written_lies_in_the_slots(house: House, seed: int, count: int) -> None:
    """And the other slots are as they were."""
    slots = chosen(seed, count)
    source, _ = target(count)
    source[...] = drawn(seed + 1, *source.shape)
    before = house.pool.copy()

    sent = await house.port.write(source, slots)

    assert sent == house.sums(slots)
    assert np.array_equal(source, house.expected(slots) if slots else source[:, :0])
    others = sorted(set(range(SLOTS)) - set(slots))
    assert np.array_equal(house.pool[:, others], before[:, others])


@pytest.mark.parametrize("count", COUNTS)
async def test_a_layer_is_read_alone(house: House, seed: int, count: int) -> None:
    """Each layer is the planes of it; a stage holds one layer of more blocks than it holds whole ones."""
    slots = chosen(seed, count)
    for layer in range(GEOMETRY.layers):
        into, around = target(count, GEOMETRY.parts)
        await house.port.layer(slots, layer, into)

        wanted = house.expected(slots) if slots else np.empty((GEOMETRY.planes, 0), np.uint8)
        assert np.array_equal(into, wanted[layer * GEOMETRY.parts : (layer + 1) * GEOMETRY.parts]) and is_untouched(around)


async def test_calls_at_once_share_the_stages(house: House, seed: int) -> None:
    """Readers and writers of different slots, more than there are stages: each is exact."""
    numbers = chosen(seed, SLOTS)
    parts = [numbers[low : low + 4] for low in range(0, SLOTS, 4)]
    fresh = [drawn(seed + low, GEOMETRY.planes, 4 * GEOMETRY.unit_bytes) for low in range(3)]
    rooms = [target(4)[0] for _ in range(3)]
    wanted = [house.expected(part) for part in parts[3:]]

    await asyncio.gather(
        *(house.port.write(source, part) for source, part in zip(fresh, parts[:3], strict=True)),
        *(house.port.read(part, room) for room, part in zip(rooms, parts[3:], strict=True)),
    )

    for source, part in zip(fresh, parts[:3], strict=True):
        assert np.array_equal(house.expected(part), source)
    for room, was in zip(rooms, wanted, strict=True):
        assert np.array_equal(room, was)


async def test_rot_in_a_slot_is_seen_by_its_checksum(house: House, seed: int) -> None:
    """The block that is not what it was has another checksum, and it alone."""
    slots = chosen(seed, 7)
    before = house.sums(slots)
    house.pool[-1, slots[4], -1] ^= 1
    into, _ = target(7)

    for found in (await house.port.read(slots, into), await house.port.sums(slots)):
        assert [place for place, one in enumerate(found) if one != before[place]] == [4]


async def test_a_checksum_is_that_of_the_bytes_that_were_copied_on(house: House, seed: int) -> None:
    """A slot that changes while what came out of it is looked at changes neither."""
    slots = chosen(seed, 2)
    wanted, before = house.expected(slots), house.sums(slots)
    held = house.threads.hold("_copy_out")
    into, _ = target(2)
    reading = asyncio.ensure_future(house.port.read(slots, into))
    await held.reached()
    house.pool[...] = 0
    held.release()

    assert await reading == before and np.array_equal(into, wanted)


@pytest.mark.parametrize("call", ["read", "sums", "layer"])
async def test_a_reader_on_the_device_begins_after_the_event_it_is_given(house: House, seed: int, call: str) -> None:
    """Another stream still writes the slots; the device would rather do the port's work first."""
    slots = chosen(seed, 5)
    fresh = drawn(seed + 1, GEOMETRY.planes, SLOTS, GEOMETRY.unit_bytes)
    writer = house.device.stream()
    house.device.choose = lambda ready: next((one for one in ready if one is not writer), writer)
    writer.call(lambda: np.copyto(house.pool, fresh))
    after = writer.record()

    if call == "sums":
        assert await house.port.sums(slots, after=after) == [checksum(fresh[:, slot]) for slot in slots]
    elif call == "read":
        into, _ = target(5)
        await house.port.read(slots, into, after=after)
        assert np.array_equal(into, np.concatenate([fresh[:, slot] for slot in slots], axis=1))
    else:
        into, _ = target(5, GEOMETRY.parts)
        await house.port.layer(slots, 1, into, after=after)
        assert np.array_equal(into, np.concatenate([fresh[2:4, slot] for slot in slots], axis=1))


@pytest.mark.parametrize("call", ["read", "write"])
async def test_who_is_cancelled_leaves_when_the_copies_are_over(house: House, seed: int, call: str) -> None:
    """Until then slots and stages belong to the copies, however often it is cancelled; then what was asked for is done."""
    slots = chosen(seed, 8)
    memory, _ = target(8)
    memory[...] = drawn(seed + 1, *memory.shape)
    wanted = house.expected(slots) if call == "read" else memory.copy()
    house.device.held = True
    going = asyncio.ensure_future(house.port.read(slots, memory) if call == "read" else house.port.write(memory, slots))
    await until(lambda: house.device.recorded == 2)  # two stages at once
    for _ in range(2):
        going.cancel()
        await asyncio.sleep(0)
    lane = Lane.DOWN if call == "read" else Lane.UP
    async with house.ring.lend(lane), house.ring.lend(lane):  # of the four of this way no third one
        for _ in range(10):
            await asyncio.sleep(0)
        assert not going.done()
        house.device.held = False
        house.device.run()
        with pytest.raises(asyncio.CancelledError):
            await going

    assert np.array_equal(memory if call == "read" else house.expected(slots), wanted)


@pytest.mark.parametrize("call", ["read", "write"])
@pytest.mark.parametrize("pieces", range(6))
async def test_a_device_that_takes_no_more_work_is_said_when_its_copies_are_over(
    house: House, seed: int, call: str, pieces: int
) -> None:
    """Wherever enqueueing fails, nothing is under way when the call fails; and the next one is exact."""
    slots = chosen(seed, 8)
    memory, _ = target(8)
    memory[...] = drawn(seed + 1, *memory.shape)
    house.device.fails_after = house.device.enqueued + pieces

    with pytest.raises(StoreError, match="takes no more work"):
        await (house.port.read(slots, memory) if call == "read" else house.port.write(memory, slots))

    assert not any(work.call for stream in house.device.streams for work in stream.work)
    house.device.fails_after = None
    memory[...] = drawn(seed + 2, *memory.shape)
    await house.port.write(memory, slots)
    into, _ = target(8)
    await house.port.read(slots, into)
    assert np.array_equal(into, memory)


@pytest.mark.parametrize("times", [1, 3])
async def test_a_thread_that_dies_waiting_ends_no_copy(house: House, seed: int, times: int) -> None:
    """Its copy goes on, and is waited for by another thread."""
    slots = chosen(seed, 8)
    wanted = house.expected(slots)
    house.threads.kill("wait", times)
    into, _ = target(8)
    await house.port.read(slots, into)

    assert np.array_equal(into, wanted)
    house.threads.kill("wait", times)
    into[...] = drawn(seed + 1, *into.shape)
    await house.port.write(into, slots)
    assert np.array_equal(house.expected(slots), into)


@pytest.mark.parametrize("name", ["enqueue", "_copy_out"])
async def test_a_thread_that_dies_copying_is_told(house: House, seed: int, name: str) -> None:
    """The call fails, and leaves a port that works."""
    slots = chosen(seed, 8)
    house.threads.kill(name)
    into, _ = target(8)
    with pytest.raises(WorkerDied):
        await house.port.read(slots, into)

    await house.port.read(slots, into)
    assert np.array_equal(into, house.expected(slots))


async def test_a_stage_that_the_device_still_uses_is_written_after_that(house: House, seed: int) -> None:
    """Another stream has work on every stage, and the device would do it between the port's gather and its copy to the host."""
    slots = chosen(seed, 1)
    wanted = house.expected(slots)
    other = house.device.stream()
    for _ in range(4):  # each of the stages of this way in turn
        async with house.ring.lend(Lane.DOWN) as stage:
            assert isinstance(stage.memory, LazyMemory)
            other.call(partial(stage.memory.bytes.fill, POISON))
            stage.after = other.record()
    turns = itertools.count()
    house.device.choose = lambda ready: min(ready, key=lambda stream: (stream is other) != (next(turns) > 1))
    into, _ = target(1)

    await house.port.read(slots, into)

    assert np.array_equal(into, wanted)


async def test_what_does_not_fit_is_refused(house: House) -> None:
    """Memory of another shape, before anything is enqueued; slots that do not exist."""
    into, _ = target(2)
    with pytest.raises(InvalidTensor):
        await house.port.read([1, 2, 3], into)
    with pytest.raises(InvalidTensor):
        await house.port.write(into, [1])
    with pytest.raises(InvalidTensor):
        await house.port.layer([1, 2], 0, into)
    assert house.device.enqueued == 0
    with pytest.raises(InvalidTensor):
        await house.port.read([1, SLOTS], into)
    with pytest.raises(InvalidTensor):
        await house.port.write(into, [1, SLOTS])


async def test_slots_that_are_gone_are_said_to_be(house: House) -> None:
    """After the arena's end a port reads nothing."""
    house.arena.close()

    with pytest.raises(Closed):
        await house.port.read([1], target(1)[0])


async def test_settling_waits_for_copies_whose_callers_have_gone(house: House, seed: int) -> None:
    """Who closes the house waits for what is under way."""
    house.device.held = True
    reading = asyncio.ensure_future(house.port.read(chosen(seed, 1), target(1)[0]))
    await until(lambda: house.device.recorded == 1)
    settling = asyncio.ensure_future(house.port.settle())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not settling.done()
    house.device.held = False
    house.device.run()

    await settling
    await reading
