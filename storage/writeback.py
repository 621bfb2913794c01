"""Early write-back: the disk begins to write a commit's pages while the rest of them is still being copied to the page cache.

A commit copies all of its pages to the page cache and then waits for the disk. Without a hint the disk idles during the first half
and the processor during the second; and where more is dirty at once than the system likes, it lets the writer sleep.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_WRITE: Final = 2
"""SYNC_FILE_RANGE_WRITE: begin to write what is dirty and not under way, and wait for nothing."""
_PAUSE: Final = 0.0003
"""Seconds between two hints: what is copied meanwhile is about 1 MiB, enough for requests of full size."""
_LEAST: Final = 4 << 20
"""Bytes of a commit below which a hint gains nothing."""


class Writeback:
    """Hints for the file `path`, given by a thread of its own that is started by the first large commit.

    It is a hint and nothing more: whether pages are safe is said by the sync of the commit, which also learns of every error. The
    thread is a daemon, as the disk may keep it for ever, and the descriptor is its own. Where they can't be had nothing is hinted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread: threading.Thread | None = None
        self._wanted = threading.Event()
        self._idle = threading.Event()
        self._closed = False

    @contextmanager
    def during(self, size: int) -> Iterator[None]:
        """Give hints for as long as the block runs, in which `size` bytes are written. One thread at a time."""
        if size < _LEAST or not self._ready():
            yield
            return
        self._idle.clear()
        self._wanted.set()
        try:
            yield
        finally:
            self._wanted.clear()
            self._idle.set()

    def close(self, seconds: float) -> None:
        """End the thread, and wait at most `seconds` for a disk that keeps it. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._idle.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(seconds)

    def _ready(self) -> bool:
        if self._closed or _sync_file_range is None:
            return False
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="tiercache-writeback", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread can be had now: the commit works without
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        assert _sync_file_range is not None
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # the commit works without
            return
        try:
            while not self._closed:
                self._wanted.wait()
                while self._wanted.is_set() and not self._closed:
                    _sync_file_range(descriptor, 0, 0, _WRITE)
                    self._idle.wait(_PAUSE)
        finally:
            os.close(descriptor)


def _find() -> Callable[[int, int, int, int], int] | None:
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
        call.restype = ctypes.c_int
    return call


_sync_file_range = _find()
