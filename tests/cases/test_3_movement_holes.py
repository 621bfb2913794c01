"""M6: a hole in the stored chain. What lies behind one is never found, is stored once when it is put again, and takes no room."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from tests.cases.movement import well_again
from tests.seams import Rig
from tests.service.caches import (
    LARGE,
    SIZE,
    disk_of,
    durable_slots,
    free,
    opened_kv,
    prompt,
    read,
    small,
    stack_of,
    store,
    tensor_of,
)
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV
from tiercache.storage.contract import FULL_CHARGE
from tiercache.types import Tier

BLOCKS = 128
ONE_A_WRITE, MANY_A_WRITE = LARGE.block_bytes, 16 * LARGE.block_bytes


def through(path: Path, batch: int, **fields: Any) -> Any:
    """Return a configuration that writes through, `batch` bytes a transaction, and writes nothing down when it ends."""
    return small(
        hbm=None,
        dram=BLOCKS + 8,
        ssd=BLOCKS + 16,
        spec=LARGE,
        directory=path / "ssd",
        write_policy="through",
        batch_bytes=batch,
        drain_seconds=0.0,
        **fields,
    )


def stored_values(cache: TierCache) -> int:
    """Return how many records lie on disk, named or not."""
    return len(disk_of(cache)._values[FULL_CHARGE].keys(0, None, 1 << 20))


async def written_through(cache: TierCache) -> None:
    """Wait until the write policy has done what it will do."""
    await stack_of(cache).writes.settle()  # type: ignore[union-attr]
    await cache.settle()


async def holds_once(cache: TierCache, kv: LocalKV, tokens: list[int], count: int) -> bool:
    """Return whether the disk holds the first `count` blocks of the prompt, each once, and nothing else."""
    slots = durable_slots(kv, tokens)
    return len(slots) == len(set(slots)) == count == disk_of(cache).stats().blocks == stored_values(cache)


@pytest.mark.parametrize("batch", [ONE_A_WRITE, MANY_A_WRITE], ids=["a block a write", "16 blocks a write"])
@pytest.mark.parametrize("hole", [0, 60])
async def test_m6_hole_at_the_head_of_a_stored_chain(tmp_path: Path, seed: int, hole: int, batch: int) -> None:
    """128 blocks, written through; the write of block `hole` alone fails. After a restart all before it is found, and nothing
    behind it. Put again, all 128 are there and on disk, none twice, and after one more restart, too.

    Nothing is written behind a hole in the first place. With several blocks a transaction, those go with the one that failed:
    the hole is where the transaction begins.
    """
    rig = Rig()
    tokens = prompt(seed, BLOCKS)
    config = through(tmp_path, batch)
    async with opened_kv(config, rig, spec=LARGE) as (cache, kv):
        rig.disk.fail("commit", OSError(errno.EIO, "injected"), key=hole, times=1)  # a fresh disk is filled from its first slot
        await store(kv, tokens)
        await written_through(cache)

        assert sum(stack_of(cache).cache.stats.failures.values()) == 1
        whole = len(durable_slots(kv, tokens))
        assert hole - batch // LARGE.block_bytes < whole <= hole
        assert await holds_once(cache, kv, tokens, whole)
        assert await read(kv, tokens) == BLOCKS * SIZE, "memory has all of it"
        await cache.check()
    async with opened_kv(config, rig, spec=LARGE) as (cache, kv):
        async with kv.match(tokens) as hit:
            assert hit.tokens == whole * SIZE
        assert await read(kv, tokens) == whole * SIZE

        assert await kv.insert(tokens, tensor_of(tokens, spec=LARGE)) == ((BLOCKS - whole) * SIZE, whole * SIZE, 0)
        await written_through(cache)
        assert await read(kv, tokens) == BLOCKS * SIZE
        assert await holds_once(cache, kv, tokens, BLOCKS)
        await cache.check()
    async with opened_kv(config, spec=LARGE) as (cache, kv):
        assert await read(kv, tokens) == BLOCKS * SIZE
        assert await holds_once(cache, kv, tokens, BLOCKS)
        await cache.check()


@pytest.mark.parametrize("hole", [0, 60])
async def test_m6_put_again_without_a_restart(tmp_path: Path, seed: int, hole: int) -> None:
    """The failed write marks nothing as stored: when the same prompt is put again, what is missing is written, once."""
    rig = Rig()
    tokens = prompt(seed, BLOCKS)
    async with opened_kv(through(tmp_path, ONE_A_WRITE), rig, spec=LARGE) as (cache, kv):
        rig.disk.fail("commit", OSError(errno.EIO, "injected"), key=hole, times=1)
        await store(kv, tokens)
        await written_through(cache)
        await well_again(cache)
        longer = tokens + prompt(seed + 1, 1)
        await store(kv, longer)  # nothing of the prompt is new, but what follows it is
        await written_through(cache)

        assert await holds_once(cache, kv, longer, BLOCKS + 1)
        assert sorted(rig.disk.writes) == sorted([*set(rig.disk.writes), hole]), "only the failed block was written twice"
        assert await read(kv, longer) == (BLOCKS + 1) * SIZE
        await cache.check()


@pytest.mark.parametrize("hole", [0, 60])
async def test_m6_unreachable_records_are_reclaimed(tmp_path: Path, seed: int, hole: int) -> None:
    """A hole made behind the cache's back (the record is lost): what lies behind it is deleted at the next start, and its room
    is other prompts'."""
    tokens = prompt(seed, BLOCKS)
    config = through(tmp_path, MANY_A_WRITE)
    async with opened_kv(config, spec=LARGE) as (cache, kv):
        await store(kv, tokens)
        await written_through(cache)
        assert await holds_once(cache, kv, tokens, BLOCKS)
        disk_of(cache).discard([durable_slots(kv, tokens)[hole]])
    async with opened_kv(config, spec=LARGE) as (cache, kv):
        assert await read(kv, tokens) == hole * SIZE
        await cache.settle()
        assert await holds_once(cache, kv, tokens, hole)
        capacity = stack_of(cache).cache.residency.slots[-1].capacity
        assert free(cache)[Tier.SSD] == capacity - hole
        other = prompt(seed + 1, BLOCKS)
        await store(kv, other)
        await written_through(cache)
        assert await kv.flush(other) == BLOCKS * SIZE
        assert await read(kv, other) == BLOCKS * SIZE
        await cache.check()
    async with opened_kv(config, spec=LARGE) as (cache, kv):
        assert await read(kv, other) == BLOCKS * SIZE
        await cache.check()
