"""Room that can't be had, and a loop that is late: what health says and when it ends."""

from __future__ import annotations

from pathlib import Path

from tests.seams import FakeClock, Rig
from tests.service.ailing import ailments
from tests.service.caches import SIZE, free, opened_kv, prompt, read, small, stack_of, store
from tiercache.service.ailments import CHECKS, WATERMARK_SECONDS
from tiercache.service.health import Code
from tiercache.service.lateness import TOLD_SECONDS
from tiercache.types import Tier


async def test_a_watermark_that_is_not_kept_is_told_after_a_while(seed: int) -> None:
    """What is not free is leased or being written: after ten seconds it is told, readers read on; it ends when slots come back."""
    clock = FakeClock()
    config = small(hbm=8, dram=None, ssd=None, watermark_low=0.5, watermark_high=0.5)
    tokens = prompt(seed, 4)
    async with opened_kv(config, Rig(clock=clock)) as (cache, kv):
        await store(kv, tokens)
        async with kv.match(tokens), kv.reserve(prompt(seed + 1, 3)):
            await cache.settle()
            assert free(cache) == {Tier.HBM: 1}
            assert await ailments(cache) == {}
            clock.advance(WATERMARK_SECONDS)

            found = await ailments(cache)

            assert set(found) == {Code.WATERMARK}
            assert "1 slots of HBM are free, 4 are to be" in found[Code.WATERMARK].message
            assert found[Code.WATERMARK].since_seconds == WATERMARK_SECONDS
            assert await read(kv, tokens) == 4 * SIZE
        assert await ailments(cache) == {}


async def test_a_shortfall_that_passes_is_not_told(seed: int) -> None:
    """It counts from when it was seen without a break: one that ended in between begins anew."""
    clock = FakeClock()
    config = small(hbm=8, dram=None, ssd=None, watermark_low=0.25, watermark_high=0.5)
    async with opened_kv(config, Rig(clock=clock)) as (cache, _):
        stack = stack_of(cache)
        short = [(0, 1, 2)]
        stack.traffic.unkept = lambda: short  # type: ignore[method-assign]
        assert await ailments(cache) == {}
        clock.advance(WATERMARK_SECONDS - 1)
        short.clear()
        assert await ailments(cache) == {}
        short.append((0, 1, 2))
        clock.advance(1.0)
        assert await ailments(cache) == {}
        clock.advance(WATERMARK_SECONDS - 1)

        assert await ailments(cache) == {}
        clock.advance(1.0)
        assert set(await ailments(cache)) == {Code.WATERMARK}


async def test_a_loop_that_is_late_is_told(tmp_path: Path) -> None:
    """By the figures of who measures it, above a quarter of a second: the worst, for a minute after the last."""
    clock = FakeClock()
    async with opened_kv(small(directory=tmp_path / "ssd"), Rig(clock=clock)) as (cache, _):
        lateness = cache.examiner.lateness
        lateness.note(0.25)
        assert await ailments(cache) == {}
        lateness.note(0.7)
        clock.advance(50.0)
        lateness.note(0.3)
        clock.advance(20.0)
        lateness.note(0.001)

        found = await ailments(cache)

        assert set(found) == {Code.LOOP_LAG} and found[Code.LOOP_LAG].since_seconds == 70.0
        assert "late by up to 0.70 s (limit 0.25 s), last 20 s ago" in found[Code.LOOP_LAG].message
        clock.advance(TOLD_SECONDS - 20.0)
        assert await ailments(cache) == {}
        lateness.note(0.3)
        assert "up to 0.30 s" in (await ailments(cache))[Code.LOOP_LAG].message


async def test_every_ailment_has_a_function_that_looks(tmp_path: Path) -> None:
    """A cache that is well gives no sign, and no check of it moves anything."""
    async with opened_kv(small(directory=tmp_path / "ssd")) as (cache, _):
        await cache.health()

        assert [list(check(cache, 0.0)) for check in CHECKS] == [[]] * len(CHECKS)
