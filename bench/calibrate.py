"""What this machine can do at best, measured in the run that it is compared with: one memcpy, and its disk past the page cache."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

_PAGE = 4096
FLIGHTS = (1, 4, 8)
"""How many requests the disk is given at once; the best counts."""


class Disk(NamedTuple):
    """Bytes per second of O_DIRECT, the best of `FLIGHTS` requests at once."""

    write: float
    read: float


def memcpy_rate(total: int, piece: int, *, rounds: int = 5) -> float:
    """Return bytes per second of copying `total` bytes in pieces of `piece` bytes, the best of `rounds`, in one thread.

    Source and target together are larger than a processor's cache only where `total` is.
    """
    pieces = max(1, total // piece)
    source = np.random.default_rng(0).integers(0, 256, (pieces, piece), dtype=np.uint8)
    target = np.zeros_like(source)

    def copy() -> None:
        for here, there in zip(source, target, strict=True):
            np.copyto(there, here)

    return pieces * piece / min(seconds(copy) for _ in range(rounds))


def disk_rates(folder: Path, total: int, piece: int) -> Disk | None:
    """Return what writing and reading `total` bytes in pieces of `piece` costs in `folder`, past the page cache.

    Writes end with fdatasync. None where the file system has no O_DIRECT (tmpfs).
    """
    piece = -(-piece // _PAGE) * _PAGE
    offsets = range(0, max(1, total // piece) * piece, piece)
    path = folder / "raw"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError:
        return None
    buffer = mmap.mmap(-1, piece)  # a mapping begins on a page, as O_DIRECT wants it
    try:
        buffer.write(np.random.default_rng(0).bytes(piece))
        size = len(offsets) * piece

        def write(offset: int) -> None:
            os.pwritev(file, [buffer], offset)

        def read(offset: int) -> None:
            with mmap.mmap(-1, piece) as into:
                os.preadv(file, [into], offset)

        def write_all(pool: ThreadPoolExecutor) -> None:
            _drain(pool.map(write, offsets))
            os.fdatasync(file)

        writes = [size / _pooled(write_all, flights) for flights in FLIGHTS]
        reads = [size / _pooled(lambda pool: _drain(pool.map(read, offsets)), flights) for flights in FLIGHTS]
    finally:
        os.close(file)
        buffer.close()
        path.unlink()
    return Disk(max(writes), max(reads))


def seconds(call: Callable[[], object]) -> float:
    """Return how long one call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _pooled(call: Callable[[ThreadPoolExecutor], None], flights: int) -> float:
    with ThreadPoolExecutor(flights) as pool:
        return seconds(lambda: call(pool))


def _drain(results: Iterable[None]) -> None:
    for _ in results:
        pass
