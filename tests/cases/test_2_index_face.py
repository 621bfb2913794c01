"""Kind 2, index and tree, at the face of the whole product: T1 leases, T2 pages that are not whole; else `test_2_index`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.service.caches import LARGE, SIZE, free, is_exact, leases, opened_kv, prompt, read, small, store, tensor_of
from tiercache.errors import LeaseReleased
from tiercache.types import Tier


async def test_t1_a_lease_protects_its_prompt_from_its_end_to_the_root(seed: int) -> None:
    """A(2) → B(2) → C(2), D(2) beside C, and no room for more: under a lease on C only D goes for what comes; held twice and
    released once it is held; released once too often is an error, and counts nothing below zero; then all of it can go."""
    c = prompt(seed, 6)
    d = [*c[: 4 * SIZE], *prompt(seed + 1, 2)]
    new, newer = prompt(seed + 2, 4), prompt(seed + 3, 8)
    async with opened_kv(small(hbm=8, dram=None, ssd=None)) as (cache, kv):
        for tokens in (c[: 2 * SIZE], c[: 4 * SIZE], c, d):
            await store(kv, tokens)
        assert free(cache) == {Tier.HBM: 0}
        first, second = await kv.match(c), await kv.match(c)

        stored = await kv.insert(new, tensor_of(new))
        under_lease = [await read(kv, c), await read(kv, d)]
        await first.release()
        again = await kv.insert(newer, tensor_of(newer))
        held = is_exact(await second.gather(), c)
        with pytest.raises(LeaseReleased):
            await first.release()
        await second.release()
        with pytest.raises(LeaseReleased):
            await second.release()

        assert stored == (2 * SIZE, 0, 2 * SIZE) and under_lease == [6 * SIZE, 4 * SIZE]
        assert again.stored == 2 * SIZE and held
        assert leases(cache) == 0
        await cache.check()
        assert (await kv.insert(newer, tensor_of(newer))).refused == 0
        assert [await read(kv, c), await read(kv, newer)] == [0, 8 * SIZE]


@pytest.mark.parametrize(("count", "kept"), [(0, 0), (1, 0), (15, 0), (16, 16), (17, 16), (31, 16), (33, 32)])
async def test_t2_tokens_that_fill_no_page(tmp_path: Path, seed: int, count: int, kept: int) -> None:
    """Stored, found, taken in part, flushed and deleted: always whole pages, none of no length, each slot back once."""
    tokens = prompt(seed, 3)[:count]
    async with opened_kv(small(spec=LARGE, directory=tmp_path / "ssd"), spec=LARGE) as (cache, kv):
        before = free(cache)
        outcomes = [await kv.insert(tokens, tensor_of(tokens, spec=LARGE)) for _ in range(2)]
        async with kv.match(tokens) as hit:
            found = hit.tokens, await hit.ready(), tuple((await hit.gather()).shape[2:3])
            audit = await cache.check()
            taken = hit.take(max(0, count - 7)), hit.take(0)
        after = free(cache)

        assert outcomes == [(kept, 0, 0), (0, kept, 0)]
        assert found == (kept, kept, (kept,))
        assert (audit["nodes"], audit["blocks"]) == (min(1, kept // 16), kept // 16)
        assert taken == (max(0, min(kept, (count - 7) // 16 * 16)), 0)
        assert after[Tier.HBM] == before[Tier.HBM] - kept // 16 and leases(cache) == 0
        assert await kv.flush(tokens) == kept
        assert await kv.pin(tokens, ttl=60) == kept and await kv.pin(tokens, ttl=0) == 0
        assert await kv.delete(tokens) == kept
        assert free(cache) == before
        await cache.check()


@pytest.mark.parametrize("upto", [0, 7, 16, 24, 40, 48])
async def test_t2_a_room_left_in_the_middle_of_a_page(seed: int, upto: int) -> None:
    """Committed up to a token inside a page: the page is not stored, and its slot goes back once, with the rest."""
    tokens = prompt(seed, 3)
    async with opened_kv(small(ssd=None)) as (cache, kv):
        data = tensor_of(tokens)
        async with kv.reserve(tokens) as room:
            for number, block in enumerate(room.blocks):
                block.copy_(data[:, :, number * SIZE : (number + 1) * SIZE])
            assert await room.commit(upto) == upto // SIZE * SIZE
        await cache.check()

        assert free(cache)[Tier.HBM] == 8 - upto // SIZE
        assert await read(kv, tokens) == upto // SIZE * SIZE
        await kv.clear()
        for number in range(1, 9):
            await store(kv, prompt(seed + number, 1))
        assert [await read(kv, prompt(seed + number, 1)) for number in range(1, 9)] == [SIZE] * 8
        await cache.check()
