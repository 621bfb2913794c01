"""Files whose pages are not in memory, as a disk has to be measured: dropped, and looked at by mincore."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

_PAGE = mmap.PAGESIZE


def chill(folder: Path) -> float:
    """Write what is dirty of all files below `folder`, drop their pages, and return which share of them is still in memory.

    Pages of a file that is mapped anywhere stay: whoever owns the files has closed them.
    """
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    for path in files:
        file = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
    counts = [_resident(path) for path in files]
    total = sum(pages for _, pages in counts)
    return sum(there for there, _ in counts) / total if total else 0.0


def _resident(path: Path) -> tuple[int, int]:
    """Return how many pages of a file are in memory, and how many it has."""
    size = path.stat().st_size
    pages = -(-size // _PAGE)
    there = np.zeros(pages, np.uint8)
    file = os.open(path, os.O_RDONLY)
    try:
        with mmap.mmap(file, size, prot=mmap.PROT_READ) as mapped:
            whole = np.frombuffer(mapped, np.uint8)
            libc = ctypes.CDLL(None, use_errno=True)
            failed = libc.mincore(ctypes.c_void_p(whole.ctypes.data), ctypes.c_size_t(size), ctypes.c_void_p(there.ctypes.data))
            error = ctypes.get_errno()
            del whole  # it keeps the mapping from being closed
    finally:
        os.close(file)
    if failed:
        raise OSError(error, os.strerror(error), os.fspath(path))
    return int((there & 1).sum()), pages
