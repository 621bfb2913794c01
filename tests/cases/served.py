"""A daemon in a process of its own, as an operator runs it, and what the system says of that process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from tests.service.daemon.http import get
from tiercache.config import Config

PATIENCE = 100.0
"""Seconds after which what a test waits for never comes."""


def toml(config: Config) -> str:
    """Return a configuration as its file says it."""
    plain = msgspec.to_builtins(config)
    tiers, limits = plain.pop("tiers"), plain.pop("limits")
    lines = [_line(name, value) for name, value in plain.items() if value not in (None, [])]
    lines += ["[limits]", *(_line(name, value) for name, value in limits.items() if value is not None)]
    for tier in tiers:
        lines += ["[[tiers]]", *(_line(name, value) for name, value in tier.items())]
    return "\n".join(lines) + "\n"


def _line(name: str, value: object) -> str:
    return f"{name} = {json.dumps(value)}"


class File(NamedTuple):
    """A memfd that a process has open."""

    name: str
    inode: tuple[int, int]
    mode: int
    size: int
    allocated: int


def memfds(pid: int) -> list[File]:
    """Return the memfds that a process has open, each once."""
    found = {}
    for entry in _descriptors(pid):
        try:
            name, status = os.readlink(entry), os.stat(entry)
        except OSError:  # closed by now
            continue
        if named := re.match(r"/memfd:(\S+)", name):
            inode = (status.st_dev, status.st_ino)
            found[inode] = File(named[1], inode, stat.S_IMODE(status.st_mode), status.st_size, 512 * status.st_blocks)
    return list(found.values())


def holders(inodes: set[tuple[int, int]]) -> list[int]:
    """Return the processes of this machine that have one of these memfds open."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and {each.inode for each in memfds(int(entry))} & inodes]


async def gone(inodes: set[tuple[int, int]]) -> bool:
    """Wait until no process but this one, which may have been a client, has these memfds open."""

    async def are_gone() -> bool:
        return not set(holders(inodes)) - {os.getpid()}

    await until(are_gone, every=0.1)
    return True


async def until(true: Callable[[], Awaitable[bool]], *, every: float = 0.01) -> None:
    """Wait until something is true of another process, asked again and again."""
    async with asyncio.timeout(PATIENCE):
        while not await true():  # noqa: ASYNC110 - what another process does sets no event here
            await asyncio.sleep(every)


def _descriptors(pid: int) -> list[str]:
    try:
        return [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:  # ended, or not ours to look at
        return []


class Held(NamedTuple):
    """How many descriptors and threads a process has."""

    descriptors: int
    threads: int

    def is_near(self, other: Held) -> bool:
        """Return whether both counts differ by at most 2."""
        return all(abs(mine - its) <= 2 for mine, its in zip(self, other, strict=True))


class Served:
    """A daemon process. `path` is its socket."""

    def __init__(self, path: Path, process: asyncio.subprocess.Process) -> None:
        self.path = path
        self.address = f"unix://{path}"
        self.process = process

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    async def ready(self) -> None:
        """Wait until it serves."""

        async def serves() -> bool:
            assert self.process.returncode is None, await self.ended()
            try:
                return bool((await get(self.path, "/health"))[1]["status"] == "ok")
            except (aiohttp.ClientError, OSError):
                return False

        await until(serves)

    async def stats(self) -> dict[str, Any]:
        """Return what it counts."""
        return dict((await get(self.path, "/v1/stats"))[1])

    async def until(self, true: Callable[[dict[str, Any]], bool]) -> None:
        """Wait until its counts are so."""

        async def are() -> bool:
            return true(await self.stats())

        await until(are)

    def held(self) -> Held:
        """Return what the process holds now."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        threads = re.search(r"^Threads:\s+(\d+)", status, re.MULTILINE)
        assert threads is not None
        return Held(len(os.listdir(f"/proc/{self.pid}/fd")), int(threads[1]))

    async def until_near(self, base: Held) -> None:
        """Wait until it holds what it held, give or take two."""

        async def is_near() -> bool:
            return self.held().is_near(base)

        await until(is_near)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    async def ended(self) -> tuple[int | None, str]:
        """Return its exit status and what it said on standard error, once it has ended."""
        async with asyncio.timeout(PATIENCE):
            _, said = await self.process.communicate()
        return self.process.returncode, said.decode()

    async def stop(self) -> None:
        """Stop it in order."""
        self.signal(signal.SIGTERM)
        code, said = await self.ended()
        assert code == 0, said

    async def kill(self) -> None:
        """End it without a word."""
        self.signal(signal.SIGKILL)
        await self.ended()


@asynccontextmanager
async def starting(
    folder: Path, config: Config, *, name: str = "s", program: Sequence[str] = ("-m", "tiercache.service.daemon"), shell: str = ":"
) -> AsyncIterator[Served]:
    """A daemon that may not serve yet, on the socket `name` in `folder`; killed in the end if it is still there.

    `shell` is run before it in its own process, such as `umask 000`.
    """
    file, path = folder / f"{Path(name).name}.toml", folder / name
    file.write_text(toml(config))
    command = [sys.executable, *program, "--config", str(file), "--socket", str(path), "--log-level", "warning"]
    process = await asyncio.create_subprocess_exec(
        "/bin/sh", "-c", f'{shell}; exec "$@"', "sh", *command, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield Served(path, process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def served(folder: Path, config: Config, **how: Any) -> AsyncIterator[Served]:
    """A daemon that serves."""
    async with starting(folder, config, **how) as daemon:
        await daemon.ready()
        yield daemon
