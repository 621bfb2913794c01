"""Worker threads: what a call raises belongs to who waits, and a thread that dies is seen, told and replaced."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.seams import PATIENCE, FakeClock, ThreadHold
from tests.service.client.fake import until
from tiercache.errors import Closed, StoreError, TierCacheError, WorkerDied
from tiercache.storage.workers import Lane, LaneState, ThreadWorkers


@contextmanager
def workers_of(
    count: int = 1, kind: type[ThreadWorkers] = ThreadWorkers, clock: FakeClock | None = None
) -> Iterator[ThreadWorkers]:
    """Workers with one lane."""
    workers = kind({Lane.COPY: count}, name="test", clock=clock)
    try:
        yield workers
    finally:
        workers.close()


def lane_of(workers: ThreadWorkers) -> LaneState:
    [lane] = workers.lanes()
    return lane


def die(error: BaseException) -> None:
    raise error


def name() -> str:
    return threading.current_thread().name


@pytest.mark.parametrize("error", [ValueError("v"), StoreError("s"), MemoryError()], ids=lambda error: type(error).__name__)
async def test_what_a_call_raises_belongs_to_who_waits(error: Exception) -> None:
    """The thread lives on, and nothing is counted."""
    with workers_of() as workers:
        with pytest.raises(type(error)) as raised:
            await workers.run(Lane.COPY, die, error)

        assert raised.value is error
        assert await workers.run(Lane.COPY, name) == "test-copy-0"
        assert (lane_of(workers).alive, lane_of(workers).deaths) == (1, 0)


async def test_an_error_that_no_future_takes_still_ends_the_wait() -> None:
    """asyncio refuses a StopIteration as a result; who waits is told all the same."""
    with workers_of() as workers:
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(TierCacheError, match="StopIteration"):
                await workers.run(Lane.COPY, die, StopIteration())


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()], ids=repr)
async def test_a_thread_that_dies_fails_its_call_and_is_replaced(error: BaseException) -> None:
    """The call is answered with the cause, what stood behind it is done by the next thread, and the death is counted."""
    clock = FakeClock()
    with workers_of(clock=clock) as workers:
        dying = asyncio.ensure_future(workers.run(Lane.COPY, die, error))
        behind = asyncio.ensure_future(workers.run(Lane.COPY, name))
        async with asyncio.timeout(PATIENCE):
            with pytest.raises(WorkerDied) as raised:
                await dying
            assert await behind == "test-copy-1"
        clock.advance(7.0)

        lane = lane_of(workers)
        assert repr(error) in str(raised.value) and raised.value.fields["lane"] == "copy"
        assert (lane.threads, lane.alive, lane.busy, lane.deaths, lane.last_death) == (1, 1, 0, 1, 7.0)
        assert lane.cause == repr(error)


async def test_all_threads_of_a_lane_may_die_at_once() -> None:
    """Each is replaced, and the workers close in order."""
    together = threading.Barrier(3)

    def die_together() -> None:
        together.wait(PATIENCE)
        die(SystemExit())

    with workers_of(3) as workers:
        async with asyncio.timeout(PATIENCE):
            ends = await asyncio.gather(*(workers.run(Lane.COPY, die_together) for _ in range(3)), return_exceptions=True)
            names = {await workers.run(Lane.COPY, name) for _ in range(20)}

        assert all(isinstance(end, WorkerDied) for end in ends)
        assert names <= {f"test-copy-{number}" for number in range(3, 6)}
        assert (lane_of(workers).alive, lane_of(workers).deaths) == (3, 3)
    with pytest.raises(Closed):
        await workers.run(Lane.COPY, name)


class Silent(ThreadWorkers):
    """Workers whose first thread ends with its first call and says nothing, as if it had been killed."""

    silent = True

    def _live(self, crew: Any, hand: Any) -> None:
        if self.silent:
            self.silent = False
            hand.job = crew.jobs.get()
            return
        super()._live(crew, hand)


async def test_a_thread_that_died_without_a_word_is_found_by_who_looks() -> None:
    """Its call is failed and it is replaced as soon as anybody asks how the lane does."""
    with workers_of(kind=Silent) as workers:
        waiting = asyncio.ensure_future(workers.run(Lane.COPY, name))
        async with asyncio.timeout(PATIENCE):
            await until(lambda: lane_of(workers).deaths == 1)
            with pytest.raises(WorkerDied, match="unknown cause"):
                await waiting

            assert await workers.run(Lane.COPY, name) == "test-copy-1"


async def test_without_threads_a_call_is_refused_and_not_queued_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the system gives no thread, calls fail at once and the lane says so; when it gives one again, they work."""
    with workers_of() as workers:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", lambda _: die(RuntimeError("can't start new thread")))
            async with asyncio.timeout(PATIENCE):
                with pytest.raises(WorkerDied):
                    await workers.run(Lane.COPY, die, SystemExit())
                with pytest.raises(WorkerDied, match="no thread for the lane copy"):
                    await workers.run(Lane.COPY, name)
            assert (lane_of(workers).threads, lane_of(workers).alive) == (1, 0)

        assert await workers.run(Lane.COPY, name) == "test-copy-1"
        assert lane_of(workers).alive == 1


async def test_how_long_a_call_has_run_is_told_by_the_clock() -> None:
    """The oldest of those under way counts, with those that wait behind them; idle threads have none."""
    clock = FakeClock()
    with workers_of(2, clock=clock) as workers:
        first, second = ThreadHold(), ThreadHold()
        calls: list[asyncio.Future[Any]] = [asyncio.ensure_future(workers.run(Lane.COPY, first.stand))]
        await first.reached()
        clock.advance(20.0)
        calls.append(asyncio.ensure_future(workers.run(Lane.COPY, second.stand)))
        await second.reached()
        calls.append(asyncio.ensure_future(workers.run(Lane.COPY, name)))
        await asyncio.sleep(0)
        clock.advance(11.0)

        lane = lane_of(workers)
        assert (lane.busy, lane.queued, lane.longest) == (2, 1, 31.0)
        first.release()
        await asyncio.wait([calls[0], calls[2]])
        assert (lane_of(workers).busy, lane_of(workers).longest) == (1, 11.0), "who was told must find it so"
        second.release()
        await asyncio.wait(calls)
        assert (lane_of(workers).busy, lane_of(workers).longest) == (0, None)


PROCESSORS = sorted(os.sched_getaffinity(0))


@pytest.mark.skipif(len(PROCESSORS) < 2, reason="one processor")
async def test_threads_that_copy_share_no_processor() -> None:
    """Each has a part of them, all are used, and who replaces a dead one has its part, whoever starts it."""
    with workers_of(2) as workers:
        first = await affinities(workers, 2)
        with pytest.raises(WorkerDied):
            await workers.run(Lane.COPY, die, SystemExit())
        second = await affinities(workers, 2)

    assert first == second == [PROCESSORS[::2], PROCESSORS[1::2]]


async def test_more_copying_threads_than_processors_run_anywhere() -> None:
    """A part of nothing is none."""
    count = len(PROCESSORS) + 1
    with workers_of(count) as workers:
        assert await affinities(workers, count) == [PROCESSORS] * count


async def affinities(workers: ThreadWorkers, count: int) -> list[list[int]]:
    """Return on which processors each of `count` copying threads may run."""
    meeting = threading.Barrier(count, timeout=PATIENCE)

    def tell() -> list[int]:
        meeting.wait()
        return sorted(os.sched_getaffinity(0))

    return sorted(await asyncio.gather(*(workers.run(Lane.COPY, tell) for _ in range(count))))
