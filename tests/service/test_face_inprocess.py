"""The face in one process passes the suite of all faces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import pytest

from tests.seams import Rig
from tests.service.caches import opened
from tests.service.face_suite import OpenCache, Opened, ReadingSuite, WritingSuite
from tests.service.face_suite_keeping import IdentitySuite, KeepingSuite
from tests.service.face_suite_prefetch import PrefetchSuite
from tests.service.face_suite_refusals import RefusalSuite
from tiercache.config import Config
from tiercache.service.face import KV
from tiercache.service.inprocess import TierCache
from tiercache.spec import KVSpec, Namespace


class _InProcess:
    def __init__(self, cache: TierCache) -> None:
        self._cache = cache

    async def open(self, space: Namespace, spec: KVSpec) -> KV:
        return await self._cache.open(space, spec)

    async def check(self) -> Mapping[str, int]:
        return await self._cache.check()

    async def settle(self) -> None:
        await self._cache.settle()

    async def matches(self) -> int:
        return sum(stack.cache.stats.matches for stack in self._cache.stacks)


@asynccontextmanager
async def open_in_process(config: Config, rig: Rig | None = None) -> AsyncIterator[Opened]:
    async with opened(config, rig) as cache:
        yield _InProcess(cache)


@pytest.fixture
def open_cache() -> OpenCache:
    """Open a cache in this process."""
    return open_in_process


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
