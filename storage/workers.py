"""Threads for what must not run on the event loop, in named lanes, and watched: which of them died, how long a call has run."""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

from tiercache.clock import Clock, MonotonicClock
from tiercache.errors import Closed, TierCacheError, WorkerDied

log = logging.getLogger(__name__)

T = TypeVar("T")
_PATIENCE = 1.0
"""Seconds that closing gives all threads together to end their present call."""


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
    RUNNER = "runner"
    """Waits until a runner's stream, which may take its time, has come to a point."""
    WATCH = "watch"
    """To look at a durable store's file system, for who asks how it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneState:
    """How one lane does. Times are seconds of the workers' clock."""

    lane: Lane
    threads: int
    """How many there are to be."""
    alive: int
    busy: int
    queued: int
    """Calls that no thread has begun."""
    longest: float | None
    """How long the oldest of the calls under way has been running; None while all threads are idle."""
    deaths: int
    """Threads that died since the beginning; each was replaced."""
    last_death: float | None
    """How long ago the last one died."""
    cause: str | None
    """Of what it died."""


class Workers(Protocol):
    """Runs blocking calls away from the event loop."""

    async def run(self, lane: Lane, call: Callable[..., T], *args: Any) -> T:
        """Run `call(*args)` in the lane and return its result. A caller that is cancelled does not stop the call.

        Raises WorkerDied when the thread that ran it died, and Closed.
        """
        ...

    def lanes(self) -> tuple[LaneState, ...]:
        """Return how each lane does; nothing where there are no threads."""
        ...

    def close(self) -> None:
        """Take no more work. Does not wait for a call that is stuck."""
        ...


_PAUSE = 0.05
"""Seconds until what must be waited for is waited for anew: there may be no thread to be had."""


async def outlive(workers: Workers, lane: Lane, wait: Callable[..., None], *args: Any) -> None:
    """Run `wait(*args)` in the lane until it has returned, also when a thread that waits dies.

    What it waits for knows nothing of that. Raises what `wait` raises, and Closed.
    """
    while True:
        try:
            await workers.run(lane, wait, *args)
        except WorkerDied as error:
            log.warning("what a thread waited for is waited for anew: %s", str(error))
            await asyncio.sleep(_PAUSE)
        else:
            return


class _Job(NamedTuple):
    call: Callable[..., Any]
    args: tuple[Any, ...]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class _Hand:
    """One thread, and what it does now."""

    __slots__ = ("began", "job", "number", "thread")

    def __init__(self, number: int) -> None:
        self.number = number
        """Which of the lane's threads it is; who replaces it has the same."""
        self.job: _Job | None = None
        """What it has not answered yet: failed, should the thread die."""
        self.began: float | None = None
        """Since when its present call runs; None between calls."""
        self.thread: threading.Thread


@dataclass(slots=True, eq=False)
class _Crew:
    """The threads of one lane."""

    lane: Lane
    count: int
    jobs: queue.SimpleQueue[_Job | None] = field(default_factory=queue.SimpleQueue)
    hands: list[_Hand] = field(default_factory=list)
    made: int = 0
    deaths: int = 0
    died_at: float | None = None
    cause: str | None = None


class ThreadWorkers:
    """Daemon threads, a queue a lane. `clock` says how long calls have been running.

    What a call raises belongs to who waits for it. What ends a thread (SystemExit and its like are not caught: the stack they
    come from is not to be trusted) fails the thread's call with WorkerDied, is counted, and another thread takes its place.

    Threads that copy share the processors among them, none of which two of them run on. They wake together after a while of
    doing nothing, and the kernel may then put both on one processor, where they stay for milliseconds: it takes an idle one of a
    virtual machine for one that its host has taken away.

    Not `concurrent.futures`: its threads are joined when the interpreter ends, so that one stuck fsync would keep the process
    alive for ever.
    """

    def __init__(self, counts: Mapping[Lane, int], name: str = "tiercache", *, clock: Clock | None = None) -> None:
        self._name = name
        self._clock = clock or MonotonicClock()
        self._closed = False
        self._lock = threading.Lock()
        # Here, where nothing is left out yet: a thread begins with the processors of who starts it, which may be one of ours.
        self._processors = sorted(os.sched_getaffinity(0))
        self._crews = {lane: _Crew(lane, count) for lane, count in counts.items()}
        for crew in self._crews.values():
            with self._lock:
                while len(crew.hands) < crew.count:
                    self._hire(crew)

    async def run(self, lane: Lane, call: Callable[..., T], *args: Any) -> T:
        """Run `call(*args)` in a thread of the lane."""
        if self._closed:
            raise Closed("the workers are closed")
        crew = self._crews[lane]
        self._tend(crew)
        if not crew.hands:
            raise WorkerDied(f"no thread for the lane {lane.value} can be started", lane=lane.value)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        crew.jobs.put(_Job(call, args, future, loop))
        return await future

    def lanes(self) -> tuple[LaneState, ...]:
        """Return how each lane does; threads that died unseen are replaced first."""
        return tuple(self._state(crew) for crew in self._crews.values())

    def close(self) -> None:
        """Let every thread end after its present call, and wait for those that are idle."""
        if self._closed:
            return
        self._closed = True
        threads = [hand.thread for crew in self._crews.values() for hand in crew.hands]
        for crew in self._crews.values():
            for _ in range(crew.count):
                crew.jobs.put(None)
        deadline = time.monotonic() + _PATIENCE
        for thread in threads:
            # A stuck call keeps its daemon thread; the process may end all the same.
            thread.join(timeout=max(0.0, deadline - time.monotonic()))

    # --- threads ----------------------------------------------------------------------------------------------------------

    def _state(self, crew: _Crew) -> LaneState:
        self._tend(crew)
        now = self._clock.now()
        began = [since for hand in list(crew.hands) if (since := hand.began) is not None]
        return LaneState(
            lane=crew.lane,
            threads=crew.count,
            alive=sum(hand.thread.is_alive() for hand in list(crew.hands)),
            busy=len(began),
            queued=crew.jobs.qsize(),
            longest=max(0.0, now - min(began)) if began else None,
            deaths=crew.deaths,
            last_death=None if crew.died_at is None else max(0.0, now - crew.died_at),
            cause=crew.cause,
        )

    def _tend(self, crew: _Crew) -> None:
        """Bury who died without saying so, and see to it that the lane has its threads. After the end they may go."""
        if self._closed:
            return
        for hand in [hand for hand in list(crew.hands) if not hand.thread.is_alive()]:
            self._bury(crew, hand, "an unknown cause")
        if len(crew.hands) < crew.count:
            with self._lock:
                self._fill(crew)

    def _fill(self, crew: _Crew) -> None:
        """Replace who is missing, as far as the system allows; what it refuses now is tried at the next call."""
        try:
            while len(crew.hands) < crew.count:
                self._hire(crew)
        except RuntimeError as error:  # can't start new thread
            log.error("the lane %s is short of a thread: %s", crew.lane.value, error)

    def _hire(self, crew: _Crew) -> None:
        hand = _Hand(min(set(range(crew.count)) - {other.number for other in crew.hands}))
        name = f"{self._name}-{crew.lane.value}-{crew.made}"
        hand.thread = threading.Thread(target=self._live, args=(crew, hand), name=name, daemon=True)
        hand.thread.start()
        crew.made += 1
        crew.hands.append(hand)

    def _live(self, crew: _Crew, hand: _Hand) -> None:
        try:
            self._settle(crew, hand)
            self._serve(crew, hand)
        except BaseException as error:  # noqa: BLE001 - a thread ends here, whatever ended it
            self._bury(crew, hand, repr(error))

    def _settle(self, crew: _Crew, hand: _Hand) -> None:
        """Choose the processors of the calling thread."""
        own = self._processors
        if crew.lane is Lane.COPY and len(own) >= crew.count:
            own = own[hand.number :: crew.count]
        with suppress(OSError):  # what was allowed at the start may not be so any more; then it runs where it may
            os.sched_setaffinity(0, own)

    def _serve(self, crew: _Crew, hand: _Hand) -> None:
        while (job := crew.jobs.get()) is not None:
            hand.job = job
            hand.began = self._clock.now()
            try:
                result = job.call(*job.args)
            except Exception as error:  # noqa: BLE001 - whatever it is belongs to who waits
                hand.began = None  # first: who is told that the call has ended must not find that it runs
                _post(job.loop, _fail, job.future, error)
            else:
                hand.began = None
                _post(job.loop, _succeed, job.future, result)
                del result
            # What the call worked on is not to live until the next job comes.
            hand.job = None
            del job

    def _bury(self, crew: _Crew, hand: _Hand, cause: str) -> None:
        """Count a dead thread once, fail its call, and hire another. Called by the thread itself at its end, or by who looks."""
        with self._lock:
            if hand not in crew.hands:
                return
            crew.hands.remove(hand)
            crew.deaths += 1
            crew.died_at, crew.cause = self._clock.now(), cause
            job, hand.job = hand.job, None
            self._fill(crew)  # also while closing: one end is in the queue for each of them, and calls may stand before it
        # Its text, not the error: a traceback would keep the memory of the blocks.
        log.error("a thread of the lane %s died of %s", crew.lane.value, cause)
        if job is not None:
            dead = WorkerDied(f"the thread of the lane {crew.lane.value} died of {cause}", lane=crew.lane.value, cause=cause)
            _post(job.loop, _fail, job.future, dead)


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
        if isinstance(error, StopIteration):  # a future refuses it, and who waits would wait for ever
            error = TierCacheError(f"the call raised {error!r}")
        future.set_exception(error)


async def in_parts(count: int, parts: int, work: Callable[[int, int], Awaitable[T]]) -> list[tuple[int, T | BaseException]]:
    """Await `work(low, high)` for about equal parts of `count` things at once; return where each begins and what came of it.

    All have ended when this returns: when one fails, the others may still be writing. Of nothing there are no parts.
    """
    step = max(1, -(-count // max(1, parts)))
    ranges = [(low, min(low + step, count)) for low in range(0, count, step)]
    if len(ranges) == 1:  # no task for what is one call
        try:
            return [(0, await work(0, count))]
        except Exception as error:  # noqa: BLE001 - whoever asked looks at it, as at those of several parts
            return [(0, error)]
    found = await asyncio.gather(*(work(low, high) for low, high in ranges), return_exceptions=True)
    return [(low, one) for (low, _), one in zip(ranges, found, strict=True)]


class InlineWorkers:
    """Runs every call where it is asked for: no threads, so that a test can be replayed."""

    async def run(self, lane: Lane, call: Callable[..., T], *args: Any) -> T:
        """Run `call(*args)` now."""
        return call(*args)

    def lanes(self) -> tuple[LaneState, ...]:
        """Return nothing."""
        return ()

    def close(self) -> None:
        """Do nothing."""
