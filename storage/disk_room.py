"""How much room the file system has that holds the SSD tier: looked at in a worker thread, remembered for who asks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tiercache.clock import Clock
from tiercache.errors import TierCacheError
from tiercache.storage.directory import BLOCKS, METADATA
from tiercache.storage.lmdb_env import DATA_FILE
from tiercache.storage.workers import Lane, Workers

_STALE = 2.0
"""Seconds after which who asks starts another look."""


class DiskRoom(NamedTuple):
    """What one look found, in bytes."""

    free: int
    """What this user may still write."""
    size: int
    """Of the file system."""
    data: int
    """The length of the SSD tier's files of blocks. LMDB never shrinks one: it is the most that was in use at once."""
    metadata: int
    """The length of its file of metadata."""
    folders: frozenset[str] = frozenset()
    """What lies in the directory beside files."""


def measure(directory: Path) -> DiskRoom:
    """Look at the file system under `directory` and at the tier's files in it. Raises OSError; may hang with the disk."""
    room = os.statvfs(directory)
    return DiskRoom(
        free=room.f_bavail * room.f_frsize,
        size=room.f_blocks * room.f_frsize,
        data=sum(_length(file) for file in (directory / BLOCKS).glob(f"**/{DATA_FILE}")),
        metadata=_length(directory / METADATA / DATA_FILE),
        folders=frozenset(entry.name for entry in directory.iterdir() if entry.is_dir()),
    )


def _length(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


class DiskWatch:
    """The last look at a file system and its age. Whoever asks never waits for the disk longer than he says.

    One look at a time, in a lane of its own: while that hangs, what was seen last grows older, and `asked_for` says how long.
    """

    def __init__(self, directory: Path, workers: Workers, clock: Clock, look: Callable[[Path], DiskRoom] = measure) -> None:
        self.directory = directory
        self._workers = workers
        self._clock = clock
        self._look = look
        self._looking: asyncio.Task[None] | None = None
        self._began = 0.0
        self._seen_at: float | None = None
        self._ever: set[str] = set()
        self.room: DiskRoom | None = None
        """What was seen last; None before the first look has ended."""
        self.error: str | None = None
        """Why the last look failed."""

    @property
    def age(self) -> float | None:
        """How many seconds ago `room` was so; None where there is none."""
        return None if self._seen_at is None else self._clock.now() - self._seen_at

    @property
    def asked_for(self) -> float:
        """For how many seconds the look has been under way that has not ended; 0 when there is none."""
        return 0.0 if self._looking is None else self._clock.now() - self._began

    async def look(self, seconds: float) -> None:
        """Look again if what is known is old, and wait for it for at most `seconds`."""
        if self._looking is None:
            if self.age is not None and self.age < _STALE:
                return
            self._began = self._clock.now()
            self._looking = asyncio.get_running_loop().create_task(self._see(), name="tiercache-disk-room")
        await asyncio.wait([self._looking], timeout=seconds)

    def has_lost(self, folder: str) -> bool:
        """Return whether a folder of that name was seen in the directory, and is not there any more."""
        return self.room is not None and folder in self._ever - self.room.folders

    async def close(self) -> None:
        """Give up a look that is under way."""
        if self._looking is not None:
            looking = self._looking
            looking.cancel()
            await asyncio.wait([looking])

    async def _see(self) -> None:
        try:
            self.room = await self._workers.run(Lane.WATCH, self._look, self.directory)
            self._seen_at, self.error = self._clock.now(), None
            self._ever |= self.room.folders
        except (OSError, TierCacheError) as error:
            self.error = str(error)
        finally:
            self._looking = None
