"""Clients pass the suite of all faces where the daemon's HBM tier lies on a device, which they open with their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import msgspec
import pytest

from tests.seams import Rig
from tests.service.client.fake_device import CountingDevice
from tests.service.client.test_face_remote import open_async, open_blocking
from tests.service.face_suite import OpenCache, Opened, ReadingSuite, WritingSuite
from tests.service.face_suite_keeping import IdentitySuite, KeepingSuite
from tests.service.face_suite_prefetch import PrefetchSuite
from tests.service.face_suite_refusals import RefusalSuite
from tiercache.config import Config
from tiercache.kernels.lazy import LazyDevice


@pytest.fixture(params=[open_async, open_blocking], ids=["async", "blocking"])
def open_cache(request: pytest.FixtureRequest, seed: int) -> OpenCache:
    """Open a daemon with its HBM tier on a device, and a client with its own; both work in orders drawn from the seed."""
    opener: Callable[..., AbstractAsyncContextManager[Opened]] = request.param

    @asynccontextmanager
    async def opened(config: Config, rig: Rig | None = None) -> AsyncIterator[Opened]:
        rig = rig or Rig()
        theirs, own = LazyDevice(seed), CountingDevice(seed + 1)
        rig.device = lambda name: theirs
        has_hbm = any(tier.tier == "HBM" for tier in config.tiers)
        async with opener(msgspec.structs.replace(config, device="cuda:0") if has_hbm else config, rig, device=own) as cache:
            yield cache
            assert has_hbm == bool(own.opened)
        assert not theirs.registered

    return opened


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
