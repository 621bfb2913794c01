"""What every implementation of the face promises about blocks that it does not take: how many, and why. See `face_suite`."""

from __future__ import annotations

import pytest

from tests.service.caches import SIZE, SPACE, SPEC, is_exact, prompt, read, small, store, tensor_of
from tests.service.face_suite import OpenCache
from tiercache.leases import Refusal
from tiercache.service import desk, kv


class RefusalSuite:
    """`refused_because` of an insert, for each reason that comes about without a fault."""

    async def test_what_is_stored_has_no_reason(self, open_cache: OpenCache, seed: int) -> None:
        """Stored and there already: nothing is refused, and no reason is given."""
        tokens = prompt(seed, 3)
        async with open_cache(small(hbm=4, dram=None, ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            outcomes = [await kv.insert(tokens, tensor_of(tokens)) for _ in range(2)]

        assert outcomes == [(3 * SIZE, 0, 0), (0, 3 * SIZE, 0)]
        assert [outcome.refused_because for outcome in outcomes] == [None, None]

    async def test_a_prompt_longer_than_all_memory_is_too_large(self, open_cache: OpenCache, seed: int) -> None:
        """In one piece, and piece by piece: what comes before counts, as it can't leave before what follows it."""
        tokens = prompt(seed, 12)
        async with open_cache(small(hbm=4, dram=6, ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            whole = await kv.insert(tokens, tensor_of(tokens))
            await kv.clear()
            first = await kv.insert(tokens[: 7 * SIZE], tensor_of(tokens[: 7 * SIZE]))
            rest = await kv.insert(tokens, tensor_of(tokens, start=7 * SIZE), start=7 * SIZE)

            assert whole == (10 * SIZE, 0, 2 * SIZE) and whole.refused_because is Refusal.TOO_LARGE
            assert first.refused_because is None
            assert rest == (3 * SIZE, 0, 2 * SIZE) and rest.refused_because is Refusal.TOO_LARGE
            assert await read(kv, tokens) == 10 * SIZE

    async def test_leases_are_in_the_way(self, open_cache: OpenCache, seed: int) -> None:
        """A hit that is held on other blocks; without it the same insert is taken."""
        held, tokens = prompt(seed, 3), prompt(seed + 1, 4)
        async with open_cache(small(hbm=None, dram=4, ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            await store(kv, held)
            async with kv.match(held):
                crowded = await kv.insert(tokens, tensor_of(tokens))
            later = await kv.insert(tokens, tensor_of(tokens))

            assert crowded == (SIZE, 0, 3 * SIZE) and crowded.refused_because is Refusal.LEASED
            assert later == (3 * SIZE, SIZE, 0) and later.refused_because is None

    async def test_the_hit_that_an_insert_follows_is_not_in_its_own_way(self, open_cache: OpenCache, seed: int) -> None:
        """Another writer has the other slots: that is the reason, and not the lease on the prompt's own beginning."""
        tokens, other = prompt(seed, 4), prompt(seed + 1, 2)
        async with open_cache(small(hbm=None, dram=4, ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            await store(kv, tokens[: 2 * SIZE])
            async with kv.reserve(other) as room, kv.match(tokens) as hit:
                assert len(room.blocks) == hit.tokens // SIZE == 2
                crowded = await kv.insert(tokens, tensor_of(tokens, start=hit.tokens), start=hit.tokens)

            assert crowded == (0, 0, 2 * SIZE) and crowded.refused_because is Refusal.NO_ROOM

    async def test_another_writer_has_the_blocks(self, open_cache: OpenCache, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """It does not end in time: what it still holds is pending."""
        monkeypatch.setattr(desk, "PENDING_SECONDS", 0.01)
        monkeypatch.setattr(kv, "PENDING_SECONDS", 0.01)
        tokens = prompt(seed, 3)
        async with open_cache(small(hbm=None, dram=8, ssd=None)) as cache:
            face = await cache.open(SPACE, SPEC)
            async with face.reserve(tokens) as room:
                assert len(room.blocks) == 3
                outcome = await face.insert(tokens, tensor_of(tokens))

            assert outcome == (0, 0, 3 * SIZE) and outcome.refused_because is Refusal.PENDING
            assert (await face.insert(tokens, tensor_of(tokens))) == (3 * SIZE, 0, 0)

    @pytest.mark.parametrize("act", ["delete", "clear"])
    async def test_what_an_insert_follows_is_deleted_under_its_hit(self, open_cache: OpenCache, act: str, seed: int) -> None:
        """Nobody's mistake: all of it is refused, nothing is raised, nothing comes back, and the hit reads on."""
        tokens = prompt(seed, 4)
        async with open_cache(small(hbm=None, dram=8, ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            await store(kv, tokens[: 2 * SIZE])
            async with kv.match(tokens) as hit:
                assert await hit.ready() == 2 * SIZE
                await (kv.delete(tokens[: 2 * SIZE]) if act == "delete" else kv.clear())
                outcome = await kv.insert(tokens, tensor_of(tokens, start=hit.tokens), start=hit.tokens)
                assert is_exact(await hit.gather(), tokens)

            assert outcome == (0, 0, 2 * SIZE) and outcome.refused_because is Refusal.DROPPED
            assert await read(kv, tokens) == 0
            assert (await kv.insert(tokens, tensor_of(tokens))) == (4 * SIZE, 0, 0)
