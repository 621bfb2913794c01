"""Q2: what a SIGKILL leaves, what cycles of clients leave, and what a crowd of connections can take."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.cases.brood import brood
from tests.cases.served import gone, memfds, served, starting, until
from tests.service.caches import LARGE, SPACE, prompt, read, small, store
from tests.service.daemon.http import ask, get
from tests.service.daemon.raw import connected, daemon_of, descriptors_path, session_at
from tiercache.config import Limits
from tiercache.errors import InvalidConfig
from tiercache.service import wire, wire_memory
from tiercache.service.client.client import BackOff, connect
from tiercache.service.daemon.connections import require_descriptors
from tiercache.storage.memory import HostMemory

SIZE = LARGE.block_size
NO_MORE = BackOff(first=600.0, most=600.0)
SHM = Path("/dev/shm")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A new folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="tc") as name:
        yield Path(name)


@pytest.mark.parametrize("name", ["fixed", "new"])
async def test_q2_five_rounds_of_sigkill(folder: Path, name: str, seed: int) -> None:
    """Start, fill, SIGKILL, five times, on one socket and on a new one each time: never more than one live set of memory.

    Memory has no name in /dev/shm or anywhere else: the kernel gives it back with its last process. Decoys there and beside the
    socket, of a live process, with our names and with the daemon's process id in them, are left alone.
    """
    listed = set(os.listdir(SHM))
    decoys = [SHM / f"tiercache-{os.getpid()}", folder / "s1.sock", folder / "s.fd2"]
    for decoy in decoys:
        decoy.write_bytes(b"a decoy")
    own = HostMemory(8192, name="tiercache-dram")
    own.array[:] = 7
    left: set[tuple[int, int]] = set()
    config = small(hbm=64, dram=64, ssd=64, directory=folder / "kv", spec=LARGE, drain_seconds=0.0)
    try:
        for number in range(5):
            async with served(folder, config, name="s" if name == "fixed" else f"s-{number}") as daemon:
                decoys.append(SHM / f"tiercache-dram-{daemon.pid}")
                decoys[-1].write_bytes(b"a decoy")
                async with connect(daemon.address, deadline=60.0, back_off=NO_MORE) as client:
                    kv = await client.open(SPACE, LARGE)
                    for part in range(8):
                        await store(kv, prompt(seed + part, 16))
                    live = {file.inode for file in memfds(daemon.pid)}
                    await daemon.kill()
                assert await gone(live | left)
                left |= live
            assert set(os.listdir(SHM)) - listed == {decoy.name for decoy in decoys if decoy.parent == SHM}
        assert len(left) == 15
        assert all(decoy.read_bytes() == b"a decoy" for decoy in decoys)
        assert (own.array == 7).all()
    finally:
        own.close()
        for decoy in decoys:
            decoy.unlink()


async def cycle(folder: Path, clients: int, at_once: int, seed: int) -> None:
    """Let clients connect, attach and die, and compare what the daemon holds with what it held."""
    async with served(folder, small(ssd=None, spec=LARGE, hbm=16, dram=64)) as daemon, brood(daemon.path) as children:
        async with connect(daemon.address, deadline=60.0) as client:
            await store(await client.open(SPACE, LARGE), prompt(seed, 24))
        children.kill(await children.hatch(("mapped", seed)))
        await daemon.until(lambda stats: stats["connections"] == 1)
        base = daemon.held()
        for number in range(0, clients, at_once):
            roles = [("mapped", "hold-view")[each % 2] for each in range(number, number + at_once)]
            children.kill(await children.hatch(*((role, seed) for role in roles)))
        await daemon.until(lambda stats: (len(stats["sessions"]), stats["kept_back"], stats["connections"]) == (0, 0, 1))

        await daemon.until_near(base)
        assert (await daemon.stats())["counts"]["sessions"] >= clients
        async with connect(daemon.address, deadline=60.0) as client:
            assert await read(await client.open(SPACE, LARGE), prompt(seed, 24)) == 24 * SIZE
            await client.check()


async def test_q2_clients_that_connect_attach_and_are_killed(folder: Path, seed: int) -> None:
    """Thirty of them: the daemon's descriptors and threads are what they were, give or take two."""
    await cycle(folder, 30, 10, seed)


@pytest.mark.slow
async def test_q2_three_hundred_clients(folder: Path, seed: int) -> None:
    """Three hundred, the same."""
    await cycle(folder, 300, 10, seed)


# --- connections ----------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Crowd:
    """A process that holds connections."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def heard(self) -> tuple[int, list[str]]:
        """Return how many connections it has, and what those were told that it has no more."""
        assert self._process.stdout is not None
        async with asyncio.timeout(60):
            standing, told = json.loads(await self._process.stdout.readline())
        return standing, told

    async def look(self) -> tuple[int, list[str]]:
        """Let it look again."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        return await self.heard()


@asynccontextmanager
async def crowd(count: int, *places: Path | str) -> AsyncIterator[Crowd]:
    """So many silent connections."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        Path(__file__).with_name("crowd.py"),
        str(count),
        *map(str, places),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Crowd(process)
    finally:
        process.kill()
        await process.communicate()


async def test_q2_two_thousand_idle_connections(folder: Path, seed: int) -> None:
    """On all three sockets: refused at the limit and told why; those that were there go on, and writes to the disk, too.

    The process may have no more descriptors than the limits need: without them the crowd would take those of the disk.
    """
    (folder / "token").write_text("a-token-that-is-long")
    (folder / "token").chmod(0o600)
    admin = f"127.0.0.1:{free_port()}"
    config = small(
        ssd=64,
        directory=folder / "kv",
        spec=LARGE,
        admin=admin,
        admin_token_file=str(folder / "token"),
        limits=Limits(sessions=16, connections=200),
    )
    async with served(folder, config, shell="ulimit -n 360") as daemon, connect(daemon.address, deadline=60.0) as client:
        kv = await client.open(SPACE, LARGE)
        places = (daemon.path, descriptors_path(daemon.path), admin)
        async with contextlib.AsyncExitStack() as stack:
            crowds = [await stack.enter_async_context(crowd(500, *places)) for _ in range(4)]
            told: set[str] = set()

            async def are_refused() -> bool:
                heard = [await each.look() for each in crowds]
                told.update(text for _, texts in heard for text in texts)
                return sum(count for count, _ in heard) <= 200 - 2

            for each in crowds:
                await each.heard()
            await until(are_refused)
            answers = {text.partition("\r\n")[0] for text in told if text.startswith("HTTP")}
            assert answers == {"HTTP/1.1 429 Too Many Requests"}
            assert all("the limit is 200" in text for text in told if text)
            assert any("LimitReached" in text for text in told)
            for number in range(4):
                tokens = prompt(seed + number, 4)
                await store(kv, tokens)
                assert await kv.flush(tokens) == 4 * SIZE and await read(kv, tokens) == 4 * SIZE
            await client.check()
        await daemon.until(lambda stats: stats["connections"] == 3)
        assert (await daemon.stats())["counts"]["refused_connections"] >= 2000 - 200
        async with connect(daemon.address, deadline=60.0) as another:
            assert await read(await another.open(SPACE, LARGE), prompt(seed, 4)) == 4 * SIZE


async def test_q2_connection_that_says_nothing_is_closed(folder: Path) -> None:
    """Before a request, in the middle of one, before hello, after an answer, without a fetch: each ends by the idle clock.

    A session that has said hello, and the connection that has brought it descriptors, may say nothing as long as they like.
    """
    config = small(ssd=None, limits=Limits(idle_seconds=0.3))
    async with daemon_of(folder, config) as daemon, session_at(daemon.path) as raw, connect(f"unix://{daemon.path}") as client:
        await raw.open()
        links = [await asyncio.open_unix_connection(str(daemon.path)) for _ in range(3)]
        links[1][1].write(b"GET /health HTTP/1.1\r\nHo")
        links[2][1].write(b"GET /health HTTP/1.1\r\nHost: d\r\n\r\n")
        packets = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        packets.connect(str(descriptors_path(daemon.path)))
        async with connected(daemon.path) as unsaid, asyncio.timeout(20):
            assert await unsaid.ended()
            for reader, writer in links:
                text = await reader.read()
                assert text == b"" or text.startswith(b"HTTP/1.1 200")
                writer.close()
            assert await asyncio.get_running_loop().sock_recv(packets, 100) == b""
        packets.close()

        await raw.call(wire.Audited, wire.Check)
        await client.check()
        assert client.stats().sessions == 1 and not client.stats().misses


async def test_q2_one_too_many_is_told_so_on_each_socket(folder: Path) -> None:
    """HTTP 429 with the limit, a refusal packet, and, when there is room again, an answer."""
    config = small(ssd=None, limits=Limits(sessions=2, connections=6))
    async with daemon_of(folder, config) as daemon, session_at(daemon.path) as raw:
        idle = [await asyncio.open_unix_connection(str(daemon.path)) for _ in range(3)]
        while daemon.house.connections.standing < 4:  # noqa: ASYNC110 - accepting sets no event
            await asyncio.sleep(0)

        told = "too many connections; the limit is 6 (limits.connections), 2 of them for descriptors\n"
        assert await get(daemon.path, "/health") == (429, told)
        links = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) for _ in range(3)]
        for link in links:
            link.connect(str(descriptors_path(daemon.path)))
        packets = links.pop()
        refused = wire_memory.handed.decode(await asyncio.get_running_loop().sock_recv(packets, 1000))
        assert isinstance(refused, wire.Failed) and refused.kind == "LimitReached"
        packets.close()
        for link in links:  # there was room for these, whatever the crowd
            link.close()
        while daemon.house.connections.standing > 4:  # noqa: ASYNC110
            await asyncio.sleep(0)
        async with connect(f"unix://{daemon.path}", back_off=NO_MORE) as client:
            assert client.boot is None and client._last is not None and "429" in client._last.message
        await raw.open()
        for _, writer in idle:
            writer.close()
            await writer.wait_closed()
        while daemon.house.connections.standing > 1:  # noqa: ASYNC110 - the server sets no event when a connection has gone
            await asyncio.sleep(0)
        assert (await ask(aiohttp.UnixConnector(path=str(daemon.path)), "GET", "http://daemon/health"))[0] == 200


async def test_q2_crowd_that_comes_at_once(folder: Path) -> None:
    """Connections that are taken in one turn of the loop are counted one by one: no more than the limit stand."""
    config = small(ssd=None, limits=Limits(sessions=2, connections=6))
    async with daemon_of(folder, config) as daemon:
        kinds = [(daemon.path, socket.SOCK_STREAM)] * 10 + [(descriptors_path(daemon.path), socket.SOCK_SEQPACKET)] * 10
        links = [socket.socket(socket.AF_UNIX, kind) for _, kind in kinds]
        for link, (path, _) in zip(links, kinds, strict=True):
            link.connect(str(path))
        async with asyncio.timeout(20):
            while daemon.house.connections.refused < 14:  # noqa: ASYNC110 - accepting sets no event
                await asyncio.sleep(0)

        assert daemon.house.connections.standing == 6
        for link in links:
            link.close()


def test_q2_limits_that_the_process_has_no_descriptors_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the hard limit is refused by name; a soft limit that is too low is raised to what is needed, and no further."""
    limits = [(100, 1000)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.append(pair))

    with pytest.raises(InvalidConfig, match=r"limits\.connections.*need 1128 descriptors.*1000"):
        require_descriptors(900, 100)
    require_descriptors(700, 100)
    require_descriptors(600, 100)

    assert limits == [(100, 1000), (928, 1000)]


async def test_q2_daemon_without_enough_descriptors_does_not_start(folder: Path) -> None:
    """It says so and ends with 2, rather than to fail when its disk needs one."""
    async with starting(folder, small(ssd=None), shell="ulimit -n 200") as daemon:
        code, said = await daemon.ended()

    assert code == 2 and "limits.connections" in said and "Traceback" not in said
