"""Reading over tiers, at the face: copies are held open, and every byte is compared. Positions: 0 HBM, 1 DRAM, 2 SSD."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest
import torch

from tests.seams import Rig
from tests.service.caches import (
    LARGE,
    SIZE,
    SPEC,
    disk_of,
    durable_slots,
    is_exact,
    lower,
    opened_kv,
    prompt,
    read,
    sink,
    small,
    stack_of,
    store,
    tensor_of,
)
from tiercache.service.kv import LocalKV
from tiercache.storage.contract import FULL_CHARGE
from tiercache.storage.ssd_values import Write
from tiercache.types import Tier

LONG = 60_000
"""Milliseconds that no test waits for."""


async def where(kv: LocalKV, tokens: list[int]) -> dict[Tier, int]:
    """Return how many blocks of a prompt lie where, without moving any."""
    core, handle = kv._desk.stack.cache, kv._desk
    lease = core.match(handle.session, handle.space, kv._key(tokens), count=False, charged=False)
    found = {core.tiers[position]: blocks for position, blocks in core.tiers_of(lease).items()}
    core.release(lease)
    return found


@pytest.mark.parametrize("damaged", [False, True], ids=["the disk fails", "the record is bad"])
async def test_w3_an_unreadable_block_in_the_middle(tmp_path: Path, seed: int, damaged: bool) -> None:
    """8 blocks on SSD, number 5 unreadable: 80 tokens are valid in a buffer of 0xEE, and it is counted. A bad record is gone
    with what follows it; where only the disk failed the next read tries again."""
    rig = Rig()
    tokens = prompt(seed, 8)
    async with opened_kv(small(hbm=8, dram=16, spec=LARGE, directory=tmp_path / "ssd"), rig, spec=LARGE) as (cache, kv):
        await store(kv, tokens)
        await sink(cache)
        slot = durable_slots(kv, tokens)[5]
        if damaged:
            values = disk_of(cache)._values[FULL_CHARGE]
            values.commit([Write(slot, 0, bytes(values.value_bytes))])
        else:
            rig.disk.fail("read", OSError(errno.EIO, "injected"), key=slot)
        out = torch.full(LARGE.shape(8 * SIZE), 0, dtype=torch.float32)
        out.view(torch.uint8).fill_(0xEE)

        async with kv.match(tokens) as hit:
            promised, ready = hit.tokens, await hit.ready()
            given = await hit.gather(out=out)

        assert (promised, ready, given.shape[2]) == (128, 80, 80)
        assert is_exact(given, tokens, spec=LARGE)
        assert bool((out[:, :, 80:].contiguous().view(torch.uint8) == 0xEE).all())
        assert sum(stack_of(cache).cache.stats.failures.values()) == 1
        await cache.settle()
        async with kv.match(tokens) as hit:
            assert hit.tokens == (80 if damaged else 128) and await hit.ready() == 80
        rig.release()
        assert await read(kv, tokens) == (80 if damaged else 128)
        await cache.check()


async def test_w3_a_lease_holds_what_it_promised(tmp_path: Path, seed: int) -> None:
    """After the match all tiers are filled with others: the fetch still yields every token."""
    tokens = prompt(seed, 6)
    async with opened_kv(small(hbm=8, dram=16, ssd=24, directory=tmp_path / "ssd", admit_ms=LONG)) as (cache, kv):
        await store(kv, tokens)
        await sink(cache)
        async with kv.match(tokens) as hit:
            for number in range(1, 12):
                await kv.insert(prompt(seed + number, 4), tensor_of(prompt(seed + number, 4)))
            assert is_exact(await hit.gather(), tokens) and hit.tokens == 6 * SIZE
            assert await hit.ready() == 6 * SIZE
        await cache.settle()
        await cache.check()


@pytest.mark.parametrize("shape", ["whole", "split in HBM", "a bad block"])
async def test_w4_a_prompt_over_three_tiers_is_put_back_in_order(tmp_path: Path, seed: int, shape: str) -> None:
    """Blocks 0-3 in HBM, 4-6 in DRAM, 7-9 on SSD: block i is the oracle's block i; with block 7 unreadable there are 7."""
    rig = Rig()
    tokens = prompt(seed, 10)
    config = small(hbm=16, dram=16, spec=LARGE, directory=tmp_path / "ssd")
    async with opened_kv(config, rig, spec=LARGE) as (cache, kv):
        await store(kv, tokens)
        await lower(cache, Tier.HBM, 6)
        await lower(cache, Tier.DRAM, 3)
        assert await where(kv, tokens) == {Tier.HBM: 4, Tier.DRAM: 3, Tier.SSD: 3}
        if shape == "split in HBM":
            await store(kv, tokens[: 2 * SIZE] + prompt(seed + 1, 2))
        if shape == "a bad block":
            rig.disk.fail("read", OSError(errno.EIO, "injected"), key=durable_slots(kv, tokens)[7])
        expected = 7 if shape == "a bad block" else 10

        async with kv.match(tokens) as hit:
            promised = dict(hit.tiers)
            given = await hit.gather()
            views = [torch.stack(hit.view(block, 0)) for block in range(expected)]

        assert promised == {Tier.HBM: 4 * SIZE, Tier.DRAM: 3 * SIZE, Tier.SSD: 3 * SIZE}
        assert given.shape[2] == expected * SIZE and is_exact(given, tokens, spec=LARGE)
        assert torch.equal(torch.cat(views, dim=1).view(torch.uint8), given[0].contiguous().view(torch.uint8))
        assert await kv.prefetch(tokens) == expected * SIZE
        await cache.settle()
        assert await where(kv, tokens) == {Tier.HBM: expected} | ({Tier.SSD: 3} if expected == 7 else {})
        assert await read(kv, tokens) == expected * SIZE
        await cache.check()


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
            assert await where(kv, tokens) == {Tier.SSD: 6} and not fetching.done()

        hold.let(-1)

        assert await fetching == 6 * SIZE
        hold.release()
        await cache.settle()
        await cache.check()


def test_the_specs_here_lie_differently_on_disk() -> None:
    """One is stored several to a value, the other alone: both ways are moved above."""
    assert SPEC.block_bytes < 16 * 1024 <= LARGE.block_bytes
