"""M1 and M2: a slot is its copy's until the copy has ended, at both ends of it.

M3 is in `test_3_movement_cancel`, M4 in `test_3_movement_failed`, M6 in `test_3_movement_holes`, M8 in `test_3_movement_thrash`,
M9 in `test_3_movement_delete`. Positions: 0 is the fastest tier.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cases.movement import Pair, begin_demotion, both_sides, each_pair, turns
from tests.seams import Hold, Rig
from tests.service.caches import LARGE, SIZE, free, is_exact, leases, opened_kv, placed, prompt, read, stack_of, store, tensor_of
from tiercache.leases import Refusal
from tiercache.slots import SlotState
from tiercache.transfer import Transfer
from tiercache.types import Tier

# --- M1: a slot that is still read ----------------------------------------------------------------------------------------


@each_pair
@both_sides
@pytest.mark.parametrize("how", ["evicted", "deleted"])
async def test_m1_slot_reused_while_a_demotion_reads_it(tmp_path: Path, seed: int, pair: Pair, after: bool, how: str) -> None:
    """N's demotion is held, its lease dropped, N evicted or deleted, and M put where no other slot is free.

    Until the copy has ended its slots are nobody else's: M waits for a copy between memories, and gets a clean answer where
    that goes to a disk. Then and after a restart N is exact or absent, in whatever tier, and M is exact.
    """
    rig = Rig()
    n, m = prompt(seed, 4), prompt(seed + 1, 4)
    config = pair.config(tmp_path, upper=4, lower=8, admit_ms=1)
    async with opened_kv(config, rig) as (cache, kv):
        await store(kv, n)
        generations = stack_of(cache).cache.residency.slots[0].generations.copy()
        hold = pair.hold(rig, after=after)
        begin_demotion(cache, 4)
        await hold.reached()
        async with kv.match(n) as hit:
            assert hit.tokens == 4 * SIZE
        assert leases(cache) == 0
        begin_demotion(cache, 4, drop=True)
        gone = asyncio.ensure_future(kv.delete(n)) if how == "deleted" else None
        putting = asyncio.ensure_future(kv.insert(m, tensor_of(m), tier=pair.upper))
        if pair.lower is Tier.SSD:
            await asyncio.wait([putting])
        else:
            await turns()

        assert free(cache)[pair.upper] == 0  # the held demotion still owns the slots that it reads
        assert (stack_of(cache).cache.residency.slots[0].generations == generations).all()
        assert await read(kv, m) == 0 and await read(kv, n) == (0 if gone else 4 * SIZE)
        hold.release()
        put = await putting
        if gone is not None:
            await gone
        assert put.stored + put.refused == 4 * SIZE
        assert put.refused_because is (Refusal.NO_ROOM if pair.lower is Tier.SSD else None)
        await cache.settle()
        await cache.check()
        assert await read(kv, n) == (0 if gone else 4 * SIZE)
        assert await read(kv, m) == put.stored
        await store(kv, m)
        assert await read(kv, m) == 4 * SIZE
    async with opened_kv(config) as (again, kv):
        assert await read(kv, n) in ((0,) if gone else (0, 4 * SIZE))
        assert await read(kv, m) == 4 * SIZE
        await again.check()


# --- M2: a promotion's own source -----------------------------------------------------------------------------------------


@each_pair
async def test_m2_promotion_does_not_evict_its_own_source(tmp_path: Path, seed: int, pair: Pair) -> None:
    """The upper tier full of Y, the lower one of X and Z: X, the oldest, is promoted, held open, beside a promotion of Z and a
    writer that wants all of the upper tier. X keeps its source until it has arrived; Y and Z are exact or gone."""
    rig = Rig()
    x, z, newer = prompt(seed, 4), prompt(seed + 1, 4), prompt(seed + 2, 8)
    ys = prompt(seed + 3, 4), prompt(seed + 4, 4)
    config = pair.config(tmp_path, upper=8, lower=8, spec=LARGE)
    async with opened_kv(config, rig, spec=LARGE) as (cache, kv):
        for tokens in (x, z):
            await store(kv, tokens, tier=Tier.DRAM)
            if pair.lower is Tier.SSD:
                await kv.flush(tokens)
                begin_demotion(cache, 4)
        for tokens in ys:
            await store(kv, tokens)
        below = stack_of(cache).cache.residency.slots[1]
        assert free(cache)[pair.upper] == below.free == 0
        assert placed(kv, x) == placed(kv, z) == {pair.lower: 4}
        hold = rig.copies.hold("blocks", to=0, number=0)

        async with kv.match(x) as hit:
            await hold.reached()
            assert (placed(kv, x)).get(pair.lower) == 4
            other = asyncio.ensure_future(read(kv, z))
            crowd = asyncio.ensure_future(kv.insert(newer, tensor_of(newer, spec=LARGE)))
            await turns()
            if pair.upper is Tier.HBM:
                await asyncio.wait([other])
            assert (placed(kv, x)).get(pair.lower) == 4
            assert {below.state(slot) for slot in _sources(hold)} == {SlotState.OWNED}
            hold.release()
            assert is_exact(await hit.gather(), x, spec=LARGE) and await hit.ready() == 4 * SIZE
            await crowd

        await cache.settle()
        await cache.check()
        assert await other in (0, 4 * SIZE)
        assert await read(kv, x) == 4 * SIZE
        for tokens in (*ys, z, newer):
            assert await read(kv, tokens) % SIZE == 0
        await cache.settle()
        await cache.check()


def _sources(hold: Hold) -> list[int]:
    """Return the slots that the held copy reads."""
    work = hold.standing[0].work
    assert isinstance(work, Transfer)
    return work.slots_from
