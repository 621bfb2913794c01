"""A cache as a runner meets it: in a daemon beside it, as users run it, or in its own process. Both can be started again."""

from __future__ import annotations

import shutil
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from tiercache.config import Config
from tiercache.service.client.client import connect
from tiercache.service.client.remote_kv import RemoteKV
from tiercache.service.demo.places import Places
from tiercache.service.demo.sidecar import Sidecar
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV
from tiercache.spec import KVSpec, Namespace

_DRAIN = 600.0


class House(Protocol):
    """A cache with one namespace, an async context manager; `start` and `stop` may be repeated within."""

    @property
    def kv(self) -> RemoteKV | LocalKV:
        """The namespace."""

    async def start(self) -> None:
        """Begin, and open the namespace."""

    async def stop(self) -> None:
        """End in order: what is not durable is written down."""


class InProcess:
    """The cache in this process, its SSD tier in `folder`."""

    def __init__(self, folder: Path, space: Namespace, spec: KVSpec, *, hbm: int = 0, dram: int = 0, ssd: int = 0) -> None:
        self._config = _config(folder, hbm, dram, ssd)
        self._space = space
        self._spec = spec
        self._open = AsyncExitStack()
        self._kv: LocalKV | None = None

    @property
    def kv(self) -> LocalKV:
        """The namespace."""
        assert self._kv is not None, "the cache has not been started"
        return self._kv

    async def start(self) -> None:
        """Allocate the tiers, and open the namespace."""
        cache = await self._open.enter_async_context(TierCache(self._config))
        self._kv = await cache.open(self._space, self._spec)

    async def stop(self) -> None:
        """Write down what is not durable, and free the tiers."""
        await self._open.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()


class Beside:
    """The cache in a daemon, started by the command that users start it with; its SSD tier lies in `folder`."""

    def __init__(self, folder: Path, space: Namespace, spec: KVSpec, *, hbm: int = 0, dram: int = 0, ssd: int = 0) -> None:
        self._places = Places.choose(folder)
        self._config = _config(folder / "ssd", hbm, dram, ssd)
        self._space = space
        self._spec = spec
        self._sidecar = Sidecar(self._places, patience=_DRAIN)
        self._house = AsyncExitStack()
        self._client = AsyncExitStack()
        self._kv: RemoteKV | None = None

    @property
    def kv(self) -> RemoteKV:
        """The namespace."""
        assert self._kv is not None, "the daemon has not been started"
        return self._kv

    async def start(self) -> None:
        """Start the daemon, and open the namespace as soon as it serves."""
        await self._sidecar.start()
        client = await self._client.enter_async_context(connect(self._sidecar.address, deadline=60.0))
        await self._sidecar.serves(client, after=None)
        self._kv = await client.open(self._space, self._spec)

    async def stop(self) -> None:
        """End the session, and the daemon in order."""
        await self._client.aclose()
        await self._sidecar.stop()

    async def __aenter__(self) -> Self:
        self._places.prepare(self._config)
        self._places.run.mkdir(mode=0o700)
        self._house.callback(shutil.rmtree, self._places.run)
        await self._house.enter_async_context(self._sidecar)
        try:
            await self.start()
        except BaseException:
            await self._house.aclose()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            await self._client.aclose()
        finally:
            await self._house.aclose()


def _config(directory: Path, hbm: int, dram: int, ssd: int) -> Config:
    return Config.of(hbm=hbm or None, dram=dram or None, ssd=ssd or None, directory=str(directory), drain_seconds=_DRAIN)
