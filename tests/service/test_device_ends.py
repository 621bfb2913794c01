"""The ends of a device's share that are not in order: what may still be copied is kept, and what is not is given back."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest

from tests.service.ailing import ailments
from tests.service.caches import SIZE, SPACE, SPEC, lower, opened_kv, prompt, read, small, stack_of, store, tensor_of
from tests.service.test_device_tier import Card, on_device, some_turns, until
from tiercache.errors import Closed, LeaseReleased, MemoryRefused
from tiercache.kernels.host import Bytes
from tiercache.kernels.lazy import LazyStream
from tiercache.service.health import Code
from tiercache.service.inprocess import TierCache
from tiercache.types import Tier

pytestmark = pytest.mark.usefixtures("kept")


def test_a_device_that_never_ends_keeps_its_memory_when_the_cache_is_forgotten(seed: int) -> None:
    """Nobody holds the cache any more, nor the read: its stage, the slots and what is pinned stay until the process ends."""
    card, rig = on_device(seed)
    rig.patience = 0.02

    async def leave() -> None:
        cache = TierCache(small(device="cuda:0", ssd=None), seams=rig.seams())
        await cache.__aenter__()
        kv = await cache.open(SPACE, SPEC)
        await store(kv, prompt(seed, 4))
        hit = await kv.match(prompt(seed, 4))
        await hit.ready()
        card.held = True
        card.recorded = 0
        reading = asyncio.create_task(hit.gather())
        await until(lambda: card.recorded > 0)
        await cache.close()
        assert not reading.done()

    asyncio.run(leave())  # which cancels what is left
    gc.collect()

    assert card.registered and not card.left
    card.held = False
    card.run()
    card.stream().record().wait()  # raises where a copy's memory was given back before the copy


@pytest.mark.parametrize("refused", range(1, 6))
async def test_a_model_whose_opening_breaks_can_be_opened_again(seed: int, refused: int) -> None:
    """The device has no more streams, whichever one is asked for: what was pinned for it is pinned anew."""
    card, rig = on_device(seed)
    left = [refused]

    class Short(Card):
        def stream(self) -> LazyStream:
            left[0] -= 1
            if left[0] == 0:
                raise MemoryRefused("a stream refused by the device")
            return super().stream()

    card.__class__ = Short
    async with TierCache(small(device="cuda:0", ssd=None), seams=rig.seams()) as cache:
        with pytest.raises(MemoryRefused):
            await cache.open(SPACE, SPEC)
        assert card.registered == [] and cache.stacks == ()
        kv = await cache.open(SPACE, SPEC)
        await store(kv, prompt(seed, 3))
        assert await read(kv, prompt(seed, 3)) == 3 * SIZE
        bus = stack_of(cache).bus
        assert bus is not None and bus.pageable is None


async def test_a_close_that_is_cut_short_unpins_nothing_that_is_copied(seed: int) -> None:
    """The loop ends, and cancels all tasks: copies are under way, and their memory stays."""
    card, rig = on_device(seed)
    rig.patience = 20.0
    cache = TierCache(small(device="cuda:0", ssd=None), seams=rig.seams())
    await cache.__aenter__()
    kv = await cache.open(SPACE, SPEC)
    await store(kv, prompt(seed, 4))
    hit = await kv.match(prompt(seed, 4))
    await hit.ready()
    card.held = True
    card.recorded = 0
    reading = asyncio.create_task(hit.gather())
    await until(lambda: card.recorded > 0)
    closing = asyncio.create_task(cache.close())
    await some_turns()
    [inner] = [task for task in asyncio.all_tasks() if task.get_name() == "tiercache-close"]
    inner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing

    assert card.registered and not card.left
    card.held = False
    card.run()
    with pytest.raises((LeaseReleased, Closed)):
        await reading


async def test_a_move_that_died_keeps_what_it_may_still_copy(seed: int) -> None:
    """Its task is gone and with it who waited for the device: closing unpins nothing."""
    card, rig = on_device(seed)
    rig.patience = 0.5
    cache = TierCache(small(device="cuda:0", ssd=None), seams=rig.seams())
    await cache.__aenter__()
    kv = await cache.open(SPACE, SPEC)
    await store(kv, prompt(seed, 4))
    stack = stack_of(cache)
    card.held = True
    card.recorded = 0
    stack.mover.start(stack.cache.moves.make_room(0, 1 << 20))
    await until(lambda: card.recorded > 0)
    moves = [task for task in asyncio.all_tasks() if task.get_name().startswith("tiercache-move")]
    for move in moves:
        move.cancel()
    await asyncio.wait(moves)

    await cache.close()

    assert card.registered and not card.left
    card.held = False
    card.run()


async def test_a_device_that_can_not_unpin_does_not_keep_the_cache_from_closing(seed: int) -> None:
    """A card that is gone refuses everything; the cache closes, and what was pinned is not given back."""

    class Gone(Card):
        def unregister(self, memory: Bytes) -> None:
            raise MemoryRefused("unpinning refused by the device")

    card, rig = on_device(seed)
    card.__class__ = Gone
    async with opened_kv(small(device="cuda:0", ssd=None), rig) as (_, kv):
        await store(kv, prompt(seed, 2))
    gc.collect()

    assert card.registered and card.allocated


async def test_a_device_that_fails_every_copy_is_told_and_left_alone(seed: int) -> None:
    """An insert that needs room waits for no copy that can't be, health says why, and both end with the failure."""
    card, rig = on_device(seed)
    async with opened_kv(small(device="cuda:0", ssd=None, hbm=8, dram=8, admit_ms=60_000, promote_ms=60_000), rig) as (cache, kv):
        for number in range(2):
            await store(kv, prompt(seed + number, 4))
        stack = stack_of(cache)
        stack.mover._retry = 3600.0
        card.fails_after = card.enqueued
        outcome = await kv.insert(prompt(seed + 2, 4), tensor_of(prompt(seed + 2, 4)))
        assert outcome.refused == 4 * SIZE and 0 < card.enqueued - card.fails_after < 20
        found = await ailments(cache)
        assert set(found) == {Code.DEVICE_FAILING} and "the device takes no more work" in found[Code.DEVICE_FAILING].message
        before = card.enqueued
        async with kv.match(prompt(seed + 1, 4)) as hit:
            await hit.ready()
            await hit.gather()
        await cache.settle()
        assert card.enqueued - before < 20

        card.fails_after = None
        stack.mover._moves.failing.clear()
        await store(kv, prompt(seed + 3, 4))
        await lower(cache, Tier.HBM)
        assert await ailments(cache) == {}
        await cache.check()


@pytest.mark.parametrize("way", ["down", "up"])
async def test_a_device_that_fails_is_not_taken_for_a_disk_that_does(seed: int, tmp_path: Path, way: str) -> None:
    """Between the device and SSD without DRAM, out of it and into it."""
    card, rig = on_device(seed)
    async with opened_kv(small(device="cuda:0", dram=None, directory=tmp_path / "kv"), rig) as (cache, kv):
        await store(kv, prompt(seed, 4))
        if way == "up":
            assert await kv.flush(prompt(seed, 4)) == 4 * SIZE
            await lower(cache, Tier.HBM)
        card.fails_after = card.enqueued
        if way == "up":
            async with kv.match(prompt(seed, 4)) as hit:
                assert await hit.ready() == 0
        else:
            assert await kv.flush(prompt(seed, 4)) == 0
        found = await ailments(cache)
        assert set(found) == {Code.DEVICE_FAILING}
        card.fails_after = None
