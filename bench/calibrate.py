"""What this machine can do at best, measured in the run that it is compared with: one memcpy, and its disk past the page cache."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from tiercache.bench.rawdisk import RawDisk
from tiercache.bench.timing import seconds


class Disk(NamedTuple):
    """Bytes per second of O_DIRECT, the best of `rawdisk.FLIGHTS` requests at once."""

    write: float
    read: float


def memcpy_rate(total: int, piece: int, *, rounds: int = 5) -> float:
    """Return bytes per second of copying `total` bytes in pieces of `piece` bytes, the best of `rounds`, in one thread."""
    return max(memcpy_rates(total, piece, rounds=rounds))


def memcpy_rates(total: int, piece: int, *, rounds: int = 5) -> list[float]:
    """Return bytes per second of copying `total` bytes in pieces of `piece` bytes, in one thread, once for each of `rounds`.

    Source and target together are larger than a processor's cache only where `total` is. Both have been touched before.
    """
    pieces = max(1, total // piece)
    source = np.random.default_rng(0).integers(0, 256, (pieces, piece), dtype=np.uint8)
    target = np.ones_like(source)

    def copy() -> None:
        for here, there in zip(source, target, strict=True):
            np.copyto(there, here)

    return [pieces * piece / seconds(copy) for _ in range(rounds)]


def disk_rates(folder: Path, total: int, piece: int) -> Disk | None:
    """Return what writing and reading `total` bytes in pieces of `piece` costs in `folder`, past the page cache.

    Writes end with fdatasync. None where the file system has no O_DIRECT (tmpfs).
    """
    with RawDisk.of(folder, total=total, piece=piece) as disk:
        return None if disk is None else Disk(disk.size / disk.best_write(), disk.size / disk.best_read())
