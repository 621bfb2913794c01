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
from typing import Any, TypeVar

from tests.seam_copies import PATIENCE, Copies, HeldCopier, Hold, Step
from tiercache.clock import Clock, MonotonicClock
from tiercache.config import Config
from tiercache.keys import Digest, sha256
from tiercache.service.stack import Seams
from tiercache.storage.ssd_values import LmdbValues, Write
from tiercache.storage.workers import Lane, ThreadWorkers, Workers

T = TypeVar("T")

__all__ = [
    "PATIENCE",
    "Copies",
    "Disk",
    "FakeClock",
    "HeldCopier",
    "HeldWorkers",
    "Hold",
    "Rig",
    "Step",
    "ThreadHold",
    "Threads",
]


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
        self._when: dict[str, Callable[..., bool]] = {}
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

    def hold_when(self, name: str, when: Callable[..., bool]) -> ThreadHold:
        """Hold the calls of functions with that name whose arguments `when` says True to."""
        self._when[name] = when
        return self.hold(name)

    def run(self, call: Callable[..., T], args: tuple[Any, ...]) -> T:
        """Call in the calling thread, after a wait where a hold has the name of what is called."""
        with self._changed:
            self._active += 1
        try:
            hold = self._holds.get(call.__name__)
            if hold is not None and (call.__name__ not in self._when or self._when[call.__name__](*args)):
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
        self._when.clear()


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
    forgetting: float = 30.0
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
            forgetting=self.forgetting,
        )

    def release(self) -> None:
        """End all holds and faults."""
        self.copies.release()
        self.threads.release()
        self.disk.release()
