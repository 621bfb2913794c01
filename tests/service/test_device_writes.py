"""What a runner writes on the device: inserted from its tensors and written in place, with all that its streams have yet to do."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.service.caches import (
    SIZE,
    SPEC,
    lower,
    prompt,
    read,
    stack_of,
    store,
    tensor_of,
)
from tests.service.device_runner import BLOCKS, opened, turns, until
from tiercache.types import Tier

# --- insert ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [None, Tier.DRAM])
@pytest.mark.parametrize("more", [0, 5])
async def test_insert_takes_what_the_runner_has_enqueued_to_write(seed: int, tier: Tier | None, more: int) -> None:
    """The kernel that computes the KV has not run when the insert begins: what is stored is what it computes, exact in HBM, in
    DRAM, and after its way down."""
    tokens = prompt(seed, BLOCKS, more)
    async with opened(seed) as house:
        tensor = house.tensor(BLOCKS * SIZE + more)
        house.device.held = True
        house.computes(tensor, tensor_of(tokens))
        insert = asyncio.create_task(house.kv.insert(tokens, tensor, tier=tier))
        await until(lambda: house.device.waited > 0)
        await turns()
        early = insert.done()
        house.device.held = False
        house.device.run()
        outcome = await insert

        assert not early
        assert outcome == (BLOCKS * SIZE, 0, 0)
        async with house.kv.match(tokens) as hit:
            assert dict(hit.tiers) == {tier or Tier.HBM: BLOCKS * SIZE}
        assert await read(house.kv, tokens) == BLOCKS * SIZE
        await lower(house.cache, Tier.HBM)
        assert await read(house.kv, tokens) == BLOCKS * SIZE
        await house.cache.check()


async def test_insert_spills_from_the_device_to_dram(seed: int) -> None:
    """What HBM has no room for goes on to DRAM, by the bus: every block is exact, also those of a prompt that goes on."""
    tokens = prompt(seed, 7)
    async with opened(seed, hbm=3) as house:
        first, rest = house.tensor(2 * SIZE), house.tensor(9 * SIZE)
        house.computes(first, tensor_of(tokens[: 2 * SIZE]))
        assert (await house.kv.insert(tokens[: 2 * SIZE], first)).stored == 2 * SIZE
        slice_ = rest[:, :, 3 : 3 + 5 * SIZE]
        house.computes(slice_, tensor_of(tokens, start=2 * SIZE))
        outcome = await house.kv.insert(tokens, slice_, start=2 * SIZE)

        assert outcome == (5 * SIZE, 0, 0)
        async with house.kv.match(tokens) as hit:
            assert set(hit.tiers) == {Tier.HBM, Tier.DRAM}
        assert await read(house.kv, tokens) == 7 * SIZE
        await house.cache.check()


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.DRAM])
async def test_a_cancelled_insert_owns_its_slots_until_its_copies_are_over(seed: int, tier: Tier) -> None:
    """The caller is cancelled while the device has yet to copy: it leaves when that is over, and no slot is anybody's before."""
    tokens, other = prompt(seed, BLOCKS), prompt(seed + 1, BLOCKS)
    async with opened(seed, hbm=BLOCKS, dram=BLOCKS) as house:
        tensor = house.tensor(BLOCKS * SIZE)
        house.device.held = True
        house.computes(tensor, tensor_of(tokens))
        insert = asyncio.create_task(house.kv.insert(tokens, tensor, tier=tier))
        await until(lambda: house.device.waited > 0)
        for _ in range(2):
            insert.cancel()
            await turns()
        early = insert.done()
        house.device.held = False
        house.device.run()
        with pytest.raises(asyncio.CancelledError):
            await insert

        assert not early
        await store(house.kv, other)
        assert await read(house.kv, other) == BLOCKS * SIZE
        assert await read(house.kv, tokens) in range(0, BLOCKS * SIZE + 1, SIZE)
        await house.cache.check()


# --- rooms ----------------------------------------------------------------------------------------------------------------


async def test_a_commit_takes_the_checksum_after_the_last_writer(seed: int) -> None:
    """Blocks are written in place by kernels that have not run when the commit is asked for: what it commits is what they write,
    and a way down finds it right."""
    tokens = prompt(seed, BLOCKS)
    expected = tensor_of(tokens)
    async with opened(seed) as house:
        house.device.held = True
        async with house.kv.reserve(tokens) as room:
            blocks = room.blocks
            for number, block in enumerate(blocks):
                house.computes(block, expected[:, :, number * SIZE : (number + 1) * SIZE])
            commit = asyncio.create_task(room.commit(BLOCKS * SIZE))
            await until(lambda: house.device.waited > 0)
            await turns()
            early = commit.done()
            house.device.held = False
            house.device.run()
            done = await commit

        assert (early, done) == (False, BLOCKS * SIZE)
        await lower(house.cache, Tier.HBM)
        assert stack_of(house.cache).cache.stats.failures == {}
        assert await read(house.kv, tokens) == BLOCKS * SIZE
        await house.cache.check()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_room_that_is_left_is_nobodys_before_its_last_writer(seed: int, cancelled: bool) -> None:
    """What was enqueued to be written into it and not committed is over before the slots are another's."""
    tokens, other = prompt(seed, BLOCKS), prompt(seed + 1, BLOCKS)
    async with opened(seed, hbm=BLOCKS, dram=None) as house:
        house.device.held = True

        async def leaving() -> None:
            async with house.kv.reserve(tokens) as room:
                for block in room.blocks:
                    house.computes(block, torch.zeros(SPEC.shape(SIZE), dtype=torch.float16))

        leaver = asyncio.create_task(leaving())
        await until(lambda: house.device.waited > 0)
        await turns()
        assert not leaver.done() and house.free() == 0
        if cancelled:
            leaver.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaver
            await turns()
            assert house.free() == 0
        refused = await house.kv.insert(other, tensor_of(other))
        house.device.held = False
        house.device.run()
        if not cancelled:
            await leaver
        await house.settle()

        assert refused.stored == 0 and house.free() == BLOCKS
        await store(house.kv, other)
        assert await read(house.kv, other) == BLOCKS * SIZE
        await house.cache.check()
