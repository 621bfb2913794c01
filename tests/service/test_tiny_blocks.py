"""Blocks smaller than a page: a tier has the slots that lie in it, and no share takes the generations of another."""

from __future__ import annotations

import pytest

from tests.service.caches import SPACE, opened, prompt, read, stack_of, store
from tiercache.config import Config, Share
from tiercache.spec import KVSpec, Namespace
from tiercache.types import Tier

TINY = KVSpec(layers=1, kv_heads=1, head_dim=16, dtype="float16", block_size=1)
"""Blocks of 64 bytes."""
SMALL = KVSpec(layers=1, kv_heads=1, head_dim=128, dtype="float16", block_size=2)
"""Blocks of 1 KiB."""
PAGES = KVSpec(layers=2, kv_heads=4, head_dim=64, dtype="float16", block_size=2)
"""Blocks of 4 KiB."""
OTHER = Namespace(model="other", weights="sha256:1")


@pytest.mark.parametrize("spec", [TINY, SMALL, PAGES])
async def test_dram_has_a_slot_on_every_page(spec: KVSpec, seed: int) -> None:
    """A slot is padded to a page; all pages of the tier hold one, however small the blocks are."""
    tokens = prompt(seed, 40, size=spec.block_size)
    async with opened(Config.of(dram="16 MiB")) as cache:
        kv = await cache.open(SPACE, spec)
        await store(kv, tokens)

        [dram] = stack_of(cache).stores
        assert dram.capacity == (16 << 20) // 4096
        assert await read(kv, tokens) == len(tokens)
        await cache.check()


async def test_both_memory_tiers_have_generations_of_their_own(seed: int) -> None:
    """Blocks so small that HBM could use up all generations leave those of DRAM alone."""
    tokens = prompt(seed, 40, size=1)
    async with opened(Config.of(hbm="8 MiB", dram="8 MiB")) as cache:
        kv = await cache.open(SPACE, TINY)
        await store(kv, tokens)

        stack = stack_of(cache)
        hbm, dram = stack.stores
        assert (hbm.capacity, dram.capacity) == (1 << 16, (8 << 20) // 4096)
        assert stack.generations_at == {Tier.HBM: 0, Tier.DRAM: 4 * hbm.capacity}
        assert await read(kv, tokens) == len(tokens)
        await cache.check()


async def test_a_share_of_tiny_blocks_leaves_the_others_their_slots(seed: int) -> None:
    """The second share has every slot that its bytes hold, whoever came first, and readers find both."""
    shares = (Share(block_bytes=64, fraction=0.5), Share(block_bytes=PAGES.block_bytes, fraction=0.5))
    many, few = prompt(seed, 40, size=1), prompt(seed, 8, size=2)
    async with opened(Config.of(hbm="16 MiB", shares=shares)) as cache:
        tiny, pages = await cache.open(SPACE, TINY), await cache.open(OTHER, PAGES)
        await store(tiny, many)
        await store(pages, few, space=OTHER)

        first, second = cache.stacks
        assert (first.stores[0].capacity, second.stores[0].capacity) == (1 << 16, (8 << 20) // 4096)
        assert second.generations_at[Tier.HBM] >= 4 * first.stores[0].capacity
        assert await read(tiny, many) == len(many)
        assert await read(pages, few, space=OTHER) == len(few)
        await cache.check()
