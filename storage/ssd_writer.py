"""All writing of one geometry: what is named by metadata, what lies in the data environments, and the order between the two.

Metadata names a subset of what is stored, at every moment at which the process or the machine may die:

    put       data commit, sync, metadata commit        died between: bytes that nothing names; `reconcile` deletes them
    discard   metadata commit, data commit              died between: the same
    overwrite is a discard and a put: in the other order the metadata of the old block would name the bytes of the new one

The writer is a lock and a queue, not a thread: whoever gets the lock does what is queued, first come first served, his own
included. Those that wait find their work done, many small puts become one transaction, and there is no thread to start, to
hand over to or to leave behind.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import numpy as np

from tiercache.errors import Closed, StoreError, StoreFull, Untrusted
from tiercache.storage.contract import FULL_CHARGE, Outcome
from tiercache.storage.lmdb_env import PAGE, translated
from tiercache.storage.metadata import Loaded, Row, Rows
from tiercache.storage.ssd_layout import PACKED_CHARGE, SsdLayout
from tiercache.storage.ssd_records import Staged
from tiercache.storage.ssd_values import LmdbValues, Write

_SWEEP: Final = 4096
"""Keys that one transaction deletes."""


class Reconciled(NamedTuple):
    """What one step found: `absent` slots are named but not stored, `deleted` records were stored but not named."""

    done: bool
    absent: list[int]
    deleted: int


class Call:
    """One `put`: its outcomes so far, and the rows whose bytes are stored but whose metadata is not yet."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.rows: list[Row] = []
        self.failed = False
        self.abandoned = False

    def fail(self, count: int, error: StoreError) -> None:
        """Note that of `count` further items the first failed with `error`; the others come after it in the chain."""
        self.failed = True
        if count:
            self.outcomes.append(Outcome(0, error))
            later = Outcome(0, Untrusted("order", "a block before it in the chain was not stored"))
            self.outcomes.extend([later] * (count - 1))


class _Job:
    """A piece of work in the queue: a part of a call, or slots to forget."""

    def __init__(self, call: Call | None, staged: Sequence[Staged], *, last: bool, forget: Sequence[int] = ()) -> None:
        self.call = call
        self.staged = staged
        self.last = last
        self.forget = forget
        self.done = False
        self.error: BaseException | None = None


class SsdWriter:
    """Writes to the data environments, by charge, and to `rows`. Thread-safe.

    `loaded` is what metadata names at the start. `limit` of the layout is what the files may occupy together: the maps of
    both never add up to more, so that LMDB itself refuses to grow a file beyond it. They never shrink either: packed records
    that find no room are stored raw, at full charge, in what the packed map left of the limit. A raw record that finds none is
    refused.
    """

    def __init__(
        self,
        layout: SsdLayout,
        rows: Rows,
        values: dict[int, LmdbValues],
        loaded: Loaded,
        *,
        sync: bool,
        clock: Callable[[], float],
    ) -> None:
        self._layout = layout
        self._rows = rows
        self._values = values
        self._sync = sync
        self._clock = clock
        self._charges = bytearray(layout.capacity)
        self._named = np.frombuffer(self._charges, np.uint8)
        self._named[loaded.slots] = loaded.charges
        self._pending: dict[int, int] = {}
        self._strays: dict[int, set[int]] = {charge: set() for charge in values}
        self._queue: deque[_Job] = deque()
        self._writing = threading.Lock()
        self._closed = False
        self._next_key = 0
        self.last_sync: float | None = None
        self._swept = 0

    def charge(self, slot: int) -> int:
        """Return the charge of what `slot` holds; 0 if metadata names nothing there."""
        return self._charges[slot]

    @property
    def named(self) -> int:
        """How many slots hold a block."""
        return int(np.count_nonzero(self._named))

    @property
    def strays(self) -> int:
        """How many values are known to be stored without being named."""
        return sum(map(len, self._strays.values()))

    def put(self, call: Call, staged: Sequence[Staged], *, last: bool) -> None:
        """Store the next part of `call`, at most a batch; with `last` write the metadata of all of it. Failures are outcomes."""
        self._submit(_Job(call, staged, last=last))

    def abandon(self, call: Call) -> None:
        """Give up a call that will get no last part: what it stored is never named."""
        with self._writing:
            call.abandoned = True  # a part of it may still be queued, if its thread was interrupted while it waited
            self._unname(call)

    def forget(self, slots: Sequence[int]) -> None:
        """Forget what `slots` hold, for good. Raises StoreError, and then nothing is forgotten."""
        self._submit(_Job(None, (), last=True, forget=slots))

    def sync(self) -> None:
        """Make everything that was put so far safe from power loss. Raises StoreError."""
        with self._writing:
            self._require_open()
            self._sync_values()
            self._rows.sync()
            self.last_sync = self._clock()

    def reconcile(self, step: int) -> Reconciled:
        """Compare the next `step` keys with metadata, delete what is unnamed, and return what is absent.

        Reading the keys and judging them is one step under the writer's lock: a put between the two would make its slot look
        absent, or its record unnamed. What is stored but not named yet counts as named.
        """
        with self._writing:
            self._require_open()
            first = self._next_key
            stop = min(first + step, self._layout.keys) if first < self._layout.keys else None
            absent: list[int] = []
            before = self._swept
            more = False
            for charge, values in self._values.items():
                with translated(values.folder):
                    stored = values.keys(first, stop, step)
                self._strays[charge].update(key for key in stored if not self._lives(key, charge))
                if stop is None:
                    more = more or len(stored) == step
                else:
                    absent += self._absent(first, stop, charge, set(stored))
            self._next_key = self._layout.keys if stop is None else stop
            self._sweep()
            done = stop is None and not more
            return Reconciled(done, sorted(absent), self._swept - before)

    def close(self, seconds: float) -> bool:
        """Refuse what comes from now on; return whether what runs ended within `seconds`, and everything is closed."""
        self._closed = True
        if not self._writing.acquire(timeout=seconds):
            return False
        try:
            ended = [values.close(seconds) for values in self._values.values()]
            return all(ended)
        finally:
            self._writing.release()

    def _submit(self, job: _Job) -> None:
        self._queue.append(job)
        with self._writing:
            while not job.done:
                self._round()
        if job.error is not None:
            raise job.error

    def _round(self) -> None:
        """Do the job at the head of the queue, and with it those behind it that fit the same transaction."""
        jobs = [self._queue.popleft()]
        try:
            self._require_open()
            if jobs[0].call is None:
                while self._queue and self._queue[0].call is None:
                    jobs.append(self._queue.popleft())
                self._forget([slot for job in jobs for slot in job.forget])
            else:
                room = self._layout.batch - self._size(jobs[0])
                while self._queue and self._queue[0].call is not None and (room := room - self._size(self._queue[0])) >= 0:
                    jobs.append(self._queue.popleft())
                self._store(jobs)
        except BaseException as error:
            for job in jobs:
                job.error = error
            if not isinstance(error, (StoreError, Closed)):
                raise
        finally:
            # Whatever happened: a job that is never done would keep its owner in the loop above for ever.
            for job in jobs:
                job.done = True

    def _store(self, jobs: Sequence[_Job]) -> None:
        jobs = [job for job in jobs if job.call is not None and not job.call.abandoned]
        calls = [job.call for job in jobs if job.call is not None]
        old = [item.slot for job in jobs for item in job.staged if self._charges[item.slot]]
        try:
            if old:
                self._forget(old)
            self._sweep()
        except StoreError as error:
            for job, call in zip(jobs, calls, strict=True):
                call.fail(len(job.staged), error)
        else:
            self._store_values(jobs)
        self._name([call for job, call in zip(jobs, calls, strict=True) if job.last or call.failed])

    def _store_values(self, jobs: Sequence[_Job]) -> None:
        """Commit the records of `jobs`, and note in their calls what became of each."""
        failures: dict[int, StoreError] = {}
        for charge in (PACKED_CHARGE, FULL_CHARGE):  # in this order: what finds no room packed is stored raw
            writes = [item.write for job in jobs for item in job.staged if item.charge == charge]
            try:
                if writes:
                    self._commit(charge, writes)
            except StoreError as error:
                if charge == PACKED_CHARGE and isinstance(error, StoreFull):
                    for job in jobs:
                        job.staged = [item.unpacked() for item in job.staged]
                else:
                    failures[charge] = error
        if failures and len(jobs) > 1:  # one caller's failure is not the others': each by itself
            for item in (item for job in jobs for item in job.staged if item.charge not in failures):
                self._stray(item.slot, item.charge)  # until it is written again, which may fail this time
            for job in jobs:
                self._store_values([job])
            return
        for job in jobs:
            assert job.call is not None
            good = next((place for place, item in enumerate(job.staged) if item.charge in failures), len(job.staged))
            for item in job.staged[:good]:
                self._pending[item.slot] = item.charge
                job.call.rows.append(Row(item.slot, item.identity, item.charge))
                job.call.outcomes.append(Outcome(item.charge))
            if good < len(job.staged):
                job.call.fail(len(job.staged) - good, failures[job.staged[good].charge])
            for item in job.staged[good:]:
                if item.charge not in failures:
                    self._stray(item.slot, item.charge)

    def _name(self, calls: Sequence[Call]) -> None:
        """Make the bytes of `calls` safe and then write their rows; what can't be named is not stored."""
        rows = [row for call in calls for row in call.rows]
        if not rows:
            return
        try:
            if self._sync:
                self._sync_values()
                self.last_sync = self._clock()
            self._rows.commit(rows)
        except StoreError as error:
            for call in calls:
                count = len(call.outcomes)
                self._unname(call)
                call.outcomes.clear()
                call.fail(count, error)
            return
        for row in rows:
            self._pending.pop(row.slot, None)
            self._charges[row.slot] = row.charge
        for call in calls:
            call.rows.clear()

    def _unname(self, call: Call) -> None:
        for row in call.rows:
            self._pending.pop(row.slot, None)
            self._stray(row.slot, row.charge)
        call.rows.clear()

    def _forget(self, slots: Sequence[int]) -> None:
        known = [(slot, self._charges[slot]) for slot in dict.fromkeys(slots) if self._charges[slot]]
        if not known:
            return
        self._rows.commit((), [slot for slot, _ in known])
        for slot, _ in known:
            self._charges[slot] = 0
        for slot, charge in known:
            self._stray(slot, charge)
        self._sweep()

    def _stray(self, slot: int, charge: int) -> None:
        key = slot // self._layout.group
        if not self._lives(key, charge):
            self._strays[charge].add(key)

    def _lives(self, key: int, charge: int) -> bool:
        """Return whether a slot of value `key` is named, or will be."""
        group = self._layout.group
        for slot in range(key * group, min((key + 1) * group, self._layout.capacity)):
            if charge in (self._charges[slot], self._pending.get(slot)):
                return True
        return False

    def _absent(self, first: int, stop: int, charge: int, stored: set[int]) -> list[int]:
        group = self._layout.group
        places = np.flatnonzero(self._named[first * group : stop * group] == charge) + first * group
        return [slot for slot in places.tolist() if slot // group not in stored]

    def _sweep(self) -> None:
        """Delete what is stored but not named. A failure leaves it for the next time: nothing that is promised depends on it."""
        for charge, values in self._values.items():
            strays = self._strays[charge]
            strays -= {key for key in strays if self._lives(key, charge)}
            with suppress(StoreError):
                while strays:
                    keys = [key for key, _ in zip(strays, range(_SWEEP), strict=False)]
                    with translated(values.folder, need=PAGE):
                        values.commit((), keys)
                    strays.difference_update(keys)
                    self._swept += len(keys)

    def _commit(self, charge: int, writes: Sequence[Write]) -> None:
        """Commit `writes`. With the map full let it grow, if the limit allows; else make room, once; then it is StoreFull.

        Pages that the last transaction freed are no room yet: one more must be committed before they are.
        """
        values = self._values[charge]
        # Maps never shrink, so raw records may leave packed ones none for good: that is seen here, not by trying each time.
        while charge == PACKED_CHARGE and not values.has_room(writes):
            if not self._grow(values):
                raise StoreFull(f"{values.folder}: the map is full and can't grow", path=str(values.folder), kind="map")
        retried = False
        while True:
            try:
                with translated(values.folder, need=sum(len(write.data) for write in writes)):
                    values.commit(writes)
                # No stray any more: the sweep of a later commit of this round, before it is pending, must not take it.
                self._strays[charge].difference_update(write.key for write in writes)
                return
            except StoreFull as full:
                kind = full.fields.get("kind")
                if kind == "map" and self._grow(values):
                    continue
                if retried or not (kind == "map" or (kind == "disk" and values.can_reuse(writes))):
                    raise
            retried = True
            self._sweep()
            with translated(values.folder, need=PAGE):
                values.settle()

    def _grow(self, values: LmdbValues) -> bool:
        spare = self._layout.limit - sum(other.map_bytes for other in self._values.values())
        step = min(spare, max(self._layout.limit // 16, 2 * self._layout.batch))
        if step < PAGE:
            return False
        with translated(values.folder):
            values.grow(values.map_bytes + step)
        return True

    def _sync_values(self) -> None:
        for values in self._values.values():
            with translated(values.folder):
                values.sync()

    def _size(self, job: _Job) -> int:
        return len(job.staged) * self._layout.raw_pages * PAGE // self._layout.group  # raw is what any of it may become

    def _require_open(self) -> None:
        if self._closed:
            raise Closed("the SSD store is closed")
