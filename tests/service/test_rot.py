"""Bytes that change where they lie: whoever copies them next finds out; the good part is served, the rot counted and gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from tests.seams import Rig
from tests.service.caches import SIZE, is_exact, lower, opened_kv, placed, prompt, read, small, stack_of, store
from tiercache.errors import InvalidInput
from tiercache.kernels.host import Bytes, copy_block
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV
from tiercache.storage import arenas
from tiercache.storage.contract import Planes
from tiercache.types import Tier

GOOD = 2


async def gather(cache: TierCache, kv: LocalKV, tokens: list[int]) -> int:
    return await read(kv, tokens)


async def gather_into(cache: TierCache, kv: LocalKV, tokens: list[int]) -> int:
    out = torch.zeros(kv.spec.shape(len(tokens)), dtype=torch.float16)
    async with kv.match(tokens) as hit:
        given = await hit.gather(out=out)
        assert is_exact(given, tokens) and hit.tokens == given.shape[2]
    return int(given.shape[2])


async def layers(cache: TierCache, kv: LocalKV, tokens: list[int]) -> int:
    async with kv.match(tokens) as hit:
        counts = {len((await hit.layer(layer))[0]) for layer in range(4)}
    return counts.pop()


async def prefetch(cache: TierCache, kv: LocalKV, tokens: list[int]) -> int:
    return await kv.prefetch(tokens)


async def flush(cache: TierCache, kv: LocalKV, tokens: list[int]) -> int:
    return await kv.flush(tokens)


async def demote(cache: TierCache, kv: LocalKV, tokens: list[int]) -> int:
    await lower(cache, Tier.HBM)
    return await read(kv, tokens)


Use = Callable[[TierCache, LocalKV, list[int]], Awaitable[int]]


@pytest.mark.parametrize(
    ("use", "tier"),
    [
        (gather, Tier.HBM),
        (gather_into, Tier.HBM),
        (layers, Tier.HBM),
        (flush, Tier.HBM),
        (demote, Tier.HBM),
        (gather, Tier.DRAM),
        (prefetch, Tier.DRAM),
        (flush, Tier.DRAM),
    ],
)
async def test_rot_is_found_by_the_next_copy(tmp_path: Path, seed: int, use: Use, tier: Tier) -> None:
    """A bit of block 2 turns: two blocks come, nothing of the third is served or stored anywhere, and it can be stored anew."""
    tokens, other = prompt(seed, 5), prompt(seed + 1, 2)
    async with opened_kv(small(directory=tmp_path / "ssd")) as (cache, kv):
        await store(kv, other, tier=tier)
        await store(kv, tokens, tier=tier)
        turn_a_bit(cache, kv, tokens, GOOD)

        found = await use(cache, kv, tokens)

        assert found == GOOD * SIZE
        assert stack_of(cache).cache.stats.failures["checksum"] >= 1
        await cache.settle()
        await cache.check()
        assert await read(kv, tokens) == GOOD * SIZE and await read(kv, other) == 2 * SIZE
        await store(kv, tokens)
        await lower(cache, Tier.HBM)
        await lower(cache, Tier.DRAM)
        assert await read(kv, tokens) == 5 * SIZE
        await cache.check()


async def test_a_reader_is_told_of_rot_that_a_move_found(seed: int) -> None:
    """What failed on its way up is not readable by the lease that asked for it, in place or otherwise."""
    tokens = prompt(seed, 5)
    async with opened_kv(small(ssd=None)) as (cache, kv):
        await store(kv, tokens, tier=Tier.DRAM)
        turn_a_bit(cache, kv, tokens, GOOD)
        async with kv.match(tokens) as hit:
            await cache.settle()

            assert await hit.ready() == GOOD * SIZE
            hit.view(GOOD - 1, 0)
            with pytest.raises(InvalidInput):
                hit.view(GOOD, 0)
            await cache.check()
        assert await cache.check() == {"nodes": 1, "blocks": GOOD, "leases": 0}


@pytest.mark.parametrize("when", ["before the copy", "under the copy", "in the copy"])
async def test_rot_on_the_way_up_is_found_where_it_arrives(seed: int, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """A bit of block 2 turns when its way to HBM has begun, in the middle of its copy, or in what is written: it never arrives."""
    rig, tokens = Rig(), prompt(seed, 5)
    rig.copies.chunk = 1
    async with opened_kv(small(ssd=None), rig) as (cache, kv):
        await store(kv, tokens, tier=Tier.DRAM)
        third = block_of(cache, kv, tokens, GOOD)

        def copy(source: Bytes, into: Bytes) -> None:
            if source.ctypes.data != third.ctypes.data:
                copy_block(source, into)
                return
            half = source.copy()
            if when != "in the copy":
                source[3, 5] ^= 1
            copy_block(source if when == "before the copy" else half, into)
            if when == "under the copy":
                into[3:] = source[3:]
            elif when == "in the copy":
                into[3, 5] ^= 1

        monkeypatch.setattr(arenas, "copy_block", copy)

        assert await kv.prefetch(tokens) == GOOD * SIZE
        assert stack_of(cache).cache.stats.failures == {"checksum": 1}
        await cache.settle()
        monkeypatch.undo()
        assert placed(kv, tokens) == {Tier.HBM: GOOD} and await read(kv, tokens) == GOOD * SIZE
        await cache.check()


async def test_rot_under_two_readers_is_cut_off_once_for_each(seed: int) -> None:
    """Hits that share the lease each get the good part; the blocks after it leave the tree once."""
    tokens = prompt(seed, 5)
    async with opened_kv(small(ssd=None)) as (cache, kv):
        await store(kv, tokens)
        turn_a_bit(cache, kv, tokens, GOOD)
        async with kv.match(tokens, request=1) as one, kv.match(tokens, request=1) as two, kv.match(tokens) as three:
            given = await asyncio.gather(one.gather(), two.gather(), three.gather())
            again = await asyncio.gather(one.ready(), two.ready(), three.ready())

        assert all(is_exact(tensor, tokens) and tensor.shape[2] == GOOD * SIZE for tensor in given)
        assert set(again) == {GOOD * SIZE}
        assert await read(kv, tokens) == GOOD * SIZE
        await cache.check()


def turn_a_bit(cache: TierCache, kv: LocalKV, tokens: list[int], block: int) -> None:
    """Change the bytes of a block of a prompt in its slot."""
    block_of(cache, kv, tokens, block)[3, 5] ^= 1


def block_of(cache: TierCache, kv: LocalKV, tokens: list[int], block: int) -> Planes:
    """Return a block of a prompt in its slot."""
    stack, space = stack_of(cache), kv._desk.space
    lease = stack.cache.match(kv._desk.session, space, kv._key(tokens), count=False, charged=False)
    place = stack.readable(lease)[block]
    stack.cache.release(lease)
    planes: Planes = stack.reader.view(place)
    return planes
