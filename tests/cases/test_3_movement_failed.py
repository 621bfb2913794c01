"""M4: a demotion that could not be done is not done. Positions: 0 is the fastest tier."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from tests.cases.movement import LONG, Asked, Pair, begin_demotion, both_sides, each_pair, leased, turns, well_again
from tests.seams import Rig
from tests.service.caches import (
    SIZE,
    disk_of,
    durable_slots,
    free,
    lower,
    opened_kv,
    placed,
    prompt,
    read,
    small,
    stack_of,
    store,
    tensor_of,
)
from tiercache.changes import Reason
from tiercache.errors import StoreError
from tiercache.types import Tier


async def test_m4_a_leased_host_is_passed_by_ahead_of_need(tmp_path: Path, seed: int) -> None:
    """All of DRAM is leased, SSD has room: what the watermarks of HBM give up ahead of need goes to SSD, and nothing is lost.

    It is never tagged DRAM, and what was freed is what had been asked for. A writer that needs room at once does not go this
    way (the next test): its room would hang on the disk, as what is being written can't be dropped.
    """
    held, old = prompt(seed, 4), prompt(seed + 1, 4)
    config = small(hbm=4, dram=4, directory=tmp_path / "ssd", admit_ms=LONG, watermark_low=0.5, watermark_high=0.5)
    async with opened_kv(config) as (cache, kv):
        await store(kv, held, tier=Tier.DRAM)
        core = stack_of(cache).cache
        lease = leased(cache, kv, held)
        await cache.settle()  # DRAM, too, was drained ahead; the lease keeps what was being copied down
        await store(kv, old)
        await cache.settle()

        assert placed(kv, old) == {Tier.HBM: 2, Tier.SSD: 2} and placed(kv, held) == {Tier.DRAM: 4}
        assert free(cache)[Tier.HBM] == 2 and free(cache)[Tier.DRAM] == 0
        assert core.stats.total(Reason.DROP) == core.stats.total(Reason.EVICT) == 0
        assert core.stats.between(Tier.HBM, Tier.DRAM) == 0 and core.stats.between(Tier.HBM, Tier.SSD) == 2
        await cache.check()
        core.release(lease)
        for tokens, blocks in ((held, 4), (old, 4)):
            assert await read(kv, tokens) == blocks * SIZE
        await cache.check()


@pytest.mark.parametrize("below", ["nothing", "SSD", "an SSD that fails"])
async def test_m4_what_a_leased_host_can_t_take_is_lost_and_counted(
    tmp_path: Path, seed: int, below: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of DRAM is leased and a writer asks HBM for 2 blocks: exactly two are dropped and counted, whatever lies further down.

    Never tagged DRAM without bytes there; the answer comes after a few questions for room, and waits for nothing.
    """
    rig = Rig()
    held, old, new = prompt(seed, 4), prompt(seed + 1, 4), prompt(seed + 2, 2)
    directory = None if below == "nothing" else tmp_path / "ssd"
    async with opened_kv(small(hbm=4, dram=4, directory=directory, admit_ms=LONG), rig) as (cache, kv):
        await store(kv, held, tier=Tier.DRAM)
        await store(kv, old)
        core = stack_of(cache).cache
        lease = leased(cache, kv, held)
        if below == "an SSD that fails":
            rig.disk.fail("commit", OSError(errno.EIO, "injected"))
        asked = Asked(monkeypatch)

        outcome = await kv.insert(new, tensor_of(new))

        assert outcome == (2 * SIZE, 0, 0) and outcome.refused_because is None
        assert asked.count <= 4
        assert core.stats.total(Reason.DROP) == core.stats.between(Tier.HBM, None) == 2
        assert placed(kv, old) == {Tier.HBM: 2} and placed(kv, held) == {Tier.DRAM: 4}
        assert await read(kv, old) == 2 * SIZE and await read(kv, new) == 2 * SIZE
        await cache.check()
        core.release(lease)
        assert await read(kv, held) == 4 * SIZE


async def test_m4_with_no_time_to_wait_for_a_disk_it_is_lost_and_counted(tmp_path: Path, seed: int) -> None:
    """As configured: with `admit_ms` 0 an insert begins no write that it could not wait for; with more, it goes to disk."""
    for admit_ms, tier in ((0, None), (LONG, Tier.SSD)):
        old, new = prompt(seed, 4), prompt(seed + 1, 2)
        async with opened_kv(small(hbm=None, dram=4, directory=tmp_path / str(admit_ms), admit_ms=admit_ms)) as (cache, kv):
            await store(kv, old)
            assert await kv.insert(new, tensor_of(new)) == (2 * SIZE, 0, 0)

            assert stack_of(cache).cache.stats.total(Reason.DROP) == (0 if tier else 2)
            assert placed(kv, old) == {Tier.DRAM: 2} | ({tier: 2} if tier else {})
            assert await read(kv, new) == 2 * SIZE and await read(kv, old) == (4 if tier else 2) * SIZE
            await cache.settle()
            await cache.check()


async def test_m4_a_parent_does_not_pass_a_child_that_comes_meanwhile(tmp_path: Path, seed: int) -> None:
    """On its way to SSD, past a leased DRAM, a prompt gets a child in DRAM: it stays in HBM, and its record is a clean copy."""
    rig = Rig()
    blocker, tokens = prompt(seed, 1), prompt(seed + 1, 3)
    async with opened_kv(small(hbm=2, dram=1, directory=tmp_path / "ssd", admit_ms=LONG), rig) as (cache, kv):
        await store(kv, tokens[: 2 * SIZE])
        await store(kv, blocker, tier=Tier.DRAM)
        core = stack_of(cache).cache
        lease = leased(cache, kv, blocker)
        hold = rig.copies.hold("put")
        begin_demotion(cache, 2, past=True)
        await hold.reached()
        core.release(lease)
        core.delete(kv._desk.space, kv._key(blocker))
        await store(kv, tokens, tier=Tier.DRAM)
        hold.release()
        await cache.settle()

        assert placed(kv, tokens) == {Tier.HBM: 2, Tier.DRAM: 1}
        assert len(durable_slots(kv, tokens)) == 2
        await cache.check()
        assert await read(kv, tokens) == 3 * SIZE


@each_pair
@pytest.mark.parametrize("at", [0, 1, 2], ids=["the first", "the second", "the last"])
async def test_m4_a_copy_that_fails_leaves_the_node_where_it_is(tmp_path: Path, seed: int, pair: Pair, at: int) -> None:
    """An error on the way down: what did not arrive stays in the upper tier, readable, and that much less is free."""
    rig = Rig()
    rig.copies.chunk = 1
    tokens = prompt(seed, 3)
    async with opened_kv(pair.config(tmp_path, upper=4, lower=8, admit_ms=LONG), rig) as (cache, kv):
        for count in (1, 2, 3):
            await store(kv, tokens[: count * SIZE])
        arrive = at if pair.upper is Tier.HBM else 0  # a put is one transaction: all or nothing
        rig.copies.fail(*pair.copy, StoreError("injected"), number=at if pair.upper is Tier.HBM else 0)
        begin_demotion(cache, 3)
        await cache.settle()

        assert free(cache)[pair.upper] == 1, "the last of a chain did not arrive: none before it may leave"
        assert placed(kv, tokens) == {pair.upper: 3}
        assert stack_of(cache).cache.residency.slots[1].free == 8 - arrive or pair.upper is Tier.DRAM
        assert await read(kv, tokens) == 3 * SIZE
        await cache.check()
        await well_again(cache)
        await lower(cache, pair.upper)
        assert placed(kv, tokens) == {pair.lower: 3} and free(cache)[pair.upper] == 4
        assert await read(kv, tokens) == 3 * SIZE
        await cache.check()


@pytest.mark.parametrize("operation", ["commit", "sync"])
async def test_m4_eio_between_host_and_disk(tmp_path: Path, seed: int, operation: str) -> None:
    """EIO at the data or at its sync: the prompt stays in DRAM and readable, nothing of it is on disk, and it goes down later."""
    rig = Rig()
    tokens = prompt(seed, 6)
    async with opened_kv(small(hbm=None, dram=8, directory=tmp_path / "ssd", admit_ms=LONG), rig) as (cache, kv):
        for count in (2, 4, 6):
            await store(kv, tokens[: count * SIZE])
        rig.disk.fail(operation, OSError(errno.EIO, "injected"))
        begin_demotion(cache, 6)
        await cache.settle()

        assert placed(kv, tokens) == {Tier.DRAM: 6} and free(cache)[Tier.DRAM] == 2
        assert durable_slots(kv, tokens) == [] and disk_of(cache).stats().blocks == 0
        assert await read(kv, tokens) == 6 * SIZE
        await cache.check()
        rig.disk.release()
        await well_again(cache)
        await lower(cache, Tier.DRAM)
        assert placed(kv, tokens) == {Tier.SSD: 6} and free(cache)[Tier.DRAM] == 8
        assert await read(kv, tokens) == 6 * SIZE


@each_pair
@pytest.mark.parametrize("touched", [False, True], ids=["used together", "the parent used later"])
async def test_m4_a_chain_of_three_nodes_goes_in_one_call(tmp_path: Path, seed: int, pair: Pair, touched: bool) -> None:
    """Asked for all of it, one call reaches the parents: what becomes a leaf when its child has gone goes next."""
    tokens = prompt(seed, 3)
    async with opened_kv(pair.config(tmp_path, upper=3, lower=8, admit_ms=LONG)) as (cache, kv):
        for count in (1, 2, 3):
            await store(kv, tokens[: count * SIZE])
        if touched:
            assert await read(kv, tokens[:SIZE]) == SIZE
        other = prompt(seed + 1, 3)

        assert await kv.insert(other, tensor_of(other)) == (3 * SIZE, 0, 0)

        assert placed(kv, tokens) == {pair.lower: 3} and placed(kv, other) == {pair.upper: 3}
        assert stack_of(cache).cache.stats.total(Reason.DROP) == 0
        await cache.check()
        assert await read(kv, tokens) == 3 * SIZE and await read(kv, other) == 3 * SIZE


@both_sides
async def test_m4_a_put_that_waits_does_not_spin(tmp_path: Path, seed: int, after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the copy that makes its room is held the put sleeps: hundreds of turns of the loop, no question for room."""
    rig = Rig()
    old, new = prompt(seed, 4), prompt(seed + 1, 4)
    async with opened_kv(small(hbm=4, dram=8, directory=tmp_path / "ssd", admit_ms=LONG), rig) as (cache, kv):
        await store(kv, old)
        hold = rig.copies.hold("blocks", to=1, after=after)
        putting = asyncio.ensure_future(kv.insert(new, tensor_of(new)))
        await hold.reached()
        asked = Asked(monkeypatch)
        await turns(500)

        assert asked.count == 0 and not putting.done()
        hold.release()
        assert await putting == (4 * SIZE, 0, 0)
        assert await read(kv, old) == 4 * SIZE and await read(kv, new) == 4 * SIZE
        await cache.check()
