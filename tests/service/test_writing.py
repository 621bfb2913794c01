"""Write-through and selective write-through: what goes to SSD without being pushed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.seams import Rig
from tests.service.caches import opened_kv, prompt, read, small, stack_of, store
from tiercache.cache import Cache
from tiercache.errors import StoreError
from tiercache.service.inprocess import TierCache
from tiercache.service.writing import WriteBack, WriteThrough
from tiercache.tree import subtree


def durable_blocks(core: Cache) -> int:
    position = len(core.tiers) - 1
    return sum(
        len(node.blocks)
        for space in core.residency.spaces.values()
        for node in subtree(space.tree.root)
        if node.copies >> position & 1
    )


async def settled(cache: TierCache) -> int:
    """Wait for the policy's copies, and return how many blocks are durable."""
    writes = stack_of(cache).writes
    if isinstance(writes, WriteThrough):
        await writes.settle()
    await cache.settle()
    await cache.check()
    return durable_blocks(stack_of(cache).cache)


async def test_write_back_writes_nothing_by_itself(tmp_path: Path) -> None:
    async with opened_kv(small(directory=tmp_path)) as (cache, kv):
        await store(kv, prompt(1, 4))
        await read(kv, prompt(1, 4))

        assert await settled(cache) == 0
        assert isinstance(stack_of(cache).writes, WriteBack)


async def test_write_through_writes_what_is_committed(tmp_path: Path) -> None:
    async with opened_kv(small(directory=tmp_path, write_policy="through")) as (cache, kv):
        await store(kv, prompt(1, 4))
        assert await settled(cache) == 4
        await store(kv, prompt(1, 6))
        assert await settled(cache) == 6


async def test_the_writer_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    rig = Rig()
    async with opened_kv(small(directory=tmp_path, write_policy="through"), rig) as (cache, kv):
        hold = rig.copies.hold(kind="put")
        await store(kv, prompt(1, 4))
        await hold.reached()
        await read(kv, prompt(1, 4))

        assert durable_blocks(stack_of(cache).cache) == 0
        rig.release()
        assert await settled(cache) == 4


@pytest.mark.parametrize("hits", [1, 2, 3])
async def test_selective_writes_at_the_nth_match(tmp_path: Path, hits: int) -> None:
    async with opened_kv(small(directory=tmp_path, write_policy="selective", write_through_hits=hits)) as (cache, kv):
        await store(kv, prompt(1, 4))
        for _ in range(hits - 1):
            await read(kv, prompt(1, 4))
            assert await settled(cache) == 0
        await read(kv, prompt(1, 4))

        assert await settled(cache) == 4


async def test_selective_writes_the_part_that_was_matched_often(tmp_path: Path) -> None:
    """Two prompts share their first blocks: those have two matches, what follows one."""
    async with opened_kv(small(directory=tmp_path, write_policy="selective", write_through_hits=2)) as (cache, kv):
        one, two = prompt(1, 4), [*prompt(1, 2), *prompt(2, 2)]
        await store(kv, one)
        await store(kv, two)
        await read(kv, one)
        assert await settled(cache) == 0
        await read(kv, two)

        assert await settled(cache) == 2


async def test_a_disk_that_refuses_leaves_the_blocks_to_write_back(tmp_path: Path) -> None:
    rig = Rig()
    async with opened_kv(small(directory=tmp_path, write_policy="through"), rig) as (cache, kv):
        rig.copies.fail("put", StoreError("no"))
        await store(kv, prompt(1, 4))

        assert await settled(cache) == 0
        assert await kv.flush(prompt(1, 4)) in (0, 64)


async def test_without_a_disk_there_is_nothing_to_write_to() -> None:
    async with opened_kv(small(write_policy="through")) as (cache, kv):
        await store(kv, prompt(1, 4))

        assert isinstance(stack_of(cache).writes, WriteBack)
