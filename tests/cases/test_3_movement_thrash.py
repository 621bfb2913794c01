"""M8: thrash. Moves are bounded, and what is clean below is not written again. A block of these is a value of its own on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cases.movement import LONG, Pair, each_pair
from tests.seams import Rig
from tests.service.caches import LARGE, SIZE, lower, opened_kv, placed, prompt, read, sink, small, stack_of, store, tensor_of
from tiercache.changes import Change, Reason
from tiercache.service.inprocess import TierCache
from tiercache.tree import Node
from tiercache.types import Tier


@contextmanager
def watched(cache: TierCache) -> Iterator[list[Change]]:
    """Collect the changes of a cache."""
    seen: list[Change] = []
    listeners = stack_of(cache).cache.residency.listeners
    listeners.append(seen.append)
    yield seen
    listeners.remove(seen.append)


def blocks(changes: list[Change], before: Tier, after: Tier) -> int:
    """Return how many blocks of `changes` went from one tier to another."""
    return sum(len(change.blocks) for change in changes if (change.before, change.after) == (before, after))


def nodes_of(cache: TierCache) -> list[Node]:
    """Return all nodes of a cache."""
    return [node for node in stack_of(cache).cache.residency.nodes if node is not None]


def node_tiers(cache: TierCache, node: Node) -> list[Tier]:
    """Return the tiers that hold a node."""
    return [tier for position, tier in enumerate(stack_of(cache).cache.tiers) if node.copies >> position & 1]


@each_pair
async def test_m8_thrash_moves_no_more_than_the_cycle(tmp_path: Path, seed: int, pair: Pair) -> None:
    """12 nodes, 20 times round, through 10 of the upper tier above 100: a round moves at most 12 up and 12 down.

    What an operation promoted is in the upper tier when it ends, and none of its blocks went down meanwhile. Each node is
    copied down once at most: the copies below are kept, and from the second time on going down costs nothing.
    """
    nodes = [prompt(seed + number, 1) for number in range(12)]
    rig = Rig()
    config = pair.config(tmp_path, upper=10, lower=100, ssd=120, spec=LARGE, promote_ms=LONG)
    async with opened_kv(config, rig, spec=LARGE) as (cache, kv):
        for node in nodes:
            await store(kv, node)
        await cache.settle()
        for _ in range(20):
            with watched(cache) as round_:
                for node in nodes:
                    with watched(cache) as seen:
                        assert await kv.prefetch(node) == SIZE
                        await cache.settle()
                    assert await read(kv, node) == SIZE
                    assert placed(kv, node) == {pair.upper: 1}
                    promoted = {block for change in seen if change.reason is Reason.PROMOTE for block in change.blocks}
                    demoted = {block for change in seen if change.reason is Reason.DEMOTE for block in change.blocks}
                    assert not promoted & demoted
            assert blocks(round_, pair.lower, pair.upper) <= 12
            assert blocks(round_, pair.upper, pair.lower) <= 12

        stats = stack_of(cache).cache.stats
        assert stats.copied[pair.upper, pair.lower] <= 12 and stats.total(Reason.DROP) == stats.total(Reason.EVICT) == 0
        assert len(rig.disk.writes) == (0 if pair.upper is Tier.HBM else stats.copied[pair.upper, pair.lower])
        await cache.check()


async def test_m8_clean_data_is_not_written_again(tmp_path: Path, seed: int) -> None:
    """Down to disk, up again, down again, three times over: the record is still there, and not a byte is written to it."""
    tokens = prompt(seed, 6)
    rig = Rig()
    async with opened_kv(small(hbm=8, dram=8, directory=tmp_path / "ssd", spec=LARGE), rig, spec=LARGE) as (cache, kv):
        await store(kv, tokens)
        await sink(cache)
        assert len(rig.disk.writes) == 6
        rig.disk.writes.clear()
        for _ in range(3):
            assert await kv.prefetch(tokens) == 6 * SIZE
            await cache.settle()
            assert placed(kv, tokens) == {Tier.HBM: 6}
            await sink(cache)
            assert placed(kv, tokens) == {Tier.SSD: 6}

        assert rig.disk.writes == []
        assert stack_of(cache).cache.stats.copied[Tier.DRAM, Tier.SSD] + stack_of(cache).cache.stats.copied[Tier.HBM, Tier.SSD] == 6
        assert await read(kv, tokens) == 6 * SIZE
        await cache.check()


async def test_m8_only_what_grew_is_written(tmp_path: Path, seed: int) -> None:
    """A prompt that went down and has grown since: of the next demotion only the new blocks are written."""
    tokens = prompt(seed, 6)
    rig = Rig()
    async with opened_kv(small(hbm=8, dram=8, directory=tmp_path / "ssd", spec=LARGE), rig, spec=LARGE) as (cache, kv):
        await store(kv, tokens[: 4 * SIZE])
        await sink(cache)
        await store(kv, tokens)
        rig.disk.writes.clear()
        await sink(cache)

        assert len(rig.disk.writes) == 2 and placed(kv, tokens) == {Tier.SSD: 6}
        assert await read(kv, tokens) == 6 * SIZE
        await cache.check()


@pytest.mark.parametrize("count", [100, pytest.param(1_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("hbm", [8, None], ids=["below HBM", "without HBM"])
async def test_m8_one_shot_prompts_write_what_is_demoted(tmp_path: Path, seed: int, count: int, hbm: int | None) -> None:
    """Prompts that never come back: no block is written to disk that did not have to leave DRAM, and none twice.

    A path goes down root first: of a prompt that has begun to leave, a clean copy may lie below. In the end all have left, and
    as many bytes were written as were demoted.
    """
    rig = Rig()
    config = small(hbm=hbm, dram=16, ssd=64, directory=tmp_path / "ssd", spec=LARGE, admit_ms=LONG)
    async with opened_kv(config, rig, spec=LARGE) as (cache, kv):
        for number in range(count):
            tokens = prompt(seed + number, 2)
            assert await kv.insert(tokens, tensor_of(tokens, spec=LARGE)) == (2 * SIZE, 0, 0)
        await cache.settle()
        stats = stack_of(cache).cache.stats
        leaving = [node for node in nodes_of(cache) if len(node_tiers(cache, node)) > 1]
        demoted = stats.between(Tier.DRAM, Tier.SSD)

        assert len(rig.disk.writes) == demoted + sum(len(node.blocks) for node in leaving)
        assert 2 * count - 16 - (hbm or 0) - 2 <= demoted <= 2 * count
        assert await read(kv, prompt(seed + count - 1, 2)) == 2 * SIZE
        await sink(cache)
        demoted = stats.between(Tier.DRAM, Tier.SSD) + stats.between(Tier.HBM, Tier.SSD)
        assert len(rig.disk.writes) * LARGE.block_bytes == demoted * LARGE.block_bytes
        assert demoted == stats.total(Reason.INSERT) == 2 * count and stats.total(Reason.DROP) == 0
        assert await read(kv, prompt(seed + count - 1, 2)) == 2 * SIZE
        await cache.check()


async def test_m8_a_disk_smaller_than_memory_is_not_written_in_vain(tmp_path: Path, seed: int) -> None:
    """A prompt that the disk can't hold whole is not begun there, over and over: the insert that wants its room gets it at once."""
    rig = Rig()
    old, new = prompt(seed, 8), prompt(seed + 1, 4)
    config = small(hbm=None, dram=8, ssd=6, directory=tmp_path / "ssd", spec=LARGE, admit_ms=300)
    async with opened_kv(config, rig, spec=LARGE) as (cache, kv):
        await store(kv, old)
        assert await kv.insert(new, tensor_of(new, spec=LARGE)) == (4 * SIZE, 0, 0)
        await cache.settle()

        assert rig.disk.writes == []
        assert stack_of(cache).cache.stats.total(Reason.DROP) == 4
        assert await read(kv, old) == 4 * SIZE and await read(kv, new) == 4 * SIZE
        await lower(cache, Tier.DRAM)
        await cache.check()
