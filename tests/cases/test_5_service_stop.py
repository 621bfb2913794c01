"""R5: shutdown in order, whatever is going on, and coming back after an end without one."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.cases.served import Served, gone, memfds, served, starting
from tests.seams import Rig
from tests.service.caches import LARGE, SPACE, prompt, read, sink, small, stack_of, store, tensor_of
from tests.service.client.daemons import running
from tests.service.client.fake import until
from tests.service.daemon.raw import daemon_of, names_in, session_at
from tiercache.config import Config
from tiercache.service import wire
from tiercache.service.client.client import BackOff, connect
from tiercache.service.client.remote_kv import RemoteKV
from tiercache.service.daemon.daemon import Daemon
from tiercache.types import Tier

SIZE = LARGE.block_size
AT_ONCE = BackOff(first=0.01, most=0.05)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A new folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="tc") as name:
        yield Path(name)


def durable(folder: Path, *, drain: float = 20.0, **fields: Any) -> Config:
    sizes = {"hbm": 4, "dram": 16, "ssd": 256, **fields}
    return small(**sizes, directory=folder / "kv", spec=LARGE, admit_ms=5000, drain_seconds=drain)


@asynccontextmanager
async def idle(daemon: Served, count: int = 10) -> AsyncIterator[None]:
    """Clients that have each asked for one thing over HTTP and keep the connection, and sessions that say nothing."""
    async with AsyncExitStack() as stack:
        for _ in range(count):
            http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(daemon.path))))
            async with http.get("http://daemon/health") as answer:
                assert answer.status == 200
                await answer.read()
            await stack.enter_async_context(session_at(daemon.path))
        yield


class Writer:
    """Puts prompt after prompt until its daemon is gone; `inserted` and `flushed` are those that were acknowledged."""

    def __init__(self, kv: RemoteKV, seed: int) -> None:
        self.inserted: list[int] = []
        self.flushed: list[int] = []
        self.begun = seed
        self._kv = kv
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            self.begun += 1
            tokens = prompt(self.begun, 4)
            if (await self._kv.insert(tokens, tensor_of(tokens, spec=LARGE))).stored != 4 * SIZE:
                return
            self.inserted.append(self.begun)
            if await self._kv.flush(tokens) != 4 * SIZE:
                return
            self.flushed.append(self.begun)


@pytest.mark.parametrize("drain", [20.0, 0.0], ids=["flushed", "dropped"])
async def test_r5_shutdown_with_everything_going_on(folder: Path, drain: float, seed: int) -> None:
    """Ten idle keep-alive connections, ten idle sessions, a put in flight, SIGTERM: it exits with 0 and its names are gone.

    What was acknowledged as durable is there again; with time to drain so is all that was put; the put that was cut off is
    there or absent, as far as it is there exact.
    """
    config = durable(folder, drain=drain)
    put = prompt(seed + 5000, 4)
    async with served(folder, config) as daemon:
        inodes = {file.inode for file in memfds(daemon.pid)}
        assert len(inodes) == 3
        async with connect(daemon.address, deadline=60.0, back_off=BackOff(first=600.0, most=600.0)) as client, idle(daemon):
            kv = await client.open(SPACE, LARGE)
            await store(kv, put)
            writer = Writer(kv, seed)
            await until(lambda: len(writer.flushed) >= 3)
            daemon.signal(signal.SIGTERM)
            code, said = await daemon.ended()
            await writer.task
        assert code == 0, said
        assert names_in(folder) == ["kv", "s.toml"]
    assert await gone(inodes)
    async with served(folder, config) as daemon, connect(daemon.address, deadline=60.0) as client:
        kv = await client.open(SPACE, LARGE)
        for number in writer.inserted if drain else writer.flushed:
            assert await read(kv, prompt(number, 4)) == 4 * SIZE
        assert await read(kv, put) == 4 * SIZE or not drain
        assert await read(kv, prompt(writer.begun, 4)) % SIZE == 0
        await client.check()
        await daemon.stop()


@pytest.mark.parametrize("drain", [20.0, 0.05], ids=["flushed", "dropped"])
async def test_r5_shutdown_with_twenty_demotions_queued(folder: Path, drain: float, seed: int) -> None:
    """The first write is held and twenty blocks wait behind it: with time they are written, without it they are dropped.

    The stop ends either way, and what is there afterwards is exact and closed towards the root.
    """
    rig = Rig(patience=0.05)
    prompts = [prompt(seed + number, 1) for number in range(24)]
    config = durable(folder, drain=drain, dram=24, watermark_low=0.0, watermark_high=0.0)
    daemon = Daemon(config, folder / "s", seams=rig.seams())
    async with daemon, connect(f"unix://{daemon.path}", deadline=60.0, back_off=BackOff(first=600.0, most=600.0)) as client:
        kv = await client.open(SPACE, LARGE)
        for tokens in prompts:
            await store(kv, tokens, tier=Tier.DRAM)
        core = stack_of(daemon.cache).cache
        hold = rig.copies.hold("put")
        demoting = [asyncio.ensure_future(sink(daemon.cache))]
        await hold.reached()
        assert len(core.inflight.flying) >= 20
        stopping = asyncio.ensure_future(daemon.stop())
        await until(lambda: daemon.state == "draining")
        if drain > 1:
            rig.release()
        await stopping
        rig.release()
        await asyncio.gather(*demoting, return_exceptions=True)
    assert names_in(folder) == ["kv"]

    async with daemon_of(folder, config) as daemon, connect(f"unix://{daemon.path}", deadline=60.0) as client:
        kv = await client.open(SPACE, LARGE)
        found = [await read(kv, tokens) for tokens in prompts]
        assert found == [SIZE] * 24 if drain > 1 else sum(found) < 24 * SIZE
        await daemon.cache.check()


@pytest.mark.parametrize("signals", [[signal.SIGTERM, signal.SIGTERM], [signal.SIGINT], [signal.SIGTERM, signal.SIGINT]])
async def test_r5_signals(folder: Path, signals: list[signal.Signals], seed: int) -> None:
    """Clients are told, sessions end, blocks are written down, names go, the exit status is 0; a second signal changes nothing."""
    config = durable(folder)
    tokens = prompt(seed, 4)
    async with served(folder, config) as daemon, session_at(daemon.path) as raw:
        async with connect(daemon.address, deadline=60.0) as client:
            await store(await client.open(SPACE, LARGE), tokens)
        boot = raw.welcome.boot
        daemon.signal(signals[0])
        assert isinstance(await raw.notice(), wire.Draining)
        for number in signals[1:]:
            # One that comes at once would be the same signal to the system.
            with suppress(ProcessLookupError):
                daemon.signal(number)
        assert await raw.ended() and raw.ws.close_code == 1001
        code, said = await daemon.ended()
        assert code == 0, said
    assert names_in(folder) == ["kv", "s.toml"]
    async with served(folder, config) as daemon, connect(daemon.address, deadline=60.0) as client:
        kv = await client.open(SPACE, LARGE)
        async with kv.match(tokens) as hit:
            assert hit.tiers == {Tier.SSD: 4 * SIZE}
        assert await read(kv, tokens) == 4 * SIZE and client.boot != boot
        await daemon.stop()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("when", ["s.lock", "s"])
async def test_r5_sigterm_during_start(folder: Path, when: str, times: int) -> None:
    """As soon as the first name is there, or the socket: it exits with 0 and leaves nothing but the data directory."""
    config = small(hbm=1024, dram=1024, directory=folder / "kv", spec=LARGE)
    async with starting(folder, config) as daemon:
        while not (folder / when).exists():
            assert daemon.process.returncode is None
            await asyncio.sleep(0)
        for _ in range(times):
            daemon.signal(signal.SIGTERM)
        code, said = await daemon.ended()

        assert code == 0, said
        assert set(names_in(folder)) <= {"kv", "s.toml"}
    async with served(folder, durable(folder)) as daemon:
        await daemon.stop()


async def test_r5_sigterm_before_there_is_anything(folder: Path) -> None:
    """While the interpreter is still busy with imports it is the signal that ends it; nothing is there to be left."""
    async with starting(folder, durable(folder)) as daemon:
        daemon.signal(signal.SIGTERM)
        code, said = await daemon.ended()

        assert code in (0, -signal.SIGTERM), said
        assert set(names_in(folder)) <= {"kv", "s.toml"}


async def test_r5_killed_and_started_again(folder: Path, seed: int) -> None:
    """Sockets and locks that it left do not stand in the way, its memory is gone, what was acknowledged as durable is there."""
    config = durable(folder)
    tokens, new = prompt(seed, 4), prompt(seed + 1, 4)
    listed = set(os.listdir("/dev/shm"))
    for round_ in range(2):
        async with served(folder, config) as daemon, connect(daemon.address, deadline=60.0, back_off=AT_ONCE) as client:
            kv = await client.open(SPACE, LARGE)
            if round_ == 0:
                await store(kv, tokens)
                assert await kv.flush(tokens) == 4 * SIZE
            assert await read(kv, tokens) == 4 * SIZE
            inodes = {file.inode for file in memfds(daemon.pid)}
            await daemon.kill()
        assert (folder / "s").is_socket() and (folder / "s.fd").is_socket() and (folder / "s.lock").exists()
        assert await gone(inodes) and set(os.listdir("/dev/shm")) <= listed
    async with served(folder, config) as daemon, connect(daemon.address, deadline=60.0) as client:
        kv = await client.open(SPACE, LARGE)
        assert await read(kv, tokens) == 4 * SIZE
        await store(kv, new)
        assert await read(kv, new) == 4 * SIZE
        await client.check()
        await daemon.stop()
    assert names_in(folder) == ["kv", "s.toml"]


async def test_r5_stop_and_a_request_that_waits(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that waits for another one's reservation is answered or ended, and the stop is not held up by it."""
    monkeypatch.setattr("tiercache.service.daemon.daemon._REQUESTS_END", 0.2)
    tokens = prompt(seed, 4)
    async with (
        running(small(ssd=None, spec=LARGE)) as (daemon, address),
        connect(address, back_off=AT_ONCE) as one,
        connect(address, back_off=AT_ONCE) as two,
    ):
        there, here = await one.open(SPACE, LARGE), await two.open(SPACE, LARGE)
        async with there.reserve(tokens):
            waiting = asyncio.ensure_future(here.insert(tokens, tensor_of(tokens, spec=LARGE)))
            await until(lambda: daemon.house.counts.requests["Reserve"] == 2)
            await daemon.stop()
            assert (await waiting).stored == 0
