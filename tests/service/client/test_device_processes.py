"""Daemon and clients in processes of their own, the HBM tier on a device: whoever is killed, nobody reads a wrong byte."""

from __future__ import annotations

import asyncio
import gc

import msgspec
import pytest

from tests.seams import PATIENCE, Rig
from tests.service.caches import LARGE, SPACE, is_exact, prompt, read, small, stack_of, store, tensor_of
from tests.service.client.child import BLOCKS, ON_DEVICE
from tests.service.client.daemons import Child, own_process, running
from tests.service.client.fake import until
from tests.service.client.fake_device import CountingDevice
from tests.service.client.test_failures import raw
from tiercache.config import Config
from tiercache.errors import StaleHandle
from tiercache.kernels.lazy import LazyDevice
from tiercache.service.client.client import BackOff, connect
from tiercache.types import Tier

AT_ONCE = BackOff(first=0.01, most=0.05)
SIZE = LARGE.block_size
READERS = ("hold-lease", "hold-view", "hold-reading")
WRITERS = {"hold-reserved": 0, "hold-written": 0, "hold-writing": 0, "hold-committed": 4}


def roomy() -> Config:
    """Everything of one client fits the device's tier."""
    config = small(hbm=2 * BLOCKS, dram=BLOCKS, ssd=None, spec=LARGE, admit_ms=5000)
    return msgspec.structs.replace(config, device="cuda:0")


@pytest.mark.parametrize("way", ["", "-in-place"], ids=["copied", "in place"])
async def test_what_one_process_computed_another_reads(way: str, seed: int) -> None:
    """Three processes, each with its own device; KV goes through the daemon's device memory, almost none over the sockets."""
    with own_process(roomy(), on_device=True) as daemon:
        async with connect(daemon.address, back_off=AT_ONCE) as client:
            await client.connected()
        writer = Child(f"write{way}{ON_DEVICE}", daemon.address, seed)
        assert (await writer.says())["stored"] == [BLOCKS * SIZE, 0, 0] and writer.end() == 0
        reader = Child(f"read{way}{ON_DEVICE}", daemon.address, seed)
        found = await reader.says()

        assert reader.end() == 0 and found["exact"] and found["tokens"] == BLOCKS * SIZE and found["misses"] == {}
        assert found["sent"] + found["received"] < BLOCKS * LARGE.block_bytes / 100


@pytest.mark.parametrize("role", [*READERS, *WRITERS])
async def test_a_killed_client_leaves_nothing(role: str, seed: int) -> None:
    """Also in the middle of its own device's copies: slots come back when it is gone, the daemon and others go on."""
    theirs = LazyDevice(seed)
    await one_is_killed(role, seed, theirs)

    await until(lambda: gc.collect() >= 0 and theirs.allocated == 0)


async def one_is_killed(role: str, seed: int, theirs: LazyDevice) -> None:
    """Kill a client at one point, and use the cache afterwards."""
    rig = Rig(device=lambda name: theirs)
    tokens, new = prompt(seed, BLOCKS), prompt(seed + 1, BLOCKS)
    async with (
        asyncio.timeout(3 * PATIENCE),
        running(roomy(), rig) as (daemon, address),
        connect(address, device=CountingDevice(seed + 2)) as client,
    ):
        kv = await client.open(SPACE, LARGE)
        await store(kv, tokens)
        child = Child(f"{role}{ON_DEVICE}", address, seed if role in READERS else seed + 1)
        assert await child.says() == {"there": True}
        pools = stack_of(daemon.cache).cache.residency.slots
        assert [session.watch.on_device for session in daemon.house.sessions] == [True, True]
        assert (pools[0].census().held > 0) == (role in WRITERS)

        child.kill()

        await until(lambda: len(daemon.house.sessions) == 1 and daemon.house.kept_back == 0)
        await until(lambda: all(pool.census().held == pool.census().quarantined == 0 for pool in pools))
        assert (await client.check())["leases"] == 0
        assert await read(kv, tokens) == BLOCKS * SIZE
        async with kv.match(new) as hit:
            assert hit.tokens == WRITERS.get(role, 0) * SIZE
        outcome = await kv.insert(new, tensor_of(new, spec=LARGE))
        assert outcome.refused == 0
        async with kv.match(tokens) as hit:  # what it never wrote to is what it was
            assert hit.tiers.keys() == {Tier.HBM} and is_exact(await hit.gather(), tokens, spec=LARGE)


async def test_what_is_open_of_a_killed_daemon_is_exact_or_stale(seed: int) -> None:
    """Views stay as they are, copies raise StaleHandle, the card's memory is let go of; the next daemon is gone on with."""
    own = CountingDevice(seed)
    tokens = prompt(seed, BLOCKS)
    expected = raw(tensor_of(tokens, spec=LARGE)[2, 1, 3 * SIZE : 4 * SIZE])
    with own_process(roomy(), on_device=True) as daemon:
        async with asyncio.timeout(3 * PATIENCE), connect(daemon.address, device=own, back_off=AT_ONCE, deadline=60.0) as client:
            await client.connected()
            kv = await client.open(SPACE, LARGE)
            await store(kv, tokens)
            async with kv.match(tokens) as hit, kv.match(tokens) as other:
                seen = hit.view(3, 2)[1]
                own.held = True
                reading = asyncio.ensure_future(other.gather())
                await own.holds_work()

                daemon.kill()

                await until(lambda: client.boot is None)
                own.run()
                own.held = False
                assert is_exact(await reading, tokens, spec=LARGE) and raw(seen) == expected
                for one in (hit, other):
                    with pytest.raises(StaleHandle):
                        await one.gather()
                    with pytest.raises(StaleHandle):
                        await one.layer(0)
                with pytest.raises(StaleHandle):
                    hit.view(0, 0)
                assert await hit.ready() == 0
            outcome = await kv.insert(tokens, tensor_of(tokens, spec=LARGE))
            assert outcome.refused == len(tokens)

            daemon.start()
            await client.connected()
            await store(kv, tokens)
            assert await read(kv, tokens) == len(tokens) and own.open_now == 2 and raw(seen) == expected
            del seen, hit, other, one, reading
            assert own.open_now == 1
