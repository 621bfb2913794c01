"""When blocks go to the durable tier: when room is needed (write-back), when committed (write-through), or when used often."""

from __future__ import annotations

import asyncio
from typing import Protocol

from tiercache.cache import Cache
from tiercache.config import Config
from tiercache.leases import Lease
from tiercache.storage.traffic import Traffic
from tiercache.tree import ancestry

_MOST = 64
"""Prompts that are on their way down at once; one more is left to write-back."""


class WritePolicy(Protocol):
    """Is told what happens, and begins copies to the durable tier in the background. Nobody waits for them."""

    def matched(self, lease: Lease) -> None:
        """Take note of a reader's match."""
        ...

    def written(self, lease: Lease) -> None:
        """Take note of a commit; the lease covers what was committed and what it follows."""
        ...

    async def close(self) -> None:
        """Begin nothing more, and give up what waits. What is under way goes on in the mover."""
        ...


class WriteBack:
    """Blocks go down when room is needed above, and at the end."""

    def matched(self, lease: Lease) -> None:
        """Do nothing."""

    def written(self, lease: Lease) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""


class WriteThrough:
    """Blocks go down when they are committed."""

    def __init__(self, cache: Cache, traffic: Traffic) -> None:
        self._cache = cache
        self._traffic = traffic
        self._account = cache.begin_session()
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._closed = False

    def matched(self, lease: Lease) -> None:
        """Do nothing."""

    def written(self, lease: Lease) -> None:
        """Begin to copy the path down."""
        self.begin(lease, lease.blocks)

    def begin(self, lease: Lease, blocks: int) -> None:
        """Begin to copy the first `blocks` blocks of a lease down, under a lease of the house's own."""
        if self._closed or blocks == 0 or not lease.node.alive:
            return
        if len(self._tasks) >= _MOST:
            self._cache.stats.failed("write-through")
            return
        own = self._cache.share(lease, self._account)
        self._cache.shorten(own, blocks)
        task = asyncio.get_running_loop().create_task(self._persist(own), name="tiercache-write-through")
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def _persist(self, lease: Lease) -> None:
        try:
            await self._traffic.persist(lease)
        finally:
            self._cache.release(lease)

    async def close(self) -> None:
        """Begin nothing more, and give up what waits."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    async def settle(self) -> None:
        """Wait until nothing is on its way down for this policy."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))


class Selective(WriteThrough):
    """Blocks go down at their `hits`-th match: what is used once is not worth a write."""

    def __init__(self, cache: Cache, traffic: Traffic, *, hits: int) -> None:
        super().__init__(cache, traffic)
        self._hits = hits

    def matched(self, lease: Lease) -> None:
        """Count the match, and begin to copy down what has had enough of them."""
        blocks = lease.blocks
        worth = 0
        for node in ancestry(lease.node):
            node.matches += 1
            if not worth and node.matches >= self._hits:
                worth = blocks
            blocks -= len(node.blocks)
        if worth and self._traffic.durable(lease) < worth:
            self.begin(lease, worth)

    def written(self, lease: Lease) -> None:
        """Do nothing."""


def write_policy(config: Config, cache: Cache, traffic: Traffic) -> WriteBack | WriteThrough:
    """Return the policy that the configuration names; without a durable tier there is nothing to write to."""
    if config.write_policy == "back" or not cache.residency.durable[-1]:
        return WriteBack()
    if config.write_policy == "through":
        return WriteThrough(cache, traffic)
    return Selective(cache, traffic, hits=config.write_through_hits)
