"""A client of a daemon whose HBM tier lies on a device: opened by handle, copied by the client's own device, never a wrong byte."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
import torch

from tests.seams import PATIENCE
from tests.service.client.fake import SIZE, SPACE, SPEC, until
from tests.service.client.fake_device import CountingDevice, DeviceDaemon, committed, lets_reserve, opened
from tests.service.client.test_failures import MISSES, TOKENS, all_calls, is_exact, kv_of
from tiercache.errors import DeviceRefused, LeaseLost
from tiercache.kernels.device import Device
from tiercache.leases import Refusal
from tiercache.service import wire
from tiercache.service.client.client import connect
from tiercache.service.face import Stored
from tiercache.storage.checksum import checksum

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
        async with kv.match(TOKENS) as hit, other.match(TOKENS) as same:
            assert is_exact(await hit.gather(), TOKENS) and is_exact(await same.gather(), TOKENS)

        assert len(own.opened) == 1 and own.open_now == 1
    del kv, other, hit, same
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
        gathering = asyncio.ensure_future(hit.gather(out=into)) if way == "gather" else None
        layer = asyncio.ensure_future(hit.layer(1, out=into[1] if into is not None else None)) if gathering is None else None
        await own.holds_work()
        daemon.generations[2] += 1
        daemon.slots[2][:] = 0xEE
        own.run()
        if gathering is not None:
            given = await gathering

            assert given.shape[2] == 2 * SIZE and is_exact(given, TOKENS)
            assert await hit.ready() == 2 * SIZE
        elif layer is not None:
            with pytest.raises(LeaseLost):
                await layer
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
        await daemon.until(wire.Close, 2)
        assert daemon.count(wire.Distrust) == daemon.count(wire.Commit) == 0
        async with kv.match(TOKENS) as hit:
            assert is_exact(await hit.gather(), TOKENS) and hit.tokens == 4 * SIZE


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
