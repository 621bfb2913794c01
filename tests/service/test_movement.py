"""Reading over tiers, at the face: copies are held open, and every byte is compared. Positions: 0 HBM, 1 DRAM, 2 SSD."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.seams import FakeClock, Rig
from tests.service.caches import (
    LARGE,
    SIZE,
    SPEC,
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
)
from tiercache.errors import StoreError
from tiercache.types import Tier


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
            assert placed(kv, tokens) == {Tier.SSD: 6} and not fetching.done()

        hold.let(-1)

        assert await fetching == 6 * SIZE
        hold.release()
        await cache.settle()
        await cache.check()


async def test_a_promotion_that_waited_for_room_finds_its_blocks_elsewhere(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was to bring from DRAM came up meanwhile, and what follows is on its way from SSD: nothing comes from there twice."""
    rig, tokens = Rig(), prompt(seed, 4)
    async with opened_kv(small(hbm=8, dram=16, directory=tmp_path / "ssd"), rig) as (cache, kv):
        await store(kv, tokens)
        await sink(cache)
        await kv.prefetch(tokens[: 2 * SIZE])
        await lower(cache, Tier.HBM)
        assert placed(kv, tokens) == {Tier.DRAM: 2, Tier.SSD: 2}
        stack = stack_of(cache)
        plain, waiting, go = stack.traffic._room, asyncio.Event(), asyncio.Event()

        async def room(position: int, want: int, deadline: float) -> None:
            await plain(position, want, deadline)
            if position == 0 and not waiting.is_set():
                waiting.set()
                await go.wait()

        monkeypatch.setattr(stack.traffic, "_room", room)
        hold = rig.copies.hold("blocks", to=1)
        async with kv.match(tokens) as hit:
            await waiting.wait()
            await hold.reached()
            another = stack.cache.moves.plan_promote(hit.lease.node, 0, most=8)
            assert another is not None and another.count == 2
            [flight] = stack.mover.start([another])
            await flight.wait()
            go.set()
            await asyncio.sleep(0)
            hold.release()

            assert await hit.ready() == 4 * SIZE and is_exact(await hit.gather(), tokens)
        await cache.settle()
        assert not stack.cache.stats.failures and placed(kv, tokens) == {Tier.HBM: 4}
        assert (Tier.SSD, Tier.HBM) not in stack.cache.stats.copied
        await cache.check()


def test_the_specs_here_lie_differently_on_disk() -> None:
    """One is stored several to a value, the other alone: both ways are moved above."""
    assert SPEC.block_bytes < 16 * 1024 <= LARGE.block_bytes


async def test_a_slow_disk_is_given_smaller_moves(tmp_path: Path, seed: int) -> None:
    """Slots that a move frees are free at its end: it ends within what a writer waits, and on a faster disk it is larger again."""
    rig, clock, moved = Rig(), FakeClock(), []
    rig.clock = clock
    commit = 0.125

    def slow() -> bool:
        clock.advance(commit)
        return False

    rig.disk.fail_when("commit", StoreError("no error"), slow)
    config = small(hbm=None, dram=64, ssd=256, spec=LARGE, directory=tmp_path / "ssd", batch_bytes=80_000, admit_ms=500)
    async with opened_kv(config, rig, spec=LARGE) as (cache, kv):
        pace = stack_of(cache).cache.moves.pace
        for number in range(6):
            commit = 0.125 if number < 2 else 0.0
            tokens = prompt(seed + number, 32)
            await store(kv, tokens)
            moved.append(pace.blocks)
            assert await kv.flush(tokens) == len(tokens)

        assert (moved[0], pace.blocks) == (19, 19), "eight transactions of two blocks and the rest of one"
        assert moved[1:3] == [3, 3], "two transactions, in a half of what a writer waits"
        await cache.check()
