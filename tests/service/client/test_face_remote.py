"""Clients of a daemon pass the suite of all faces: the async one, and the blocking one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeVar, cast

import pytest

from tests.seams import Rig
from tests.service.caches import SPEC, small
from tests.service.client.daemons import running
from tests.service.face_suite import OpenCache, Opened, ReadingSuite, WritingSuite
from tests.service.face_suite_keeping import IdentitySuite, KeepingSuite
from tests.service.face_suite_prefetch import PrefetchSuite
from tests.service.face_suite_refusals import RefusalSuite
from tiercache.config import Config
from tiercache.kernels.device import Device
from tiercache.service.client.blocking import BlockingClient, BlockingHit, BlockingKV, BlockingRoom
from tiercache.service.client.client import Client, connect
from tiercache.service.daemon.daemon import Daemon
from tiercache.service.face import KV
from tiercache.spec import KVSpec, Namespace

R = TypeVar("R")
DEADLINE = 120.0


class _Remote:
    def __init__(self, daemon: Daemon, client: Client) -> None:
        self._daemon = daemon
        self._client = client

    async def open(self, space: Namespace, spec: KVSpec) -> KV:
        return await self._client.open(space, spec)

    async def check(self) -> Mapping[str, int]:
        return await self._client.check()

    async def settle(self) -> None:
        await self._daemon.cache.settle()

    async def matches(self) -> int:
        await self._client.check()  # what was sent before has been heard then
        return sum(stack.cache.stats.matches for stack in self._daemon.cache.stacks)


@asynccontextmanager
async def open_async(config: Config, rig: Rig | None = None, *, device: Device | None = None) -> AsyncIterator[Opened]:
    async with running(config, rig) as (daemon, address), connect(address, deadline=DEADLINE, device=device) as client:
        yield _Remote(daemon, client)


class _Thread:
    """Runs what blocks beside the loop: each call in a thread of its own, as one may wait for what another does."""

    async def __call__(self, call: Callable[..., R], *args: Any, **named: Any) -> R:
        with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="blocking-caller") as pool:
            return await asyncio.get_running_loop().run_in_executor(pool, lambda: call(*args, **named))


class _Hit:
    def __init__(self, thread: _Thread, hit: BlockingHit) -> None:
        self._thread, self.hit = thread, hit

    def __getattr__(self, name: str) -> Any:
        return getattr(self.hit, name)  # tokens, tiers, view, take: they do not wait in the async face either

    async def __aenter__(self) -> _Hit:
        await self._thread(self.hit.__enter__)
        return self

    async def __aexit__(self, *why: Any) -> None:
        await self._thread(self.hit.__exit__, *why)

    async def ready(self, within: object = None) -> int:
        return await self._thread(self.hit.ready, within)

    async def gather(self, out: Any = None) -> Any:
        return await self._thread(self.hit.gather, out)

    async def layer(self, layer: int, out: Any = None) -> Any:
        return await self._thread(self.hit.layer, layer, out)

    async def release(self) -> None:
        await self._thread(self.hit.release)


class _Room:
    def __init__(self, thread: _Thread, room: BlockingRoom) -> None:
        self._thread, self._room = thread, room

    def __getattr__(self, name: str) -> Any:
        return getattr(self._room, name)

    async def __aenter__(self) -> _Room:
        await self._thread(self._room.__enter__)
        return self

    async def __aexit__(self, *why: Any) -> None:
        await self._thread(self._room.__exit__, *why)

    async def commit(self, upto: int) -> int:
        return await self._thread(self._room.commit, upto)


class _KV:
    def __init__(self, thread: _Thread, kv: BlockingKV) -> None:
        self._thread, self._kv = thread, kv
        self.spec = kv.spec

    def match(self, tokens: Any, *, request: Any = None, prefetch: object = None) -> _Hit:
        return _Hit(self._thread, self._kv.match(tokens, request=request, prefetch=prefetch))

    def reserve(self, tokens: Any, *, after: _Hit | None = None, tier: Any = None) -> _Room:
        return _Room(self._thread, self._kv.reserve(tokens, after=None if after is None else after.hit, tier=tier))

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._kv, name)

        async def run(*args: Any, **named: Any) -> Any:
            return await self._thread(call, *args, **named)

        return run


class _Blocking:
    def __init__(self, thread: _Thread, daemon: Daemon, client: BlockingClient) -> None:
        self._thread, self._daemon, self._client = thread, daemon, client

    async def open(self, space: Namespace, spec: KVSpec) -> KV:
        return cast(KV, _KV(self._thread, await self._thread(self._client.open, space, spec)))

    async def check(self) -> Mapping[str, int]:
        return await self._thread(self._client.check)

    async def settle(self) -> None:
        await self._daemon.cache.settle()

    async def matches(self) -> int:
        await self.check()
        return sum(stack.cache.stats.matches for stack in self._daemon.cache.stacks)


@asynccontextmanager
async def open_blocking(config: Config, rig: Rig | None = None, *, device: Device | None = None) -> AsyncIterator[Opened]:
    thread = _Thread()
    async with running(config, rig) as (daemon, address):
        client = BlockingClient(address, deadline=DEADLINE, device=device)
        await thread(client.__enter__)
        try:
            yield _Blocking(thread, daemon, client)
        finally:
            await thread(client.close)


@pytest.fixture(params=[open_async, open_blocking], ids=["async", "blocking"])
def open_cache(request: pytest.FixtureRequest) -> OpenCache:
    """Open a daemon and a client of it."""
    opener: Callable[..., AbstractAsyncContextManager[Opened]] = request.param
    return opener


class TestReading(ReadingSuite):
    pass


class TestWriting(WritingSuite):
    pass


class TestRefusals(RefusalSuite):
    pass


class TestKeeping(KeepingSuite):
    pass


class TestIdentity(IdentitySuite):
    pass


class TestPrefetch(PrefetchSuite):
    pass


ON_UVLOOP = """
import sys, uvloop
from tests.service.caches import SPACE, SPEC, prompt, read, store
from tiercache.service.client.client import connect

async def main(address):
    async with connect(address, deadline=120.0) as client:
        kv = await client.open(SPACE, SPEC)
        await store(kv, prompt(1, 4))
        print(await read(kv, prompt(1, 4)), dict(client.stats().misses))

uvloop.run(main(sys.argv[1]))
"""


async def test_client_on_uvloop() -> None:
    """The loop that many runners bring: its transports are no subclasses of asyncio's."""
    async with running(small(ssd=None)) as (_, address):
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", ON_UVLOOP, address, stdout=asyncio.subprocess.PIPE)

        said, _ = await process.communicate()

        assert said.decode() == f"{4 * SPEC.block_size} {{}}\n"
