"""The face in one process passes the suite of all faces where the HBM tier lies on a device, lazy here: host tensors in and out."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from tests.seams import Rig
from tests.service import test_face_inprocess as inprocess
from tests.service.face_suite import OpenCache, Opened, ReadingSuite, WritingSuite
from tests.service.face_suite_keeping import IdentitySuite, KeepingSuite
from tests.service.face_suite_prefetch import PrefetchSuite
from tests.service.face_suite_refusals import RefusalSuite
from tiercache.config import Config
from tiercache.kernels.lazy import LazyDevice


@pytest.fixture
def open_cache(seed: int) -> OpenCache:
    """Open a cache in this process, its HBM tier on a device whose streams run in an order drawn from the seed."""

    @asynccontextmanager
    async def opened(config: Config, rig: Rig | None = None) -> AsyncIterator[Opened]:
        rig = rig or Rig()
        device = LazyDevice(seed)
        rig.device = lambda name: device
        if any(tier.tier == "HBM" for tier in config.tiers):
            config = msgspec.structs.replace(config, device="cuda:0")
        async with inprocess.open_in_process(config, rig) as cache:
            yield cache
        assert not device.registered

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
