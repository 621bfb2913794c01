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
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_file(folder / DATA_FILE)
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
                _sync_folder(place)
    return environment


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


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free(folder: Path) -> int:
    try:
        room = os.statvfs(folder)
    except OSError:
        return 1 << 62
    return room.f_bavail * room.f_frsize
