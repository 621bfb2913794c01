"""How much room a disk has: remembered, with its age, and nobody waits for a disk that does not answer."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.seams import PATIENCE, Disk, FakeClock
from tests.storage.ssd_faults import Rig
from tiercache.storage.disk_room import DiskWatch, measure
from tiercache.storage.workers import Lane, ThreadWorkers


@pytest.fixture
def workers() -> Iterator[ThreadWorkers]:
    made = ThreadWorkers({Lane.WATCH: 1})
    yield made
    made.close()


def test_a_look_finds_the_file_system_the_files_and_the_folders(tmp_path: Path) -> None:
    """The figures are the system's own; only the tier's data files are counted."""
    with Rig(tmp_path / "kv") as _:
        (tmp_path / "kv" / "set-aside-1").mkdir()
        (tmp_path / "kv" / "set-aside-1" / "data.mdb").write_bytes(b"x" * 10_000_000)
        room, real = measure(tmp_path / "kv"), os.statvfs(tmp_path)
        [data] = (tmp_path / "kv" / "blocks").rglob("data.mdb")

        assert room.size == real.f_blocks * real.f_frsize and 0 < room.free <= room.size
        assert room.data == data.stat().st_size > 0
        assert room.metadata == (tmp_path / "kv" / "metadata" / "data.mdb").stat().st_size > 0
        assert room.folders == {"metadata", "blocks", "set-aside-1"}


async def test_nobody_waits_for_a_look_that_hangs(tmp_path: Path, workers: ThreadWorkers) -> None:
    """What was seen last stays, and grows older; one look at a time is under way; when it ends, what it saw counts."""
    disk, clock = Disk(), FakeClock()
    watch = DiskWatch(tmp_path, workers, clock, disk.measure)
    disk.free = 5
    await watch.look(PATIENCE)
    assert watch.room is not None and (watch.room.free, watch.age, watch.asked_for) == (5, 0.0, 0.0)
    hold, disk.free = disk.hold("room"), 6
    clock.advance(10.0)

    async with asyncio.timeout(PATIENCE):
        for _ in range(3):
            await watch.look(0.01)
            await hold.reached()
            clock.advance(10.0)

    assert (watch.room.free, watch.age, watch.asked_for) == (5, 40.0, 30.0)
    disk.release()
    await watch.look(PATIENCE)
    assert (watch.room.free, watch.age, watch.asked_for) == (6, 0.0, 0.0)


async def test_what_is_known_is_not_asked_for_again_at_once(tmp_path: Path, workers: ThreadWorkers) -> None:
    """Two answers in a row cost one look."""
    disk, clock = Disk(), FakeClock()
    watch = DiskWatch(tmp_path, workers, clock, disk.measure)
    disk.free = 5
    await watch.look(PATIENCE)
    disk.free = 6

    await watch.look(PATIENCE)
    assert watch.room is not None and watch.room.free == 5
    clock.advance(3.0)
    await watch.look(PATIENCE)

    assert watch.room.free == 6


async def test_a_look_that_fails_says_why_and_keeps_what_was_seen(tmp_path: Path, workers: ThreadWorkers) -> None:
    """An I/O error is told until a look succeeds."""
    disk, clock = Disk(), FakeClock()
    watch = DiskWatch(tmp_path, workers, clock, disk.measure)
    await watch.look(PATIENCE)
    before = watch.room
    clock.advance(3.0)
    disk.fail("room", OSError(errno.EIO, os.strerror(errno.EIO)))

    await watch.look(PATIENCE)

    assert watch.error is not None and "Input/output error" in watch.error and watch.room == before
    disk.release()
    await watch.look(PATIENCE)
    assert watch.error is None


async def test_a_look_under_way_does_not_hold_up_the_end(tmp_path: Path, workers: ThreadWorkers) -> None:
    """Closing gives it up; the thread ends when the disk lets it."""
    disk = Disk()
    watch = DiskWatch(tmp_path, workers, FakeClock(), disk.measure)
    hold = disk.hold("room")
    await watch.look(0.01)
    await hold.reached()

    async with asyncio.timeout(PATIENCE):
        await watch.close()

    assert watch.room is None
    hold.release()
