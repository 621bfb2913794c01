"""Files whose pages are not in memory: they are dropped, and what the system says of it is checked."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_MOST = 0.01
"""Of a file's pages may still be in memory when it counts as cold."""


def chill(folder: Path) -> float:
    """Write the dirty pages of every file under `folder` and drop all pages; return the share that is still in memory.

    No process may have the files mapped: under an open map nothing is dropped. Raises AssertionError if a hundredth or more stays.
    """
    files = [file for file in folder.rglob("*") if file.is_file() and file.stat().st_size]
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    share = resident(files)
    assert share < _MOST, f"{share:.1%} of the pages are still in memory"
    return share


def resident(files: Iterable[Path]) -> float:
    """Return which share of the files' pages is in memory, as mincore says."""
    found = pages = 0
    for file in files:
        with open(file, "r+b") as stream, mmap.mmap(stream.fileno(), 0) as mapped:
            count = -(-len(mapped) // mmap.PAGESIZE)
            marks = np.zeros(count, np.uint8)
            begin = ctypes.c_char.from_buffer(mapped)
            status = _libc.mincore(ctypes.byref(begin), ctypes.c_size_t(len(mapped)), marks.ctypes.data_as(ctypes.c_void_p))
            del begin  # else the mapping can't be closed
            if status:
                raise OSError(ctypes.get_errno(), "mincore")
            found += int(np.count_nonzero(marks & 1))
            pages += count
    return found / pages if pages else 0.0


_libc = ctypes.CDLL(None, use_errno=True)
