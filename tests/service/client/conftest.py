"""Fake daemons for tests of the client."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.service.client.fake import FakeDaemon, serving
from tests.service.client.fake_device import CountingDevice, DeviceDaemon
from tiercache.kernels.lazy import LazyDevice


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="tc") as name:
        yield Path(name)


@pytest.fixture
async def fake(short_path: Path) -> AsyncIterator[FakeDaemon]:
    """A fake daemon that is being served."""
    daemon = FakeDaemon(short_path)
    try:
        async with serving(daemon):
            yield daemon
    finally:
        daemon.close()


@pytest.fixture(params=["host", "device"])
def device(request: pytest.FixtureRequest, seed: int) -> Iterator[LazyDevice | None]:
    """No device, or one whose copies come late."""
    lazy = LazyDevice(seed) if request.param == "device" else None
    yield lazy
    if lazy is not None:
        lazy.held = False
        lazy.run()
        assert lazy.registered == []


@pytest.fixture
def lazy(seed: int) -> LazyDevice:
    """A device whose copies come late."""
    return LazyDevice(seed)


@pytest.fixture
async def daemon(short_path: Path) -> AsyncIterator[DeviceDaemon]:
    """A fake daemon whose slots lie on a device, being served."""
    made = DeviceDaemon(short_path)
    try:
        async with serving(made):
            yield made
    finally:
        made.close()


@pytest.fixture
def own() -> CountingDevice:
    """The client's own device."""
    return CountingDevice(2)
