"""Layers on their way into the device are read where they arrive, by a runner's stream, and their slots stay theirs until then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.service.caches import (
    SIZE,
    SPEC,
    is_exact,
    leases,
    prompt,
    read,
    stack_of,
    tensor_of,
)
from tests.service.device_runner import BLOCKS, House, lowered, opened, turns, until
from tiercache.kernels.lazy import LazyStream
from tiercache.service.hit import Hit
from tiercache.types import Tier


def first_of(stream: LazyStream) -> Callable[[list[LazyStream]], LazyStream]:
    """Return a choice that takes a stream whenever it can go on."""
    return lambda ready: stream if stream in ready else ready[0]


async def coming(house: House, tokens: list[int]) -> Hit:
    """Return a hit on a prompt all of whose layers are enqueued on their way up, and of which nothing has happened."""
    await lowered(house, tokens)
    house.device.held = True
    house.device.recorded = 0
    hit = await house.kv.match(tokens)
    await until(lambda: house.device.recorded >= SPEC.layers)
    await turns()
    return hit


@pytest.mark.parametrize("how", ["gather", "layer"])
async def test_a_layer_on_its_way_up_is_read_where_it_arrives(seed: int, how: str) -> None:
    """The runner's stream is the first to be chosen, and goes on when the layer is there: exact, without a wait, and over the bus
    once: what crosses it is the promotion's alone."""
    tokens = prompt(seed, BLOCKS)
    async with opened(seed) as house:
        hit = await coming(house, tokens)
        out = house.tensor(BLOCKS * SIZE)
        house.device.choose = first_of(house.stream)
        house.device.waited = 0
        written = len([work for work in house.stream.work if work.needs])
        if how == "gather":
            await hit.gather(out=out)
        else:
            for layer in range(SPEC.layers):
                await hit.layer(layer, out=out[layer])
        crossing = [work for work in house.stream.work if work.needs]
        seen = house.reads(out)
        await hit.release()
        await house.settle()

        assert not written and not crossing
        assert is_exact(seen[0], tokens)
        assert leases(house.cache) == 0
        assert await read(house.kv, tokens) == BLOCKS * SIZE
        await house.cache.check()


async def test_a_transfer_ends_after_who_reads_where_it_arrives(seed: int) -> None:
    """The prompt is deleted while its layers come up and are read: its slots are another's only when they have been read."""
    tokens, other = prompt(seed, BLOCKS), prompt(seed + 1, BLOCKS)
    async with opened(seed, hbm=BLOCKS) as house:
        hit = await coming(house, tokens)
        out = house.tensor(BLOCKS * SIZE)
        still = house.stream
        for layer in range(SPEC.layers):
            await hit.layer(layer, out=out[layer])
        seen = house.reads(out)
        delete = asyncio.create_task(house.kv.delete(tokens))
        house.device.choose = lambda ready: next(stream for stream in ready if stream is not still)
        while any(stream.work for stream in house.device.streams if stream is not still):
            house.device.step()
        await until(lambda: house.device.waited > 0)
        await turns()
        free = house.free()
        refused = await house.kv.insert(other, tensor_of(other), tier=Tier.HBM)
        house.device.choose = lambda ready: ready[0]
        await hit.release()
        await house.settle()
        await delete

        assert free == 0
        assert refused.stored in range(0, BLOCKS * SIZE + 1, SIZE)
        assert is_exact(seen[0], tokens)
        assert house.free() in range(BLOCKS + 1)
        await house.cache.check()


async def test_rot_on_the_way_up_is_no_part_of_what_was_read(seed: int) -> None:
    """The sources change when all layers have been copied, and before the last check: what was read where they arrived is exact,
    and the block is gone afterwards."""
    tokens = prompt(seed, BLOCKS)
    async with opened(seed, hbm=BLOCKS) as house:
        hit = await coming(house, tokens)
        out = house.tensor(BLOCKS * SIZE)
        place = stack_of(house.cache).readable(hit.lease)[2]
        for layer in range(SPEC.layers):
            await hit.layer(layer, out=out[layer])
        seen = house.reads(out)
        still = house.stream
        house.device.choose = lambda ready: next(stream for stream in ready if stream is not still)
        while any(stream.work for stream in house.device.streams if stream is not still):
            house.device.step()
        view = stack_of(house.cache).stores[1].view(place.slot)
        assert view is not None
        view[3, 5] ^= 1
        house.device.choose = lambda ready: ready[0]
        await hit.release()
        await house.settle()

        assert is_exact(seen[0], tokens)
        assert await read(house.kv, tokens) in (2 * SIZE, BLOCKS * SIZE)
        await house.cache.check()
