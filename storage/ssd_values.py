"""One data environment: fixed-size values under 8-byte keys, and the three operations that touch the disk."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import lmdb

from tiercache.errors import Closed, StoreFull
from tiercache.storage.lmdb_env import DATA_FILE, PAGE, PAGE_HEAD, Environment, Headroom, file_bytes, open_environment, whole_pages
from tiercache.storage.lmdb_file import mend_values
from tiercache.storage.writeback import Writeback

_KEY_BYTES: Final = 8
_TICK: Final = b"\xff" * _KEY_BYTES
_HEADROOM_PAGES: Final = 64
GATE_SECONDS: Final = 10.0
"""How long a change of the map waits for reads to end. They take milliseconds; one that hangs must not stop the writer."""


class Write(NamedTuple):
    """`data` at `offset` of the value under `key`; a whole value where it has the value's length."""

    key: int
    offset: int
    data: bytes | memoryview


class Gate:
    """Many readers, or one who changes what they read through. Readers come first: the one waits until none is inside."""

    def __init__(self) -> None:
        self._inside = 0
        self._shut = False
        self._changed = threading.Condition()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Be a reader inside the block."""
        with self._changed:
            while self._shut:
                self._changed.wait()
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self, seconds: float) -> Iterator[bool]:
        """Be the only one inside the block; the value is False, and others are inside, if `seconds` did not suffice."""
        with self._changed:
            free = self._changed.wait_for(lambda: self._inside == 0 and not self._shut, seconds)
            self._shut = self._shut or free
        try:
            yield free
        finally:
            if free:
                with self._changed:
                    self._shut = False
                    self._changed.notify_all()


class LmdbValues:
    """Values of `value_bytes` bytes each in the environment in `folder`.

    `read`, `commit` and `sync` are all that touches the disk; a test replaces the class with one that lets them fail or
    wait. They raise what lmdb and the system raise: the caller translates. One thread at a time writes; any may read.

    Opening raises StoreError (see `open_environment`). `metasync` is off: a commit is safe from kill -9 at once and from a
    loss of power after the next commit or `sync`. With `sync=False` nothing is safe from a loss of power before `sync`.
    """

    def __init__(self, folder: Path, *, value_bytes: int, map_bytes: int, sync: bool) -> None:
        self.folder = folder
        self.value_bytes = value_bytes
        self.map_bytes = whole_pages(max(map_bytes, file_bytes(folder)))
        self._gate = Gate()
        self._environment: Environment | None = open_environment(folder, map_bytes=self.map_bytes, sync=sync, metasync=False)
        self._headroom = Headroom(self._environment, folder, _HEADROOM_PAGES)
        self._writeback = Writeback(folder / DATA_FILE)

    def read(self, key: int, copy: Callable[[memoryview], None]) -> bool:
        """Call `copy` with the value in place and return True, or return False if there is none.

        The view is released before its transaction ends, so that it can't show a later record's bytes: whoever keeps it gets
        a ValueError. `copy` must not wait: the transaction pins every page that is freed meanwhile.
        """
        with self._gate.shared(), self._open().begin(buffers=True) as transaction:
            value = transaction.get(_key(key))
            if value is None:
                return False
            with value:
                copy(value)
            return True

    def commit(self, writes: Sequence[Write] = (), deletes: Sequence[int] = ()) -> None:
        """Do all of `deletes` and `writes`, or nothing of it, in one transaction.

        Parts of a value are written over what is there, zeros where nothing is; parts of one value are brought together
        first, so that it is written once. On a full disk writes may only use free pages: room is left for deletes.

        Where the disk lost the beginning of a value that is to go, LMDB can't free it: that is mended, and it is tried again.
        """
        if not self._headroom.keep(self.map_bytes) and not self.can_reuse(writes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            self._change(writes, deletes)
        except lmdb.CorruptedError:
            if not mend_values(self.folder / DATA_FILE):
                raise
            self._change(writes, deletes)

    def _change(self, writes: Sequence[Write], deletes: Sequence[int]) -> None:
        parts: dict[int, bytearray] = {}
        size = sum(len(write.data) for write in writes)
        with self._writeback.during(size), self._open().begin(write=True) as transaction:
            for key in deletes:
                transaction.delete(_key(key))
            for write in writes:
                if len(write.data) == self.value_bytes:
                    transaction.put(_key(write.key), write.data)
                    continue
                if write.key not in parts:
                    parts[write.key] = self._value(transaction.get(_key(write.key)))
                parts[write.key][write.offset : write.offset + len(write.data)] = write.data
            for key, value in parts.items():
                transaction.put(_key(key), value)

    def can_reuse(self, writes: Sequence[Write]) -> bool:
        """Return whether the file has free pages for `writes`; LMDB may take fresh ones all the same."""
        return self._pages(writes) <= self._headroom.free_pages()

    def has_room(self, writes: Sequence[Write]) -> bool:
        """Return whether the map has pages for `writes`; some may not be reusable yet."""
        return self._pages(writes) <= self._headroom.free_pages() + self._headroom.pages_behind(self.map_bytes)

    def sync(self) -> None:
        """Make what was committed safe from a loss of power."""
        self._open().sync(True)

    def settle(self) -> None:
        """Commit a transaction of next to nothing: pages are reused two transactions after the one that freed them."""
        with self._open().begin(write=True) as transaction:
            transaction.put(_TICK, transaction.id().to_bytes(_KEY_BYTES, "big"))

    def grow(self, map_bytes: int) -> None:
        """Map `map_bytes` bytes instead. Raises StoreFull, `kind` busy, if a read hangs: under it the map can't move."""
        with self._gate.alone(GATE_SECONDS) as free:
            if not free:
                raise StoreFull(f"{self.folder}: a read under way for {GATE_SECONDS} s", path=str(self.folder), kind="busy")
            self.map_bytes = map_bytes // PAGE * PAGE
            self._open().set_mapsize(self.map_bytes)

    def keys(self, start: int, stop: int | None, limit: int) -> list[int]:
        """Return the first `limit` keys from `start` to before `stop` (None: to the end), without reading values."""
        found: list[int] = []
        with self._open().begin() as transaction, transaction.cursor() as cursor:
            if cursor.set_range(_key(start)):
                for key in cursor.iternext(values=False):
                    number = int.from_bytes(key, "big")
                    if key == _TICK or len(found) == limit or (stop is not None and number >= stop):
                        break
                    found.append(number)
        return found

    def count(self) -> int:
        """Return the number of values."""
        with self._gate.shared(), self._open().begin() as transaction:
            return int(transaction.stat()["entries"]) - (transaction.get(_TICK) is not None)

    @property
    def file_bytes(self) -> int:
        """The length of the file: the most that was in use at once, as LMDB never shrinks it."""
        return file_bytes(self.folder)

    def close(self, seconds: float = GATE_SECONDS) -> bool:
        """Close the environment and return True; after `seconds` of waiting for a read, leave it open and return False.

        A hint that the disk keeps is waited for within the same `seconds`, and then left to itself.
        """
        end = time.monotonic() + seconds
        with self._gate.alone(seconds) as free:
            if free and self._environment is not None:
                self._headroom.close()
                self._writeback.close(max(0.0, end - time.monotonic()))
                self._environment.close()
                self._environment = None
            return free

    def _open(self) -> Environment:
        if self._environment is None:
            raise Closed(f"the SSD store in {self.folder} is closed")
        return self._environment

    def _pages(self, writes: Sequence[Write]) -> int:
        return len({write.key for write in writes}) * whole_pages(self.value_bytes + PAGE_HEAD) // PAGE

    def _value(self, old: bytes | None) -> bytearray:
        # A value of another length is no record of ours; what its members claimed is gone with it.
        return bytearray(old) if old is not None and len(old) == self.value_bytes else bytearray(self.value_bytes)


def _key(number: int) -> bytes:
    return number.to_bytes(_KEY_BYTES, "big")
