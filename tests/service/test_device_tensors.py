"""Tensors on the device at the face: gathered, read by layers, inserted, written in place, on the runner's own streams.

The device is the lazy one: nothing happens before its stream comes to it, in an order drawn from the seed. A tensor is the device's
where its memory is, and the stream that is current is one of the house's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.seams import PATIENCE, Rig
from tests.service.caches import (
    SIZE,
    SPACE,
    SPEC,
    is_exact,
    kv_bytes,
    leases,
    lower,
    prompt,
    read,
    small,
    stack_of,
    store,
    tensor_of,
)
from tiercache.errors import InvalidTensor, LeaseReleased
from tiercache.kernels.device import Device
from tiercache.kernels.lazy import LazyDevice, LazyStream, pool_array
from tiercache.service.device_tensors import DeviceTensors
from tiercache.service.hit import Hit
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV
from tiercache.storage.workers import Lane
from tiercache.types import Tier

BLOCKS = 4
ALL = [(block, layer) for block in range(BLOCKS) for layer in range(SPEC.layers)]


class House:
    """A cache over a lazy device, tensors in that device's memory, and a runner's streams, of which one is current."""

    def __init__(self, seed: int) -> None:
        self.device = LazyDevice(seed)
        self.rig = Rig()
        self.rig.device = lambda name: self.device
        self.rig.tensors = self._tensors
        self.current = 1
        self.cache: TierCache
        self.kv: LocalKV
        self._memory: list[tuple[int, int]] = []

    def _tensors(self, device: Device) -> DeviceTensors:
        house = self

        class Tensors(DeviceTensors):
            def holds(self, tensor: Any) -> bool:
                if not isinstance(tensor, torch.Tensor):
                    return False
                begin = tensor.untyped_storage().data_ptr()
                return any(at <= begin < at + size for at, size in house._memory)

            def pointer(self) -> int:
                return house.current

        return Tensors(device)

    def tensor(self, tokens: int) -> torch.Tensor:
        """Return a tensor on the device, with room for so many tokens, filled with 7.5."""
        size = SPEC.token_bytes * SPEC.layers * SPEC.parts * tokens
        array = self.device.array(self.device.allocate(size), size)
        found = torch.from_numpy(array).view(torch.float16).view(SPEC.shape(tokens)).fill_(7.5)
        self._memory.append((found.data_ptr(), size))
        return found

    @property
    def stream(self) -> LazyStream:
        """The runner's current stream."""
        return self.device.adopt(self.current)

    def computes(self, into: torch.Tensor, what: torch.Tensor) -> None:
        """Enqueue a kernel of the runner's that writes `what` to `into`."""

        def kernel() -> None:
            into.copy_(what)

        self.stream.call(kernel)

    def reads(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Enqueue a kernel of the runner's that reads `tensor`; what it saw is in the list when it has run."""
        seen: list[torch.Tensor] = []
        self.stream.call(lambda: seen.append(tensor.clone()))
        return seen

    async def settle(self) -> None:
        """Let the device do all its work, and everything end."""
        self.device.held = False
        self.device.run()
        await self.cache.settle()

    def free(self) -> int:
        """Return how many slots of the device are free."""
        return stack_of(self.cache).cache.residency.slots[0].free

    def poison(self) -> None:
        """Overwrite every free slot of the device."""
        stack = stack_of(self.cache)
        assert stack.bus is not None
        pool = pool_array(stack.bus.arena.pool)
        residency = stack.cache.residency
        used = {
            slot
            for node in residency.nodes
            if node is not None and node.copies & 1
            for slot in residency.table.slots(node.blocks, 0)
        }
        for slot in set(range(pool.shape[1])) - used:
            pool[:, slot] = 0xEE


@asynccontextmanager
async def opened(seed: int, *, hbm: int = 8, dram: int | None = 8) -> AsyncIterator[House]:
    house = House(seed)
    config = small(hbm=hbm, dram=dram, ssd=None, device="cuda:0")
    async with TierCache(config, seams=house.rig.seams()) as house.cache:
        try:
            house.kv = await house.cache.open(SPACE, SPEC)
            yield house
        finally:
            house.rig.release()
            house.device.held = False
            house.device.run()


async def until(true: Callable[[], bool]) -> None:
    """Wait until `true()`; threads make it so."""
    async with asyncio.timeout(PATIENCE):
        while not true():  # noqa: ASYNC110 - threads of the device's side know no event loop
            await asyncio.sleep(0)


async def turns(count: int = 50) -> None:
    """Let everything run that can run without a thread's answer."""
    for _ in range(count):
        await asyncio.sleep(0)


async def lowered(house: House, tokens: list[int]) -> None:
    """Put a prompt into DRAM alone."""
    await store(house.kv, tokens)
    await lower(house.cache, Tier.HBM)
    house.poison()


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


def others_have_work(house: House, still: LazyStream) -> bool:
    """Return whether a stream that does not stand still can go on."""
    return any(
        stream.work and (stream.work[0].after is None or stream.work[0].after.happened)
        for stream in house.device.streams
        if stream is not still
    )


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


# --- blocks on their way up -----------------------------------------------------------------------------------------------


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
