"""Kind 7, accounting, of the whole product: A2 hit rates and counters of moves that say what happened."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.seams import Rig
from tests.service.caches import (
    SIZE,
    SPACE,
    SPEC,
    lower,
    opened_kv,
    placed,
    prompt,
    small,
    stack_of,
    store,
)
from tests.service.daemon.http import get
from tests.service.daemon.raw import Raw, connected, daemon_of, fetched, session_at, stored, whole
from tiercache.changes import Reason
from tiercache.config import Config, Limits
from tiercache.errors import StoreError
from tiercache.service import wire
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV
from tiercache.spec import Namespace
from tiercache.types import Tier


@pytest.fixture
def folder() -> Iterator[Path]:
    """A new folder whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="tc") as name:
        yield Path(name)


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
