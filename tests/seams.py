"""What the tests put in the place of time, threads, copies and the disk, to stop each of them at a named step.

A `Rig` has one of each and makes the `Seams` for a cache. What is held stays held until the test releases it; `Rig.release`
lets everything go, so that no cache has to close against a hold.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tiercache.clock import Clock, MonotonicClock
from tiercache.config import Config
from tiercache.keys import Digest, sha256
from tiercache.moves import Work
from tiercache.service.stack import Seams
from tiercache.storage.copier import Copier
from tiercache.storage.ssd_values import LmdbValues, Write
from tiercache.storage.workers import Lane, ThreadWorkers, Workers
from tiercache.transfer import Discard, Report, Transfer

T = TypeVar("T")
PATIENCE = 20.0
"""Seconds after which a test that waits for a step that never comes gives up. No test waits that long on purpose."""


class FakeClock:
    """A clock that moves when it is told to."""

    def __init__(self) -> None:
        self._now = 1000.0

    def now(self) -> float:
        """Return the time it was told."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Go forward."""
        self._now += seconds


# --- copies ---------------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One call of the copier: `verify`, `layer`, `blocks`, `put` or `discard`, before or after its copy.

    `to` is the position of the tier that it writes (or discards from), `number` the layer, or the first of the blocks.
    """

    kind: str
    to: int
    number: int
    after: bool
    work: Work


class Hold:
    """Where the steps that match stand until they are let through."""

    def __init__(self, matches: Callable[[Step], bool]) -> None:
        self.matches = matches
        self._standing: list[tuple[Step, asyncio.Event]] = []
        self._came = asyncio.Condition()
        self._count = 0
        self.open = False

    async def stand(self, step: Step) -> None:
        """Wait, on behalf of `step`, until it is let through."""
        go = asyncio.Event()
        self._standing.append((step, go))
        self._count += 1
        async with self._came:
            self._came.notify_all()
        if not self.open:
            await go.wait()

    async def reached(self, count: int = 1) -> Step:
        """Wait until `count` steps have come, and return the last of them."""
        async with asyncio.timeout(PATIENCE), self._came:
            await self._came.wait_for(lambda: self._count >= count)
        return self._standing[-1][0]

    @property
    def standing(self) -> list[Step]:
        """The steps that wait here, in the order in which they came."""
        return [step for step, go in self._standing if not go.is_set()]

    def let(self, number: int) -> None:
        """Let the waiting step through that stands at `number` of `standing`."""
        [go for _, go in self._standing if not go.is_set()][number].set()

    def release(self) -> None:
        """Let all through, now and from now on."""
        self.open = True
        for _, go in self._standing:
            go.set()


@dataclass(slots=True)
class _Failure:
    matches: Callable[[Step], bool]
    error: Exception
    times: int


class Copies:
    """The holds and failures of all copiers of a rig. `chunk` is how many blocks a copier takes at once; None: as it likes."""

    def __init__(self) -> None:
        self.chunk: int | None = None
        self.seen: list[Step] = []
        self._holds: list[Hold] = []
        self._failures: list[_Failure] = []

    def around(self, copier: Copier) -> HeldCopier:
        """Return a copier that obeys."""
        return HeldCopier(copier, self)

    def hold(
        self,
        kind: str,
        *,
        to: int | None = None,
        number: int | None = None,
        after: bool = False,
        where: Callable[[Step], bool] | None = None,
    ) -> Hold:
        """Hold the steps of a kind, of one tier position and number if they are given, before their copy or after it."""
        hold = Hold(_matcher(kind, to, number, after, where))
        self._holds.append(hold)
        return hold

    def fail(
        self,
        kind: str,
        error: Exception,
        *,
        to: int | None = None,
        number: int | None = None,
        after: bool = False,
        times: int = 1,
        where: Callable[[Step], bool] | None = None,
    ) -> None:
        """Let the next `times` matching steps raise `error`."""
        self._failures.append(_Failure(_matcher(kind, to, number, after, where), error, times))

    def release(self) -> None:
        """End all holds and failures."""
        for hold in self._holds:
            hold.release()
        self._holds.clear()
        self._failures.clear()

    async def pass_by(self, step: Step) -> None:
        """Wait where a hold matches, then fail where a failure does."""
        self.seen.append(step)
        for hold in list(self._holds):
            if hold.matches(step):
                await hold.stand(step)
        for failure in self._failures:
            if failure.times and failure.matches(step):
                failure.times -= 1
                raise failure.error


def _matcher(
    kind: str, to: int | None, number: int | None, after: bool, where: Callable[[Step], bool] | None
) -> Callable[[Step], bool]:
    def matches(step: Step) -> bool:
        return (
            step.kind == kind
            and step.after == after
            and to in (None, step.to)
            and number in (None, step.number)
            and (where is None or where(step))
        )

    return matches


class HeldCopier:
    """A copier whose every call passes by `copies` before and after the call that it wraps."""

    def __init__(self, inner: Copier, copies: Copies) -> None:
        self._inner = inner
        self._copies = copies

    def layers(self, transfer: Transfer) -> int:
        return self._inner.layers(transfer)

    def chunks(self, transfer: Transfer) -> Sequence[tuple[int, int]]:
        chunk = self._copies.chunk
        if chunk is None:
            return self._inner.chunks(transfer)
        return [(low, min(low + chunk, transfer.count)) for low in range(0, transfer.count, chunk)]

    async def verify(self, transfer: Transfer) -> Report:
        before = Step("verify", transfer.to, 0, False, transfer)
        await self._copies.pass_by(before)
        report = await self._inner.verify(transfer)
        await self._copies.pass_by(before._replace(after=True))
        return report

    async def layer(self, transfer: Transfer, layer: int, count: int) -> None:
        before = Step("layer", transfer.to, layer, False, transfer)
        await self._copies.pass_by(before)
        await self._inner.layer(transfer, layer, count)
        await self._copies.pass_by(before._replace(after=True))

    async def blocks(self, transfer: Transfer, low: int, high: int) -> Report:
        before = Step("blocks", transfer.to, low, False, transfer)
        await self._copies.pass_by(before)
        report = await self._inner.blocks(transfer, low, high)
        await self._copies.pass_by(before._replace(after=True))
        return report

    async def put(self, transfer: Transfer) -> Report:
        before = Step("put", transfer.to, 0, False, transfer)
        await self._copies.pass_by(before)
        report = await self._inner.put(transfer)
        await self._copies.pass_by(before._replace(after=True))
        return report

    async def discard(self, discard: Discard) -> None:
        before = Step("discard", discard.position, 0, False, discard)
        await self._copies.pass_by(before)
        await self._inner.discard(discard)
        await self._copies.pass_by(before._replace(after=True))


# --- threads and the disk -------------------------------------------------------------------------------------------------


class ThreadHold:
    """Where calls stand in their own thread, whoever waits for them, until they are let through. Made on the event loop."""

    def __init__(self, times: int = 1 << 30) -> None:
        self._loop = asyncio.get_running_loop()
        self._reached = asyncio.Event()
        self._go = threading.Event()
        self._left = times

    def stand(self) -> None:
        """Wait in the calling thread."""
        self._left -= 1
        if self._left >= 0 and not self._go.is_set():
            self._loop.call_soon_threadsafe(self._reached.set)
            self._go.wait()

    async def reached(self) -> None:
        """Wait until a call stands here."""
        async with asyncio.timeout(PATIENCE):
            await self._reached.wait()

    def release(self) -> None:
        """Let all through, now and from now on."""
        self._go.set()


class Threads:
    """Workers whose calls can be held in their thread, by the name of what is called, such as `_gather`."""

    def __init__(self) -> None:
        self._holds: dict[str, ThreadHold] = {}
        self._active = 0
        self._changed = threading.Condition()

    def __call__(self, config: Config) -> Workers:
        """Return workers for `config`."""
        counts = {Lane.COPY: config.copy_threads, Lane.READ: config.read_threads, Lane.WRITE: 4}
        return HeldWorkers(ThreadWorkers(counts), self)

    def hold(self, name: str, times: int = 1 << 30) -> ThreadHold:
        """Hold the next `times` calls of functions with that name."""
        hold = self._holds[name] = ThreadHold(times)
        return hold

    def run(self, call: Callable[..., T], args: tuple[Any, ...]) -> T:
        """Call in the calling thread, after a wait where a hold has the name of what is called."""
        with self._changed:
            self._active += 1
        try:
            hold = self._holds.get(call.__name__)
            if hold is not None:
                hold.stand()
            return call(*args)
        finally:
            with self._changed:
                self._active -= 1
                self._changed.notify_all()

    def join(self) -> None:
        """Wait until no call is under way, whoever waited for it."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._active == 0, PATIENCE)

    def release(self) -> None:
        """End all holds."""
        for hold in self._holds.values():
            hold.release()
        self._holds.clear()


class HeldWorkers:
    """Workers whose every call is run by `threads`, in its own thread."""

    def __init__(self, inner: Workers, threads: Threads) -> None:
        self._inner = inner
        self._threads = threads

    async def run(self, lane: Lane, call: Callable[..., T], *args: Any) -> T:
        return await self._inner.run(lane, self._threads.run, call, args)

    def close(self) -> None:
        self._inner.close()


@dataclass(slots=True)
class _Fault:
    operation: str
    key: int | None
    error: Exception | None
    hold: ThreadHold | None
    times: int
    when: Callable[[], bool] | None = None


class Disk:
    """What befalls the three operations of the SSD store on its data: `read`, `commit` and `sync`, and `copy` inside a read.

    A `copy` stands between the record's being found and its being copied out.
    """

    def __init__(self) -> None:
        self._faults: list[_Fault] = []
        self.reads: list[int] = []
        self.writes: list[int] = []

    def fail(self, operation: str, error: Exception, *, key: int | None = None, times: int = 1 << 30) -> None:
        """Let the next `times` operations, on one key if it is given, raise `error`."""
        self._faults.append(_Fault(operation, key, error, None, times))

    def fail_when(self, operation: str, error: Exception, when: Callable[[], bool]) -> None:
        """Let each of the operations raise `error` for which `when`, asked in order, says True."""
        self._faults.append(_Fault(operation, None, error, None, 1 << 30, when))

    def hold(self, operation: str, *, key: int | None = None) -> ThreadHold:
        """Hold the operations, on one key if it is given, in their thread."""
        hold = ThreadHold()
        self._faults.append(_Fault(operation, key, None, hold, 1 << 30))
        return hold

    def release(self) -> None:
        """End all faults."""
        faults, self._faults = self._faults, []
        for fault in faults:
            if fault.hold is not None:
                fault.hold.release()

    def meet(self, operation: str, keys: Sequence[int]) -> None:
        """Wait where a hold matches and raise where an error does; in the thread that calls."""
        for fault in list(self._faults):
            if fault.operation != operation or not fault.times or (fault.key is not None and fault.key not in keys):
                continue
            if fault.when is not None and not fault.when():
                continue
            fault.times -= 1
            if fault.hold is not None:
                fault.hold.stand()
            if fault.error is not None:
                raise fault.error

    def values(self) -> type[LmdbValues]:
        """Return the class whose instances meet these faults."""
        disk = self

        class FaultyValues(LmdbValues):
            def __init__(self, folder: Path, *, value_bytes: int, map_bytes: int, sync: bool) -> None:
                super().__init__(folder, value_bytes=value_bytes, map_bytes=map_bytes, sync=sync)

            def read(self, key: int, copy: Callable[[memoryview], None]) -> bool:
                def held(view: memoryview) -> None:
                    disk.meet("copy", [key])
                    copy(view)

                disk.reads.append(key)
                disk.meet("read", [key])
                return super().read(key, held)

            def commit(self, writes: Sequence[Write] = (), deletes: Sequence[int] = ()) -> None:
                disk.writes.extend(write.key for write in writes)
                disk.meet("commit", [*(write.key for write in writes), *deletes])
                super().commit(writes, deletes)

            def sync(self) -> None:
                disk.meet("sync", [])
                super().sync()

        return FaultyValues


# --- all of it ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Rig:
    """One of each, for one cache or for several lives of it."""

    clock: Clock = field(default_factory=MonotonicClock)
    digest: Digest = sha256
    retry: float = 0.02
    patience: float = 5.0
    copies: Copies = field(default_factory=Copies)
    threads: Threads = field(default_factory=Threads)
    disk: Disk = field(default_factory=Disk)

    def seams(self) -> Seams:
        """Return the seams that lead here."""
        return Seams(
            clock=self.clock,
            workers=self.threads,
            copier=self.copies.around,
            values=self.disk.values(),
            digest=self.digest,
            retry=self.retry,
            patience=self.patience,
        )

    def release(self) -> None:
        """End all holds and faults."""
        self.copies.release()
        self.threads.release()
        self.disk.release()
