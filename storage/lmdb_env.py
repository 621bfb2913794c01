"""The thin layer over lmdb: environments opened by the rules, its errors translated in one table."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import lmdb

from tiercache.errors import StoreError, StoreFull
from tiercache.storage.directory import make_private, sync_folder
from tiercache.storage.lmdb_file import check_file

PAGE: Final = min(os.sysconf("SC_PAGE_SIZE"), 32_768)
"""Bytes of a page in files that this machine creates; LMDB takes the system's, up to 32 KiB."""
PAGE_HEAD: Final = 16
"""Bytes that LMDB puts before a large value: one of n·PAGE - 16 bytes takes n pages."""
READERS: Final = 512
DATA_FILE: Final = "data.mdb"

Environment = Any
"""An `lmdb.Environment`: the library has no types."""
Transaction = Any

_FULL: Final = (
    (lmdb.MapFullError, "map"),
    (lmdb.TxnFullError, "transaction"),
    (lmdb.DiskError, "disk"),
)
_BROKEN: Final = (
    lmdb.CorruptedError,
    lmdb.IncompatibleError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.VersionMismatchError,
)


def open_environment(folder: Path, *, map_bytes: int, sync: bool, metasync: bool, databases: int = 0) -> Environment:
    """Open the environment in `folder`, created with mode 0700 if absent, and clear readers that died in it.

    The caller owns the data directory, so any lock file is a dead owner's and goes. Never `writemap`: with it a full disk is
    a bus error. `readahead` stays on: a cold 2 MiB value takes 5 ms with it and 50 ms without. The files are 0600.

    Raises StoreError for files that are no whole LMDB environment or can't be opened.
    """
    with translated(folder):
        absent = [place for place in (folder, *folder.parents) if not place.exists()]
        fresh = not (folder / DATA_FILE).exists()
        make_private(folder)
        check_file(folder / DATA_FILE, values=databases > 0)  # metadata has few large values, data nothing else
        (folder / "lock.mdb").unlink(missing_ok=True)
        environment = lmdb.open(
            os.fspath(folder),
            map_size=whole_pages(max(map_bytes, file_bytes(folder))),
            mode=0o600,
            sync=sync,
            metasync=metasync,
            writemap=False,
            readahead=True,
            max_readers=READERS,
            max_dbs=databases,
        )
        environment.reader_check()
        if fresh and sync:
            for place in (folder, *(place.parent for place in absent)):
                sync_folder(place)
    return environment


class Headroom:
    """Allocated room behind the last page in use of a data file, so that a full disk can't stop a delete.

    LMDB copies each page that it changes, also to delete: without room for the copies a full disk would stay full. Writing
    must leave the room alone when it can't be had again; `keep` tells.
    """

    def __init__(self, environment: Environment, folder: Path, pages: int) -> None:
        self._environment = environment
        self._bytes = pages * PAGE
        self._descriptor = os.open(folder / DATA_FILE, os.O_RDWR | os.O_CLOEXEC)

    def keep(self, limit: int) -> bool:
        """Allocate what is missing, up to `limit` bytes of file, and return whether all of it is there."""
        end = (self._environment.info()["last_pgno"] + 1) * PAGE
        if os.fstat(self._descriptor).st_size >= min(end + self._bytes, limit):
            return True
        try:
            os.posix_fallocate(self._descriptor, end, min(end + 2 * self._bytes, limit) - end)
        except OSError as error:
            return error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # else: a file system that can't allocate
        return True

    def free_pages(self) -> int:
        """Return how many pages of the file hold nothing, for an environment without named databases."""
        stat = self._environment.stat()
        last = int(self._environment.info()["last_pgno"])
        return last - 1 - sum(int(stat[kind]) for kind in ("branch_pages", "leaf_pages", "overflow_pages"))

    def pages_behind(self, map_bytes: int) -> int:
        """Return how many pages of a map of `map_bytes` lie behind the last one that was ever in use."""
        return map_bytes // PAGE - 1 - int(self._environment.info()["last_pgno"])

    def close(self) -> None:
        """Close the descriptor. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def whole_pages(count: int) -> int:
    """Return `count` bytes rounded up to pages."""
    return -(-count // PAGE) * PAGE


def file_bytes(folder: Path) -> int:
    """Return the length of the data file of the environment in `folder`; 0 if there is none."""
    try:
        return os.stat(folder / DATA_FILE).st_size
    except FileNotFoundError:
        return 0


@contextmanager
def translated(folder: Path, *, need: int = 0) -> Iterator[None]:
    """Raise what lmdb and the system raise inside as StoreFull (`kind`: map, transaction or disk) or StoreError.

    A StoreError whose field `broken` is true says that the files themselves are bad; any other may pass.
    `need` is what was to be written, in bytes: LMDB reports a short write on a full disk as a plain I/O error, and only the
    room that is left tells the two apart.
    """
    try:
        yield
    except lmdb.Error as error:
        for kind, name in _FULL:
            if isinstance(error, kind):
                raise StoreFull(f"{folder}: no room in the {name}: {error}", path=str(folder), kind=name) from error
        if _free(folder) < need:
            raise StoreFull(f"{folder}: the disk is full: {error}", path=str(folder), kind="disk") from error
        raise StoreError(f"{folder}: {error}", path=str(folder), broken=isinstance(error, _BROKEN)) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(f"{folder}: the disk is full: {error.strerror}", path=str(folder), kind="disk") from error
        raise StoreError(f"{folder}: {error}", path=str(folder), errno=error.errno) from error


def _free(folder: Path) -> int:
    try:
        room = os.statvfs(folder)
    except OSError:
        return 1 << 62
    return room.f_bavail * room.f_frsize
