"""Kind 7, accounting, of the whole product: A1 what is charged is given back, and never is more used than there is.

A2 is in `test_7_accounting_counters`; both, in the books of the core, in `test_7_accounting_books`.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tests.seams import PATIENCE, Rig
from tests.service.caches import (
    LARGE,
    SIZE,
    SPACE,
    disk_of,
    free,
    is_exact,
    leases,
    lower,
    opened,
    opened_kv,
    prompt,
    read,
    small,
    stack_of,
    store,
    tensor_of,
    wind_down,
)
from tiercache.changes import Reason
from tiercache.config import Share
from tiercache.errors import StoreError, TierTooSmall
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV
from tiercache.spec import KVSpec
from tiercache.storage.contract import FULL_CHARGE
from tiercache.types import Tier

CAP = 10


class Given(NamedTuple):
    """What a way of taking away works on: a prompt of one block, put five times and flushed."""

    cache: TierCache
    kv: LocalKV
    rig: Rig
    tokens: list[int]
    other: list[int]


async def usage(cache: TierCache) -> dict[Tier, int]:
    """Return the blocks in use by tier, after comparing the pools with the nodes, and with the records on disk."""
    await cache.settle()
    audit = await cache.check()  # used = sum over blocks = capacity - free, in each tier
    core = stack_of(cache).cache
    counts = [pool.census() for pool in core.residency.slots]
    used = {tier: count.owned + count.held for tier, count in zip(core.tiers, counts, strict=True)}
    disk = disk_of(cache).stats()
    assert disk.blocks == disk.raw_records + disk.packed_records == used[Tier.SSD]
    assert all(pool.used == count.used >= 0 for pool, count in zip(core.residency.slots, counts, strict=True))
    assert audit["blocks"] >= max(used.values())
    return used


async def nothing(at: Given) -> None:
    """Leave it."""


async def shorter(at: Given) -> None:
    """Put two blocks, then one in their place."""
    two = [*at.other, *at.tokens]
    await store(at.kv, two)
    await at.kv.flush(two)
    assert await at.kv.delete(two) == 2 * SIZE
    await store(at.kv, at.other)


async def smaller(at: Given) -> None:
    """Put in its place what compresses: the record costs less."""
    assert stack_of(at.cache).cache.residency.slots[2].used == FULL_CHARGE
    await at.kv.delete(at.tokens)
    await at.kv.insert(at.tokens, torch.zeros(LARGE.shape(SIZE)))
    assert await at.kv.flush(at.tokens) == SIZE
    assert stack_of(at.cache).cache.residency.slots[2].used == FULL_CHARGE - 1


async def delete(at: Given) -> None:
    """Delete it."""
    assert await at.kv.delete(at.tokens) == SIZE


async def clear(at: Given) -> None:
    """Clear the namespace."""
    assert await at.kv.clear() == SIZE


async def expire(at: Given) -> None:
    """Pin it for no time worth speaking of, and delete it when the pin has ended."""
    assert await at.kv.pin(at.tokens, ttl=0.01) == SIZE
    async with asyncio.timeout(PATIENCE):
        while leases(at.cache):
            await stack_of(at.cache).mover.change(0.01)
    await at.kv.delete(at.tokens)


async def refused_copy(at: Given) -> None:
    """Let a copy to disk, and one to DRAM, fail."""
    await store(at.kv, at.other)
    at.rig.copies.fail("put", StoreError("injected"))
    at.rig.copies.fail("blocks", StoreError("injected"))
    assert await at.kv.flush(at.other) == 0
    await lower(at.cache, Tier.HBM)
    at.rig.copies.release()


async def cancelled_put(at: Given) -> None:
    """Cancel an insert in the middle of its copy."""
    hold = at.rig.threads.hold("_scatter", times=1)
    task = asyncio.create_task(at.kv.insert(at.other, tensor_of(at.other, spec=LARGE)))
    await hold.reached()
    task.cancel()
    hold.release()
    await wind_down(task)


async def left_room(at: Given) -> None:
    """Reserve, and leave without a commit."""
    async with at.kv.reserve(at.other * 3) as room:
        assert len(room.blocks) == 3


async def evicted_under_lease(at: Given) -> None:
    """Push everything down, and delete it, while it is leased."""
    async with at.kv.match(at.tokens) as hit:
        for number in range(CAP):
            await at.kv.insert(prompt(number, 4), tensor_of(prompt(number, 4), spec=LARGE))
        await at.kv.delete(at.tokens)
        assert is_exact(await hit.gather(), at.tokens, spec=LARGE)


@pytest.mark.parametrize(
    "way",
    [nothing, shorter, smaller, delete, clear, expire, refused_copy, cancelled_put, left_room, evicted_under_lease],
    ids=lambda way: way.__name__,
)
async def test_a1_what_is_charged_is_given_back(tmp_path: Path, seed: int, way: Callable[[Given], Awaitable[None]]) -> None:
    """The same put five times is charged once; whatever takes it away gives it back, once; after a clear nothing is used, and ten
    puts fit, in every tier. (Overwriting is deleting and putting: a block's bytes never change under their tokens.)"""
    rig = Rig(retry=0.01)
    tokens, other = prompt(seed, 1), prompt(seed + 1, 1)
    config = small(hbm=CAP, dram=CAP, ssd=CAP, spec=LARGE, directory=tmp_path / "ssd", codec="zstd" if way is smaller else "raw")
    async with opened_kv(config, rig, spec=LARGE) as (cache, kv):
        for _ in range(5):
            await store(kv, tokens)
            assert await kv.flush(tokens) == SIZE
            assert await usage(cache) == {Tier.HBM: 1, Tier.DRAM: 0, Tier.SSD: 1}

        await way(Given(cache, kv, rig, tokens, other))
        await usage(cache)
        await kv.clear()

        assert set((await usage(cache)).values()) == {0}
        assert min(free(cache).values()) >= CAP
        for number in range(CAP):
            await store(kv, prompt(number, 1))
            assert await kv.flush(prompt(number, 1)) == SIZE
        assert await usage(cache) == {Tier.HBM: CAP, Tier.DRAM: 0, Tier.SSD: CAP}
        assert [await read(kv, prompt(number, 1)) for number in range(CAP)] == [SIZE] * CAP


async def test_a1_what_never_fits_is_refused_and_nothing_goes_for_it(tmp_path: Path, seed: int) -> None:
    """A block of 15 units where 10 are: refused when its namespace is opened, and nothing is evicted."""
    huge = KVSpec(layers=4, kv_heads=2, head_dim=32, dtype="float32", block_size=16 * 30)
    shares = (Share(block_bytes=LARGE.block_bytes, fraction=0.5), Share(block_bytes=huge.block_bytes, fraction=0.5))
    config = small(hbm=2 * CAP, dram=2 * CAP, ssd=64, spec=LARGE, directory=tmp_path / "ssd", shares=shares)
    async with opened(config) as cache:
        kv = await cache.open(SPACE, LARGE)
        for number in range(CAP):
            await store(kv, prompt(seed + number, 1))
        before = free(cache)

        with pytest.raises(TierTooSmall):
            await cache.open(SPACE, huge)

        assert free(cache) == before and before[Tier.HBM] == 0
        assert [await read(kv, prompt(seed + number, 1)) for number in range(CAP)] == [SIZE] * CAP
        assert stack_of(cache).cache.stats.total(Reason.EVICT) + stack_of(cache).cache.stats.total(Reason.DROP) == 0


async def test_a1_a_prompt_longer_than_the_cap(seed: int) -> None:
    """15 blocks where 10 fit: a prompt is no entry that is worth nothing in part, so its beginning is stored and the rest refused;
    it takes no more than there is, and what is leased stays."""
    held, long = prompt(seed, 2), prompt(seed + 1, 15)
    async with opened_kv(small(hbm=CAP, dram=None, ssd=None)) as (cache, kv):
        await store(kv, held)
        async with kv.match(held) as hit:
            outcome = await kv.insert(long, tensor_of(long))
            exact = is_exact(await hit.gather(), held)

        assert outcome == (8 * SIZE, 0, 7 * SIZE) and exact
        assert [await read(kv, held), await read(kv, long)] == [2 * SIZE, 8 * SIZE]
        assert free(cache) == {Tier.HBM: 0}
        await cache.check()


class Sampler:
    """A thread that looks at the use of every tier, and at the length of the data files, for as long as it is entered."""

    def __init__(self, cache: TierCache) -> None:
        self._pools = stack_of(cache).cache.residency.slots
        self._disk = disk_of(cache)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, name="sampler")
        self.faults: list[str] = []
        self.samples = 0
        self.most = [0] * len(self._pools)

    def _look(self) -> None:
        try:
            self._look_on()
        except Exception as error:  # noqa: BLE001 - whatever it is, the test is told
            self.faults.append(repr(error))

    def _look_on(self) -> None:
        while not self._end.is_set():
            for position, pool in enumerate(self._pools):
                used, free_now = pool.used, pool.free
                self.most[position] = max(self.most[position], used)
                if not 0 <= used <= pool.budget or not 0 <= free_now <= pool.capacity:
                    self.faults.append(f"{position}: {used} of {pool.budget} used, {free_now} of {pool.capacity} free")
            stats = self._disk.stats()
            if stats.raw_file_bytes + stats.packed_file_bytes > stats.limit_bytes:
                self.faults.append(f"files of {stats.raw_file_bytes} and {stats.packed_file_bytes} bytes")
            self.samples += 1

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


async def churn(kv: LocalKV, choose: random.Random, steps: int) -> None:
    """Put, flush, read and delete prompts that share beginnings."""
    for _ in range(steps):
        tokens = prompt(choose.randrange(6), choose.randint(1, 5))
        match choose.randrange(6):
            case 0 | 1 | 2:
                await kv.insert(tokens, tensor_of(tokens, spec=kv.spec))
            case 3:
                await kv.flush(tokens)
            case 4:
                await read(kv, tokens)
            case _:
                await kv.delete(tokens)


@pytest.mark.parametrize(
    ("steps", "codec"), [(60, "raw"), (60, "zstd"), pytest.param(1_500, "zstd", marks=pytest.mark.slow)], ids=str
)
async def test_a1_a_sampling_thread_never_sees_more_than_the_cap(tmp_path: Path, seed: int, steps: int, codec: str) -> None:
    """Four writers at once in tiers that are full: at no moment, also in the middle of a put, is more used than there is."""
    config = small(hbm=CAP, dram=CAP, ssd=CAP, spec=LARGE, directory=tmp_path / "ssd", codec=codec)
    async with opened_kv(config, spec=LARGE) as (cache, kv):
        with Sampler(cache) as sampler:
            await asyncio.gather(*(churn(kv, random.Random(seed + number), steps) for number in range(4)))
        await usage(cache)

        assert sampler.faults == []
        assert sampler.samples > 10
        assert sampler.most[0] == FULL_CHARGE * CAP and min(sampler.most) > FULL_CHARGE * 4, "the tiers were full, or nearly"
        await kv.clear()
        assert set((await usage(cache)).values()) == {0}
