"""A prefetch policy that is set once holds for every hit, and a session's frames of before it was one are still heard."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from tests.seams import Rig
from tests.service.caches import SIZE, SPACE, SPEC, free, is_exact, leases, opened_kv, prompt, read, sink, small, store
from tests.service.client.daemons import running
from tests.service.daemon.raw import daemon_of, fetched, session_at, stored, whole
from tiercache.errors import InvalidConfig, InvalidInput, LeaseReleased
from tiercache.service import wire
from tiercache.service.client.blocking import BlockingClient
from tiercache.service.client.client import connect
from tiercache.service.client.connection import Connection
from tiercache.types import Tier

BLOCKS = 4


async def test_the_configuration_says_how_long_hits_in_this_process_wait(tmp_path: Path, seed: int) -> None:
    """With `prefetch = "best-effort"` a match that says nothing takes what is there; one that says `wait` waits."""
    rig, tokens = Rig(), prompt(seed, BLOCKS)
    async with opened_kv(small(directory=tmp_path, prefetch="best-effort"), rig) as (cache, kv):
        await store(kv, tokens)
        await sink(cache)
        hold = rig.copies.hold("blocks", to=1)
        async with kv.match(tokens) as hasty, kv.match(tokens, prefetch="wait") as patient:
            said = await hasty.ready()
            await hold.reached()
            hold.release()

            assert said == 0 and await patient.ready() == BLOCKS * SIZE


@pytest.mark.parametrize("value", ["soon", -1, "nan"])
def test_a_configuration_that_can_not_be_names_its_key(value: object) -> None:
    """The error is the configuration's, and says what may be."""
    with pytest.raises(InvalidConfig, match="prefetch must be 'wait', 'best-effort' or a number") as caught:
        small(prefetch=value)

    assert caught.value.fields["field"] == "prefetch"


def test_a_client_that_can_not_be_is_refused_before_anything() -> None:
    """Both clients check the policy when they are made."""
    for make in (connect, BlockingClient):
        with pytest.raises(InvalidInput, match="prefetch must be"):
            make("unix:///nowhere", prefetch="soon")


async def test_a_client_says_how_long_its_hits_wait(tmp_path: Path, seed: int) -> None:
    """`connect(prefetch=…)` holds for matches that say nothing; a match, and a `ready`, may say otherwise."""
    rig, tokens = Rig(), prompt(seed, BLOCKS)
    async with running(small(directory=tmp_path), rig) as (daemon, address), connect(address, prefetch=0) as client:
        kv = await client.open(SPACE, SPEC)
        await store(kv, tokens)
        await client.check()  # the end of the insert's claim has been heard then
        await sink(daemon.cache)
        hold = rig.copies.hold("blocks", to=1)
        async with kv.match(tokens) as hasty, kv.match(tokens, prefetch="wait") as one, kv.match(tokens) as two:
            said = await hasty.ready()
            waiting = [asyncio.create_task(one.ready()), asyncio.create_task(two.ready("wait"))]
            await hold.reached()
            await client.check()
            done = [task.done() for task in waiting]
            hold.release()

            assert (said, done) == (0, [False, False])
            assert [await task for task in waiting] == [BLOCKS * SIZE] * 2 and is_exact(await two.gather(), tokens)
        await daemon.cache.settle()
        assert (await client.check())["leases"] == 0
        assert client.stats().misses == {}


async def test_a_client_that_is_cancelled_in_its_wait_leaves_no_claim(tmp_path: Path, seed: int) -> None:
    """The wait is abandoned, the copy goes on, and every slot is accounted for."""
    rig, tokens = Rig(), prompt(seed, BLOCKS)
    async with running(small(directory=tmp_path), rig) as (daemon, address), connect(address) as client:
        kv = await client.open(SPACE, SPEC)
        await store(kv, tokens)
        await client.check()  # the end of the insert's claim has been heard then
        await sink(daemon.cache)
        hold = rig.copies.hold("blocks", to=1)

        async def wait() -> None:
            async with kv.match(tokens, prefetch=600) as hit:
                await hit.ready()

        waiting = asyncio.create_task(wait())
        await hold.reached()
        waiting.cancel()
        await asyncio.wait([waiting])
        await client.check()
        left = leases(daemon.cache)
        hold.release()
        await daemon.cache.settle()

        assert waiting.cancelled() and left == 0
        assert await read(kv, tokens) == BLOCKS * SIZE


async def test_the_last_reader_gone_a_promotion_nobody_waits_for_goes_on(tmp_path: Path, seed: int) -> None:
    """A hit that gives up in the very step of its match, before the promotion has begun, has started it all the same."""
    tokens = prompt(seed, BLOCKS)
    async with opened_kv(small(directory=tmp_path)) as (cache, kv):
        await store(kv, tokens)
        await sink(cache)
        before = free(cache)

        async with kv.match(tokens, prefetch="best-effort") as hit:
            said = await hit.ready()
        await cache.settle()

        assert said == 0 and leases(cache) == 0
        assert free(cache) == {**before, Tier.HBM: before[Tier.HBM] - BLOCKS, Tier.DRAM: free(cache)[Tier.DRAM]}
        assert await read(kv, tokens) == BLOCKS * SIZE
        await cache.check()


async def test_a_ready_without_a_time_is_one_of_before(tmp_path: Path) -> None:
    """A frame without the last field is heard as one that waits; a time that is none is an error, and the session goes on."""
    rig, tokens = Rig(), prompt(1, BLOCKS)
    async with daemon_of(tmp_path, small(directory=tmp_path / "kv"), rig) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        handed = await fetched(raw)
        await stored(raw, opened, handed, tokens)
        assert (await raw.call(wire.Count, wire.Flush, kv=opened.kv, prompt=whole(tokens))).count == BLOCKS
        await sink(daemon.cache)
        hold = rig.copies.hold("blocks", to=1)
        hit = await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(tokens))
        await hold.reached()

        old = msgspec.msgpack.encode(["ready", 77, hit.lease])
        now = await raw.call(wire.Places, wire.Ready, lease=hit.lease, within=0.0)
        refused = [await raw.refused(wire.Ready, lease=hit.lease, within=seconds) for seconds in (-1.0, float("nan"), float("inf"))]

        assert wire.requests.decode(old) == wire.Ready(id=77, lease=hit.lease, within=None)
        assert now.places == b"" and refused == ["InvalidInput"] * 3
        hold.release()
        later = await raw.call(wire.Places, wire.Ready, lease=hit.lease)
        assert len(later.places) == BLOCKS * wire.PLACE_BYTES


async def test_a_late_answer_renews_no_lease_that_was_released(tmp_path: Path, seed: int) -> None:
    """A hit that is released while another task waits for it is held no more, whatever comes of the wait."""
    rig, tokens = Rig(), prompt(seed, BLOCKS)
    async with running(small(directory=tmp_path), rig) as (daemon, address), connect(address) as client:
        kv = await client.open(SPACE, SPEC)
        await store(kv, tokens)
        await client.check()
        await sink(daemon.cache)
        hold = rig.copies.hold("blocks", to=1)
        hit = await kv.match(tokens)
        waiting = asyncio.create_task(hit.ready())
        await hold.reached()
        await client.check()
        connection, [session] = kv._sessions.connection(), daemon.house.sessions
        assert isinstance(connection, Connection) and connection._channel is not None
        stream = connection._channel._transport
        assert stream is not None
        stream.pause_reading()  # so that the answer is in the socket, and not yet read
        hold.release()
        while session._running:
            await asyncio.wait(list(session._running))
        await hit.release()
        stream.resume_reading()
        await asyncio.wait([waiting])
        await client.check()

        assert not connection._renewal._held
        assert isinstance(waiting.exception(), LeaseReleased)
