"""A caller that goes away while a thread works for it: on the caller's own memory, on opening, on closing.

The thread can't be stopped; so what it may still do must harm nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.seams import PATIENCE, Rig, ThreadHold
from tests.service.caches import (
    LARGE,
    SIZE,
    SPACE,
    SPEC,
    is_exact,
    leases,
    opened,
    opened_kv,
    prompt,
    read,
    reservations,
    sink,
    small,
    stack_of,
    store,
    tensor_of,
    wind_down,
)
from tiercache.config import Config
from tiercache.errors import Closed, DirectoryLocked, LeaseReleased
from tiercache.kernels.host import Bytes, copy_run
from tiercache.service.inprocess import TierCache
from tiercache.storage import reader


async def turns(count: int = 20) -> None:
    """Let everything run that can run without a thread's answer."""
    for _ in range(count):
        await asyncio.sleep(0)


async def cancelled(call: Awaitable[Any], hold: ThreadHold) -> None:
    """Cancel `call` when its thread stands at `hold`; the thread goes on when the caller has gone, or waits for it."""
    waiter = asyncio.ensure_future(call)
    await hold.reached()
    waiter.cancel()
    await turns()
    if not waiter.done():
        hold.release()
    assert isinstance(await wind_down(waiter), asyncio.CancelledError)


async def test_a_cancelled_insert_stores_nothing_of_what_its_tensor_becomes(seed: int) -> None:
    """The caller's memory is its own again with the cancellation, and the slots are nobody else's before the thread has ended:
    what either holds then must never be served for another prompt."""
    rig = Rig()
    tokens, other = prompt(seed, 4), prompt(seed + 1, 4)
    data = tensor_of(tokens)
    async with opened_kv(small(hbm=None, dram=4, ssd=None), rig) as (cache, kv):
        hold = rig.threads.hold("_scatter", times=1)

        await cancelled(kv.insert(tokens, data), hold)
        found = await read(kv, tokens)
        data.zero_()
        await store(kv, other)
        hold.release()
        await turns()
        rig.threads.join()
        await turns()

        assert found in range(0, 4 * SIZE + 1, SIZE)
        assert await read(kv, other) == 4 * SIZE and await read(kv, tokens) == 0
        await cache.check()
        assert leases(cache) == reservations(cache) == 0
        await store(kv, tokens)
        assert await read(kv, tokens) == 4 * SIZE


@pytest.mark.parametrize("name", ["_gather", "_layer"])
async def test_a_cancelled_gather_writes_nothing_afterwards(seed: int, name: str) -> None:
    """`out` is the caller's again with the cancellation: no thread writes into it any more."""
    rig = Rig()
    tokens = prompt(seed, 4)
    out = torch.zeros(SPEC.shape(4 * SIZE), dtype=torch.float16)
    async with opened_kv(small(ssd=None), rig) as (cache, kv):
        await store(kv, tokens)
        hold = rig.threads.hold(name)

        async def gather() -> None:
            async with kv.match(tokens) as hit:
                await (hit.gather(out=out) if name == "_gather" else hit.layer(1, out=out[1]))

        await cancelled(gather(), hold)
        out.fill_(7.5)
        hold.release()
        rig.threads.join()

        assert bool((out == 7.5).all())
        assert leases(cache) == 0
        assert await read(kv, tokens) == 4 * SIZE
        await cache.check()


@pytest.mark.parametrize("name", ["_verify", "_layer"])
async def test_a_cancelled_layer_leaves_no_claim(seed: int, name: str) -> None:
    """Its slots may be reused at once; the thread only reads them, and nobody gets what it read."""
    rig = Rig()
    tokens = prompt(seed, 4)
    async with opened_kv(small(hbm=None, dram=4, ssd=None), rig) as (cache, kv):
        await store(kv, tokens)
        hold = rig.threads.hold(name)

        async def layer() -> None:
            async with kv.match(tokens) as hit:
                await hit.layer(1)

        await cancelled(layer(), hold)
        await store(kv, prompt(seed + 1, 4))
        hold.release()
        rig.threads.join()

        assert leases(cache) == 0
        assert await read(kv, prompt(seed + 1, 4)) == 4 * SIZE and await read(kv, tokens) == 0
        await cache.check()


@pytest.mark.parametrize("kept", [None, 0, 2], ids=["released", "taken to 0", "taken to 2"])
async def test_a_layer_whose_lease_ends_meanwhile_hands_out_nothing(seed: int, kept: int | None) -> None:
    """The slots may hold other blocks by the time they are copied: what is no longer leased is not returned."""
    rig = Rig()
    tokens = prompt(seed, 4)
    async with opened_kv(small(hbm=None, dram=4, ssd=None), rig) as (cache, kv):
        await store(kv, tokens)
        hold = rig.threads.hold("_layer", times=1)
        async with kv.match(tokens) as hit:
            reading = asyncio.ensure_future(hit.layer(1))
            await hold.reached()
            if kept is None:
                await hit.release()
            else:
                hit.take(kept * SIZE)
            await kv.insert(prompt(seed + 1, 4), tensor_of(prompt(seed + 1, 4)))
            hold.release()

            if kept is None:
                with pytest.raises(LeaseReleased):
                    await reading
            else:
                k, v = await reading
                expected = tensor_of(tokens)[1, :, : kept * SIZE]
                same = torch.equal(torch.stack((k, v)).view(torch.uint8), expected.contiguous().view(torch.uint8))
                assert same
        await cache.check()


@pytest.mark.parametrize("kept", [None, 0, 2], ids=["released", "taken to 0", "taken to 2"])
async def test_a_gather_whose_lease_ends_meanwhile_hands_out_nothing(
    seed: int, kept: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another prompt is copied, and what was asked for is back in its slots when they are checked: a check can't tell."""
    tokens, other = prompt(seed, 4), prompt(seed + 1, 4)
    before, after = ThreadHold(), ThreadHold()

    def slow(blocks: Bytes, into: Bytes) -> None:
        before.stand()
        copy_run(blocks, into)
        after.stand()

    monkeypatch.setattr(reader, "copy_run", slow)
    async with opened_kv(small(hbm=None, dram=4, ssd=None)) as (cache, kv):
        await store(kv, tokens)
        async with kv.match(tokens) as hit:
            places = stack_of(cache).readable(hit.lease)
            reading = asyncio.ensure_future(hit.gather())
            await before.reached()
            if kept is None:
                await hit.release()
            else:
                hit.take(kept * SIZE)
            await kv.insert(other, tensor_of(other))
            before.release()
            await after.reached()
            await kv.delete(other)
            await kv.insert(tokens, tensor_of(tokens))
            async with kv.match(tokens) as again:
                assert stack_of(cache).readable(again.lease) == places
                after.release()
                if kept is None:
                    with pytest.raises(LeaseReleased):
                        await reading
                else:
                    found = await reading
                    assert found.shape[2] == kept * SIZE and is_exact(found, tokens)
        await cache.check()


async def test_a_cancelled_commit_commits_nothing(seed: int) -> None:
    """Before the tree knows of the blocks they are the writer's: the room goes on, or is left with nothing stored."""
    rig = Rig()
    tokens = prompt(seed, 4)
    data = tensor_of(tokens)
    async with opened_kv(small(ssd=None), rig) as (cache, kv):
        hold = rig.threads.hold("_seal")
        async with kv.reserve(tokens) as room:
            for number, block in enumerate(room.blocks):
                block.copy_(data[:, :, number * SIZE : (number + 1) * SIZE])
            await cancelled(room.commit(4 * SIZE), hold)
            found = await read(kv, tokens)
            hold.release()
            rig.threads.join()
            count = await room.commit(2 * SIZE)

        assert (found, count) == (0, 2 * SIZE)
        assert await read(kv, tokens) == 2 * SIZE
        await cache.check()


async def test_two_commits_at_once_commit_each_block_once(seed: int) -> None:
    """The second waits for the first, and takes up where that ended."""
    rig = Rig()
    tokens = prompt(seed, 4)
    data = tensor_of(tokens)
    async with opened_kv(small(ssd=None), rig) as (cache, kv):
        hold = rig.threads.hold("_seal")
        async with kv.reserve(tokens) as room:
            for number, block in enumerate(room.blocks):
                block.copy_(data[:, :, number * SIZE : (number + 1) * SIZE])
            both = [asyncio.ensure_future(room.commit(upto)) for upto in (2 * SIZE, 4 * SIZE)]
            await hold.reached()
            hold.release()

            counts = [await commit for commit in both]

        assert counts == [2 * SIZE, 4 * SIZE]
        assert await read(kv, tokens) == 4 * SIZE
        await cache.check()


async def test_a_room_that_is_left_during_its_commit_commits_nothing(seed: int) -> None:
    """The slots are free with the room, and the late commit is refused: it would hang freed slots into the tree."""
    rig = Rig()
    tokens = prompt(seed, 2)
    async with opened_kv(small(ssd=None), rig) as (cache, kv):
        hold = rig.threads.hold("_seal")
        async with kv.reserve(tokens) as room:
            late = asyncio.ensure_future(room.commit(2 * SIZE))
            await hold.reached()
        hold.release()

        with pytest.raises(LeaseReleased):
            await late

        assert await cache.check() == {"nodes": 0, "blocks": 0, "leases": 0}
        assert await read(kv, tokens) == 0


async def test_a_cancelled_flush_goes_on(tmp_path: Path, seed: int) -> None:
    """The write that hung in the disk ends by itself, and is found at the next flush."""
    rig = Rig()
    tokens = prompt(seed, 3)
    async with opened_kv(small(directory=tmp_path / "ssd"), rig) as (cache, kv):
        await store(kv, tokens)
        hold = rig.disk.hold("sync")

        await cancelled(kv.flush(tokens), hold)
        hold.release()
        await cache.settle()

        assert leases(cache) == 0
        rig.disk.reads.clear()
        rig.disk.writes.clear()
        assert await kv.flush(tokens) == 3 * SIZE and rig.disk.writes == []
        await cache.check()


async def test_a_cancelled_open_can_be_repeated(tmp_path: Path, seed: int) -> None:
    """The stores that its thread opened are not lost: the next open of the same layout has them."""
    rig = Rig()
    tokens = prompt(seed, 2)
    async with opened(small(directory=tmp_path / "ssd"), rig) as cache:
        hold = rig.threads.hold("open")

        await cancelled(cache.open(SPACE, SPEC), hold)
        hold.release()

        kv = await cache.open(SPACE, SPEC)
        await store(kv, tokens)
        assert await read(kv, tokens) == 2 * SIZE
        await cache.check()


async def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    """Memory and the directory's lock are given back when the thread that takes them has ended."""
    rig = Rig()
    config = small(directory=tmp_path / "ssd")
    hold = rig.threads.hold("allocate")
    cache = TierCache(config, seams=rig.seams())

    await cancelled(cache.__aenter__(), hold)
    hold.release()
    async with asyncio.timeout(PATIENCE):
        while not await can_be_opened(config):
            pass

    with pytest.raises(Closed):
        await cache.open(SPACE, SPEC)


async def can_be_opened(config: Config) -> bool:
    """Whether nobody owns the directory."""
    try:
        async with opened_kv(config):
            return True
    except DirectoryLocked:
        return False


async def test_a_cancelled_close_goes_on(tmp_path: Path, seed: int) -> None:
    """What it had begun to write down is there after the restart, and a second close waits for the first."""
    rig = Rig()
    tokens = prompt(seed, 3)
    config = small(directory=tmp_path / "ssd")
    cache = TierCache(config, seams=rig.seams())
    await cache.__aenter__()
    kv = await cache.open(SPACE, SPEC)
    await store(kv, tokens)
    hold = rig.copies.hold("put")
    closing = asyncio.ensure_future(cache.close())
    await hold.reached()

    assert isinstance(await wind_down(closing), asyncio.CancelledError)
    with pytest.raises(Closed):
        await kv.flush(tokens)
    hold.release()
    await cache.close()

    async with opened_kv(config) as (again, kv):
        assert await read(kv, tokens) == 3 * SIZE
        await again.check()


async def test_a_close_during_an_open_ends_both(tmp_path: Path) -> None:
    """The open is refused, the directory is free, and nothing is left."""
    rig = Rig()
    config = small(directory=tmp_path / "ssd")
    cache = TierCache(config, seams=rig.seams())
    await cache.__aenter__()
    hold = rig.threads.hold("open")
    opening = asyncio.ensure_future(cache.open(SPACE, SPEC))
    await hold.reached()
    closing = asyncio.ensure_future(cache.close())
    await turns()
    hold.release()

    await closing

    with pytest.raises(Closed):
        await opening
    async with opened(config) as again:
        await again.open(SPACE, SPEC)


async def test_leaving_a_room_after_the_end_starts_nothing(tmp_path: Path, seed: int) -> None:
    """A cache that is closed while rooms and hits are open takes them back; their own end is then no event."""
    config = small(hbm=None, dram=4, directory=tmp_path / "ssd", watermark_low=0.5, watermark_high=0.5)
    rig = Rig()
    cache = TierCache(config, seams=rig.seams())
    await cache.__aenter__()
    kv = await cache.open(SPACE, SPEC)
    await store(kv, prompt(seed, 3))
    async with kv.match(prompt(seed, 3)) as hit, kv.reserve(prompt(seed + 1, 1)) as room:
        await cache.close()
        seen = len(rig.copies.seen)
    await turns()

    assert len(rig.copies.seen) == seen
    calls: list[Callable[[], Awaitable[int]]] = [hit.ready, lambda: room.commit(SIZE)]
    for call in calls:
        with pytest.raises(LeaseReleased):
            await call()


async def test_a_hit_read_while_its_prompt_moves_is_exact(tmp_path: Path, seed: int) -> None:
    """Between found on disk and copied out 20 other records are overwritten, deleted and inserted: the bytes are the prompt's."""
    rig = Rig()
    tokens = prompt(seed, 2)
    async with opened_kv(small(spec=LARGE, directory=tmp_path / "ssd", ssd=48), rig, spec=LARGE) as (cache, kv):
        others = [prompt(seed + number, 2) for number in range(1, 21)]
        for other in others[:10]:
            await store(kv, other)
            await kv.flush(other)
        await store(kv, tokens)
        await sink(cache)
        hold = rig.disk.hold("copy")
        reading = asyncio.ensure_future(read(kv, tokens))
        await hold.reached()

        for old, new in zip(others[:10], others[10:], strict=True):
            await kv.delete(old)
            await store(kv, new)
            await kv.flush(new)
        hold.release()

        assert await reading == 2 * SIZE
        for other in others[10:]:
            assert await read(kv, other) == 2 * SIZE
        await cache.settle()
        await cache.check()
        assert stack_of(cache).cache.stats.failures == {}
        assert is_exact(await (await kv.match(tokens)).gather(), tokens, spec=LARGE)
