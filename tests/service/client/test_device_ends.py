"""When slots on a device are given back: after the client's own copies, after its runner's streams, and not with a session."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import torch

from tests.seams import PATIENCE
from tests.service.client.fake import SIZE, SPACE, SPEC, until
from tests.service.client.fake_device import CountingDevice, DeviceDaemon, committed, lets_reserve, opened
from tests.service.client.test_failures import AT_ONCE, TOKENS, is_exact, kv_of, raw
from tiercache.errors import StaleHandle
from tiercache.service import wire
from tiercache.service.client.client import Client, connect
from tiercache.service.client.own_device import OwnDevice
from tiercache.service.client.remote_kv import RemoteKV
from tiercache.service.device_tensors import DeviceTensors
from tiercache.service.face import Stored
from tiercache.storage.checksum import checksum


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
        done, _ = await asyncio.wait([closing], timeout=0.05)
        assert not done and daemon.peers == 1 and len(daemon.sockets) == 1

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

    async with connect(daemon.address):  # what ended before it has been seen by now
        assert raw(second) == expected and own.open_now == 1 and daemon.peers == 2
    del second
    assert own.open_now == 0
    await until(lambda: daemon.peers == 0)
    assert daemon.unmapped == 2


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


# --- a runner's streams ---------------------------------------------------------------------------------------------------


class Enqueuing(DeviceTensors):
    """As if torch enqueued what it does in the lazy device's memory, on the stream that is current."""

    current = 7

    @property
    def enqueues(self) -> bool:
        """Say so."""
        return True

    def pointer(self) -> int:
        """Return the stream's number."""
        return self.current


@asynccontextmanager
async def streaming(daemon: DeviceDaemon, own: CountingDevice) -> AsyncIterator[tuple[Client, RemoteKV]]:
    """As `opened`, with a runner whose work is enqueued."""
    made = connect(daemon.address, back_off=AT_ONCE)
    made._device = OwnDevice(own, tensors=Enqueuing)
    async with asyncio.timeout(PATIENCE), made as client:
        yield client, await client.open(SPACE, SPEC)


def read_into(found: list[bytes], address: int, size: int) -> None:
    """Be a kernel that reads: it has an address, and no tensor."""
    found.append(ctypes.string_at(address, size))


def fill(tensor: torch.Tensor, value: float) -> None:
    """Be a kernel that writes."""
    tensor.fill_(value)


async def test_a_lease_in_place_ends_after_the_streams_that_read_it(daemon: DeviceDaemon, own: CountingDevice) -> None:
    """The tensor is gone when Python says so, and the kernel that reads it has not begun."""
    daemon.holds(TOKENS, [0, 1, 2, 3])
    async with streaming(daemon, own) as (client, kv):
        async with kv.match(TOKENS) as hit:
            seen = hit.view(1, 2)[0]
            found: list[bytes] = []
            own.held = True
            own.adopt(7).call(partial(read_into, found, seen.data_ptr(), seen.nbytes))
            expected = raw(seen)
            del seen
        await client.check()
        assert daemon.count(wire.Release) == 0

        own.run()
        own.held = False
        await daemon.until(wire.Release)
        assert found == [expected]


async def test_a_room_is_sealed_and_left_after_the_streams_that_write_it(daemon: DeviceDaemon, own: CountingDevice) -> None:
    """Its checksums are of what the runner's kernels write, and its slots nobody else's while they do."""
    lets_reserve(daemon, [5, 4])
    own.choose = lambda streams: min(streams, key=lambda stream: stream is own.adopt(7))  # the runner's stream goes last
    async with streaming(daemon, own) as (client, kv):
        async with kv.reserve(TOKENS[: 2 * SIZE]) as room:
            first, second = room.blocks
            own.adopt(7).call(partial(fill, first, 1.5))
            assert await room.commit(SIZE) == SIZE
            assert first.flatten()[0] == 1.5 and committed(daemon) == [checksum(daemon.slots[5].copy())]
            own.held = True
            own.adopt(7).call(partial(fill, second, 2.5))
        await client.check()
        assert daemon.count(wire.Close) == 0

        own.run()
        own.held = False
        await daemon.until(wire.Close)
        assert second.flatten()[0] == 2.5
