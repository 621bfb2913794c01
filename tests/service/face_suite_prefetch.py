"""What every implementation of the face promises about waiting for what lies on SSD: all of it, some time, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.seams import Hold, Rig
from tests.service.caches import SIZE, SPACE, SPEC, is_exact, prompt, read, small, store, tensor_of
from tests.service.face_suite import OpenCache
from tiercache.errors import InvalidInput
from tiercache.types import Tier

BLOCKS, UP = 6, 2
GIVING_UP = pytest.mark.parametrize("policy", ["best-effort", 0, 0.05, "0.05"])


@asynccontextmanager
async def held_on_the_way_up(open_cache: OpenCache, folder: Path, tokens: list[int]) -> AsyncIterator[tuple[Any, Any, Hold]]:
    """A cache in which the first blocks of a prompt are in memory, the others on SSD, and reading these is held."""
    config, rig = small(directory=folder / "ssd"), Rig()
    async with open_cache(config) as cache:
        await store(await cache.open(SPACE, SPEC), tokens)
    async with open_cache(config, rig) as cache:
        kv = await cache.open(SPACE, SPEC)
        assert await kv.prefetch(tokens[: UP * SIZE]) == UP * SIZE
        await cache.settle()
        yield cache, kv, rig.copies.hold("blocks", to=1)


class PrefetchSuite:
    """How long a hit waits, and what it says then."""

    @GIVING_UP
    async def test_a_reader_that_does_not_wait_gets_what_is_there(
        self, open_cache: OpenCache, seed: int, tmp_path: Path, policy: object
    ) -> None:
        """What is still on its way is not waited for, and not this hit's any more, also when it has come; the next one's it is."""
        tokens = prompt(seed, BLOCKS)
        async with held_on_the_way_up(open_cache, tmp_path, tokens) as (cache, kv, hold):
            async with kv.match(tokens, prefetch=policy) as hit:
                promised, said, kept = hit.tokens, await hit.ready(), hit.tokens
                early = await hit.gather()
                await hold.reached()
                hold.release()
                await cache.settle()
                later = await hit.ready(), await hit.ready("wait"), hit.tokens, len((await hit.layer(2))[0])
                late = await hit.gather()
                hit.view(UP - 1, 0)
                with pytest.raises(InvalidInput):
                    hit.view(UP, 0)
            async with kv.match(tokens, prefetch=policy) as hit:
                next_found, next_said, whole = dict(hit.tiers), await hit.ready(), await hit.gather()
            await cache.settle()

            assert (promised, said, kept) == (BLOCKS * SIZE, UP * SIZE, UP * SIZE)
            assert later == (UP * SIZE,) * 4
            assert early.shape[2] == late.shape[2] == UP * SIZE and is_exact(early, tokens) and is_exact(late, tokens)
            assert Tier.SSD not in next_found and next_said == BLOCKS * SIZE and is_exact(whole, tokens)
            assert (await cache.check())["leases"] == 0

    async def test_a_reader_that_waits_gets_all(self, open_cache: OpenCache, seed: int, tmp_path: Path) -> None:
        """Without a limit, or within one that is long enough, `ready` comes back when the blocks have come, and not before."""
        tokens = prompt(seed, BLOCKS)
        async with held_on_the_way_up(open_cache, tmp_path, tokens) as (cache, kv, hold):
            async with kv.match(tokens) as one, kv.match(tokens, prefetch=600) as two, kv.match(tokens, prefetch=0) as three:
                waiting = [asyncio.create_task(call) for call in (one.ready(), two.ready(), three.ready("wait"))]
                await hold.reached()
                await cache.check()  # a round trip: what was asked before it has been heard
                done = [task.done() for task in waiting]
                hold.release()
                said = [await task for task in waiting]
                whole = await three.gather()

            assert done == [False] * 3 and said == [BLOCKS * SIZE] * 3 and is_exact(whole, tokens)
            assert (await cache.check())["leases"] == 0

    async def test_hits_of_one_request_wait_each_as_long_as_it_likes(
        self, open_cache: OpenCache, seed: int, tmp_path: Path
    ) -> None:
        """One lease, two hits: that one takes what is there does not shorten the other, which waits."""
        tokens = prompt(seed, BLOCKS)
        async with held_on_the_way_up(open_cache, tmp_path, tokens) as (cache, kv, hold):
            async with kv.match(tokens, request="r") as patient, kv.match(tokens, request="r", prefetch=0) as hasty:
                waiting = asyncio.create_task(patient.ready())
                await hold.reached()
                said = await hasty.ready()
                done = waiting.done()
                hold.release()
                whole = await waiting, await patient.gather()
                part = await hasty.gather()
            await cache.settle()

            assert (said, done, whole[0]) == (UP * SIZE, False, BLOCKS * SIZE)
            assert is_exact(whole[1], tokens) and whole[1].shape[2] == BLOCKS * SIZE
            assert is_exact(part, tokens) and part.shape[2] == UP * SIZE
            assert (await cache.check())["leases"] == 0

    @GIVING_UP
    async def test_what_was_given_up_on_comes_when_nobody_waits(
        self, open_cache: OpenCache, seed: int, tmp_path: Path, policy: object
    ) -> None:
        """The hit ends while the blocks are on their way: they come up, are inserted as present, and every slot comes back."""
        tokens = prompt(seed, BLOCKS)
        async with held_on_the_way_up(open_cache, tmp_path, tokens) as (cache, kv, hold):
            async with kv.match(tokens, prefetch=policy) as hit:
                said = await hit.ready()
                outcome = await kv.insert(tokens, tensor_of(tokens, start=said), start=hit.tokens)
            hold.release()
            await cache.settle()

            async with kv.match(tokens, prefetch=0) as hit:
                found = await hit.ready()

            assert (said, found) == (UP * SIZE, BLOCKS * SIZE)
            assert outcome == (0, (BLOCKS - UP) * SIZE, 0)
            assert await read(kv, tokens) == BLOCKS * SIZE
            assert await kv.clear() == BLOCKS * SIZE
            await cache.settle()
            assert await cache.check() == {"nodes": 0, "blocks": 0, "leases": 0}

    @pytest.mark.parametrize("policy", ["sometimes", "", -1, "-0.5", float("nan"), float("inf"), True, [1], 10**400])
    async def test_a_time_that_is_none_is_refused(self, open_cache: OpenCache, policy: object) -> None:
        """What is neither a policy's name nor a number of seconds raises InvalidInput, which says what may be."""
        tokens = prompt(1, 2)
        async with open_cache(small(ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            await store(kv, tokens)

            with pytest.raises(InvalidInput, match="prefetch must be 'wait', 'best-effort' or a number of seconds"):
                kv.match(tokens, prefetch=policy)
            async with kv.match(tokens) as hit:
                with pytest.raises(InvalidInput, match="within must be"):
                    await hit.ready(policy)
                assert await hit.ready() == 2 * SIZE
