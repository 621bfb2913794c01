"""Tensors on the device at the face: gathered and read by layers on the runner's own streams, after which what holds slots ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest
import torch

from tests.service.caches import (
    SIZE,
    SPACE,
    SPEC,
    is_exact,
    kv_bytes,
    leases,
    prompt,
    read,
    small,
    stack_of,
    store,
    tensor_of,
)
from tests.service.device_runner import ALL, BLOCKS, House, opened, others_have_work, turns, until
from tiercache.errors import InvalidTensor, LeaseReleased
from tiercache.kernels.lazy import LazyStream
from tiercache.service.inprocess import TierCache
from tiercache.storage.workers import Lane
from tiercache.types import Tier

# --- gather and layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [0, 3 * SIZE, 5])
async def test_gather_fills_a_tensor_on_the_device_without_a_wait(seed: int, more: int) -> None:
    """Nothing has happened when it returns, and no thread waited; the runner's next kernel sees every byte, and only the leading
    part of a larger tensor changes."""
    tokens = prompt(seed, BLOCKS)
    async with opened(seed) as house:
        await store(house.kv, tokens)
        out = house.tensor(BLOCKS * SIZE + more)
        house.device.held = True
        house.device.waited = 0
        async with house.kv.match(tokens) as hit:
            given = await hit.gather(out=out)
            seen = house.reads(out)
            late, waited = bool((out == 7.5).all()), house.device.waited
        await house.settle()

        assert late and waited == 0
        assert given.data_ptr() == out.data_ptr() and given.shape[2] == BLOCKS * SIZE
        [whole] = seen
        assert is_exact(whole[:, :, : BLOCKS * SIZE], tokens) and bool((whole[:, :, BLOCKS * SIZE :] == 7.5).all())
        assert leases(house.cache) == 0
        await house.cache.check()


async def test_layers_come_to_a_tensor_on_the_device_without_a_wait(seed: int) -> None:
    """Each layer is a stream's work: the kernel behind it sees that layer, exact, while no thread has waited."""
    tokens = prompt(seed, BLOCKS)
    async with opened(seed) as house:
        await store(house.kv, tokens)
        out = house.tensor(BLOCKS * SIZE)
        house.device.held = True
        house.device.waited = 0
        seen: list[list[torch.Tensor]] = []
        async with house.kv.match(tokens) as hit:
            for layer in range(SPEC.layers):
                k, v = await hit.layer(layer, out=out[layer])
                assert (k.data_ptr(), v.data_ptr()) == (out[layer, 0].data_ptr(), out[layer, 1].data_ptr())
                seen.append(house.reads(out[layer : layer + 1]))
            waited = house.device.waited
        await house.settle()

        assert waited == 0
        expected = tensor_of(tokens)
        for layer, [found] in enumerate(seen):
            assert np.array_equal(kv_bytes(found), kv_bytes(expected[layer : layer + 1]))
        assert leases(house.cache) == 0


async def test_blocks_of_both_tiers_come_to_a_tensor_on_the_device(seed: int) -> None:
    """What HBM has no room for is read from DRAM, on the same stream: exact, by layers and at once."""
    tokens = prompt(seed, 7)
    async with opened(seed, hbm=3) as house:
        await store(house.kv, tokens)
        out, layers = house.tensor(7 * SIZE), house.tensor(7 * SIZE)
        async with house.kv.match(tokens) as hit:
            assert dict(hit.tiers) == {Tier.HBM: 3 * SIZE, Tier.DRAM: 4 * SIZE}
            await hit.gather(out=out)
            for layer in range(SPEC.layers):
                await hit.layer(layer, out=layers[layer])
        await house.settle()

        assert is_exact(out, tokens) and is_exact(layers, tokens)


@pytest.mark.parametrize("how", ["gather", "layer"])
async def test_rot_below_the_device_ends_the_tokens_before_it(seed: int, how: str) -> None:
    """A block that changed in DRAM is found before it is enqueued: it and what follows it are left out, and gone."""
    tokens = prompt(seed, 7)
    async with opened(seed, hbm=3) as house:
        await store(house.kv, tokens)
        out = house.tensor(7 * SIZE)
        async with house.kv.match(tokens) as hit:
            await hit.ready()
            hit.view(5, 2)[1].view(torch.uint8)[0, 0, 0] ^= 1
            if how == "gather":
                assert (await hit.gather(out=out)).shape[2] == 5 * SIZE
            else:
                given = [await hit.layer(layer, out=out[layer]) for layer in range(SPEC.layers)]
                assert all(len(part) == 5 * SIZE for parts in given for part in parts)
        await house.settle()

        assert is_exact(out[:, :, : 5 * SIZE], tokens)
        assert stack_of(house.cache).cache.stats.failures == {"checksum": 1}
        assert await read(house.kv, tokens) == 5 * SIZE


async def test_a_tensor_that_does_not_fit_is_refused(seed: int) -> None:
    """Too short, of another type, or of scattered tokens: refused by name, and nothing is enqueued."""
    tokens = prompt(seed, BLOCKS)
    async with opened(seed) as house:
        await store(house.kv, tokens)
        out = house.tensor(2 * BLOCKS * SIZE)
        async with house.kv.match(tokens) as hit:
            await hit.ready()
            house.device.enqueued = 0
            for wrong in (out[:, :, :SIZE], out.view(torch.int16), out[:, :, ::2]):
                with pytest.raises(InvalidTensor, match="out"):
                    await hit.gather(out=wrong)
                with pytest.raises(InvalidTensor, match="out"):
                    await hit.layer(0, out=wrong[0])
            with pytest.raises(InvalidTensor, match="tensor"):
                await house.kv.insert(tokens, out[:, :, :SIZE])

        assert house.device.enqueued == 0


# --- ends of hits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["gather", "layer", "view"])
async def test_a_lease_ends_after_the_runners_reads(seed: int, how: str) -> None:
    """The hit is left at once, before the device has read. Its slots are nobody's before that: a writer who wants all of the
    tier gets them afterwards, and what the runner then sees is what it asked for."""
    tokens, other = prompt(seed, BLOCKS), prompt(seed + 1, BLOCKS)
    async with opened(seed, hbm=BLOCKS, dram=None) as house:
        await store(house.kv, tokens)
        out = house.tensor(BLOCKS * SIZE)
        house.device.held = True
        async with house.kv.match(tokens) as hit:
            await hit.ready()
            if how == "gather":
                await hit.gather(out=out)
                seen = [house.reads(out)]
            elif how == "layer":
                for layer in range(SPEC.layers):
                    await hit.layer(layer, out=out[layer])
                seen = [house.reads(out)]
            else:
                seen = [house.reads(part) for block, layer in ALL for part in hit.view(block, layer)]
        with pytest.raises(LeaseReleased):
            hit.take(SIZE)
        held = leases(house.cache)
        refused = await house.kv.insert(other, tensor_of(other))
        writer = asyncio.create_task(stored_in_the_end(house, other))
        await turns()
        assert not writer.done()
        house.device.held = False
        house.device.run()
        await writer

        assert held == 1 and refused.stored == 0
        found = [one for [one] in seen]
        if how == "view":
            whole = torch.stack(found).view(BLOCKS, SPEC.layers, SPEC.parts, SIZE, SPEC.kv_heads, SPEC.head_dim)
            assert is_exact(whole.permute(1, 2, 0, 3, 4, 5).flatten(2, 3), tokens)
        else:
            assert is_exact(found[0], tokens)
        await house.settle()
        assert leases(house.cache) == 0
        assert await read(house.kv, other) == BLOCKS * SIZE
        await house.cache.check()


async def stored_in_the_end(house: House, tokens: list[int]) -> None:
    """Insert until all is stored."""
    for _ in range(10_000):
        if not (await house.kv.insert(tokens, tensor_of(tokens))).refused:
            return
        await asyncio.sleep(0)
    raise AssertionError("there is never any room")


def only(stream: LazyStream) -> Callable[[list[LazyStream]], LazyStream]:
    """Return a choice of that stream."""
    return lambda ready: stream


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
async def test_every_stream_of_a_hit_is_waited_for(seed: int, order: tuple[int, int]) -> None:
    """Two streams read under one lease, which stands until both have."""
    tokens = prompt(seed, BLOCKS)
    async with opened(seed, hbm=BLOCKS, dram=None) as house:
        await store(house.kv, tokens)
        outs = [house.tensor(BLOCKS * SIZE) for _ in range(2)]
        house.device.held = True
        async with house.kv.match(tokens) as hit:
            for pointer, out in enumerate(outs, 1):
                house.current = pointer
                await hit.gather(out=out)
        for pointer in order:
            stream = house.device.adopt(pointer)
            while stream.work and (stream.work[0].after is None or stream.work[0].after.happened):
                house.device.choose = only(stream)
                house.device.step()
            await turns()
            if pointer == order[0]:
                assert leases(house.cache) == 1
        house.device.choose = lambda ready: ready[0]
        await house.settle()

        assert leases(house.cache) == 0
        assert all(is_exact(out, tokens) for out in outs)


async def test_what_is_taken_after_a_read_stays_leased(seed: int) -> None:
    """The hit gives blocks up while the device has yet to read them: they stay until it has."""
    tokens = prompt(seed, BLOCKS)
    async with opened(seed, hbm=BLOCKS, dram=None) as house:
        await store(house.kv, tokens)
        out = house.tensor(BLOCKS * SIZE)
        house.device.held = True
        async with house.kv.match(tokens) as hit:
            await hit.gather(out=out)
            seen = house.reads(out)
            taken = hit.take(SIZE)
            insert = asyncio.create_task(house.kv.insert(prompt(seed + 1, 2), tensor_of(prompt(seed + 1, 2))))
            still = house.stream
            house.device.choose = lambda ready: next(stream for stream in ready if stream is not still)
            await until(lambda: insert.done() or (others_have_work(house, still) and house.device.step() and False))
        house.device.choose = lambda ready: ready[0]
        await house.settle()
        refused = await insert

        assert taken == SIZE and refused.refused == 2 * SIZE
        assert is_exact(seen[0], tokens)


@pytest.mark.parametrize("how", ["gather", "layer"])
async def test_who_is_cancelled_abandons_no_copy(seed: int, how: str) -> None:
    """Cancelled while the copies are being enqueued, and leaving: the lease ends after what was enqueued all the same."""
    tokens, other = prompt(seed, BLOCKS), prompt(seed + 1, BLOCKS)
    async with opened(seed, hbm=BLOCKS, dram=None) as house:
        await store(house.kv, tokens)
        out = house.tensor(BLOCKS * SIZE)
        house.device.held = True
        hold = house.rig.threads.hold("after", times=1)
        enqueued = house.device.enqueued

        async def reading() -> None:
            async with house.kv.match(tokens) as hit:
                if how == "gather":
                    await hit.gather(out=out)
                else:
                    await hit.layer(2, out=out[2])

        reader = asyncio.create_task(reading())
        await hold.reached()
        reader.cancel()
        await turns()
        hold.release()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert house.device.enqueued > enqueued
        assert leases(house.cache) == 1
        seen = house.reads(out)
        assert (await house.kv.insert(other, tensor_of(other))).stored == 0
        await house.settle()

        first, last = (0, SPEC.layers) if how == "gather" else (2, 3)
        assert np.array_equal(kv_bytes(seen[0][first:last]), kv_bytes(tensor_of(tokens)[first:last]))
        assert leases(house.cache) == 0
        await house.cache.check()


async def test_a_hit_that_is_released_while_it_is_read_ends_after_that(seed: int) -> None:
    """Another task releases it while the copies are being enqueued: the reader is told, and the lease outlasts them."""
    tokens = prompt(seed, BLOCKS)
    async with opened(seed, hbm=BLOCKS, dram=None) as house:
        await store(house.kv, tokens)
        out = house.tensor(BLOCKS * SIZE)
        house.device.held = True
        hit = await house.kv.match(tokens)
        await hit.ready()
        hold = house.rig.threads.hold("after", times=1)
        reader = asyncio.create_task(hit.gather(out=out))
        await hold.reached()
        house.device.held = False
        await hit.release()
        for _ in range(4):  # whoever waits for an event by now has it
            await house.cache.require_open().run(Lane.RUNNER, bool)
            await turns()
        before = leases(house.cache)
        house.device.held = True
        hold.release()
        with pytest.raises(LeaseReleased):
            await reader
        await turns()
        after = leases(house.cache)
        await house.settle()

        assert (before, after, leases(house.cache)) == (1, 1, 0)


async def test_a_view_on_the_device_is_in_place(seed: int) -> None:
    """Every layer of every block, in HBM and in DRAM, is read where it lies."""
    tokens = prompt(seed, 5)
    expected = tensor_of(tokens)
    async with opened(seed, hbm=3) as house:
        await store(house.kv, tokens)
        async with house.kv.match(tokens) as hit:
            await hit.ready()
            for block in range(5):
                for layer in range(SPEC.layers):
                    seen = torch.stack(hit.view(block, layer))[None]
                    part = expected[layer : layer + 1, :, block * SIZE : (block + 1) * SIZE]
                    assert np.array_equal(kv_bytes(seen), kv_bytes(part))


async def test_a_cache_closes_when_the_runners_streams_have_read(seed: int) -> None:
    """Closed with a hit just left: what it gave out is exact, and what it was read from is given back after that."""
    tokens = prompt(seed, BLOCKS)
    house = House(seed)
    out = house.tensor(BLOCKS * SIZE)
    closing: Awaitable[None]
    async with TierCache(small(hbm=BLOCKS, dram=None, ssd=None, device="cuda:0"), seams=house.rig.seams()) as house.cache:
        house.kv = await house.cache.open(SPACE, SPEC)
        await store(house.kv, tokens)
        house.device.held = True
        async with house.kv.match(tokens) as hit:
            await hit.gather(out=out)
        closing = asyncio.ensure_future(house.cache.close())
        await until(lambda: house.device.waited > 0)
        await turns()
        house.device.held = False
        house.device.run()
        await closing

    assert is_exact(out, tokens)
