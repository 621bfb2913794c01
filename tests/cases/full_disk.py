"""A process that fills the disk under a cache: `python -m tests.cases.full_disk cache|daemon LIMIT DIR`; it says `well` at its end.

The disk is full where the file system of DIR is (LIMIT 0), or where a file would pass LIMIT bytes: the limit of the process, which
the kernel answers by an error of the same kind, and which is there without any privilege. It is set when the cache is open, as
the memory of the upper tiers is a file, too.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tests.service.caches import LARGE, SIZE, SPACE, disk_of, opened_kv, prompt, read, small, stack_of, store
from tests.service.client.daemons import own_process
from tests.service.daemon.http import get
from tiercache.config import Config
from tiercache.service.client.client import connect

PROMPTS = 60
BLOCKS = 4
WHOLE = BLOCKS * SIZE


class Room:
    """How much disk there is: less from `take` on, more from `give` on."""

    def __init__(self, directory: Path, limit: int) -> None:
        self._ballast = directory / "ballast"
        self._limit = limit
        if not limit:
            self._ballast.write_bytes(bytes(1 << 19))

    def take(self, pid: int) -> None:
        """Let the disk be as small as it is to be."""
        if self._limit:
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (self._limit, hard))

    def lift(self, pid: int) -> None:
        """Let memory be allocated, which the limit would refuse, too; a file system stays as full as it is."""
        if self._limit:
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))

    def give(self, pid: int) -> None:
        """Make room."""
        self.lift(pid)
        if not self._limit:
            self._ballast.unlink()


async def fill(kv: Any) -> list[int]:
    """Store all prompts and flush each; return those that were acknowledged as durable."""
    durable = []
    for number in range(PROMPTS):
        await store(kv, prompt(number, BLOCKS))
        flushed = await kv.flush(prompt(number, BLOCKS))
        assert flushed in range(0, WHOLE + 1, SIZE)
        if flushed == WHOLE:
            durable.append(number)
    assert 3 < len(durable) < PROMPTS - 10, durable
    return durable


async def all_exact(kv: Any, numbers: Any) -> None:
    """Read prompts; all of them must come, every byte."""
    for number in numbers:
        assert await read(kv, prompt(number, BLOCKS)) == WHOLE, number


async def in_one_process(config: Config, room: Room) -> None:
    """The cache in this process: full, closed and opened again while full, room by deleting, room by more disk."""
    async with opened_kv(config, spec=LARGE) as (cache, kv):
        room.take(0)
        durable = await fill(kv)
        failures = stack_of(cache).cache.stats.failures
        assert set(failures) == {"StoreFull"} and disk_of(cache).stats().refused["disk full"] > 0
        await all_exact(kv, range(PROMPTS))  # memory goes on
        await cache.check()
    room.lift(0)
    async with opened_kv(config, spec=LARGE) as (cache, kv):
        room.take(0)
        await all_exact(kv, durable)  # all of it comes from the disk
        given_up, kept = durable[: len(durable) // 2], durable[len(durable) // 2 :]
        for number in given_up:
            assert await kv.delete(prompt(number, BLOCKS)) == WHOLE
        for number in (58, 59):
            await store(kv, prompt(number, BLOCKS))
            assert await flushed(kv, number), f"no room for prompt {number} after deletes"
        await cache.check()
    room.give(0)
    async with opened_kv(config, spec=LARGE) as (cache, kv):
        await all_exact(kv, [*kept, 58, 59])
        assert [await read(kv, prompt(number, BLOCKS)) for number in given_up] == [0] * len(given_up)
        await cache.check()


async def flushed(kv: Any, number: int) -> bool:
    """Flush a prompt; for a while after a refusal nothing more is tried, so it is asked for as often as that may take."""
    for _ in range(400):
        if await kv.flush(prompt(number, BLOCKS)) == WHOLE:
            return True
        await asyncio.sleep(0.05)
    return False


async def beside_a_daemon(config: Config, room: Room) -> None:
    """A daemon and its client: full, degraded and alive; with room again it resumes; killed, it finds what it acknowledged."""
    with own_process(config) as daemon:
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(connect(daemon.address, deadline=60.0))
            await client.connected()
            assert daemon.process is not None
            kv = await client.open(SPACE, LARGE)
            room.take(daemon.process.pid)
            durable = await fill(kv)
            await all_exact(kv, range(PROMPTS))
            _, metrics = await get(Path(daemon.address.removeprefix("unix://")), "/metrics")
            assert 'reason="StoreFull"' in metrics
            assert daemon.process.poll() is None and client.stats().misses == {}

            room.give(daemon.process.pid)
            assert await flushed(kv, 59), "nothing is stored although there is room"
            await all_exact(kv, range(PROMPTS))
            await client.check()
        daemon.kill()
        daemon.start()
        async with connect(daemon.address, deadline=60.0) as client:
            await client.connected()
            await all_exact(await client.open(SPACE, LARGE), [*durable, 59])


def main() -> None:
    """Play one of the two."""
    role, limit, directory = sys.argv[1:]
    config = small(hbm=4, dram=300, ssd=2000, spec=LARGE, directory=Path(directory) / "ssd", admit_ms=60_000, drain_seconds=0.0)
    play = {"cache": in_one_process, "daemon": beside_a_daemon}[role]
    asyncio.run(play(config, Room(Path(directory), int(limit))))
    print("well")


if __name__ == "__main__":
    main()
