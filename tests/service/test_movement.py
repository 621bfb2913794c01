"""Faults of tier movement that others met, at the face: the copy is held open where it hurts, and every byte is compared.

The names are those of CASES: M1 slot reuse, M2 own source, M4 a demotion that could not be done, M9 delete in flight.
Positions: 0 HBM, 1 DRAM, 2 SSD.
"""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest
import torch

from tests.seams import Rig
from tests.service.caches import (
    LARGE,
    SIZE,
    SPEC,
    disk_of,
    free,
    is_exact,
    lower,
    opened_kv,
    prompt,
    read,
    sink,
    small,
    stack_of,
    store,
    tensor_of,
)
from tiercache.changes import Reason
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV
from tiercache.types import Tier

LONG = 60_000
"""Milliseconds that no test waits for."""


def begin_demotion(cache: TierCache, blocks: int) -> None:
    """Have the least recently used blocks of the fastest tier moved down."""
    stack = stack_of(cache)
    stack.mover.start(stack.cache.moves.make_room(0, stack.cache.residency.slots[0].free + blocks))


async def where(kv: LocalKV, tokens: list[int]) -> dict[Tier, int]:
    """Return how many blocks of a prompt lie where, without moving any."""
    core, handle = kv._desk.stack.cache, kv._desk
    lease = core.match(handle.session, handle.space, kv._key(tokens), count=False, charged=False)
    found = {core.tiers[position]: blocks for position, blocks in core.tiers_of(lease).items()}
    core.release(lease)
    return found


@pytest.mark.parametrize("after", [False, True], ids=["before the copy", "after the copy"])
@pytest.mark.parametrize("tier", [Tier.HBM, Tier.DRAM])
async def test_m1_a_slot_is_not_reused_while_a_demotion_reads_it(tmp_path: Path, seed: int, tier: Tier, after: bool) -> None:
    """N's demotion is held, N is deleted, and M is put where no other slot is free: N is absent, M exact or refused."""
    rig = Rig()
    n, m = prompt(seed, 4), prompt(seed + 1, 4)
    top = tier is Tier.HBM
    config = small(hbm=4 if top else None, dram=8 if top else 4, directory=tmp_path / "ssd", admit_ms=1)
    async with opened_kv(config, rig) as (cache, kv):
        await store(kv, n)
        hold = rig.copies.hold("blocks" if top else "put", after=after)
        begin_demotion(cache, 4)
        await hold.reached()
        deleting = asyncio.ensure_future(kv.delete(n))
        putting = asyncio.ensure_future(kv.insert(m, tensor_of(m), tier=tier))
        for _ in range(50):
            await asyncio.sleep(0)

        assert free(cache)[tier] == 0  # the held demotion still owns the slots it reads
        assert await read(kv, n) == 0 and await read(kv, m) == 0
        hold.release()
        await deleting
        put = await putting
        assert put.stored + put.refused == 4 * SIZE
        await cache.settle()
        assert await read(kv, n) == 0
        assert await read(kv, m) == put.stored
        await cache.check()
        await store(kv, m)
        assert await read(kv, m) == 4 * SIZE
    async with opened_kv(config) as (again, kv):
        assert await read(kv, n) == 0
        assert await read(kv, m) == 4 * SIZE
        await again.check()


async def test_m2_a_promotion_does_not_evict_its_own_source(tmp_path: Path, seed: int) -> None:
    """HBM full of Y, DRAM full of X and Z: X is promoted, held open, beside a promotion of Z; all three are exact or gone."""
    rig = Rig()
    x, y, z = prompt(seed, 4), prompt(seed + 1, 8), prompt(seed + 2, 4)
    async with opened_kv(small(hbm=8, dram=8, directory=tmp_path / "ssd"), rig) as (cache, kv):
        await store(kv, x, tier=Tier.DRAM)
        await store(kv, z, tier=Tier.DRAM)
        await store(kv, y)
        assert free(cache)[Tier.HBM] == free(cache)[Tier.DRAM] == 0
        hold = rig.copies.hold("layer", to=0, number=0)

        async with kv.match(x) as hit:
            await hold.reached()
            assert (await where(kv, x)).get(Tier.DRAM) == 4
            other = asyncio.ensure_future(read(kv, z))
            crowd = asyncio.ensure_future(kv.insert(prompt(seed + 3, 8), tensor_of(prompt(seed + 3, 8))))
            await asyncio.wait([other])
            assert (await where(kv, x)).get(Tier.DRAM) == 4
            hold.release()
            assert is_exact(await hit.gather(), x) and await hit.ready() == 4 * SIZE
            await crowd

        await cache.settle()
        await cache.check()
        assert await other in (0, 4 * SIZE)
        assert await read(kv, x) == 4 * SIZE
        for tokens in (y, z):
            assert await read(kv, tokens) % SIZE == 0
        await cache.check()


async def test_m4_a_demotion_that_finds_no_place_is_not_done(seed: int) -> None:
    """All of DRAM is leased and there is no SSD: what HBM gives up is gone and counted, never tagged DRAM without bytes."""
    held, old, new = prompt(seed, 4), prompt(seed + 1, 4), prompt(seed + 2, 2)
    async with opened_kv(small(hbm=4, dram=4, ssd=None, admit_ms=LONG)) as (cache, kv):
        await store(kv, held, tier=Tier.DRAM)
        core = stack_of(cache).cache
        lease = core.match(kv._desk.session, kv._desk.space, kv._key(held), charged=False)
        await store(kv, old)

        outcome = await kv.insert(new, tensor_of(new))

        assert outcome == (2 * SIZE, 0, 0)
        assert core.stats.total(Reason.DROP) == 2
        assert await where(kv, old) == {Tier.HBM: 2} and await where(kv, held) == {Tier.DRAM: 4}
        assert await read(kv, old) == 2 * SIZE and await read(kv, new) == 2 * SIZE
        await cache.check()
        core.release(lease)
        assert await read(kv, held) == 4 * SIZE


async def test_m4_all_of_a_tier_is_leased(tmp_path: Path, seed: int) -> None:
    """With DRAM leased and SSD below, an insert into full HBM gets a clean answer, nothing is without bytes, nobody spins."""
    rig = Rig()
    held, old, new = prompt(seed, 4), prompt(seed + 1, 4), prompt(seed + 2, 2)
    async with opened_kv(small(hbm=4, dram=4, directory=tmp_path / "ssd", admit_ms=LONG), rig) as (cache, kv):
        await store(kv, held, tier=Tier.DRAM)
        core = stack_of(cache).cache
        lease = core.match(kv._desk.session, kv._desk.space, kv._key(held), charged=False)
        await store(kv, old)

        outcome = await kv.insert(new, tensor_of(new))

        assert outcome == (2 * SIZE, 0, 0)
        found = await where(kv, old)
        assert sum(found.values()) == await read(kv, old) // SIZE and Tier.DRAM not in found
        assert await read(kv, held) == 4 * SIZE
        assert len(rig.copies.seen) < 20
        await cache.check()
        core.release(lease)


async def test_m4_a_disk_that_refuses_leaves_the_node_where_it_is(tmp_path: Path, seed: int) -> None:
    """EIO on the way to SSD: the prompt stays in DRAM and readable, and goes down when the disk is well again."""
    rig = Rig()
    tokens = prompt(seed, 6)
    async with opened_kv(small(hbm=None, dram=8, directory=tmp_path / "ssd", admit_ms=LONG), rig) as (cache, kv):
        for count in (2, 4, 6):
            await store(kv, tokens[: count * SIZE])
        rig.disk.fail("commit", OSError(errno.EIO, "injected"))
        begin_demotion(cache, 6)
        await cache.settle()

        assert await where(kv, tokens) == {Tier.DRAM: 6}
        assert await read(kv, tokens) == 6 * SIZE
        await cache.check()
        rig.disk.release()
        while stack_of(cache).cache.moves.refusing:
            await stack_of(cache).mover.change()
        await lower(cache, Tier.DRAM)
        assert await where(kv, tokens) == {Tier.SSD: 6} and free(cache)[Tier.DRAM] == 8
        assert await read(kv, tokens) == 6 * SIZE


@pytest.mark.parametrize("clear", [False, True], ids=["delete", "clear"])
@pytest.mark.parametrize("after", [False, True], ids=["before the copy", "after the copy"])
async def test_m9_a_deleted_prompt_does_not_come_back(tmp_path: Path, seed: int, clear: bool, after: bool) -> None:
    """Copies in HBM, DRAM and SSD and a demotion held open: not found at once, nor after it ends, nor after a restart."""
    rig = Rig()
    tokens, renewed = prompt(seed, 4), None
    config = small(hbm=8, dram=8, directory=tmp_path / "ssd")
    async with opened_kv(config, rig) as (cache, kv):
        await store(kv, tokens[: 2 * SIZE])
        assert await kv.flush(tokens) == 2 * SIZE
        await lower(cache, Tier.HBM)
        assert await read(kv, tokens[: 2 * SIZE]) == 2 * SIZE
        await cache.settle()
        await store(kv, tokens)
        hold = rig.copies.hold("put", after=after)
        flushing = asyncio.ensure_future(kv.flush(tokens))
        await hold.reached()

        deleting = asyncio.ensure_future(kv.clear() if clear else kv.delete(tokens))
        await asyncio.sleep(0)

        assert await read(kv, tokens) == 0
        hold.release()
        assert await deleting == 4 * SIZE and await flushing <= 2 * SIZE
        await cache.settle()
        assert await read(kv, tokens) == 0
        assert await cache.check() == {"nodes": 0, "blocks": 0, "leases": 0}
        assert all(pool.free == pool.capacity for pool in kv._desk.stack.cache.residency.slots)
        assert disk_of(cache).stats().blocks == 0
    async with opened_kv(config) as (cache, kv):
        assert await read(kv, tokens) == 0
        renewed = -tensor_of(tokens)
        assert (await kv.insert(tokens, renewed)).stored == 4 * SIZE
        assert await kv.flush(tokens) == 4 * SIZE
        await sink(cache)
        async with kv.match(tokens) as hit:
            assert torch.equal((await hit.gather()).view(torch.uint8), renewed.view(torch.uint8))


async def test_m9_a_clear_under_a_lease(tmp_path: Path, seed: int) -> None:
    """The leased bytes stay exact until the release, though others fill every slot; then every tier is empty."""
    tokens, other = prompt(seed, 4), prompt(seed + 1, 4)
    async with opened_kv(small(hbm=8, dram=8, directory=tmp_path / "ssd")) as (cache, kv):
        await store(kv, tokens)
        await kv.flush(tokens)
        async with kv.match(tokens) as hit:
            await hit.ready()
            assert await kv.clear() == 4 * SIZE
            for number in range(1, 6):
                await store(kv, prompt(seed + number, 4))
            assert is_exact(await hit.gather(), tokens)
            await kv.clear()
        await cache.settle()

        assert all(pool.free == pool.capacity for pool in kv._desk.stack.cache.residency.slots)
        assert await read(kv, tokens) == await read(kv, other) == 0
        await cache.check()


async def test_pieces_of_one_copy_may_arrive_in_any_order(tmp_path: Path, seed: int) -> None:
    """Blocks whose reads end last first are committed in chain order; with one of them failing, only those before it."""
    rig = Rig()
    rig.copies.chunk = 1
    tokens = prompt(seed, 6)
    async with opened_kv(small(hbm=8, dram=16, directory=tmp_path / "ssd"), rig) as (cache, kv):
        await store(kv, tokens)
        await sink(cache)
        hold = rig.copies.hold("blocks", to=1, after=True)
        fetching = asyncio.ensure_future(read(kv, tokens))
        await hold.reached(6)
        for _ in range(5):
            hold.let(-1)
            await asyncio.sleep(0)
            assert await where(kv, tokens) == {Tier.SSD: 6} and not fetching.done()

        hold.let(-1)

        assert await fetching == 6 * SIZE
        hold.release()
        await cache.settle()
        await cache.check()


def test_the_specs_here_lie_differently_on_disk() -> None:
    """One is stored several to a value, the other alone: both ways are moved above."""
    assert SPEC.block_bytes < 16 * 1024 <= LARGE.block_bytes
