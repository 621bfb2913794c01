"""What a hit reads is the block that was promised, or it is not handed out."""

from __future__ import annotations

import asyncio
import gc
import threading

import numpy as np
import pytest
import torch

from tests.service.client.fake import SIZE, SPACE, SPEC, FakeDaemon, turn, until
from tests.service.client.test_failures import TOKENS, is_exact, kv_of, raw
from tiercache.errors import InvalidInput, InvalidTensor, LeaseLost
from tiercache.kernels.host import Bytes, copy_run
from tiercache.service import wire
from tiercache.service.client import copies
from tiercache.service.client.client import connect


async def test_every_way_of_reading_is_exact(fake: FakeDaemon) -> None:
    """Blocks in any order of slots; the tensors that were copied are the caller's own, the others are not."""
    fake.holds(TOKENS, [9, 2, 3, 15])
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        async with kv.match(TOKENS) as hit:
            whole = await hit.gather()
            layers = torch.stack([torch.stack(await hit.layer(layer)) for layer in range(4)])
            views = torch.stack(
                [torch.cat([torch.stack(hit.view(block, layer)) for block in range(4)], dim=1) for layer in range(4)]
            )

        await client.check()
        assert is_exact(whole, TOKENS) and is_exact(layers, TOKENS) and is_exact(views, TOKENS)
        assert hit._blocks == 4 and client.stats().read == 2 * 4 * SPEC.block_bytes
        assert fake.count(wire.InPlace) == 1 and fake.count(wire.Ready) == 0


@pytest.mark.parametrize("when", ["before", "during"])
async def test_a_slot_that_was_given_away_is_not_handed_out(fake: FakeDaemon, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second look at the generation decides; what comes before that block is good, and `out` says where that ends."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    out = torch.full(SPEC.shape(4 * SIZE), 7.5, dtype=torch.float16)

    def slow(blocks: Bytes, into: Bytes) -> None:
        half = len(into) // 2
        copy_run(blocks[:, :half], into[:half])
        if when == "during":
            fake.generations[2] = 1
            fake.slots[2][:] = 0xEE
        copy_run(blocks[:, half:], into[half:])

    monkeypatch.setattr(copies, "copy_run", slow)
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        async with kv.match(TOKENS) as hit:
            if when == "before":
                fake.generations[2] = 1
            given = await hit.gather(out=out)

            assert given.shape[2] == 2 * SIZE and is_exact(given, TOKENS)
            assert hit.tokens == 2 * SIZE and await hit.ready() == 2 * SIZE
            assert client.stats().misses == {"lost": 1} and fake.count(wire.Distrust) == 0


async def test_a_slot_that_changes_under_its_copy_is_not_handed_out(fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody writes where he may not: the generation stays, and the checksum is the guard."""
    fake.holds(TOKENS, [0, 1, 2, 3])

    def torn(blocks: Bytes, into: Bytes) -> None:
        half = len(into) // 2
        copy_run(blocks[:, :half], into[:half])
        fake.slots[2][half:] = 0xEE
        copy_run(blocks[:, half:], into[half:])

    monkeypatch.setattr(copies, "copy_run", torn)
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        async with kv.match(TOKENS) as hit:
            given = await hit.gather()

            assert given.shape[2] == 2 * SIZE and is_exact(given, TOKENS)
            assert client.stats().misses == {"checksum": 1}


async def test_a_layer_of_a_slot_that_was_given_away_is_an_error(fake: FakeDaemon) -> None:
    """After its check: layers of one hit have the same tokens, so nothing is handed out. `view` says so, too."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        async with kv.match(TOKENS) as hit:
            await hit.layer(0)
            fake.generations[1] += 1
            with pytest.raises(LeaseLost):
                await hit.layer(1)
            with pytest.raises(LeaseLost):
                hit.view(1, 0)
            hit.view(0, 0)


async def test_a_rotten_block_is_left_out_and_told(fake: FakeDaemon) -> None:
    """By every way of reading, with all that follows it."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    fake.slots[2][3, 5] ^= 1
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        async with kv.match(TOKENS) as hit:
            assert [len(part) for part in await hit.layer(2)] == [2 * SIZE] * 2
        async with kv.match(TOKENS) as hit:
            assert is_exact(await hit.gather(), TOKENS) and hit.tokens == 2 * SIZE
        await client.check()

        assert [frame.block for frame in fake.asked if isinstance(frame, wire.Distrust)] == [2, 2]
        assert client.stats().misses == {"checksum": 2}


async def test_a_layer_waits_for_its_notice(fake: FakeDaemon) -> None:
    """Layer 0 does not wait for layer 1; a notice that comes with the reply is not missed."""
    fake.holds(TOKENS, [0, 1, 2, 3], lifting=True)
    plain = fake.answers[wire.Match]
    fake.answers[wire.Match] = lambda asked: [plain(asked), wire.Arrived(lease=asked.id, layer=0)]  # type: ignore[list-item]
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        async with kv.match(TOKENS) as hit:
            first = await hit.layer(0)
            second = asyncio.create_task(hit.layer(1))
            await client.check()
            waited = not second.done()
            await fake.say(wire.Arrived(lease=hit.claim.lease or 0, layer=1))

            assert waited
            assert raw(torch.stack(first)) == raw(kv_of(TOKENS)[0]) and raw(torch.stack(await second)) == raw(kv_of(TOKENS)[1])


async def test_a_layer_that_is_never_announced_is_read_where_it_was(fake: FakeDaemon) -> None:
    """After the deadline; the lease protects that place, too."""
    fake.holds(TOKENS, [0, 1, 2, 3], lifting=True)
    async with connect(fake.address, deadline=0.05) as client:
        kv = await client.open(SPACE, SPEC)
        async with kv.match(TOKENS) as hit:
            assert raw(torch.stack(await hit.layer(3))) == raw(kv_of(TOKENS)[3])
        assert client.stats().misses == {"slow": 1}


async def test_what_is_not_told_at_once_is_asked_for(fake: FakeDaemon) -> None:
    """`ready` waits for it, once for all hits that share a lease."""
    fake.holds(TOKENS, [0, 1, 2, 3], told=False)
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        async with kv.match(TOKENS, request="r") as one, kv.match(TOKENS, request="r") as two:
            found = await asyncio.gather(one.ready(), two.ready(), two.gather())

        assert list(found[:2]) == [4 * SIZE] * 2 and is_exact(found[2], TOKENS)
        assert fake.count(wire.Ready) == 1 and fake.count(wire.Match) == 1
        await client.check()
        assert fake.count(wire.Release) == 1


async def test_a_tensor_in_place_owns_its_lease(fake: FakeDaemon) -> None:
    """The lease ends with the last of the hit, the tensors, and what was made of them."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        async with kv.match(TOKENS) as hit:
            k, v = hit.view(1, 1)
        part = v[:3].reshape(-1)
        del k, v
        gc.collect()
        await client.check()
        held = fake.count(wire.Release)
        value = raw(part)
        del part
        await turn()
        await client.check()

        assert held == 0 and fake.count(wire.Release) == 1
        assert value == raw(kv_of(TOKENS)[1, 1, SIZE : SIZE + 3])


async def test_a_tensor_in_place_outlives_its_client(fake: FakeDaemon) -> None:
    """And the connection for descriptors with it, which is how the daemon knows."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        async with kv.match(TOKENS) as hit:
            k = hit.view(0, 0)[0]
    del client, kv, hit
    gc.collect()
    open_then = fake.peers
    assert raw(k) == raw(kv_of(TOKENS)[0, 0, :SIZE])
    del k
    gc.collect()

    assert open_then == 1
    await until(lambda: fake.peers == 0)


@pytest.mark.parametrize("kind", ["block-first", "layer-first"])
async def test_only_reserved_slots_are_written(fake: FakeDaemon, kind: str) -> None:
    """In place or copied, in whatever slots, with checksums of what lies there; neighbours keep their bytes."""
    fake.lay_out(kind)
    fake.memory.array[:] = 0x77
    taken = [5, 6, 9, 2]
    fake.answers[wire.Reserve] = lambda asked: wire.Reserved(
        id=asked.id, reservation=asked.id, present=0, pending=0, places=fake.places(taken)
    )
    fake.answers[wire.Commit] = lambda asked: wire.Count(id=asked.id, count=asked.upto)
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        async with kv.reserve(TOKENS) as room:
            for number, block in enumerate(room.blocks):
                block.copy_(kv_of(TOKENS)[:, :, number * SIZE : (number + 1) * SIZE])
            counts = [await room.commit(SIZE), await room.commit(4 * SIZE)]
        stored = await kv.insert(TOKENS, kv_of(TOKENS))
        del room, block
        gc.collect()

    sums = [frame.checksums for frame in fake.asked if isinstance(frame, wire.Commit)]
    assert counts == [SIZE, 4 * SIZE] and stored == (4 * SIZE, 0, 0)
    assert sums[0] + sums[1] == sums[2] and len(sums[2]) == 32
    whole = torch.from_numpy(np.concatenate([fake.slots[slot] for slot in taken], axis=1)).reshape(-1)
    assert is_exact(whole.view(torch.float16).reshape(SPEC.shape(4 * SIZE)), TOKENS)
    assert all((fake.slots[slot] == 0x77).all() for slot in range(16) if slot not in taken)
    await fake.until(wire.Close, 2)


async def test_a_gather_that_is_cancelled_ends_with_its_copy(fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the caller has left, the memory that it gave is its own again."""
    begun, go_on = threading.Event(), threading.Event()
    plain = copies.gather

    def held(*args: object) -> tuple[int, str | None]:
        begun.set()
        go_on.wait()
        return plain(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(copies, "gather", held)
    fake.holds(TOKENS, [9, 2, 3, 15])
    out = torch.zeros(SPEC.shape(len(TOKENS)), dtype=torch.float16)
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        async with kv.match(TOKENS) as hit:
            task = asyncio.create_task(hit.gather(out))
            await until(begun.is_set)
            task.cancel()
            await client.check()
            early = task.done()
            go_on.set()
            await asyncio.gather(task, return_exceptions=True)

            assert not early and task.cancelled() and is_exact(out, TOKENS)


async def test_a_gather_into_an_array_is_checked_as_a_tensor_is(fake: FakeDaemon) -> None:
    """It may have room for more; a read-only one is refused."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    out = np.zeros(SPEC.shape(len(TOKENS) + SIZE), np.float16)
    shut = out.copy()
    shut.flags.writeable = False
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        async with kv.match(TOKENS) as hit:
            found = await hit.gather(out)  # type: ignore[arg-type]
            with pytest.raises(InvalidTensor, match="read-only"):
                await hit.gather(shut)  # type: ignore[arg-type]
            for count in (-1, 1.0, True, None):
                with pytest.raises(InvalidInput):
                    hit.take(count)  # type: ignore[arg-type]

        assert is_exact(found, TOKENS) and is_exact(torch.from_numpy(out[:, :, : len(TOKENS)]), TOKENS)


async def test_two_commits_at_once_go_one_after_the_other(fake: FakeDaemon) -> None:
    """The second one hands over what the first one left."""
    asked: list[wire.Commit] = []

    def commit(frame: wire.Commit) -> wire.Reply:
        asked.append(frame)
        return wire.Count(id=frame.id, count=frame.upto)

    fake.answers[wire.Reserve] = lambda frame: wire.Reserved(
        id=frame.id, reservation=5, present=0, pending=0, places=fake.places([0, 1, 2, 3])
    )
    fake.answers[wire.Commit] = commit
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        async with kv.reserve(TOKENS) as room:
            counts = await asyncio.gather(room.commit(2 * SIZE), room.commit(4 * SIZE))

    assert [*counts] == [2 * SIZE, 4 * SIZE]
    assert [(frame.upto, len(frame.checksums)) for frame in asked] == [(2, 16), (4, 16)]


async def test_an_insert_that_is_cancelled_commits_nothing(fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots are given back when the thread is done with them, not before."""
    begun, go_on = threading.Event(), threading.Event()
    plain = copies.scatter

    def held(*args: object) -> list[int]:
        begun.set()
        go_on.wait()
        return plain(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(copies, "scatter", held)
    fake.answers[wire.Reserve] = lambda asked: wire.Reserved(
        id=asked.id, reservation=5, present=0, pending=0, places=fake.places([0, 1, 2, 3])
    )
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        task = asyncio.create_task(kv.insert(TOKENS, kv_of(TOKENS)))
        await until(begun.is_set)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.check()
        early = fake.count(wire.Close)
        go_on.set()
        await fake.until(wire.Close)

        assert task.cancelled() and early == 0
        assert fake.count(wire.Commit) == 0
