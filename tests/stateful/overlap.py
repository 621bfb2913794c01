"""The same machine with copies that are held, fail, and come in any order, and with calls that run beside each other."""

from __future__ import annotations

import asyncio
import errno
from typing import Any, ClassVar, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.stateful.machine import FaceMachine
from tests.stateful.steps import ASKS, PICKS, PLACES, TAKING, Ask
from tiercache.errors import Closed, LeaseReleased

CALLS = st.sampled_from(["insert", "insert", "flush", "prefetch", "delete", "match", "hasty", "reserve", "invalidate"])


class Job(NamedTuple):
    """A call that runs, and what is expected of its result."""

    what: str
    place: int
    prompt: list[int]
    task: asyncio.Task[Any]
    gone: set[bytes]
    """What a delete, or the like, took away."""


class OverlapMachine(FaceMachine):
    """Calls are begun and left to run; copies wait until a step lets them go on."""

    held: ClassVar[bool] = True
    steps: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.jobs: list[Job] = []

    @precondition(lambda self: len(self.jobs) < 5)
    @rule(which=PLACES, ask=ASKS, what=CALLS, turns=st.integers(0, 3))
    def start(self, which: int, ask: Ask, what: str, turns: int) -> None:
        place = which % 2
        chunks = self.prompt(place, ask)
        gone = set(self.book(place).keys) if what == "invalidate" else self.book(place).doomed(self.world.key(chunks))[0]
        work = self.call(which, chunks, what)
        self.jobs.append(Job(what, place, chunks, self.world.loop.create_task(work, name=f"job-{what}"), gone))
        self.world.loop.turn(max(turns, what in TAKING))

    @precondition(lambda self: self.jobs)
    @rule(pick=PICKS)
    def cancel_job(self, pick: int) -> None:
        self.jobs[pick % len(self.jobs)].task.cancel()
        self.world.loop.turn()

    @rule(turns=st.integers(1, 12))
    def go_on(self, turns: int) -> None:
        self.world.loop.turn(turns)

    @rule()
    def hold(self) -> None:
        assert self.world.copier is not None
        self.world.copier.open = False

    @rule()
    def let_all_go(self) -> None:
        assert self.world.copier is not None
        self.world.copier.open = True
        while self.world.let_go():
            pass

    @precondition(lambda self: self.world.copier_holds())
    @rule(pick=PICKS, turns=st.integers(0, 4))
    def release_copy(self, pick: int, turns: int) -> None:
        assert self.world.copier is not None
        kind = self.world.copier.release(pick)
        self.world.loop.turn(turns)
        self.note("let go", kind)

    @precondition(lambda self: self.world.copier_holds())
    @rule(pick=PICKS, part=st.sampled_from([None, None, 0, 1]))
    def fail_copy(self, pick: int, part: int | None) -> None:
        """Let a copy fail, at once or after a part of its blocks."""
        assert self.world.copier is not None
        kind = self.world.copier.held[pick % len(self.world.copier.held)][0]
        self.world.copier.release(pick, fail=part is None or kind != "blocks", part=part)
        self.failed = True
        self.world.loop.turn()
        self.note("fail", kind)

    @precondition(lambda self: self.world.shape.ssd)
    @rule(key=st.one_of(st.none(), st.integers(0, 15)), times=st.sampled_from([1, 2, 6, 1 << 30]))
    def fail_reads(self, key: int | None, times: int) -> None:
        """Let reads of the disk fail, of one of its values or of any."""
        self.world.disk.fail("read", OSError(errno.EIO, "the test lets this read fail"), key=key, times=times)
        self.world.unread = self.failed = True
        self.note("fail reads", key, times)

    @precondition(lambda self: self.world.unread)
    @rule()
    def heal(self) -> None:
        """Let the disk read again."""
        self.world.disk.release()
        self.note("heal")

    def end_maybes(self) -> None:
        """Look at the results of the calls that have ended."""
        for job in [job for job in self.jobs if job.task.done()]:
            self.jobs.remove(job)
            self.judge(job)
        if not self.jobs:
            super().end_maybes()

    def judge(self, job: Job) -> None:
        if job.task.cancelled():
            self.note(job.what, "cancelled")
            return
        done = job.task.result()
        chapter, key = self.world.chapters[job.place], self.world.key(job.prompt)
        if job.what == "insert":
            self.check_stored(done, len(job.prompt) // self.size)
        else:
            assert 0 <= done <= len(job.prompt)
        if job.what in TAKING:
            chapter.ghosts -= job.gone - chapter.maybe
        if job.what == "flush":
            acked = (chapter.book.prefixes(key, upto=done // self.size) & chapter.book.keys) - chapter.maybe
            chapter.acked |= acked
            assert not self.world.shape.ample or acked <= self.world.durable_keys(job.place)
        self.note(job.what, done)

    def quiet(self, place: int) -> bool:
        return not self.jobs and super().quiet(place)

    def alone(self) -> bool:
        slow = self.world.copier is not None and not self.world.copier.open
        return not (self.jobs or slow) and super().alone()

    def finish_jobs(self) -> None:
        """Let every call that runs come to its end."""
        while self.jobs:
            job = self.jobs.pop()
            self.world.loop.run(_ended(job.task))
            self.judge(job)

    def abandon_jobs(self) -> None:
        """See that calls which a close overtook have ended, and how."""
        while self.jobs:
            job = self.jobs.pop()
            self.world.loop.run(_ended(job.task))
            if not job.task.cancelled():
                error = job.task.exception()
                assert error is None or isinstance(error, Closed | LeaseReleased), repr(error)

    def drop_claims(self) -> None:
        self.finish_jobs()
        super().drop_claims()


async def _ended(task: asyncio.Task[Any]) -> None:
    await asyncio.wait([task])
