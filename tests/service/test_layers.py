"""A layer can be read as soon as its blocks can be, wherever they lie: no reader waits for their way further up.

12 layers; position 0 is HBM, 1 DRAM.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.seams import Rig, Step
from tests.service.caches import (
    SIZE,
    SPACE,
    kv_bytes,
    leases,
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
from tiercache.errors import StoreError
from tiercache.service.hit import Hit
from tiercache.spec import KVSpec
from tiercache.transfer import Transfer
from tiercache.types import Tier

SPEC = KVSpec(layers=12, kv_heads=1, head_dim=32, dtype="float16", block_size=16)
BLOCKS = 4


async def settled() -> None:
    """Let everything run that can run; what still waits then waits for something else."""
    for _ in range(50):
        await asyncio.sleep(0)


def is_layer(given: tuple[torch.Tensor, ...], layer: int, tokens: list[int], spec: KVSpec = SPEC) -> bool:
    """Return whether `given` is that layer of the KV of `tokens`, byte for byte."""
    count = given[0].shape[0]
    expected = tensor_of(tokens[:count], spec=spec)[layer : layer + 1]
    return np.array_equal(kv_bytes(torch.stack(given)[None]), kv_bytes(expected))


@pytest.mark.parametrize("after", [False, True], ids=["before the copy", "after the copy"])
@pytest.mark.parametrize("latent", [False, True], ids=["K and V", "latent"])
async def test_a_layer_does_not_wait_for_its_way_up(seed: int, latent: bool, after: bool) -> None:
    """With block 2 held on its way up, every layer is read where it is; after it, every layer is exact again."""
    spec = KVSpec(layers=12, kv_heads=1, head_dim=32, dtype="float16", block_size=16, latent=latent)
    rig = Rig()
    rig.copies.chunk = 1
    tokens = prompt(seed, BLOCKS)
    async with opened_kv(small(ssd=None, spec=spec), rig, spec=spec) as (cache, kv):
        await store(kv, tokens, tier=Tier.DRAM)
        hold = rig.copies.hold("blocks", to=0, number=2, after=after)
        async with kv.match(tokens) as hit:
            await hold.reached()
            early = [await hit.layer(layer) for layer in range(12)]

            hold.release()
            await cache.settle()

            late = [await hit.layer(layer) for layer in range(12)]

        assert all(is_layer(given, layer, tokens, spec) for layer, given in [*enumerate(early), *enumerate(late)])
        async with kv.match(tokens) as hit:
            assert hit.tiers == {Tier.HBM: BLOCKS * SIZE}
        await cache.check()


async def test_a_second_reader_starts_no_second_copy(seed: int) -> None:
    """A match while the promotion is under way starts none of its own, and reads every layer beside the first reader."""
    rig = Rig()
    rig.copies.chunk = 1
    tokens = prompt(seed, BLOCKS)
    async with opened_kv(small(ssd=None, spec=SPEC), rig, spec=SPEC) as (cache, kv):
        await store(kv, tokens, tier=Tier.DRAM)
        hold = rig.copies.hold("blocks", to=0, number=2)
        async with kv.match(tokens) as first:
            await hold.reached()
            async with kv.match(tokens) as second:
                given = [(layer, await hit.layer(layer)) for layer in (4, 5, 11) for hit in (first, second)]
                hold.release()

        assert all(is_layer(each, layer, tokens) for layer, each in given)
        await cache.settle()
        assert sorted(step.number for step in rig.copies.seen if not step.after) == list(range(BLOCKS))
        await cache.check()


async def test_layers_of_a_copy_that_fails_are_read_where_it_came_from(seed: int) -> None:
    """When block 2 can't be copied those before it come up alone, and every layer of all of them is exact all the same."""
    rig = Rig()
    rig.copies.chunk = 1
    tokens = prompt(seed, BLOCKS)
    async with opened_kv(small(ssd=None, spec=SPEC), rig, spec=SPEC) as (cache, kv):
        await store(kv, tokens, tier=Tier.DRAM)
        rig.copies.fail("blocks", StoreError("injected"), to=0, times=1 << 30, where=_is_block_2)
        async with kv.match(tokens) as hit:
            layers = [await hit.layer(layer) for layer in range(12)]

        assert all(is_layer(given, layer, tokens) and len(given[0]) == BLOCKS * SIZE for layer, given in enumerate(layers))
        await cache.settle()
        assert placed(kv, tokens) == {Tier.HBM: 2, Tier.DRAM: 2}
        assert stack_of(cache).cache.stats.failures.keys() == {"StoreError"}
        assert await read(kv, tokens, space=SPACE) == BLOCKS * SIZE
        await cache.check()


async def test_a_prompt_that_is_deleted_on_its_way_is_read_to_the_end(seed: int) -> None:
    """The lease keeps the source; the copy above is given back, and nobody else finds the prompt."""
    rig = Rig()
    rig.copies.chunk = 1
    tokens = prompt(seed, BLOCKS)
    async with opened_kv(small(ssd=None, spec=SPEC), rig, spec=SPEC) as (cache, kv):
        await store(kv, tokens, tier=Tier.DRAM)
        hold = rig.copies.hold("blocks", to=0, number=2)
        async with kv.match(tokens) as hit:
            await hold.reached()
            await kv.delete(tokens)
            assert is_layer(await hit.layer(5), 5, tokens)
            hold.release()
            await cache.settle()
            assert is_layer(await hit.layer(5), 5, tokens) and is_layer(await hit.layer(11), 11, tokens)
            assert await read(kv, tokens) == 0

        await cache.settle()
        assert await cache.check() == {"nodes": 0, "blocks": 0, "leases": 0}


async def test_a_rotten_block_ends_the_layers(seed: int) -> None:
    """Bytes that changed in memory are found with the first layer: every layer stops before that block, and it is counted."""
    rig = Rig()
    tokens = prompt(seed, BLOCKS)
    async with opened_kv(small(hbm=None, ssd=None, spec=SPEC), rig, spec=SPEC) as (cache, kv):
        await store(kv, tokens)
        async with kv.match(tokens) as hit:
            view = hit.view(2, 3)[1]
            view.view(torch.uint8)[0, 0, 0] ^= 1

            layers = [await hit.layer(layer) for layer in range(12)]

            assert all(is_layer(given, layer, tokens) and len(given[0]) == 2 * SIZE for layer, given in enumerate(layers))
        assert stack_of(cache).cache.stats.failures == {"checksum": 1}
        assert await read(kv, tokens) == 2 * SIZE
        await cache.check()


async def test_layers_from_the_disk_wait_for_their_blocks_alone(tmp_path: Path, seed: int) -> None:
    """Blocks come from SSD one by one and then go up: each layer is exact while they are held on that second way."""
    rig = Rig()
    rig.copies.chunk = 1
    tokens = prompt(seed, BLOCKS)
    async with opened_kv(small(spec=SPEC, directory=tmp_path / "ssd"), rig, spec=SPEC) as (cache, kv):
        await store(kv, tokens)
        for tier in (Tier.HBM, Tier.DRAM):
            await lower(cache, tier)
        blocks = rig.copies.hold("blocks", to=1, number=2)
        up = rig.copies.hold("blocks", to=0, number=2)
        async with kv.match(tokens) as hit:
            first: asyncio.Task[tuple[torch.Tensor, ...]] = asyncio.create_task(_layer(hit, 0))
            await blocks.reached()
            await settled()
            early = first.done()
            blocks.release()
            assert is_layer(await first, 0, tokens)
            await up.reached()
            assert all([is_layer(await hit.layer(layer), layer, tokens) for layer in range(12)])
            up.release()

        assert not early and leases(cache) == 0
        await cache.settle()
        await cache.check()


def _is_block_2(step: Step) -> bool:
    """Whether this copies the third block of the prompt, also where a second try begins after the first blocks."""
    return isinstance(step.work, Transfer) and BLOCKS - step.work.count + step.number == 2


async def _layer(hit: Hit, layer: int) -> tuple[torch.Tensor, ...]:
    return await hit.layer(layer)
