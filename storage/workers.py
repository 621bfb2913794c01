"""Threads for what must not run on the event loop, in named lanes."""

from __future__ import annotations

import asyncio
import enum
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from tiercache.errors import Closed

T = TypeVar("T")
_PATIENCE = 1.0
"""Seconds that closing gives all threads together to end their present call."""
_Job = tuple[Callable[..., Any], tuple[Any, ...], "asyncio.Future[Any]", asyncio.AbstractEventLoop]


class Lane(enum.Enum):
    """What a thread is for. Work of one lane never waits for work of another."""

    COPY = "copy"
    """Between memories."""
    READ = "read"
    """From a durable store."""
    WRITE = "write"
    """To a durable store."""
    DOWN = "down"
    """Waits until a device has copied out of its memory."""
    UP = "up"
    """Waits until a device has copied into its memory."""


class Workers(Protocol):
    """Runs blocking calls away from the event loop."""

    async def run(self, lane: Lane, call: Callable[..., T], *args: Any) -> T:
        """Run `call(*args)` in the lane and return its result. A caller that is cancelled does not stop the call."""
        ...

    def close(self) -> None:
        """Take no more work. Does not wait for a call that is stuck."""
        ...


class ThreadWorkers:
    """Daemon threads, a queue a lane.

    Not `concurrent.futures`: its threads are joined when the interpreter ends, so that one stuck fsync would keep the process
    alive for ever.
    """

    def __init__(self, counts: Mapping[Lane, int], name: str = "tiercache") -> None:
        self._queues: dict[Lane, queue.SimpleQueue[_Job | None]] = {lane: queue.SimpleQueue() for lane in counts}
        self._closed = False
        self._threads: list[tuple[Lane, threading.Thread]] = []
        for lane, count in counts.items():
            for number in range(count):
                thread = threading.Thread(
                    target=self._serve, args=(self._queues[lane],), name=f"{name}-{lane.value}-{number}", daemon=True
                )
                thread.start()
                self._threads.append((lane, thread))

    async def run(self, lane: Lane, call: Callable[..., T], *args: Any) -> T:
        """Run `call(*args)` in a thread of the lane."""
        if self._closed:
            raise Closed("the workers are closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._queues[lane].put((call, args, future, loop))
        return await future

    def close(self) -> None:
        """Let every thread end after its present call, and wait for those that are idle."""
        if self._closed:
            return
        self._closed = True
        for lane, _ in self._threads:
            self._queues[lane].put(None)
        deadline = time.monotonic() + _PATIENCE
        for _, thread in self._threads:
            # A stuck call keeps its daemon thread; the process may end all the same.
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    @staticmethod
    def _serve(jobs: queue.SimpleQueue[_Job | None]) -> None:
        while (job := jobs.get()) is not None:
            call, args, future, loop = job
            try:
                result = call(*args)
            except BaseException as error:  # noqa: BLE001 - whatever it is belongs to who waits
                _post(loop, _fail, future, error)
            else:
                _post(loop, _succeed, future, result)
                del result
            # What the call worked on is not to live until the next job comes.
            del job, call, args, future, loop


def _post(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: Any) -> None:
    try:
        loop.call_soon_threadsafe(call, *args)
    except RuntimeError:
        pass  # the loop is gone, and with it whoever waited


def _succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


class InlineWorkers:
    """Runs every call where it is asked for: no threads, so that a test can be replayed."""

    async def run(self, lane: Lane, call: Callable[..., T], *args: Any) -> T:
        """Run `call(*args)` now."""
        return call(*args)

    def close(self) -> None:
        """Do nothing."""
