"""M9: clear, delete and replace reach every copy, also those in flight."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tests.cases.movement import Pair, begin_demotion, both_sides, each_pair, turns
from tests.seams import Rig
from tests.service.caches import (
    SIZE,
    disk_of,
    durable_slots,
    is_exact,
    lower,
    opened_kv,
    placed,
    prompt,
    read,
    sink,
    small,
    stack_of,
    store,
    tensor_of,
)
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV
from tiercache.types import Tier


async def is_empty(cache: TierCache) -> bool:
    """Return whether no tier holds anything; the books must be right."""
    await cache.settle()
    await cache.check()
    unused = all(pool.free == pool.capacity and pool.used == 0 for pool in stack_of(cache).cache.residency.slots)
    return unused and disk_of(cache).stats().blocks == 0


async def bytes_of(kv: LocalKV, tokens: list[int]) -> torch.Tensor:
    """Return what the cache gives for a prompt."""
    async with kv.match(tokens) as hit:
        return await hit.gather()


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors hold the same bytes."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@each_pair
@both_sides
@pytest.mark.parametrize("clear", [False, True], ids=["delete", "clear"])
async def test_m9_delete_reaches_every_copy(tmp_path: Path, seed: int, pair: Pair, after: bool, clear: bool) -> None:
    """Copies in all tiers and a demotion held open: not found at once, nor when it ends, nor after a restart; all is free.

    Acknowledged only when the copy in flight is gone, too: a kill after the answer brings nothing back.
    """
    rig = Rig()
    tokens = prompt(seed, 4)
    config = pair.config(tmp_path, upper=8, lower=8)
    async with opened_kv(config, rig) as (cache, kv):
        await store(kv, tokens[: 2 * SIZE])
        assert await kv.flush(tokens) == 2 * SIZE
        await lower(cache, pair.upper)
        assert await read(kv, tokens[: 2 * SIZE]) == 2 * SIZE
        await cache.settle()
        await store(kv, tokens)
        assert placed(kv, tokens) == {pair.upper: 4} and len(durable_slots(kv, tokens)) == 2
        hold = pair.hold(rig, after=after)
        begin_demotion(cache, 8)
        await hold.reached()

        deleting = asyncio.ensure_future(kv.clear() if clear else kv.delete(tokens))
        await turns()

        assert await read(kv, tokens) == 0
        if pair.lower is Tier.SSD:
            assert not deleting.done(), "the record may yet be written"
        hold.release()
        assert await deleting == 4 * SIZE
        assert disk_of(cache).stats().blocks == 0, "forgotten before it was acknowledged"
        assert await is_empty(cache) and await read(kv, tokens) == 0
    async with opened_kv(config) as (cache, kv):
        assert await read(kv, tokens) == 0 and await is_empty(cache)


@each_pair
@pytest.mark.parametrize("again", ["at once", "after the copy", "after a restart"])
async def test_m9_only_the_new_bytes_are_returned(tmp_path: Path, seed: int, pair: Pair, again: str) -> None:
    """Deleted while the old bytes were on their way down, and put again with new ones: in every tier, and after a restart."""
    rig = Rig()
    tokens = prompt(seed, 4)
    renewed = -tensor_of(tokens)
    config = pair.config(tmp_path, upper=8, lower=16)
    async with opened_kv(config, rig) as (cache, kv):
        await store(kv, tokens)
        hold = pair.hold(rig, after=True)
        begin_demotion(cache, 8)
        await hold.reached()
        deleting = asyncio.ensure_future(kv.delete(tokens))
        await turns()
        if again == "at once":
            assert (await kv.insert(tokens, renewed)).stored == 4 * SIZE
            assert same(await bytes_of(kv, tokens), renewed)
        hold.release()
        await deleting
        await cache.settle()
        if again == "after the copy":
            assert (await kv.insert(tokens, renewed)).stored == 4 * SIZE
        await cache.check()
        assert same(await bytes_of(kv, tokens), renewed[:, :, : 0 if again == "after a restart" else 4 * SIZE])
        if again != "after a restart":
            for tier in (pair.upper, Tier.DRAM):
                await lower(cache, tier)
                assert same(await bytes_of(kv, tokens), renewed)
                await cache.settle()
    async with opened_kv(config) as (cache, kv):
        if again == "after a restart":
            assert (await kv.insert(tokens, renewed)).stored == 4 * SIZE
        assert same(await bytes_of(kv, tokens), renewed)
        await sink(cache)
        assert same(await bytes_of(kv, tokens), renewed)
        await cache.check()


@pytest.mark.parametrize("moving", [False, True], ids=["at rest", "on its way down"])
async def test_m9_clear_under_a_lease(tmp_path: Path, seed: int, moving: bool) -> None:
    """The leased bytes stay exact until the release, though others fill every slot; then the usage of every tier is 0."""
    rig = Rig()
    tokens = prompt(seed, 4)
    async with opened_kv(small(hbm=8, dram=8, directory=tmp_path / "ssd"), rig) as (cache, kv):
        await store(kv, tokens)
        if moving:
            hold = rig.copies.hold("blocks", to=1)
            begin_demotion(cache, 8)
            await hold.reached()
        else:
            await kv.flush(tokens)
        async with kv.match(tokens) as hit:
            await hit.ready()
            assert await kv.clear() == 4 * SIZE
            assert disk_of(cache).stats().blocks == 0, "a restart would bring back what was acknowledged as gone"
            await store(kv, prompt(seed + 1, 4))
            assert await read(kv, tokens) == 0
            assert is_exact(await hit.gather(), tokens) and await hit.ready() == 4 * SIZE
            rig.release()
            for number in range(2, 6):
                await kv.insert(prompt(seed + number, 4), tensor_of(prompt(seed + number, 4)))
            await cache.settle()
            assert is_exact(await hit.gather(), tokens) and await hit.ready() == 4 * SIZE
            await kv.clear()
        assert await is_empty(cache)


async def test_m9_delete_spares_what_others_share(tmp_path: Path, seed: int) -> None:
    """Of two prompts with one beginning, one is deleted while that is on its way down: the other is exact, also after a restart."""
    rig = Rig()
    shared = prompt(seed, 2)
    one, other = shared + prompt(seed + 1, 2), shared + prompt(seed + 2, 2)
    config = small(hbm=8, dram=8, directory=tmp_path / "ssd")
    async with opened_kv(config, rig) as (cache, kv):
        await store(kv, one)
        await store(kv, other)
        hold = rig.copies.hold("put")
        flushing = asyncio.ensure_future(kv.flush(one))
        await hold.reached()
        deleting = asyncio.ensure_future(kv.delete(one))
        await turns()
        assert await read(kv, one) == 2 * SIZE
        hold.release()
        assert await deleting == 2 * SIZE
        await flushing
        await cache.check()
        assert await read(kv, one) == 2 * SIZE and await read(kv, other) == 4 * SIZE
    async with opened_kv(config) as (cache, kv):
        assert await read(kv, one) == 2 * SIZE and await read(kv, other) == 4 * SIZE
        await cache.check()
