"""Clients as processes of their own, forked off one that has imported everything: `brood.py SOCKET`.

Each line of standard input is a client to be, `[role, seed]` as JSON. It goes to one point of a client's life, says so with its
process id, and stays there until it is killed. Roles are those of `tests/service/client/child.py`, and here those of a client
that has not asked for anything yet.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tests.seams import PATIENCE
from tests.service.caches import LARGE
from tests.service.client import child
from tests.service.daemon.raw import Raw, connected, descriptors_path, fetched, session_at, slots_of
from tiercache.service.client.client import connect


def say(**what: object) -> None:
    """Tell the test, as one write: several processes share the pipe."""
    os.write(1, (json.dumps({"pid": os.getpid(), **what}) + "\n").encode())


# --- the processes --------------------------------------------------------------------------------------------------------


async def silent(path: Path) -> None:
    """Connect, and say nothing."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(path))
        await child.stay()


async def half_asked(path: Path) -> None:
    """Ask for a session, and not finish the question."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(path))
        link.send(b"GET /v1/session HTTP/1.1\r\nHost: ")
        await child.stay()


async def linked(path: Path) -> None:
    """Connect to where descriptors are handed out, and ask for none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(str(descriptors_path(path)))
        await child.stay()


async def upgraded(path: Path) -> None:
    """Have a WebSocket, and not say hello."""
    async with connected(path):
        await child.stay()


async def greeted(path: Path) -> None:
    """Say hello, and ask for nothing."""
    async with session_at(path):
        await child.stay()


async def mapped(path: Path) -> None:
    """Have descriptors and map what they lead to, read and write, before the first request for anything in it."""
    async with session_at(path) as raw:
        kept = await attached(raw)
        await child.stay()
        del kept


async def attached(raw: Raw) -> list[object]:
    """Map all memory of the daemon."""
    opened = await raw.open(spec=LARGE)
    handed = await fetched(raw)
    return [slots_of(handed, at, LARGE, writable=writable) for at in opened.arenas for writable in (False, True)]


EARLY: dict[str, Callable[[Path], Awaitable[None]]] = {
    "silent": silent,
    "half-asked": half_asked,
    "linked": linked,
    "upgraded": upgraded,
    "greeted": greeted,
    "mapped": mapped,
}


async def live(path: Path, role: str, seed: int) -> None:
    """Be one client."""
    if role in EARLY:
        await EARLY[role](path)
        return
    async with connect(f"unix://{path}", deadline=60.0) as client:
        await child.run(role, client, seed)


def main(path: Path) -> None:
    """Fork a client for each line."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    child.say = say
    pids = []
    for line in sys.stdin:
        role, seed = json.loads(line)
        pid = os.fork()
        if pid == 0:
            try:
                asyncio.run(live(path, role, seed))
            except BaseException:  # noqa: BLE001 - the test is to see whatever it is, and no process may go on from here
                say(broke=traceback.format_exc())
            finally:
                os._exit(1)
        pids.append(pid)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


# --- as a test sees them --------------------------------------------------------------------------------------------------


class Brood:
    """The process that forks clients."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def hatch(self, *clients: tuple[str, int]) -> list[int]:
        """Make clients, by role and seed, and return their process ids once all of them are there."""
        assert self._process.stdin is not None and self._process.stdout is not None
        for role, seed in clients:
            self._process.stdin.write((json.dumps([role, seed]) + "\n").encode())
        await self._process.stdin.drain()
        pids = []
        async with asyncio.timeout(6 * PATIENCE):
            for _ in clients:
                said = json.loads(await self._process.stdout.readline())
                assert "broke" not in said, said["broke"]
                pids.append(int(said["pid"]))
        return pids

    @staticmethod
    def kill(pids: list[int]) -> None:
        """End clients without a word."""
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def brood(path: Path) -> AsyncIterator[Brood]:
    """Clients of the daemon at `path`, none of which outlives this."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, str(path), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield Brood(process)
    finally:
        await process.communicate(b"")  # closes its input, which is what it ends by


if __name__ == "__main__":
    main(Path(sys.argv[1]))
