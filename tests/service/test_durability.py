"""What a clean end leaves for the next start. What damage and kill -9 leave is told by `tests/cases/test_4_durability*.py`."""

from __future__ import annotations

import errno
from pathlib import Path

from tests.cases.disks import swept
from tests.seams import FakeClock, Rig
from tests.service.caches import LARGE, SIZE, SPACE, SPEC, opened, opened_kv, prompt, read, small, store
from tiercache.config import Share
from tiercache.service.inprocess import TierCache


async def test_closing_writes_down_what_was_used_last(tmp_path: Path, seed: int) -> None:
    """What is only in memory is on SSD after a clean end; with too little room the last used prompts are."""
    config = small(hbm=8, dram=16, ssd=12, directory=tmp_path / "ssd", spec=LARGE)
    async with opened_kv(config, spec=LARGE) as (_, kv):
        for number in range(6):
            await store(kv, prompt(seed + number, 4))
        assert await read(kv, prompt(seed, 4)) == 4 * SIZE

    async with opened_kv(config, spec=LARGE) as (cache, kv):
        await swept(cache)
        found = [await read(kv, prompt(seed + number, 4)) for number in range(6)]
        assert found[0] == found[5] == 4 * SIZE and sum(found) == 12 * SIZE


async def test_closing_with_a_disk_that_refuses_ends(tmp_path: Path, seed: int) -> None:
    """What could not be written is lost, what had been is found."""
    rig = Rig()
    config = small(directory=tmp_path / "ssd", spec=LARGE)
    async with opened_kv(config, rig, spec=LARGE) as (cache, kv):
        await store(kv, prompt(seed, 2))
        await kv.flush(prompt(seed, 2))
        await store(kv, prompt(seed + 1, 2))
        rig.disk.fail("commit", OSError(errno.EIO, "injected"))
        await cache.close()

    async with opened_kv(config, spec=LARGE) as (cache, kv):
        assert [await read(kv, prompt(seed + number, 2)) for number in (0, 1)] == [2 * SIZE, 0]
        await swept(cache)


async def test_closing_has_one_time_for_all_models(tmp_path: Path, seed: int) -> None:
    """What writing down the first one takes is not there for the second, whose blocks are left out."""
    rig = Rig(clock=FakeClock())
    shares = (Share(block_bytes=SPEC.block_bytes, fraction=0.5), Share(block_bytes=LARGE.block_bytes, fraction=0.5))
    config = small(hbm=None, dram=64, ssd=256, directory=tmp_path / "ssd", shares=shares, drain_seconds=5.0)
    tokens = prompt(seed, 4)

    def slow() -> bool:
        assert isinstance(rig.clock, FakeClock)
        rig.clock.advance(6.0)
        return False

    async with TierCache(config, seams=rig.seams()) as cache:
        for spec in (SPEC, LARGE):
            await store(await cache.open(SPACE, spec), tokens)
        rig.disk.fail_when("commit", OSError("never raised"), slow)
    async with opened(config) as cache:
        assert await read(await cache.open(SPACE, SPEC), tokens) == 4 * SIZE
        assert await read(await cache.open(SPACE, LARGE), tokens) == 0
