"""An engine's own KV memory, for engines whose workers have no event loop: `PagedKV` without async.

All names, arguments and errors are those of `tiercache.service.client.engine`. What is begun goes on while the engine computes: a
step asks `done`, which costs nothing, and `result` when it is.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from tiercache.kernels.device import Event
from tiercache.service.client.engine import Loaded, Loading, PagedKV, Storing
from tiercache.service.client.remote_hit import RemoteHit
from tiercache.service.face import Stored
from tiercache.types import Tier

R = TypeVar("R")


class Runs(Protocol):
    """Who runs coroutines in the client's thread."""

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run `work` there and return its result."""
        ...


class Entered(Protocol):
    """A hit of the blocking client."""

    @property
    def hit(self) -> RemoteHit:
        """The hit beneath it."""
        ...


class BlockingPaged:
    """An engine's KV memory beside one namespace; made by `BlockingKV.attach`."""

    def __init__(self, client: Runs, paged: PagedKV) -> None:
        self._client = client
        self._paged = paged

    @property
    def blocks(self) -> int:
        """How many blocks the engine's memory has."""
        return self._paged.blocks

    @property
    def layout(self) -> str:
        """The axes of a layer's tensor."""
        return self._paged.layout

    def now(self) -> Event | None:
        """Return the point that the calling thread's stream has reached; None on the host."""
        return self._paged.now()

    def load(
        self, hit: Entered, block_ids: Sequence[int], *, start: int = 0, after: Event | None = None, by_layer: bool = False
    ) -> BlockingLoading:
        """Begin to copy a hit's blocks into the engine's."""
        point = self.now() if after is None else after  # here: the stream is the calling thread's

        async def begin() -> Loading:
            return self._paged.load(hit.hit, block_ids, start=start, after=point, by_layer=by_layer)

        return BlockingLoading(self._client, self._paged, self._client.run(begin()))

    def store(
        self, tokens: Any, block_ids: Sequence[int], *, start: int = 0, tier: Tier | None = None, after: Event | None = None
    ) -> BlockingStoring:
        """Begin to store the KV of `tokens[start:]` from the engine's blocks."""
        point = self.now() if after is None else after

        async def begin() -> Storing:
            return self._paged.store(tokens, block_ids, start=start, tier=tier, after=point)

        return BlockingStoring(self._client, self._client.run(begin()))


class BlockingLoading:
    """A load under way."""

    def __init__(self, client: Runs, paged: PagedKV, loading: Loading) -> None:
        self._client = client
        self._paged = paged
        self._loading = loading

    @property
    def done(self) -> bool:
        """Whether it is over: the blocks are the engine's again."""
        return self._loading.done

    def layer(self, layer: int) -> int:
        """Wait for a layer, on a device by the calling thread's stream; return how many of the leading blocks have it."""

        async def arrived() -> tuple[Event | None, int]:
            return await self._loading.arrival(layer), await self._loading.begun()

        event, blocks = self._client.run(arrived())
        self._paged.follow(event)
        return blocks

    def result(self) -> Loaded:
        """Wait until it is over; return what became of it."""

        async def over() -> Loaded:
            return await self._loading

        return self._client.run(over())


class BlockingStoring:
    """A store under way."""

    def __init__(self, client: Runs, storing: Storing) -> None:
        self._client = client
        self._storing = storing

    @property
    def done(self) -> bool:
        """Whether it is over: the blocks may change again."""
        return self._storing.done

    def result(self) -> Stored:
        """Wait until it is over; return what became of it."""

        async def over() -> Stored:
            return await self._storing

        return self._client.run(over())
