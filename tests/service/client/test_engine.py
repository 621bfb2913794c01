"""Hits are loaded into an engine's own KV memory, and its blocks are stored, on the host and on a device whose copies come late."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Any

import numpy as np
import pytest
import torch

from tests.engines import Engine, layouts
from tests.service.client.attached import (
    IDS,
    LAYOUT,
    TOKENS,
    attached,
    beside,
    blocking_beside,
    engine_of,
    gives_room,
    outcome,
    runs_last,
)
from tests.service.client.fake import SIZE, SPACE, SPEC, FakeDaemon, turn, until
from tiercache.errors import DeviceRefused, InvalidInput, InvalidStart, InvalidTensor, LeaseReleased, SpecMismatch, StoreError
from tiercache.kernels.device import Event
from tiercache.kernels.lazy import LazyDevice, LazyEvent
from tiercache.service import wire
from tiercache.service.client import copies
from tiercache.service.client.client import connect
from tiercache.storage import engine_copies
from tiercache.storage.engine_memory import put

# --- loading ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", layouts(SPEC))
@pytest.mark.parametrize("by_layer", [False, True])
async def test_a_hit_goes_where_the_engine_says(fake: FakeDaemon, device: LazyDevice | None, layout: str, by_layer: bool) -> None:
    """Every layout: the engine's blocks are the oracle's, all others stay as they are."""
    fake.holds(TOKENS, [9, 2, 3, 15])
    engine = engine_of(layout)
    async with beside(fake.address, device) as client:
        kv, paged = await attached(client, engine)
        async with kv.match(TOKENS) as hit:
            loaded = await paged.load(hit, IDS, by_layer=by_layer)

        assert (loaded.tokens, loaded.blocks, loaded.bad, loaded.reason) == (4 * SIZE, 4, (), None)
        assert engine.holds(TOKENS, IDS, space=SPACE) and engine.untouched(IDS)
        assert paged.layout == layout and paged.blocks == 8
        assert client.stats().read == 4 * SPEC.block_bytes and client.stats().misses == {}
        assert client.stats().pinned == (0 if device is None else 16 * 4096 * 2)


async def test_the_middle_of_a_hit(fake: FakeDaemon, device: LazyDevice | None) -> None:
    """An engine that has the beginning itself takes what comes after; ids for which there is nothing are left alone, and named."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    engine = engine_of()
    async with beside(fake.address, device) as client:
        kv, paged = await attached(client, engine)
        async with kv.match(TOKENS) as hit:
            some = await paged.load(hit, [6], start=SIZE)
            more = await paged.load(hit, [1, 3, 4], start=2 * SIZE)
            none = await paged.load(hit, [7], start=9 * SIZE)
            empty = await paged.load(hit, [])

        assert (some.tokens, some.blocks, some.bad, some.reason) == (2 * SIZE, 1, (), None)
        assert (more.tokens, more.blocks, more.bad, more.reason) == (4 * SIZE, 2, (4,), "absent")
        assert (none.blocks, none.bad, none.reason) == (0, (7,), "absent") and (empty.blocks, empty.bad) == (0, ())
        assert engine.holds(TOKENS, [6], space=SPACE, start=SIZE) and engine.holds(TOKENS, [1, 3], space=SPACE, start=2 * SIZE)
        assert engine.untouched([6, 1, 3])


@pytest.mark.parametrize("by_layer", [False, True])
async def test_a_rotten_block_does_not_count(fake: FakeDaemon, device: LazyDevice | None, by_layer: bool) -> None:
    """Nor does what follows it; the daemon is told, and the hit is shorter."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    fake.slots[2][3, 5] ^= 1
    engine = engine_of()
    async with beside(fake.address, device) as client:
        kv, paged = await attached(client, engine)
        async with kv.match(TOKENS) as hit:
            loaded = await paged.load(hit, IDS, by_layer=by_layer)
            assert hit.tokens == 2 * SIZE
        await client.check()

        assert (loaded.tokens, loaded.blocks, loaded.bad, loaded.reason) == (2 * SIZE, 2, (7, 2), "checksum")
        assert engine.holds(TOKENS, IDS[:2], space=SPACE)
        assert not by_layer or engine.untouched(IDS[:2])
        assert [frame.block for frame in fake.asked if isinstance(frame, wire.Distrust)] == [2]
        assert client.stats().misses == {"checksum": 1}


@pytest.mark.parametrize("by_layer", [False, True])
async def test_a_slot_that_is_given_away_under_its_copy_does_not_count(
    fake: FakeDaemon, device: LazyDevice | None, by_layer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is looked at after the copies decides, also where all was well before them."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    engine = engine_of()
    looked = 0

    def look(arenas: Any, places: Any) -> tuple[int, str | None]:
        nonlocal looked
        looked += 1
        if looked == (2 if by_layer else 1):
            fake.generations[1] += 1
        return verify(arenas, places)

    verify = copies.verify
    monkeypatch.setattr(copies, "verify", look)
    async with beside(fake.address, device) as client:
        kv, paged = await attached(client, engine)
        async with kv.match(TOKENS) as hit:
            loaded = await paged.load(hit, IDS, by_layer=by_layer)

        assert (loaded.blocks, loaded.bad, loaded.reason) == (1, (0, 7, 2), "lost")
        assert engine.holds(TOKENS, IDS[:1], space=SPACE)
        assert client.stats().misses == {"lost": 1} and fake.count(wire.Distrust) == 0


async def test_a_slot_that_changes_while_a_device_has_not_copied_it(fake: FakeDaemon, lazy: LazyDevice) -> None:
    """A copy that is enqueued is no copy: what is looked at must be looked at after it has happened."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    engine = engine_of()
    async with beside(fake.address, lazy) as client:
        kv, paged = await attached(client, engine)
        lazy.held = True
        async with kv.match(TOKENS) as hit:
            loading = paged.load(hit, IDS)
            await until(lambda: lazy.enqueued >= 2 * SPEC.layers)
            fake.slots[2][:] = 0xEE
            await turn()
            assert not loading.done
            lazy.held = False
            lazy.run()
            loaded = await loading

        assert (loaded.blocks, loaded.reason) == (2, "checksum") and engine.holds(TOKENS, IDS[:2], space=SPACE)


async def test_a_layer_is_there_before_the_next(fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host: a runner begins with layer 0 while layer 1 is copied."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    engine = engine_of()
    gates = [threading.Event() for _ in range(SPEC.layers)]
    copied = iter(range(SPEC.layers))

    def held(*args: Any) -> None:
        assert gates[next(copied)].wait(30)
        put(*args)

    monkeypatch.setattr(engine_copies, "put", held)
    async with connect(fake.address) as client:
        kv, paged = await attached(client, engine)
        async with kv.match(TOKENS) as hit:
            loading = paged.load(hit, IDS, by_layer=True)
            for layer in range(SPEC.layers):
                waiting = asyncio.create_task(loading.layer(layer))
                await turn()
                assert not waiting.done() and not loading.done
                gates[layer].set()
                assert await waiting == 4
                one = torch.stack([engine.tensors[layer][part, IDS[3]] for part in range(2)])
                assert (one != engine.tensors[layer][0, 1]).any()
            assert (await loading).blocks == 4
        with pytest.raises(InvalidInput):
            await loading.layer(SPEC.layers)


async def test_a_layer_on_a_device_is_a_wait_of_the_stream(fake: FakeDaemon, lazy: LazyDevice) -> None:
    """No copy has happened when `layer` returns; what the runner enqueues then reads it all the same, in every order."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    engine = engine_of()
    seen: list[bool] = []
    async with beside(fake.address, lazy) as client:
        kv, paged = await attached(client, engine)
        runner = lazy.adopt(0)
        lazy.held = True
        async with kv.match(TOKENS) as hit:
            loading = paged.load(hit, IDS, by_layer=True)
            for layer in range(SPEC.layers):
                assert await loading.layer(layer) == 4
                wanted = [engine_truth(layer, place) for place in range(4)]

                def compute(layer: int = layer, wanted: list[bytes] = wanted) -> None:
                    seen.append([one_layer(engine, layer, number) for number in IDS] == wanted)

                runner.call(compute)
            assert seen == [] and engine.untouched()
            lazy.held = False
            lazy.run()
            assert (await loading).blocks == 4
            runner.record().wait()

        assert seen == [True] * SPEC.layers


def engine_truth(layer: int, place: int) -> bytes:
    other = engine_of()
    other.compute(TOKENS, [0, 1, 2, 3], space=SPACE)
    return one_layer(other, layer, place)


def one_layer(engine: Engine, layer: int, number: int) -> bytes:
    return engine.block(number)[layer * SPEC.parts : (layer + 1) * SPEC.parts].tobytes()


async def test_what_the_engine_still_does_with_its_blocks_comes_first(fake: FakeDaemon, lazy: LazyDevice) -> None:
    """The last pass over a block that is given to another prompt reads it, and writes it, before the load does."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    engine = engine_of()
    async with beside(fake.address, lazy) as client:
        kv, paged = await attached(client, engine)
        async with kv.match(TOKENS) as hit:
            for after in (None, "given"):
                runs_last(lazy, lazy.adopt(0))
                lazy.adopt(0).call(lambda: engine.write(IDS[0], np.zeros_like(engine.block(0))))
                point = paged.now() if after else None
                if after:
                    lazy.adopt(0).call(lambda: None)
                assert (await paged.load(hit, IDS, after=point)).blocks == 4
                lazy.run()

                assert engine.holds(TOKENS, IDS, space=SPACE)


async def test_the_lease_is_held_until_the_copies_are_over(fake: FakeDaemon, lazy: LazyDevice) -> None:
    """The hit is left, who waits is cancelled, and nothing of it matters to the copies."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    engine = engine_of()
    async with beside(fake.address, lazy) as client:
        kv, paged = await attached(client, engine)
        lazy.held = True
        async with kv.match(TOKENS) as hit:
            loading = paged.load(hit, IDS)
        waiting = asyncio.ensure_future(outcome(loading))
        await until(lambda: lazy.enqueued >= 2 * SPEC.layers)
        waiting.cancel()
        await client.check()
        assert fake.count(wire.Release) == 0 and not any(one.done for one in [loading]) and not waiting.done()

        lazy.held = False
        lazy.run()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert loading.done and (await loading).blocks == 4 and engine.holds(TOKENS, IDS, space=SPACE)
        await fake.until(wire.Release)
        with pytest.raises(LeaseReleased):
            paged.load(hit, IDS)


async def test_a_device_that_fails_is_a_miss(fake: FakeDaemon, lazy: LazyDevice) -> None:
    """Nothing of the load counts; what was enqueued before is over when it says so."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    engine = engine_of()
    async with beside(fake.address, lazy) as client:
        kv, paged = await attached(client, engine)
        async with kv.match(TOKENS) as hit:
            lazy.fails_after = lazy.enqueued + 3
            loading = paged.load(hit, IDS, by_layer=True)
            loaded = await loading
            assert [await loading.layer(layer) for layer in range(SPEC.layers)] == [4] * SPEC.layers
            assert (loaded.blocks, loaded.bad, loaded.reason) == (0, tuple(IDS), "device")
            lazy.fails_after = None
            assert (await paged.load(hit, IDS)).blocks == 4

        assert engine.holds(TOKENS, IDS, space=SPACE) and client.stats().misses == {"device": 1}


async def test_without_a_daemon_nothing_is_loaded(device: LazyDevice | None) -> None:
    async with beside("unix:///nobody/here", device) as client:
        engine = engine_of()
        kv, paged = await attached(client, engine)
        async with kv.match(TOKENS) as hit:
            loading = paged.load(hit, IDS, by_layer=True)
            assert await loading.layer(0) == 0
            loaded = await loading
        stored = await paged.store(TOKENS, IDS)

        assert (loaded.blocks, loaded.bad, loaded.reason) == (0, tuple(IDS), "absent")
        assert (stored.stored, stored.refused) == (0, 4 * SIZE) and engine.untouched()


# --- what is wrong is said --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        ([0, 8, 1, 2], "block 8 is none of the engine's: they are 0 to 7"),
        ([0, -1, 1, 2], "block -1 is none"),
        ([3, 1, 3, 2], "block 3 comes twice"),
        ([0.0, 1.0, 2.0, 3.0], "list of integers"),
        ([[0, 1, 2, 3]], "list of integers"),
        ([True, False, True, False], "list of integers"),
        ("0123", "list of integers"),
        ([[0], [1, 2]], "list of integers"),
        (torch.zeros(4, requires_grad=True), "list of integers"),
    ],
)
async def test_ids_that_are_no_blocks_are_refused(fake: FakeDaemon, device: LazyDevice | None, ids: Any, why: str) -> None:
    """Before anything is asked or copied."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    engine = engine_of()
    async with beside(fake.address, device) as client:
        kv, paged = await attached(client, engine)
        async with kv.match(TOKENS) as hit:
            with pytest.raises(InvalidInput, match=why):
                paged.load(hit, ids)
            with pytest.raises(InvalidInput, match=why):
                paged.store(TOKENS, ids)
            with pytest.raises(InvalidStart, match="multiple of the block size"):
                paged.load(hit, IDS, start=SIZE + 1)
            with pytest.raises(InvalidStart):
                paged.store(TOKENS, IDS, start=1)
            with pytest.raises(InvalidInput, match="3 block ids for 4 whole blocks"):
                paged.store(TOKENS, [0, 1, 2])

        assert engine.untouched() and fake.count(wire.Reserve) == 0


async def test_memory_that_is_none_of_the_kvs_is_refused(fake: FakeDaemon) -> None:
    engine = engine_of()
    one = engine.tensors[0]
    wrong: list[tuple[Any, str]] = [
        (engine.tensors[:3], "3 tensors for 4 layers"),
        ([one.float(), *engine.tensors[1:]], "layer 0 is torch.float32; expected torch.float16"),
        ([*engine.tensors[:3], one[:, :4].clone()], "differ in number of blocks"),
        ([one] * 4, "memory of its own"),
        ([*engine.tensors[:3], one.numpy()], "layer 3 must be a tensor"),
        ([one[..., ::2]] * 4, "a layer has shape"),
        ([torch.empty(*one.shape[:-1], 64, dtype=one.dtype)[..., ::2]] * 4, "must be contiguous"),
        (None, "a list of tensors"),
        (one[0, 0, 0, 0, 0], "without axes"),
        (lying(blocks=8, apart=4, layers=8), "memory of its own"),
        (lying(blocks=8, apart=2, layers=1), "memory of its own"),
    ]
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        for tensors, why in wrong:
            with pytest.raises(InvalidTensor, match=why):
                await kv.attach(tensors)
        with pytest.raises(DeviceRefused, match="connect"):
            await kv.attach([torch.empty(one.shape, dtype=one.dtype, device="meta") for _ in range(4)])


def lying(*, blocks: int, apart: int, layers: int) -> list[torch.Tensor]:
    """Return layers of blocks of one allocation: so many blocks from a block to the next, and from a layer to the next."""
    block = 2 * SPEC.block_size * SPEC.kv_heads * SPEC.head_dim
    raw = torch.full((2 * SPEC.layers * blocks * max(apart, layers) * block,), 0.5, dtype=torch.float16)
    shape = (blocks, 2, SPEC.block_size, SPEC.kv_heads, SPEC.head_dim)
    inner = torch.empty(shape[1:]).stride()
    return [raw.as_strided(shape, (apart * block, *inner), number * layers * block) for number in range(SPEC.layers)]


@pytest.mark.parametrize(("apart", "layers"), [(1, 8), (4, 1), (5, 1), (1, 9)])
async def test_layers_may_lie_among_each_other(fake: FakeDaemon, device: LazyDevice | None, apart: int, layers: int) -> None:
    """All of them are one allocation: layer by layer, or block by block."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    engine = engine_of("block kv token head dim")
    engine.tensors = lying(blocks=8, apart=apart, layers=layers)
    async with beside(fake.address, device) as client:
        kv, paged = await attached(client, engine)
        async with kv.match(TOKENS) as hit:
            assert (await paged.load(hit, IDS)).blocks == 4

    assert engine.holds(TOKENS, IDS, space=SPACE)


async def test_a_hit_on_kv_of_another_layout_is_refused(fake: FakeDaemon, device: LazyDevice | None) -> None:
    """Also where its blocks are as large: their checksums are right, and their numbers would not be in their places."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    other = dataclasses.replace(SPEC, kv_heads=2 * SPEC.kv_heads, head_dim=SPEC.head_dim // 2)
    engine = engine_of()
    async with beside(fake.address, device) as client:
        _, paged = await attached(client, engine)
        kv = await client.open(SPACE, other)
        async with kv.match(TOKENS) as hit:
            with pytest.raises(SpecMismatch, match="for an engine's"):
                paged.load(hit, IDS)

    assert engine.untouched()


async def test_an_engine_whose_pass_has_failed_does_not_end_a_load_before_its_copies(fake: FakeDaemon, lazy: LazyDevice) -> None:
    """What was enqueued still writes the blocks: until it has, they are not the engine's."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    engine = engine_of()
    async with beside(fake.address, lazy) as client:
        kv, paged = await attached(client, engine)
        point = Failing(lazy)
        point.happened = True
        async with kv.match(TOKENS) as hit:
            loaded = await paged.load(hit, IDS, after=point)

        assert (loaded.blocks, loaded.reason) == (0, "device")
        assert not any(stream.work for stream in lazy.streams)


class Failing(LazyEvent):
    """A point that a stream goes past, and whose wait fails."""

    def wait(self) -> None:
        """Fail."""
        raise StoreError("the pass failed")


async def test_a_daemons_memory_that_can_not_be_pinned_is_said(fake: FakeDaemon, lazy: LazyDevice) -> None:
    """Copies take a detour and are right; the client's statistics name the refusal, once."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    engine = engine_of()
    lazy.most_registered = 0
    async with beside(fake.address, lazy) as client:
        kv, paged = await attached(client, engine)
        async with kv.match(TOKENS) as hit:
            assert (await paged.load(hit, IDS)).blocks == 4
            assert (await paged.load(hit, IDS)).blocks == 4
        stats = client.stats()

        assert (stats.pinned, stats.pageable) == (0, 16 * 8192)
        assert stats.pageable_because == f"{16 * 8192} bytes can't be pinned" and engine.holds(TOKENS, IDS, space=SPACE)


async def test_two_namespaces_pin_their_memory_once(fake: FakeDaemon, lazy: LazyDevice) -> None:
    """As read-only as it is mapped, until the client's end."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    async with beside(fake.address, lazy) as client:
        for _ in range(2):
            kv, paged = await attached(client, engine_of())
            async with kv.match(TOKENS) as hit:
                assert (await paged.load(hit, IDS)).blocks == 4
        assert len(lazy.registered) == 1 and client.stats().pinned == lazy.registered[0][1]

    assert lazy.registered == []


# --- without a loop ---------------------------------------------------------------------------------------------------------


async def test_an_engine_without_a_loop(fake: FakeDaemon, device: LazyDevice | None) -> None:
    """What is begun goes on by itself; the stream that is waited with is the calling thread's."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    gives_room(fake, [8, 9, 10, 11])
    engine = engine_of()
    points: list[Event | None] = []

    def run() -> None:
        with blocking_beside(fake.address, device) as client:
            kv = client.open(SPACE, SPEC)
            paged = kv.attach(engine.tensors, layout=LAYOUT)
            assert paged.blocks == 8 and paged.layout == LAYOUT
            points.append(paged.now())
            with kv.match(TOKENS) as hit:
                loading = paged.load(hit, IDS, by_layer=True)
                assert [loading.layer(layer) for layer in range(SPEC.layers)] == [4] * SPEC.layers
                assert loading.result().blocks == 4 and loading.done
            storing = paged.store(TOKENS, IDS)
            assert storing.result().stored == 4 * SIZE and storing.done
            with pytest.raises(InvalidInput):
                paged.store(TOKENS, [0])

    await asyncio.get_running_loop().run_in_executor(None, run)

    assert engine.holds(TOKENS, IDS, space=SPACE) and (points[0] is None) is (device is None)
    assert [fake.slots[slot].tobytes() for slot in range(8, 12)] == [fake.slots[slot].tobytes() for slot in range(4)]
