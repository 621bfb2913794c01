"""Clients that do not read, and more clients than there is room for (R4): bounded, ended, and nobody else's trouble.

KV never passes through a socket, so that no client can ask for it as a stream: what waits for one that does not read are replies.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.seams import FakeClock, Rig
from tests.service.caches import LARGE, SIZE, SPACE, SPEC, disk_of, prompt, read, sink, small, store, tensor_of
from tests.service.client.daemons import own_process
from tests.service.client.fake import until
from tests.service.daemon.http import get
from tests.service.daemon.raw import Raw, connected, daemon_of, fetched, session_at, stored, whole
from tiercache.config import Limits
from tiercache.service import wire
from tiercache.service.client.client import BackOff, connect
from tiercache.service.client.remote_kv import RemoteKV
from tiercache.spec import KVSpec
from tiercache.storage.ssd_store import SsdStore

TINY = KVSpec(layers=1, kv_heads=1, head_dim=8, dtype="int8", block_size=1)
"""Blocks of 16 bytes, of which a place takes 24: replies that say much of little."""
LONG = 24_000
"""Blocks; their places are a reply of 576,000 bytes."""
MOST = 16 << 20
"""Bytes by which a daemon may grow for the sake of clients that do not read."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A new folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="tc") as name:
        yield Path(name)


def memory_of(pid: int) -> int:
    """Return the bytes of a process's own memory: neither files nor the tiers."""
    found = re.search(r"^RssAnon:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def reading(raw: Raw) -> Any:
    """Return what can be told to read no more, and to go on."""
    connection = raw.ws._response.connection
    assert connection is not None
    return connection.protocol


@asynccontextmanager
async def deaf(path: Path, spec: KVSpec) -> AsyncIterator[tuple[Raw, int]]:
    """A session whose client reads nothing from now on, and its namespace."""
    async with connected(path) as raw:
        await raw.hello()
        opened = await raw.open(spec=spec)
        reading(raw).pause_reading()
        yield raw, opened.kv
        raw.ws._response.close()


def long_prompt(seed: int) -> Sequence[int]:
    """Return a prompt of `LONG` blocks."""
    return range(seed % 1000, seed % 1000 + LONG)


async def test_r4_a_client_that_never_reads_costs_no_more_than_a_limit(seed: int) -> None:
    """It asks for 64 replies of half a megabyte; some megabytes wait, then it ends. Every call of another client is answered."""
    tokens, other = long_prompt(seed), prompt(seed, 100, size=1)
    config = small(hbm=1 << 18, dram=None, ssd=None, spec=TINY)
    with own_process(config) as daemon:
        path = Path(daemon.address.removeprefix("unix://"))
        async with connect(daemon.address, deadline=60.0, back_off=BackOff(first=0.01, most=0.05)) as client:
            await client.connected()
            kv = await client.open(SPACE, TINY)
            await store(kv, tokens)
            await store(kv, other)
            assert await read(kv, tokens) == LONG
            assert daemon.process is not None
            before = memory_of(daemon.process.pid)
            grown = []
            async with deaf(path, TINY) as (raw, number):
                for count in range(64):
                    try:
                        asked = wire.Prompt(1, 1, 4 * LONG, b"") if count else whole(tokens)
                        await raw.send(wire.Match, kv=number, prompt=asked)
                    except ConnectionError:
                        break
                    assert await read(kv, other) == len(other)
                    grown.append(memory_of(daemon.process.pid) - before)
            _, stats = await get(path, "/v1/stats")

            assert max(grown) <= MOST, f"grew by {max(grown)} bytes"
            assert stats["counts"]["overrun"] == 1 and stats["counts"]["stalled"] == 0
            assert len(stats["sessions"]) == 1 and stats["sessions"][0]["leases"] == 0
            assert await read(kv, tokens) == LONG and not client.stats().misses
            await client.check()


async def test_r4_a_client_that_does_not_read_is_ended_in_time(folder: Path, seed: int) -> None:
    """Two replies may wait, but the first is not taken in 30 s of the daemon's clock. Others are answered before and after."""
    tokens = long_prompt(seed)
    clock = FakeClock()
    config = small(hbm=1 << 18, dram=None, ssd=None, spec=TINY, limits=Limits(write_seconds=30.0))
    async with daemon_of(folder, config, Rig(clock=clock)) as daemon, connect(f"unix://{daemon.path}", deadline=60.0) as client:
        kv = await client.open(SPACE, TINY)
        await store(kv, tokens)
        counts = daemon.house.counts
        async with deaf(daemon.path, TINY) as (raw, number):
            [session] = [one for one in daemon.house.sessions if one.token == raw.welcome.token]
            for count in range(2):
                await raw.send(wire.Match, kv=number, prompt=whole(tokens, number=count))
            await until(lambda: session.holdings.leases == 2 and session._outbox.due() is not None)
            clock.advance(29.9)
            daemon.house.terms.sweep()
            for _ in range(20):
                assert await read(kv, tokens[:10]) == 10
            assert not session.done.is_set() and (counts.stalled, counts.overrun) == (0, 0)
            clock.advance(0.1)
            await until(session.done.is_set)

            assert (counts.stalled, counts.overrun) == (1, 0) and session.quit == "it has not read for too long"
            assert sum(len(one.leases) for one in daemon.cache.stacks[0].cache.sessions) == 0
            assert await read(kv, tokens) == LONG and not client.stats().misses


async def test_r4_a_slow_client_that_reads_is_not_ended(folder: Path, seed: int) -> None:
    """Each reply has its own time: a client that takes one after the other may take longer over all of them."""
    tokens = long_prompt(seed)
    clock = FakeClock()
    config = small(hbm=1 << 18, dram=None, ssd=None, spec=TINY, limits=Limits(write_seconds=30.0))
    async with daemon_of(folder, config, Rig(clock=clock)) as daemon, session_at(daemon.path) as raw:
        async with connect(f"unix://{daemon.path}", deadline=60.0) as client:
            await store(await client.open(SPACE, TINY), tokens)
        opened = await raw.open(spec=TINY)
        [session] = daemon.house.sessions
        for _ in range(4):
            reading(raw).pause_reading()
            sent = [await raw.send(wire.Match, kv=opened.kv, prompt=whole(tokens, number=number)) for number in range(2)]
            await until(lambda: session._outbox.due() is not None)
            clock.advance(20.0)
            reading(raw).resume_reading()
            for number in sent:
                answer = await raw.reply(number)
                assert isinstance(answer, wire.Leased) and answer.blocks == LONG
            daemon.house.terms.sweep()

            assert daemon.house.counts.stalled == 0


def transactions(disk: SsdStore) -> int:
    """Return how many read transactions on the data stand now."""
    lines = [line for values in disk._values.values() for line in values._open().readers().splitlines()[1:]]
    return sum(line.split()[-1] != "-" for line in lines)


async def overwrite(kv: RemoteKV, seed: int, count: int) -> None:
    """Make so many new records, each in the place of an old one."""
    for number in range(count):
        tokens = prompt(seed + number, 1)
        await store(kv, tokens)
        assert await kv.flush(tokens) == len(tokens)


async def test_r4_a_client_that_does_not_read_holds_no_snapshot(folder: Path, seed: int) -> None:
    """While its replies about blocks from SSD wait, a hundred overwrites leave the file as large as a hundred did before."""
    kept = prompt(seed + 1000, 2)
    config = small(hbm=4, dram=4, ssd=40, directory=folder / "kv", spec=LARGE, limits=Limits(queued_bytes="64 KiB"))
    async with daemon_of(folder, config) as daemon, connect(f"unix://{daemon.path}", deadline=60.0) as client:
        kv = await client.open(SPACE, LARGE)
        await overwrite(kv, seed, 140)
        await store(kv, kept)
        await kv.flush(kept)
        await sink(daemon.cache)
        disk = disk_of(daemon.cache)
        before = disk.stats().raw_file_bytes
        async with deaf(daemon.path, LARGE) as (raw, number):
            asked = await raw.send(wire.Match, kv=number, prompt=whole(kept))
            [session] = [one for one in daemon.house.sessions if one.token == raw.welcome.token]
            await until(lambda: session.holdings.leases == 1)
            lease = next(iter(session.holdings._leases))
            while session._outbox.due() is None:  # until its replies wait
                asked = await raw.send(wire.Ready, lease=lease)
                if asked % 64 == 0:
                    await asyncio.sleep(0)
            await overwrite(kv, seed + 200, 100)
            await daemon.cache.settle()

            assert session._outbox.due() is not None and not session.done.is_set()
            assert transactions(disk) == 0
            assert disk.stats().raw_file_bytes <= before
        await until(session.done.is_set)
        assert await read(kv, kept) == len(kept)


async def test_r4_more_clients_than_there_is_room_for_are_told(seed: int) -> None:
    """Two hundred come at once where four may: the rest is refused by name, at little cost, and comes in when there is room."""
    config = small(hbm=64, dram=64, ssd=None, limits=Limits(sessions=4, connections=190))
    with own_process(config) as daemon:
        path = Path(daemon.address.removeprefix("unix://"))
        async with connect(daemon.address, back_off=BackOff(first=0.01, most=0.05)) as client:
            await client.connected()
        assert daemon.process is not None
        before = memory_of(daemon.process.pid)
        async with AsyncExitStack() as stack:

            async def come(number: int) -> str:
                try:
                    raw = await stack.enter_async_context(connected(path))
                except aiohttp.WSServerHandshakeError as error:
                    return f"status {error.status}"
                answer = await raw.reply(await raw.send(wire.Hello, version=wire.VERSION))
                if isinstance(answer, wire.Failed):
                    return answer.kind
                assert isinstance(answer, wire.Welcome)
                raw.welcome = answer
                opened = await raw.open()
                return f"stored {await stored(raw, opened, await fetched(raw), prompt(seed + number, 3))}"

            came = await asyncio.gather(*(come(number) for number in range(200)))
            grown = memory_of(daemon.process.pid) - before
            async with connect(daemon.address) as late:
                kv = await late.open(SPACE, SPEC)
                refused = await kv.insert(prompt(seed, 1), tensor_of(prompt(seed, 1)))
                assert refused == (0, 0, SIZE)
                assert late.stats().misses.keys() <= {"LimitReached", "busy"} and late.stats().misses

        told = {what: came.count(what) for what in came}
        assert told.pop("stored 3") == 4
        assert told.keys() == {"LimitReached", "status 429"} and sum(told.values()) == 196
        assert grown <= MOST, f"grew by {grown} bytes"
        async with connect(daemon.address, back_off=BackOff(first=0.01, most=0.05)) as client:
            await client.connected()
            kv = await client.open(SPACE, SPEC)
            found = [await read(kv, prompt(seed + number, 3)) for number in range(200)]
            assert found == [3 * SIZE if what == "stored 3" else 0 for what in came]
            await client.check()
