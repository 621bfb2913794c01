"""Kind 7, accounting, of the whole product: A1 what is charged is given back and never above the cap, A2 counters that say what
happened. The same in the books of the core is in `test_7_accounting_books`."""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.seams import PATIENCE, Rig
from tests.service.caches import (
    LARGE,
    SIZE,
    SPACE,
    SPEC,
    disk_of,
    free,
    is_exact,
    leases,
    lower,
    opened,
    opened_kv,
    placed,
    prompt,
    read,
    small,
    stack_of,
    store,
    tensor_of,
    wind_down,
)
from tests.service.daemon.http import get
from tests.service.daemon.raw import Raw, connected, daemon_of, fetched, session_at, stored, whole
from tiercache.changes import Reason
from tiercache.config import Config, Limits, Share
from tiercache.errors import StoreError, TierTooSmall
from tiercache.service import wire
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV
from tiercache.spec import KVSpec, Namespace
from tiercache.storage.contract import FULL_CHARGE
from tiercache.types import Tier

CAP = 10


@pytest.fixture
def folder() -> Iterator[Path]:
    """A new folder whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="tc") as name:
        yield Path(name)


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
    at.rig.copies.fail("layer", StoreError("injected"))
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


# --- A2 -------------------------------------------------------------------------------------------------------------------------


def config_of_a2(folder: Path, **fields: Any) -> Config:
    """Return tiers in which nothing moves for want of room."""
    return small(hbm=100, dram=100, ssd=200, directory=folder / "ssd", **fields)


async def spread(cache: TierCache, kv: LocalKV, tokens: list[int]) -> None:
    """Put 30 pages of a prompt in HBM, the next 20 in DRAM, the next 10 on disk, and the rest nowhere."""
    await store(kv, tokens[: 60 * SIZE])
    await lower(cache, Tier.HBM, 30)
    await lower(cache, Tier.DRAM, 10)
    assert placed(kv, tokens) == {Tier.HBM: 30, Tier.DRAM: 20, Tier.SSD: 10}


async def test_a2_a_tier_is_asked_for_what_no_faster_one_had(tmp_path: Path, seed: int) -> None:
    """100 pages, 30 in HBM, 20 in DRAM, 10 on disk: queries and hits 100/30, 70/20, 50/10, missed 40; named requests count once."""
    tokens = prompt(seed, 100)
    async with opened_kv(config_of_a2(tmp_path)) as (cache, kv):
        await spread(cache, kv, tokens)
        stats = stack_of(cache).cache.stats
        assert (stats.queries, stats.hits, stats.missed, stats.matches) == ([0, 0, 0], [0, 0, 0], 0, 0)

        async with kv.match(tokens, request=1) as one, kv.match(tokens, request=1) as two:
            promised = one.tokens, two.tokens

        assert promised == (60 * SIZE, 60 * SIZE)
        assert (stats.queries, stats.hits, stats.missed) == ([100, 70, 50], [30, 20, 10], 40)
        assert (stats.matches, stats.asked) == (1, 100)


async def test_a2_each_way_counts_exactly_what_moved(tmp_path: Path, seed: int) -> None:
    """Down: 30 from HBM to DRAM, then 10 from DRAM to disk, before which the 50 above them are written there, as clean copies; up:
    10 from disk to DRAM, 30 from DRAM to HBM. What failed counts nothing."""
    tokens = prompt(seed, 100)
    size = SPEC.block_bytes
    rig = Rig(retry=0.01)
    async with opened_kv(config_of_a2(tmp_path), rig) as (cache, kv):
        await spread(cache, kv, tokens)
        stats = stack_of(cache).cache.stats
        down = dict(stats.copied)
        assert await kv.prefetch(tokens) == 60 * SIZE
        await cache.settle()
        up = {way: blocks - down.get(way, 0) for way, blocks in stats.copied.items()}
        other = prompt(seed + 1, 4)
        await store(kv, other)
        rig.copies.fail("put", StoreError("injected"))
        await kv.flush(other)
        failed = dict(stats.copied)

        assert {way: blocks * size for way, blocks in down.items()} == {
            (Tier.HBM, Tier.DRAM): 30 * size,
            (Tier.HBM, Tier.SSD): 30 * size,
            (Tier.DRAM, Tier.SSD): 30 * size,
        }
        assert {way: blocks for way, blocks in up.items() if blocks} == {(Tier.SSD, Tier.DRAM): 10, (Tier.DRAM, Tier.HBM): 30}
        assert failed == {way: down.get(way, 0) + blocks for way, blocks in up.items()}
        assert stats.total(Reason.PROMOTE) == 40 and stats.total(Reason.INSERT) == 64


def series(text: str) -> dict[str, float]:
    """Return a scrape as its lines say it."""
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if not line.startswith("#")}


async def scrape(path: Path) -> dict[str, float]:
    """Scrape the daemon; it must answer."""
    status, text = await get(path, "/metrics")
    assert status == 200, text
    return series(text)


def totals(lines: dict[str, float]) -> dict[str, float]:
    """Return what a lookup counts."""
    names = ("queries", "hits", "missed", "matches", "asked")
    return {line: value for line, value in lines.items() if any(f"_{name}_" in line for name in names)}


@asynccontextmanager
async def with_100_pages(folder: Path, seed: int, **fields: Any) -> AsyncIterator[tuple[Any, Raw, wire.Opened, list[int]]]:
    """A daemon that has 60 of a prompt's 100 pages: 30 in HBM, 20 in DRAM, 10 on disk."""
    tokens = prompt(seed, 100)
    async with daemon_of(folder, config_of_a2(folder, **fields)) as daemon, session_at(daemon.path) as raw:
        local = await daemon.cache.open(SPACE, SPEC)
        await spread(daemon.cache, local, tokens)
        yield daemon, raw, await raw.open(), tokens


async def test_a2_a_lookup_that_is_answered_busy_counts_nothing(folder: Path, seed: int) -> None:
    """Refused five times because the session has its leases, then answered: the totals are those of the one that was."""
    size = SPEC.block_bytes
    async with with_100_pages(folder, seed, limits=Limits(leases=1)) as (daemon, raw, opened_space, tokens):
        held = await raw.call(wire.Leased, wire.Match, kv=opened_space.kv, prompt=whole([], number=9))
        before = await scrape(daemon.path)
        for _ in range(5):
            assert await raw.refused(wire.Match, kv=opened_space.kv, prompt=whole(tokens)) == "LimitReached"
        busy = await scrape(daemon.path)
        await raw.call(wire.Done, wire.Release, lease=held.lease)
        await raw.call(wire.Leased, wire.Match, kv=opened_space.kv, prompt=whole(tokens))
        after = await scrape(daemon.path)

    assert totals(busy) == totals(before)
    assert {line: value - before[line] for line, value in totals(after).items()} == {
        f'tiercache_tier_queries_blocks_total{{block_bytes="{size}",tier="HBM"}}': 100.0,
        f'tiercache_tier_queries_blocks_total{{block_bytes="{size}",tier="DRAM"}}': 70.0,
        f'tiercache_tier_queries_blocks_total{{block_bytes="{size}",tier="SSD"}}': 50.0,
        f'tiercache_tier_hits_blocks_total{{block_bytes="{size}",tier="HBM"}}': 30.0,
        f'tiercache_tier_hits_blocks_total{{block_bytes="{size}",tier="DRAM"}}': 20.0,
        f'tiercache_tier_hits_blocks_total{{block_bytes="{size}",tier="SSD"}}': 10.0,
        f'tiercache_missed_blocks_total{{block_bytes="{size}"}}': 40.0,
        f'tiercache_asked_blocks_total{{block_bytes="{size}"}}': 100.0,
        f'tiercache_matches_total{{block_bytes="{size}"}}': 1.0,
    }


async def test_a2_no_counter_steps_back(folder: Path, seed: int) -> None:
    """Lookups with more hits each time, moves in between, a clear: every counter is at least what it was, and moves are exact."""
    size = SPEC.block_bytes
    async with with_100_pages(folder, seed) as (daemon, raw, opened_space, tokens):
        handed = await fetched(raw)
        scrapes = [await scrape(daemon.path)]
        for _ in range(3):
            hit = await raw.call(wire.Leased, wire.Match, kv=opened_space.kv, prompt=whole(tokens))
            await raw.call(wire.Places, wire.Ready, lease=hit.lease)
            await raw.call(wire.Done, wire.Release, lease=hit.lease)
            await daemon.cache.settle()
            await stored(raw, opened_space, handed, tokens[: (len(tokens) + hit.blocks * SIZE) // 2])
            scrapes.append(await scrape(daemon.path))
        await raw.call(wire.Count, wire.Clear, kv=opened_space.kv)
        scrapes.append(await scrape(daemon.path))

    for first, second in pairwise(scrapes):
        stepped_back = {line for line, value in first.items() if "_total" in line and second.get(line, -1.0) < value}
        assert stepped_back == set()
    moves = {line: value for line, value in scrapes[-1].items() if line.startswith("tiercache_copied")}
    assert moves == {
        f'tiercache_copied_blocks_total{{block_bytes="{size}",from="HBM",to="DRAM"}}': 30.0,
        f'tiercache_copied_blocks_total{{block_bytes="{size}",from="HBM",to="SSD"}}': 30.0,
        f'tiercache_copied_blocks_total{{block_bytes="{size}",from="DRAM",to="SSD"}}': 30.0,
        f'tiercache_copied_blocks_total{{block_bytes="{size}",from="SSD",to="DRAM"}}': 10.0,
        f'tiercache_copied_blocks_total{{block_bytes="{size}",from="DRAM",to="HBM"}}': 30.0,
    }


async def use(path: Path, number: int, rounds: int) -> None:
    """Be a client that stores, looks up, errs and leaves, over and over, under names of its own."""
    space = Namespace(model=f"model-{number}", weights=f"weights-{number}", adapter=f"adapter-{number}", salt=f"salt-{number}")
    for turn in range(rounds):
        async with session_at(path) as raw:
            opened_space = await raw.open(space)
            room = await raw.call(wire.Reserved, wire.Reserve, kv=opened_space.kv, prompt=whole(prompt(number, 2 + turn)))
            await raw.call(wire.Done, wire.Close, reservation=room.reservation)
            asked = whole(prompt(number, 4))
            hit = await raw.call(wire.Leased, wire.Match, kv=opened_space.kv, prompt=asked, request=f"request-{number}-{turn}")
            await raw.refused(wire.Release, lease=hit.lease + 1_000_000 + turn)
            await raw.garbage(b"\x93\xa5hello" + bytes([number]))
        async with connected(path) as raw:
            await raw.garbage(f"kind-{number}".encode())


async def test_a2_metrics_answer_under_load_and_names_are_no_labels(folder: Path, seed: int) -> None:
    """Scraped all the while that clients come, err and go: each scrape is whole. However many names there were, the series stay."""
    async with daemon_of(folder, small(directory=folder / "ssd")) as daemon:
        await use(daemon.path, 0, 2)
        few = await scrape(daemon.path)
        done = asyncio.Event()

        async def watch() -> list[dict[str, float]]:
            seen = []
            while not done.is_set():
                seen.append(await scrape(daemon.path))
            return seen

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(use(daemon.path, number, 2) for number in range(1, 21)))
        done.set()
        scrapes = await watching
        many = await scrape(daemon.path)

    assert len(scrapes) >= 2 and all("tiercache_sessions" in seen for seen in scrapes)
    assert set(many) == set(few), "twenty tenants more, and not one series"
    for word in ("model-", "weights-", "adapter-", "salt-", "request-", "kind-"):
        assert not any(word in line for line in many)
