"""The ends of a device's share that are not in order: what may still be copied is kept, and what is not is given back."""

from __future__ import annotations

import asyncio
import gc

import pytest

from tests.service.caches import SIZE, SPACE, SPEC, opened_kv, prompt, read, small, stack_of, store
from tests.service.test_device_tier import Card, on_device, some_turns, until
from tiercache.errors import Closed, LeaseReleased, MemoryRefused
from tiercache.kernels.host import Bytes
from tiercache.kernels.lazy import LazyStream
from tiercache.service.inprocess import TierCache

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
