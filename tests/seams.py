"""What the tests put in the place of time, threads, copies and the disk, to stop each of them at a named step.

A `Rig` has one of each and makes the `Seams` for a cache. What is held stays held until the test releases it; `Rig.release`
lets everything go, so that no cache has to close against a hold.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tests.seam_copies import PATIENCE, Copies, HeldCopier, Hold, Step
from tiercache.clock import Clock, MonotonicClock
from tiercache.config import Config
from tiercache.kernels.device import Device
from tiercache.kernels.opening import open_device
from tiercache.keys import Digest, sha256
from tiercache.service.device_tensors import DeviceTensors
from tiercache.service.stack import Seams, lanes_of
from tiercache.storage.disk_room import DiskRoom, measure
from tiercache.storage.ssd_values import LmdbValues, Write
from tiercache.storage.workers import Lane, LaneState, ThreadWorkers, Workers

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
        self._deaths: dict[str, int] = {}
        self._active = 0
        self._changed = threading.Condition()

    def __call__(self, config: Config, clock: Clock) -> Workers:
        """Return workers for `config`."""
        return HeldWorkers(ThreadWorkers(lanes_of(config), clock=clock), self)

    def hold(self, name: str, times: int = 1 << 30) -> ThreadHold:
        """Hold the next `times` calls of functions with that name."""
        hold = self._holds[name] = ThreadHold(times)
        return hold

    def hold_when(self, name: str, when: Callable[..., bool]) -> ThreadHold:
        """Hold the calls of functions with that name whose arguments `when` says True to."""
        self._when[name] = when
        return self.hold(name)

    def kill(self, name: str, times: int = 1) -> None:
        """Let the threads die that begin the next `times` calls of functions with that name."""
        self._deaths[name] = times

    def run(self, call: Callable[..., T], args: tuple[Any, ...]) -> T:
        """Call in the calling thread, after a wait where a hold has the name of what is called."""
        with self._changed:
            self._active += 1
        try:
            name = (call.func if isinstance(call, partial) else call).__name__
            hold = self._holds.get(name)
            if hold is not None and (name not in self._when or self._when[name](*args)):
                hold.stand()
            if self._deaths.get(name, 0):
                self._deaths[name] -= 1
                raise SystemExit("killed by the test")
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
        self._deaths.clear()


class HeldWorkers:
    """Workers whose every call is run by `threads`, in its own thread."""

    def __init__(self, inner: Workers, threads: Threads) -> None:
        self._inner = inner
        self._threads = threads

    async def run(self, lane: Lane, call: Callable[..., T], *args: Any) -> T:
        return await self._inner.run(lane, self._threads.run, call, args)

    def lanes(self) -> tuple[LaneState, ...]:
        return self._inner.lanes()

    def close(self) -> None:
        self._inner.close()


@dataclass(slots=True)
class _Fault:
    operation: str
    key: int | None
    error: BaseException | None
    hold: ThreadHold | None
    times: int
    when: Callable[[], bool] | None = None


class Disk:
    """What befalls the operations of the SSD store on its data: `open`, `read`, `commit`, `sync`, `keys`, and `copy` in a read.

    A `copy` stands between the record's being found and its being copied out. `room` is the look at the file system; `free`, if
    it is given, is what that finds to be free.
    """

    def __init__(self) -> None:
        self._faults: list[_Fault] = []
        self.reads: list[int] = []
        self.writes: list[int] = []
        self.free: int | None = None

    def fail(self, operation: str, error: BaseException, *, key: int | None = None, times: int = 1 << 30) -> None:
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
                disk.meet("open", [])
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

            def keys(self, start: int, stop: int | None, limit: int) -> list[int]:
                disk.meet("keys", [])
                return super().keys(start, stop, limit)

        return FaultyValues

    def measure(self, directory: Path) -> DiskRoom:
        """Look at the file system."""
        self.meet("room", [])
        room = measure(directory)
        return room if self.free is None else room._replace(free=self.free)


# --- all of it ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Rig:
    """One of each, for one cache or for several lives of it."""

    clock: Clock = field(default_factory=MonotonicClock)
    digest: Digest = sha256
    retry: float = 0.02
    patience: float = 5.0
    forgetting: float = 30.0
    device: Callable[[str], Device] = open_device
    tensors: Callable[[Device], DeviceTensors] = DeviceTensors
    copies: Copies = field(default_factory=Copies)
    threads: Threads = field(default_factory=Threads)
    disk: Disk = field(default_factory=Disk)

    def seams(self) -> Seams:
        """Return the seams that lead here."""
        return Seams(
            clock=self.clock,
            workers=self.threads,
            device=self.device,
            tensors=self.tensors,
            copier=self.copies.around,
            values=self.disk.values(),
            measure=self.disk.measure,
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
