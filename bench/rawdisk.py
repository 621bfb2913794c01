"""The disk itself, as the reference of everything that goes to it: O_DIRECT, and the page cache with a sync.

One file. It is written once before anything is timed: the samples of `best_write` go over what is there, those of `best_growth`
into a file that grows with them.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import numpy as np

from tiercache.bench.timing import seconds

FLIGHTS = (1, 4, 8)
"""How many requests the disk is given at once; the best counts."""
_PAGE = 4096


class RawDisk:
    """A file of `total` bytes that is written and read in pieces of `piece` bytes, rounded up to pages.

    Every method returns the seconds of one pass over all of it. Writes end with fdatasync.
    """

    def __init__(self, direct: int, cached: int, *, total: int, piece: int) -> None:
        self._direct = direct
        self._cached = cached
        self._piece = -(-piece // _PAGE) * _PAGE
        self._pieces = max(1, total // self._piece)
        self._buffers = [
            mmap.mmap(-1, self._piece) for _ in range(max(FLIGHTS))
        ]  # a mapping begins on a page, as O_DIRECT wants it
        for number, buffer in enumerate(self._buffers):
            buffer.write(np.random.default_rng(number).bytes(self._piece))

    @classmethod
    @contextmanager
    def of(cls, folder: Path, *, total: int, piece: int) -> Iterator[Self | None]:
        """Make the file in `folder`, and remove it at the end. None where the file system has no O_DIRECT (tmpfs)."""
        path = folder / "raw"
        try:
            direct = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        except OSError:
            path.unlink(missing_ok=True)
            yield None
            return
        cached = os.open(path, os.O_RDWR)
        disk = cls(direct, cached, total=total, piece=piece)
        try:
            os.posix_fallocate(direct, 0, disk.size)
            disk.write(max(FLIGHTS))
            yield disk
        finally:
            disk.close()
            path.unlink()

    @property
    def size(self) -> int:
        """Bytes of one pass."""
        return self._pieces * self._piece

    def write(self, flights: int) -> float:
        """Write past the page cache, `flights` pieces at once."""
        return self._pass(flights, lambda buffer, offset: os.pwritev(self._direct, [buffer], offset), sync=True)

    def read(self, flights: int) -> float:
        """Read past the page cache, `flights` pieces at once."""
        return self._pass(flights, lambda buffer, offset: os.preadv(self._direct, [buffer], offset), sync=False)

    def best_write(self) -> float:
        """Return the shortest of one pass for each of `FLIGHTS`."""
        return min(map(self.write, self._flights))

    def best_growth(self) -> float:
        """Return the shortest of one pass for each of `FLIGHTS`, each into a file that is empty at first."""
        times: list[float] = []
        for flights in self._flights:
            os.ftruncate(self._direct, 0)
            os.fsync(self._direct)
            times.append(self.write(flights))
        return min(times)

    def best_read(self) -> float:
        """Return the shortest of one pass for each of `FLIGHTS`."""
        return min(map(self.read, self._flights))

    def write_cached(self) -> float:
        """Write through the page cache, one piece after the other, and sync: what a program gets that keeps its pages there."""
        buffer = self._buffers[0]

        def write() -> None:
            for number in range(self._pieces):
                os.pwrite(self._cached, buffer, number * self._piece)
            os.fdatasync(self._cached)

        return seconds(write)

    def read_cached(self) -> float:
        """Read through an empty page cache, one piece after the other, with the system's own readahead."""
        os.posix_fadvise(self._cached, 0, 0, os.POSIX_FADV_DONTNEED)

        def read() -> None:
            for number in range(self._pieces):
                os.preadv(self._cached, [self._buffers[0]], number * self._piece)

        return seconds(read)

    def close(self) -> None:
        """Close the file."""
        os.close(self._direct)
        os.close(self._cached)
        for buffer in self._buffers:
            buffer.close()

    @property
    def _flights(self) -> tuple[int, ...]:
        return tuple(flights for flights in FLIGHTS if flights <= self._pieces) or FLIGHTS[:1]

    def _pass(self, flights: int, call: Callable[[mmap.mmap, int], int], *, sync: bool) -> float:
        def lane(number: int) -> None:
            for piece in range(number, self._pieces, flights):
                done = call(self._buffers[number], piece * self._piece)
                assert done == self._piece, "a short transfer"

        def run(pool: ThreadPoolExecutor) -> None:
            for _ in pool.map(lane, range(flights)):
                pass
            if sync:
                os.fdatasync(self._direct)

        with ThreadPoolExecutor(flights) as pool:
            list(pool.map(abs, range(flights)))  # the threads are there before anything is timed
            return seconds(lambda: run(pool))
