"""A disk that answers no more holds up nobody who does not ask for it, and no end. Positions: 0 HBM, 1 DRAM, 2 SSD."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.seams import PATIENCE, Rig
from tests.service.caches import SIZE, leases, opened_kv, prompt, read, sink, small, store, tensor_of
from tiercache.errors import StoreError

LONG = 60_000
"""Milliseconds that no test waits for."""


@pytest.mark.parametrize("step", ["put", "read"])
async def test_a_disk_that_hangs_holds_up_nobody_else(tmp_path: Path, seed: int, step: str) -> None:
    """With SSD held for ever, reads of memory and inserts answer, the latter with what was dropped for them, and closing ends."""
    rig = Rig(patience=0.05)
    config = small(hbm=4, dram=4, directory=tmp_path / "ssd", admit_ms=10, promote_ms=10, drain_seconds=0.05)
    tokens = prompt(seed, 4)
    async with opened_kv(config, rig) as (cache, kv):
        await store(kv, tokens)
        await sink(cache)
        hold = rig.copies.hold("put" if step == "put" else "blocks", where=lambda moved: 2 in (moved.to, *_sources(moved.work)))
        waiting = asyncio.ensure_future(kv.flush(prompt(seed, 8)) if step == "put" else kv.prefetch(tokens))
        async with asyncio.timeout(PATIENCE):
            for number in range(1, 9):
                await kv.insert(prompt(seed + number, 4), tensor_of(prompt(seed + number, 4)))
                assert await read(kv, prompt(seed + number, 4)) == 4 * SIZE
            await hold.reached()
            longer = prompt(seed, 6)
            outcome = await kv.insert(longer, tensor_of(longer))
            assert sum(outcome) == 6 * SIZE
            await cache.check()
            await cache.close()
        waiting.cancel()
        await asyncio.wait([waiting])
        hold.release()
        assert leases(cache) == 0


def _sources(work: object) -> list[int]:
    return list(getattr(work, "sources", ()))


async def test_an_insert_does_not_wait_as_long_as_a_promotion_may(tmp_path: Path, seed: int) -> None:
    """A promotion that waits for room behind a hanging disk has its place in the queue; a writer passes it at its own deadline."""
    rig = Rig(patience=0.05)
    config = small(hbm=None, dram=4, directory=tmp_path / "ssd", admit_ms=10, promote_ms=LONG, drain_seconds=0.05)
    tokens, new = prompt(seed, 4), prompt(seed + 2, 2)
    async with opened_kv(config, rig) as (cache, kv):
        await store(kv, tokens)
        await sink(cache)
        await store(kv, prompt(seed + 1, 4))
        hold = rig.copies.hold("put")
        fetching = asyncio.ensure_future(kv.prefetch(tokens))
        await hold.reached()

        async with asyncio.timeout(PATIENCE):
            outcome = await kv.insert(new, tensor_of(new))

        assert sum(outcome) == 2 * SIZE
        hold.release()
        await fetching
        await cache.settle()
        await cache.check()


async def test_a_read_that_hangs_is_not_waited_for(tmp_path: Path, seed: int) -> None:
    """With every read of SSD held, ready says what is there, gather gives that, prefetch ends; when it goes on all of it comes."""
    rig = Rig(patience=0.05)
    config = small(hbm=8, dram=8, directory=tmp_path / "ssd", promote_ms=10)
    tokens = prompt(seed, 4)
    async with opened_kv(config, rig) as (cache, kv):
        await store(kv, tokens)
        await sink(cache)
        hold = rig.copies.hold("blocks")

        async with asyncio.timeout(PATIENCE), kv.match(tokens) as hit:
            assert (hit.tokens, await hit.ready(), (await hit.gather()).shape[2]) == (4 * SIZE, 0, 0)
            await hold.reached()
            assert await kv.prefetch(tokens) == 0

        hold.release()
        await cache.settle()
        await cache.check()
        assert await read(kv, tokens) == 4 * SIZE


async def test_a_delete_that_the_disk_does_not_do_says_so(tmp_path: Path, seed: int) -> None:
    """It raises in time; the prompt is not found all the same, and is gone for good once the disk goes on."""
    rig = Rig(forgetting=0.05)
    config = small(hbm=8, dram=8, directory=tmp_path / "ssd")
    tokens = prompt(seed, 4)
    async with opened_kv(config, rig) as (cache, kv):
        await store(kv, tokens)
        assert await kv.flush(tokens) == 4 * SIZE
        hold = rig.copies.hold("discard")

        async with asyncio.timeout(PATIENCE):
            with pytest.raises(StoreError, match="a restart may bring it back"):
                await kv.delete(tokens)

        assert await read(kv, tokens) == 0
        hold.release()
        await cache.settle()
        await cache.check()
    async with opened_kv(config) as (_, kv):
        assert await read(kv, tokens) == 0


async def test_a_delete_that_closing_cuts_short_is_not_acknowledged(tmp_path: Path, seed: int) -> None:
    """While the disk refuses to forget, a close ends the delete with an error: after a restart the prompt may be there."""
    rig = Rig(patience=0.05)
    config = small(hbm=8, dram=8, directory=tmp_path / "ssd", drain_seconds=0.05)
    tokens = prompt(seed, 4)
    async with opened_kv(config, rig) as (cache, kv):
        await store(kv, tokens)
        assert await kv.flush(tokens) == 4 * SIZE
        rig.copies.fail("discard", StoreError("injected"), times=1 << 30)
        deleting = asyncio.ensure_future(kv.delete(tokens))
        await asyncio.sleep(0)

        async with asyncio.timeout(PATIENCE):
            await cache.close()
            with pytest.raises(StoreError, match="a restart may bring it back"):
                await deleting
