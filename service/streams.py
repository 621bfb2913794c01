"""Runners' streams: what they are told to do with slots of a device, and the end of what holds these slots, which is after it.

A hit or a room is left while the device still works for it: the runner goes on without waiting. So its lease or reservation ends
later, when an event has happened that was recorded on each of its streams as it was left. A thread of a lane of its own waits for
that, since a runner's stream may take its time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from tiercache.errors import Closed, StoreError
from tiercache.kernels.device import Event
from tiercache.leases import Lease
from tiercache.service.device_tensors import DeviceTensors
from tiercache.storage.device_passage import Passage, Runner
from tiercache.storage.finishing import Finishing
from tiercache.storage.mover import Flight
from tiercache.storage.workers import Lane, Workers, outlive

log = logging.getLogger(__name__)

T = TypeVar("T")

Arriving = Callable[[Lease, int], dict[int, tuple[Flight, int]]]
"""By the number of a lease's block, the flight that brings it and the slot where a layer of it arrives."""


class Streams:
    """What the hits and rooms of one stack have of a device beside it."""

    def __init__(
        self, tensors: DeviceTensors, passage: Passage, workers: Workers, finishing: Finishing, arriving: Arriving
    ) -> None:
        self.arriving = arriving
        """Says which blocks of a lease have a layer on its way into the device."""
        self.tensors = tensors
        self.passage = passage
        self._workers = workers
        self._finishing = finishing

    def use(self) -> Use:
        """Return a use of slots that has not begun."""
        return Use(self)

    async def enqueue(self, call: Callable[..., T], *args: object) -> T:
        """Have `call(*args)` enqueue copies: in a thread, as a stream that is full lets nobody enqueue for a while."""
        return await self._workers.run(Lane.COPY, call, *args)

    async def happened(self, event: Event) -> None:
        """Wait until an event of a runner's stream has happened. Raises StoreError when the device failed."""
        await outlive(self._workers, Lane.RUNNER, event.wait)

    def later(self, over: Coroutine[Any, Any, None], leave: Callable[[], object]) -> asyncio.Future[None]:
        """Call `leave` when `over` has ended; whoever closes the cache waits for that. Returns what can be waited for, too."""
        return asyncio.shield(self._finishing.start(self._leave(over, leave)))

    @staticmethod
    async def _leave(over: Coroutine[Any, Any, None], leave: Callable[[], object]) -> None:
        try:
            await over
        except (StoreError, Closed) as error:  # nothing more will be done with the slots
            log.warning("a runner's stream is waited for no more: %s", str(error))
        finally:
            leave()


class Use:
    """The use that one hit or room makes of slots by way of runners' streams."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._runners: dict[int, Runner] = {}
        self._enqueuing = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def begun(self) -> bool:
        """Whether any stream was used."""
        return bool(self._runners)

    def here(self) -> None:
        """Count on the calling thread's current stream: who was given slots in place may use them on it."""
        if self._streams.tensors.pointer() not in self._runners:
            self._count(self._streams.tensors.runner())

    async def enqueue(self, runner: Runner, call: Callable[..., T], *args: object) -> T:
        """Have `call(runner, *args)` enqueue copies on a runner's stream; who is cancelled does not stop it."""
        self._count(runner)
        self._enqueuing += 1
        self._idle.clear()
        try:
            return await self._streams.enqueue(call, runner, *args)
        finally:
            self._enqueuing -= 1
            if not self._enqueuing:
                self._idle.set()

    async def over(self) -> None:
        """Wait until the device has done what these streams have now. Raises StoreError when it failed."""
        await self._over(self._ends())

    def end(self, leave: Callable[[], object]) -> Awaitable[None]:
        """Call `leave`: now where no stream was used, else when the device has done what they and the current one have now.

        Nobody needs to wait for what is returned, and who stops waiting for it changes nothing.
        """
        if self._runners:
            self.here()
            return self._streams.later(self._over(self._ends()), leave)
        leave()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def _count(self, runner: Runner) -> None:
        self._runners[runner.pointer] = runner

    def _ends(self) -> list[Event]:
        return [runner.stream.record() for runner in self._runners.values()]

    async def _over(self, ends: list[Event]) -> None:
        if self._enqueuing:  # for a caller who has gone, or will find that his hit has ended: what it reads is read all the same
            await self._idle.wait()
            ends = self._ends()
        for event in ends:
            await self._streams.happened(event)
