"""An HBM tier on a device, from its configuration to its end: the lazy device, whose copies happen when somebody waits."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.seams import PATIENCE, Rig
from tests.service.ailing import ailments
from tests.service.caches import (
    LARGE,
    SIZE,
    SPACE,
    SPEC,
    Books,
    is_exact,
    lower,
    opened_kv,
    placed,
    prompt,
    read,
    small,
    stack_of,
    store,
    tensor_of,
)
from tiercache.config import Config, Share
from tiercache.errors import Closed, InvalidConfig, LeaseReleased, MemoryRefused, TierTooSmall
from tiercache.kernels.device import LEAST_EXPORT
from tiercache.kernels.host import Bytes
from tiercache.kernels.lazy import LazyDevice, LazyMemory, pool_array
from tiercache.kernels.opening import open_device
from tiercache.leases import Refusal
from tiercache.service.daemon.report import figures
from tiercache.service.health import Code
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV
from tiercache.spec import Namespace
from tiercache.types import Tier

OTHER = Namespace(model="o", weights="sha256:2")


class Card(LazyDevice):
    """A device that notes what is given back, in which order, and has so many bytes (None: as many as are asked for)."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.room: int | None = None
        self.left: list[str] = []

    def allocate(self, size: int) -> LazyMemory:
        if self.room is not None:
            if size > self.room:
                raise MemoryRefused(f"{size} bytes of device memory refused by the device")
            self.room -= size
        memory = super().allocate(size)
        if size >= LEAST_EXPORT:
            weakref.finalize(memory, self.left.append, "memory")
        return memory

    def unregister(self, memory: Bytes) -> None:
        super().unregister(memory)
        assert not any(work.call for stream in self.streams for work in stream.work), "a copy is under way"
        self.left.append("pinned")


def on_device(seed: int) -> tuple[Card, Rig]:
    """Return a device, and a rig whose caches have it."""
    card, rig = Card(seed), Rig()
    rig.device = lambda name: card
    return card, rig


@asynccontextmanager
async def house(seed: int, **fields: object) -> AsyncIterator[tuple[Card, TierCache, LocalKV]]:
    """A cache with its HBM tier on a device, and its one namespace; nothing is held back at its end."""
    card, rig = on_device(seed)
    async with opened_kv(small(device="cuda:0", **fields), rig) as (cache, kv):  # type: ignore[arg-type]
        try:
            yield card, cache, kv
        finally:
            card.held = False
            card.fails_after = None
            card.run()


async def until(true: Callable[[], bool]) -> None:
    """Wait until `true()`; threads make it so."""
    async with asyncio.timeout(PATIENCE):
        while not true():  # noqa: ASYNC110 - threads of the device's side know no event loop
            await asyncio.sleep(0)


async def some_turns() -> None:
    """Let what can go on go on."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_blocks_go_down_and_come_back_byte_for_byte(seed: int, tmp_path: Path) -> None:
    """Out of the device to DRAM and to SSD, up again, and after a restart from SSD alone."""
    prompts = [prompt(seed + number, 3, number) for number in range(6)]
    fields = {"hbm": 8, "dram": 8, "ssd": 64, "directory": tmp_path / "kv", "admit_ms": 60_000, "promote_ms": 60_000}
    async with house(seed, **fields) as (card, cache, kv):
        for tokens in prompts:
            await store(kv, tokens)
        assert [await read(kv, tokens) for tokens in prompts] == [3 * SIZE] * 6
        for tier in (Tier.HBM, Tier.DRAM):
            await lower(cache, tier)
            assert tier not in placed(kv, prompts[0])
        assert placed(kv, prompts[0]) == {Tier.SSD: 3}
        assert [await read(kv, tokens) for tokens in prompts] == [3 * SIZE] * 6
        await cache.settle()
        assert placed(kv, prompts[-1]) == {Tier.HBM: 3}
        copied = {way for way, blocks in stack_of(cache).cache.stats.copied.items() if blocks}
        assert {(Tier.HBM, Tier.DRAM), (Tier.DRAM, Tier.SSD), (Tier.SSD, Tier.DRAM), (Tier.DRAM, Tier.HBM)} <= copied
        await cache.check()
        assert card.enqueued
    async with house(seed + 1, **fields) as (_, cache, kv):
        assert [await read(kv, tokens) for tokens in prompts] == [3 * SIZE] * 6
        await cache.check()


async def test_the_slots_lie_on_the_device(seed: int) -> None:
    """In an allocation of its own, which another process could open; the tier takes no host memory but generations."""
    tokens = prompt(seed, 3)
    async with house(seed, ssd=None) as (card, cache, kv):
        await store(kv, tokens)
        stack = stack_of(cache)
        assert stack.bus is not None and cache.memory_tiers == (Tier.DRAM,)
        pool = stack.bus.arena.pool

        lease = stack.cache.match(kv._desk.session, kv._desk.space, kv._key(tokens), count=False)
        slots = [place.slot for place in stack.readable(lease)]
        stack.cache.release(lease)
        lies = np.concatenate([pool_array(pool)[:, slot] for slot in slots], axis=1)
        assert lies.tobytes() == tensor_of(tokens).contiguous().view(-1).numpy().tobytes()
        assert pool.memory.size == LEAST_EXPORT and card.open(card.export(pool.memory), pool.memory.size).size == LEAST_EXPORT
        assert stack.generations_at[Tier.HBM] == 0 and stack.generations_at[Tier.DRAM] > 0


async def test_each_share_has_memory_of_its_own(seed: int) -> None:
    """Two models side by side: neither can open the other's, each reads its own, and DRAM is pinned for each."""
    shares = (Share(block_bytes=SPEC.block_bytes, fraction=0.25), Share(block_bytes=LARGE.block_bytes, fraction=0.75))
    config = Config.of(hbm="1 MiB", dram="1 MiB", device="cuda:0", shares=shares, lease_share=1.0)
    card, rig = on_device(seed)
    async with opened_kv(config, rig) as (cache, kv):
        large = await cache.open(OTHER, LARGE)
        tokens = prompt(seed, 4)
        await store(kv, tokens)
        await store(large, tokens, space=OTHER)

        memories = [stack.bus.arena.pool.memory for stack in cache.stacks if stack.bus is not None]
        assert len({id(memory) for memory in memories}) == 2 and len({card.export(memory) for memory in memories}) == 2
        assert [stack.stores[0].capacity * stack.geometry.block_bytes for stack in cache.stacks] == [256 << 10, 768 << 10]
        assert sorted(length for _, length in card.registered) == [256 << 10, 768 << 10]
        assert await read(kv, tokens) == 4 * SIZE and await read(large, tokens, space=OTHER) == 4 * SIZE
    assert card.registered == []


# --- readers and writers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["gather", "layer"])
async def test_a_read_that_is_cancelled_half_way_lets_go_of_everything(seed: int, call: str) -> None:
    """It ends when the device has done with the slots, and leaves claims, slots and stages as they were."""
    tokens = prompt(seed, 6)
    async with house(seed, ssd=None) as (card, cache, kv):
        await store(kv, tokens)
        await cache.settle()
        before = Books(cache, counters=False)
        stack = stack_of(cache)

        async def reading() -> None:
            async with kv.match(tokens) as hit:
                await hit.ready()
                card.held = True
                await (hit.gather() if call == "gather" else hit.layer(1))

        for _ in range(5):  # more often than there are stages
            card.recorded = 0
            task = asyncio.create_task(reading())
            await until(lambda: card.recorded > 0)
            task.cancel()
            await some_turns()
            if call == "gather":
                assert not task.done() and Books(cache, counters=False) != before, "its lease stands while the device copies"
            card.held = False
            card.run()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert stack.port is not None
            await stack.port.settle()

        assert Books(cache, counters=False) == before
        assert await read(kv, tokens) == 6 * SIZE


async def test_a_hit_that_is_released_under_its_copy_gives_nothing(seed: int) -> None:
    """Its slots are another prompt's by the time that the device reads them."""
    tokens, other = prompt(seed, 8), prompt(seed + 1, 8)
    async with house(seed, dram=None, ssd=None) as (card, _, kv):
        await store(kv, tokens)
        hit = await kv.match(tokens)
        await hit.ready()
        card.held = True
        card.recorded = 0
        task = asyncio.create_task(hit.gather())
        await until(lambda: card.recorded > 0)
        await hit.release()
        card.held = False
        # Whatever is copied now: the slots may be anybody's.
        await kv.clear()
        await store(kv, other)
        card.run()

        with pytest.raises(LeaseReleased):
            await task
        assert await read(kv, other) == 8 * SIZE


@pytest.mark.parametrize("step", range(4))
async def test_a_device_that_takes_no_more_work_is_a_miss_and_a_refusal(seed: int, step: int) -> None:
    """Whichever piece of work it refuses: no exception and no wrong byte; counted; and when it works again so does the cache."""
    tokens, other = prompt(seed, 6), prompt(seed + 1, 2)
    async with house(seed, hbm=16, dram=None, ssd=None) as (card, cache, kv):
        await store(kv, tokens)
        card.fails_after = card.enqueued + step % 2
        async with kv.match(tokens) as hit:
            found = await hit.gather() if step < 2 else (await hit.layer(0))[0][None]
            assert (found.shape[2] if step < 2 else found.shape[1]) == 0
        card.fails_after = card.enqueued + step % 2
        outcome = await kv.insert(other, tensor_of(other))
        assert outcome.stored == 0 and outcome.refused == 2 * SIZE and outcome.refused_because is Refusal.DROPPED
        card.fails_after = card.enqueued
        async with kv.reserve(other) as room:
            for number, block in enumerate(room.blocks):
                block.copy_(tensor_of(other)[:, :, number * SIZE : (number + 1) * SIZE])
            assert await room.commit(2 * SIZE) == 0
            card.fails_after = None
            assert await room.commit(2 * SIZE) == 2 * SIZE

        assert stack_of(cache).cache.stats.failures["StoreError"] == 3
        assert await read(kv, tokens) == 6 * SIZE and await read(kv, other) == 2 * SIZE
        await cache.check()


@pytest.mark.parametrize("call", ["gather", "layer"])
async def test_rot_on_the_device_is_found_and_removed(seed: int, call: str) -> None:
    """What comes before is read; the block and what follows it are gone from the cache."""
    tokens = prompt(seed, 6)
    async with house(seed, ssd=None) as (_, cache, kv):
        await store(kv, tokens)
        async with kv.match(tokens) as hit:
            await hit.ready()
            k, _ = hit.view(3, 1)
            k.view(torch.int16).view(-1)[5] ^= 1
            found = await hit.gather() if call == "gather" else None
            layer = await hit.layer(1) if call == "layer" else None

        assert found is None or (is_exact(found, tokens) and found.shape[2] == 3 * SIZE)
        assert layer is None or layer[0].shape[0] == 3 * SIZE
        assert await read(kv, tokens) == 3 * SIZE
        assert stack_of(cache).cache.stats.failures["checksum"] == 1


async def test_a_block_that_somebody_distrusts_is_looked_at_on_the_device(seed: int) -> None:
    """Sound, it stays; rotten in one of its copies, also the device's, it goes."""
    tokens = prompt(seed, 4)
    async with house(seed, ssd=None) as (_, cache, kv):
        await store(kv, tokens, tier=Tier.DRAM)
        async with kv.match(tokens) as hit:  # and a copy on the device
            await hit.ready()
            await cache.settle()
        stack = stack_of(cache)
        async with kv.match(tokens) as hit:
            assert all([await stack.recheck(hit.lease, block) for block in range(4)])
            assert hit.tiers == {Tier.HBM: 4 * SIZE}
            k, _ = hit.view(2, 0)
            k.view(torch.int16).view(-1)[0] ^= 1
            assert [await stack.recheck(hit.lease, block) for block in (1, 2)] == [True, False]

        assert await read(kv, tokens) == 2 * SIZE


# --- beginning and end ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("demotes", [True, False])
async def test_closing_waits_for_copies_then_unpins_then_gives_memory_back(seed: int, tmp_path: Path, demotes: bool) -> None:
    """A read whose caller has gone is under way, with demotions or without: nothing is unpinned before the device has done."""
    card, rig = on_device(seed)
    rig.patience = PATIENCE
    config = small(device="cuda:0", directory=tmp_path / "kv" if demotes else None)  # without a disk nothing is written down
    cache = TierCache(config, seams=rig.seams())
    await cache.__aenter__()
    kv = await cache.open(SPACE, SPEC)
    tokens = prompt(seed, 6)
    await store(kv, tokens)
    await cache.settle()
    hit = await kv.match(tokens)
    await hit.ready()
    stack = stack_of(cache)
    card.held = True
    card.recorded = 0
    reading = asyncio.create_task(hit.gather())
    if demotes:
        stack.mover.start(stack.cache.moves.make_room(0, 1 << 20))
    await until(lambda: card.recorded > 0)
    reading.cancel()
    closing = asyncio.create_task(cache.close())
    done, _ = await asyncio.wait([closing], timeout=0.1)
    assert not done and card.registered and not card.left

    card.held = False
    card.run()
    await closing
    with pytest.raises(asyncio.CancelledError):
        await reading
    del hit, kv, stack, reading
    gc.collect()

    assert card.registered == [] and card.allocated == 0
    assert card.left == ["pinned", "memory"]
    async with opened_kv(config, rig) as (_, again):
        assert await read(again, tokens) == (6 * SIZE if demotes else 0)


@pytest.mark.usefixtures("kept")
async def test_a_device_that_never_ends_keeps_what_it_may_still_touch(seed: int) -> None:
    """The cache closes after its patience; memory stays pinned and allocated until the copies are over."""
    card, rig = on_device(seed)
    rig.patience = 0.02
    cache = TierCache(small(device="cuda:0", ssd=None), seams=rig.seams())
    await cache.__aenter__()
    kv = await cache.open(SPACE, SPEC)
    tokens = prompt(seed, 4)
    await store(kv, tokens)
    hit = await kv.match(tokens)
    await hit.ready()
    card.held = True
    card.recorded = 0
    reading = asyncio.create_task(hit.gather())
    await until(lambda: card.recorded > 0)

    await cache.close()

    assert card.registered and not card.left and not reading.done()
    card.held = False
    card.run()
    with pytest.raises((LeaseReleased, Closed)):
        await reading


async def test_a_start_that_is_refused_leaves_nothing(seed: int, tmp_path: Path) -> None:
    """The device has no room, or the host has none after the device had: nothing stays allocated, and the next start works."""
    card, rig = on_device(seed)
    card.room = LEAST_EXPORT - 1
    with pytest.raises(MemoryRefused, match="refused by the device"):
        async with TierCache(small(device="cuda:0", directory=tmp_path / "kv"), seams=rig.seams()):
            pass
    card.room = None
    with pytest.raises(MemoryRefused, match="host memory"):
        async with TierCache(Config.of(hbm="1 MiB", dram="1000 TiB", device="cuda:0"), seams=rig.seams()):
            pass
    gc.collect()

    assert card.allocated == 0 and card.registered == []
    async with opened_kv(small(device="cuda:0", directory=tmp_path / "kv"), rig) as (_, kv):
        await store(kv, prompt(seed, 2))


async def test_a_model_that_finds_no_room_for_its_stages_leaves_nothing(seed: int) -> None:
    """Opening it is refused; another one, or the same when there is room, has all of the tiers."""
    card, rig = on_device(seed)
    async with TierCache(small(device="cuda:0", ssd=None), seams=rig.seams()) as cache:
        card.room = 3 * SPEC.block_bytes
        with pytest.raises(MemoryRefused):
            await cache.open(SPACE, SPEC)
        assert card.registered == [] and cache.stacks == ()
        card.room = None
        kv = await cache.open(OTHER, LARGE)
        tokens = prompt(seed, 2)
        await store(kv, tokens, space=OTHER)
        assert await read(kv, tokens, space=OTHER) == 2 * SIZE


async def test_a_model_that_another_tier_is_too_small_for_leaves_nothing(seed: int, tmp_path: Path) -> None:
    """What was pinned for it by then is not any more."""
    card, rig = on_device(seed)
    size = LARGE.block_bytes
    config = Config.of(hbm=8 * size, dram=8 * size, ssd=4096, directory=str(tmp_path / "kv"), device="cuda:0")
    async with TierCache(config, seams=rig.seams()) as cache:
        with pytest.raises(TierTooSmall):
            await cache.open(SPACE, LARGE)

        assert card.registered == [] and card.left == ["pinned"]


async def test_memory_that_can_not_be_pinned_is_told_and_works(seed: int) -> None:
    """Health says `pageable` as long as it is so, the figures how much; every byte is right all the same."""
    card, rig = on_device(seed)
    card.most_registered = 0
    tokens = prompt(seed, 6)
    async with opened_kv(small(device="cuda:0", ssd=None), rig) as (cache, kv):
        await store(kv, tokens)
        await lower(cache, Tier.HBM)
        assert await read(kv, tokens) == 6 * SIZE
        found = await ailments(cache)
        size = 8 * SPEC.block_bytes
        assert set(found) == {Code.PAGEABLE}
        assert "64.0 KiB of DRAM are not pinned for lazy" in found[Code.PAGEABLE].message
        device = figures(stack_of(cache))["device"]
        assert (device["pinned_bytes"], device["pageable_bytes"]) == (0, size) and "can't be pinned" in device["pageable"]
    card.most_registered = None
    async with opened_kv(small(device="cuda:0", ssd=None), rig) as (cache, _):
        assert await ailments(cache) == {}
        assert figures(stack_of(cache))["device"] == {
            "name": "lazy",
            "slot_bytes": LEAST_EXPORT,
            "stage_bytes": (4 + 2) * size + SPEC.block_bytes,
            "stage_host_bytes": 4 * size + SPEC.block_bytes,
            "pinned_bytes": size,
            "pageable_bytes": 0,
            "pageable": None,
        }
    async with opened_kv(small(ssd=None)) as (cache, _):
        assert figures(stack_of(cache))["device"] is None


async def test_a_card_without_cupy_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to install; nothing is left behind."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "tiercache.kernels.cuda", raising=False)
    rig = Rig()
    assert rig.device is open_device

    with pytest.raises(InvalidConfig, match=r"needs CuPy, which can't be imported here .* extra 'cuda'"):
        async with TierCache(small(device="cuda:0"), seams=rig.seams()):
            pass


def test_without_a_device_nothing_of_it_is_loaded() -> None:
    """A cache with an HBM tier in host memory, written and read: neither CuPy nor the module that would import it."""
    code = """
import asyncio, sys
from tests.service.caches import opened_kv, prompt, read, small, store
async def run():
    async with opened_kv(small(ssd=None)) as (cache, kv):
        await store(kv, prompt(1, 3))
        assert await read(kv, prompt(1, 3)) == 48
asyncio.run(run())
assert not {"cupy", "tiercache.kernels.cuda"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
