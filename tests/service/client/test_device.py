"""A client of a daemon whose HBM tier lies on a device: opened by handle, copied by the client's own device, never a wrong byte."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.seams import PATIENCE
from tests.service.client.fake import SIZE, SPACE, SPEC, serving, until
from tests.service.client.fake_device import CountingDevice, DeviceDaemon
from tests.service.client.test_failures import AT_ONCE, MISSES, TOKENS, all_calls, is_exact, kv_of, raw
from tiercache.errors import DeviceRefused, LeaseLost, StaleHandle
from tiercache.kernels.device import Device
from tiercache.leases import Refusal
from tiercache.service import wire
from tiercache.service.client.client import Client, connect
from tiercache.service.client.remote_kv import RemoteKV
from tiercache.service.face import Stored
from tiercache.storage.checksum import checksum


@pytest.fixture
async def daemon(short_path: Path) -> AsyncIterator[DeviceDaemon]:
    """A fake daemon whose slots lie on a device, being served."""
    made = DeviceDaemon(short_path)
    try:
        async with serving(made):
            yield made
    finally:
        made.close()


@pytest.fixture
def own() -> CountingDevice:
    """The client's own device."""
    return CountingDevice(2)


@asynccontextmanager
async def opened(daemon: DeviceDaemon, own: Device | str | None) -> AsyncIterator[tuple[Client, RemoteKV]]:
    """A client and its namespace; all of it ends in time."""
    async with asyncio.timeout(PATIENCE), connect(daemon.address, device=own, back_off=AT_ONCE) as client:
        yield client, await client.open(SPACE, SPEC)


def lets_reserve(daemon: DeviceDaemon, slots: list[int]) -> None:
    """Answer every reserve with these slots, and every commit with all of them."""
    daemon.answers[wire.Reserve] = lambda asked: wire.Reserved(
        id=asked.id, reservation=asked.id, present=0, pending=0, places=daemon.places(slots)
    )
    daemon.answers[wire.Commit] = lambda asked: wire.Count(id=asked.id, count=asked.upto)


def committed(daemon: DeviceDaemon) -> list[int]:
    """Return the checksums of the one commit."""
    [commit] = [asked for asked in daemon.asked if isinstance(asked, wire.Commit)]
    return [int(one) for one in np.frombuffer(commit.checksums, "<u8")]


# --- what is right --------------------------------------------------------------------------------------------------------


async def test_every_way_of_reading_is_exact(daemon: DeviceDaemon, own: CountingDevice) -> None:
    """Blocks in any order of slots. What was copied is the caller's own, the views are the device's."""
    daemon.holds(TOKENS, [9, 2, 3, 15])
    async with opened(daemon, own) as (client, kv):
        async with kv.match(TOKENS) as hit:
            whole = await hit.gather()
            layers = torch.stack([torch.stack(await hit.layer(layer)) for layer in range(4)])
            views = [[torch.stack(hit.view(block, layer)) for block in range(4)] for layer in range(4)]
            seen = torch.stack([torch.cat(blocks, dim=1) for blocks in views])
            kept = hit.view(2, 1)[0]

        await client.check()
        assert is_exact(whole, TOKENS) and is_exact(layers, TOKENS) and is_exact(seen, TOKENS)
        assert client.stats().read == 2 * 4 * SPEC.block_bytes and not client.stats().misses
        assert daemon.count(wire.InPlace) == 1
        daemon.slots[3, 2, :4] = 0xAB
        assert kept.contiguous().view(torch.uint8).flatten()[:4].tolist() == [0xAB] * 4


async def test_an_insert_goes_into_the_device_and_its_checksums_are_of_what_lies_there(
    daemon: DeviceDaemon, own: CountingDevice
) -> None:
    lets_reserve(daemon, [7, 1, 2, 12])
    async with opened(daemon, own) as (client, kv):
        stored = await kv.insert(TOKENS, kv_of(TOKENS))

        assert stored == Stored(4 * SIZE, 0, 0) and client.stats().written == 4 * SPEC.block_bytes
    there = [daemon.slots[slot].copy() for slot in (7, 1, 2, 12)]
    assert committed(daemon) == [checksum(block) for block in there]
    assert is_exact(torch.from_numpy(np.concatenate(there, axis=1).reshape(-1)).view(torch.float16).view(4, 2, -1, 1, 32), TOKENS)


async def test_a_room_is_written_in_place(daemon: DeviceDaemon, own: CountingDevice) -> None:
    lets_reserve(daemon, [5, 4])
    tensor = kv_of(TOKENS)
    async with opened(daemon, own) as (_, kv), kv.reserve(TOKENS[: 2 * SIZE]) as room:
        for number, block in enumerate(room.blocks):
            block.copy_(tensor[:, :, number * SIZE : (number + 1) * SIZE])

        assert await room.commit(2 * SIZE) == 2 * SIZE
    assert committed(daemon) == [checksum(daemon.slots[slot].copy()) for slot in (5, 4)]


async def test_namespaces_share_what_was_opened(daemon: DeviceDaemon, own: CountingDevice) -> None:
    """A driver opens a handle once a process, and every stage is memory of the card."""
    daemon.holds(TOKENS, [0, 1, 2, 3])
    async with opened(daemon, own) as (client, kv):
        other = await client.open(SPACE, SPEC)
        for one in (kv, other):
            async with one.match(TOKENS) as hit:
                assert is_exact(await hit.gather(), TOKENS)

        assert len(own.opened) == 1 and own.open_now == 1
    del kv, other, one, hit
    assert own.open_now == 0


# --- what is lost or wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", [False, True])
@pytest.mark.parametrize("way", ["gather", "layer"])
async def test_a_slot_that_is_given_away_while_a_copy_is_held_is_not_handed_out(
    daemon: DeviceDaemon, own: CountingDevice, way: str, out: bool
) -> None:
    """The device copies when its turn comes; the generation is looked at after that, not when the copy was asked for."""
    daemon.holds(TOKENS, [0, 1, 2, 3])
    async with opened(daemon, own) as (client, kv), kv.match(TOKENS) as hit:
        await hit.layer(0)  # checked once a hit
        own.held = True
        into = torch.full(SPEC.shape(4 * SIZE), 7.5, dtype=torch.float16) if out else None
        if way == "gather":
            reading = asyncio.ensure_future(hit.gather(out=into))
        else:
            reading = asyncio.ensure_future(hit.layer(1, out=into[1] if into is not None else None))
        await own.holds_work()
        daemon.generations[2] += 1
        daemon.slots[2][:] = 0xEE
        own.run()
        if way == "gather":
            given = await reading

            assert given.shape[2] == 2 * SIZE and is_exact(given, TOKENS)
            assert await hit.ready() == 2 * SIZE
        else:
            with pytest.raises(LeaseLost):
                await reading
        own.held = False
        assert client.stats().misses == {"lost": 1} and daemon.count(wire.Distrust) == 0


@pytest.mark.parametrize("way", ["gather", "layer"])
async def test_rot_is_found_by_the_checksum_of_what_arrived(daemon: DeviceDaemon, own: CountingDevice, way: str) -> None:
    """The blocks before it are handed out, the daemon is told which one is bad."""
    daemon.holds(TOKENS, [0, 1, 2, 3])
    daemon.slots[1, 3, 5] ^= 1
    async with opened(daemon, own) as (client, kv), kv.match(TOKENS) as hit:
        if way == "gather":
            given = await hit.gather()
        else:
            given = torch.stack([torch.stack(await hit.layer(layer)) for layer in range(4)])

        assert given.shape[2] == SIZE and is_exact(given, TOKENS)
        await client.check()
        [distrust] = [asked for asked in daemon.asked if isinstance(asked, wire.Distrust)]
        assert distrust.block == 1 and client.stats().misses == {"checksum": 1}


async def test_a_device_that_fails_is_a_miss(daemon: DeviceDaemon, own: CountingDevice) -> None:
    """A read has no tokens, an insert is refused, a room says what was cached before it; no exception."""
    daemon.holds(TOKENS, [0, 1, 2, 3])
    lets_reserve(daemon, [4, 5, 6, 7])
    async with opened(daemon, own) as (client, kv):
        own.fails_after = 0
        async with kv.match(TOKENS) as hit:
            assert (await hit.gather()).shape[2] == 0 and await hit.ready() == 0
        async with kv.match(TOKENS) as hit:
            assert [len(part) for part in await hit.layer(0)] == [0, 0]
        stored = await kv.insert(TOKENS, kv_of(TOKENS))
        async with kv.reserve(TOKENS) as room:
            assert len(room.blocks) == 4 and await room.commit(4 * SIZE) == 0
        own.fails_after = None

        await client.check()
        assert stored == Stored(0, 0, 4 * SIZE) and stored.refused_because is Refusal.UNREACHED
        assert client.stats().misses == {"device": 4}
        assert daemon.count(wire.Close) == 2 and daemon.count(wire.Distrust) == daemon.count(wire.Commit) == 0
        async with kv.match(TOKENS) as hit:
            assert is_exact(await hit.gather(), TOKENS) and hit.tokens == 4 * SIZE


# --- what owns its slots --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["gather", "layer", "check"])
async def test_a_lease_ends_when_the_copies_out_of_its_slots_are_over(daemon: DeviceDaemon, own: CountingDevice, way: str) -> None:
    """Also when who wanted them has gone: cancelled, the hit left."""
    daemon.holds(TOKENS, [0, 1, 2, 3])
    async with opened(daemon, own) as (client, kv):

        async def read() -> None:
            async with kv.match(TOKENS) as hit:
                if way == "layer":
                    await hit.layer(0)
                own.held = True
                await (hit.gather() if way == "gather" else hit.layer(1))

        reading = asyncio.ensure_future(read())
        await own.holds_work()
        reading.cancel()
        if way != "gather":  # which outlasts its caller
            with pytest.raises(asyncio.CancelledError):
                await reading
        await client.check()
        assert daemon.count(wire.Release) == 0

        own.run()
        own.held = False
        await daemon.until(wire.Release)
        assert reading.cancelled() and daemon.count(wire.Release) == 1


async def test_reserved_slots_go_back_when_the_copies_into_them_are_over(daemon: DeviceDaemon, own: CountingDevice) -> None:
    """An insert whose caller is cancelled: given back sooner, the slots would be written when they are another block's."""
    lets_reserve(daemon, [0, 1, 2, 3])
    async with opened(daemon, own) as (client, kv):
        own.held = True
        storing = asyncio.ensure_future(kv.insert(TOKENS, kv_of(TOKENS)))
        await own.holds_work()
        storing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await storing
        await client.check()
        assert daemon.count(wire.Close) == 0

        own.run()
        own.held = False
        await daemon.until(wire.Close)
        assert daemon.count(wire.Commit) == 0


async def test_a_client_is_closed_when_its_copies_are_over(daemon: DeviceDaemon, own: CountingDevice) -> None:
    """The end of its connections tells the daemon that it touches nothing any more."""
    lets_reserve(daemon, [0, 1, 2, 3])
    async with opened(daemon, own) as (client, kv):
        own.held = True
        storing = asyncio.ensure_future(kv.insert(TOKENS, kv_of(TOKENS)))
        await own.holds_work()
        storing.cancel()
        await asyncio.wait([storing])
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0)
        assert not closing.done() and daemon.peers == 1 and len(daemon.sockets) == 1

        own.run()
        own.held = False
        await closing
        await until(lambda: not daemon.sockets)


async def test_a_view_owns_its_lease_and_the_memory(daemon: DeviceDaemon, own: CountingDevice) -> None:
    """Every slice of it, too, beyond the hit, the namespace and the client; its end is told at once."""
    daemon.holds(TOKENS, [0, 1, 2, 3])
    async with opened(daemon, own) as (client, kv):
        async with kv.match(TOKENS) as hit:
            first = hit.view(0, 0)[0][1:]
        async with kv.match(TOKENS) as hit:
            second = hit.view(3, 3)[1].flatten()
        await client.check()
        assert daemon.count(wire.Release) == 0
        del first
        gc.collect()
        await daemon.until(wire.Release)
    expected = raw(kv_of(TOKENS)[3, 1, 3 * SIZE :])
    del kv, client, hit
    gc.collect()

    assert raw(second) == expected and own.open_now == 1 and daemon.peers == 1
    del second
    assert own.open_now == 0
    await until(lambda: daemon.peers == 0)
    assert daemon.unmapped == 1


# --- who may come in ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (None, "connect"),
        ("cpu", "connect"),
        (CountingDevice(3, uuid=b"another device!!"), "lies on the device"),
        ("cuda:7", "can't be opened"),
    ],
    ids=["none", "cpu", "another card", "no such card"],
)
async def test_a_client_without_the_daemons_device_is_told_so_at_open(
    daemon: DeviceDaemon, device: Device | str | None, words: str
) -> None:
    async with asyncio.timeout(PATIENCE), connect(daemon.address, device=device) as client:
        with pytest.raises(DeviceRefused, match=words):
            await client.open(SPACE, SPEC)

        await client.check()  # the session stands


@pytest.mark.parametrize("changes", [{"handle": b"1:9999"}, {"length": 1 << 40}])
async def test_memory_that_can_not_be_opened_is_told_at_open(
    daemon: DeviceDaemon, own: CountingDevice, changes: dict[str, object]
) -> None:
    """A container that shares the socket and not the card's memory."""
    daemon.changes = changes
    async with asyncio.timeout(PATIENCE), connect(daemon.address, device=own) as client:
        with pytest.raises(DeviceRefused, match="can't be opened"):
            await client.open(SPACE, SPEC)


async def test_a_namespace_that_loses_its_device_later_misses(daemon: DeviceDaemon, own: CountingDevice) -> None:
    """A daemon began anew on another card: what runs is not told by an exception."""
    async with opened(daemon, own) as (client, kv):
        assert own.open_now == 1
        daemon.changes = {"device": b"another device!!"}
        await daemon.hang_up()
        await until(lambda: client.stats().sessions == 2)

        assert await all_calls(kv) == MISSES
        assert client.stats().misses.keys() == {"DeviceRefused"} and own.open_now == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"handle": None},
        {"device": None},
        {"offset": 4096},
        {"slots": 17},
        {"slots": 0},
        {"length": -1},
        {"generations": 2},
        {"generations": 1 << 20},
        {"layout": "device-first"},
    ],
)
async def test_what_a_daemon_says_of_its_device_and_can_not_be_is_a_miss(
    daemon: DeviceDaemon, own: CountingDevice, changes: dict[str, object]
) -> None:
    daemon.changes = changes
    async with asyncio.timeout(PATIENCE), connect(daemon.address, device=own) as client:
        kv = await client.open(SPACE, SPEC)

        assert await all_calls(kv) == MISSES and client.stats().misses.keys() == {"unmapped"}


# --- sessions that end ----------------------------------------------------------------------------------------------------


async def test_the_end_of_a_session_gives_its_memory_back(daemon: DeviceDaemon, own: CountingDevice) -> None:
    """Before anybody calls again: a daemon that begins anew on the same card needs the room. Views keep theirs."""
    daemon.holds(TOKENS, [0, 1, 2, 3])
    async with opened(daemon, own) as (client, kv):
        async with kv.match(TOKENS) as hit:
            await hit.ready()
            await daemon.hang_up()
            await until(lambda: client.stats().sessions == 2)

            assert own.open_now == 0
            for call in (hit.gather, lambda: hit.layer(0)):
                with pytest.raises(StaleHandle):
                    await call()
            with pytest.raises(StaleHandle):
                hit.view(0, 0)
        async with kv.match(TOKENS) as hit:
            assert is_exact(await hit.gather(), TOKENS) and own.open_now == 1


async def test_a_copy_that_is_under_way_when_the_session_ends_is_stale_or_exact(daemon: DeviceDaemon, own: CountingDevice) -> None:
    daemon.holds(TOKENS, [0, 1, 2, 3])
    async with opened(daemon, own) as (client, kv), kv.match(TOKENS) as hit:
        own.held = True
        reading = asyncio.ensure_future(hit.gather())
        await own.holds_work()
        await daemon.hang_up()
        await until(lambda: client.stats().sessions == 2)
        own.run()
        own.held = False

        assert is_exact(await reading, TOKENS)


async def test_reserved_slots_are_held_beyond_the_session_until_the_copies_are_over(
    daemon: DeviceDaemon, own: CountingDevice
) -> None:
    """The daemon gives them to nobody while the connection for descriptors stands."""
    lets_reserve(daemon, [0, 1, 2, 3])
    async with opened(daemon, own) as (client, kv):
        own.held = True
        storing = asyncio.ensure_future(kv.insert(TOKENS, kv_of(TOKENS)))
        await own.holds_work()
        daemon.answers[wire.Reserve] = lambda asked: wire.Reserved(asked.id, asked.id, 0, 0, b"")
        await daemon.hang_up()
        await until(lambda: client.stats().sessions == 2)
        await kv.flush(TOKENS)  # opens anew
        gc.collect()
        assert daemon.peers == 2

        own.run()
        own.held = False
        stored = await storing
        gc.collect()
        await until(lambda: daemon.peers == 1)
        assert stored == Stored(0, 0, 4 * SIZE)


# --- versions -------------------------------------------------------------------------------------------------------------


def test_an_arena_of_before_there_were_devices_means_what_it_meant() -> None:
    """The fields came last and may be left out; an older client leaves those alone that it does not know."""

    class Before(msgspec.Struct, array_like=True, frozen=True):
        tier: str
        layout: str
        memory: int
        offset: int
        length: int
        slots: int
        generations: int

    before = Before("HBM", "layer-first", 0, 0, 4096, 1, 0)
    now = wire.ArenaAt("HBM", "device", -1, 0, 4096, 1, 0, b"handle", b"uuid")

    read = msgspec.msgpack.decode(msgspec.msgpack.encode(before), type=wire.ArenaAt)
    assert (read.layout, read.handle, read.device) == ("layer-first", None, None)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(now), type=Before).layout == "device"
