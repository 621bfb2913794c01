"""Early write-back gives hints while a large commit runs, at no other time, and ends with the store."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tiercache.storage import writeback
from tiercache.storage.ssd_values import LmdbValues, Write
from tiercache.storage.writeback import Writeback

LARGE = 64 << 20
LATE = 1000
"""Hints of a thread that was not told to stop come for as long as somebody looks."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4096)
    return path


class Hints:
    """What the system is asked."""

    def __init__(self, status: int = 0) -> None:
        self.seen = threading.Semaphore(0)
        self._status = status

    def __call__(self, descriptor: int, offset: int, size: int, flags: int) -> int:
        assert (offset, size, flags) == (0, 0, 2)
        self.seen.release()
        return self._status


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tiercache-writeback"]


@pytest.mark.parametrize("status", [0, -1])
def test_hints_are_given_while_a_large_commit_runs(file: Path, status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as the commit lasts, and whatever the system answers: what failed is the sync's to say."""
    hints = Hints(status)
    monkeypatch.setattr(writeback, "_sync_file_range", hints)
    behind = Writeback(file)
    late = 0

    for _ in range(3):
        with behind.during(LARGE):
            assert hints.seen.acquire(timeout=10)
            assert hints.seen.acquire(timeout=10)
        while hints.seen.acquire(timeout=0.05):  # the last ones may be on their way
            late += 1
            assert late < LATE, "hints go on"

    assert len(threads()) == 1
    behind.close(10)
    behind.close(10)
    assert not threads()


def test_a_small_commit_starts_no_thread(file: Path) -> None:
    behind = Writeback(file)
    with behind.during(1 << 20):
        assert not threads()
    behind.close(10)


def test_after_the_end_there_are_no_hints(file: Path) -> None:
    """A commit that comes late works without."""
    behind = Writeback(file)
    behind.close(10)
    with behind.during(LARGE):
        assert not threads()


def test_a_disk_that_keeps_the_thread_keeps_the_file_and_nobody_else(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit and the end don't wait for a hint that hangs."""
    entered, leave = threading.Event(), threading.Event()

    def hang(*_: int) -> int:
        entered.set()
        assert leave.wait(30)
        return 0

    monkeypatch.setattr(writeback, "_sync_file_range", hang)
    behind = Writeback(file)
    with behind.during(LARGE):
        assert entered.wait(10)
    behind.close(0.0)
    assert threads()

    leave.set()
    for thread in threads():
        thread.join(10)
    assert not threads()


def test_a_store_closes_under_a_hint_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was committed is there at once for the next owner; the thread is left to the disk."""
    entered, leave = threading.Event(), threading.Event()

    def hang(*_: int) -> int:
        entered.set()
        assert leave.wait(30)
        return 0

    monkeypatch.setattr(writeback, "_sync_file_range", hang)
    size = (5 << 20) // 4096 * 4096 - 16
    values = LmdbValues(tmp_path / "values", value_bytes=size, map_bytes=1 << 26, sync=True)
    values.commit([Write(1, 0, b"a" * size)])
    with values._writeback.during(size):  # a commit may be over before the thread has begun
        assert entered.wait(10)

    assert values.close(0.0)

    again = LmdbValues(tmp_path / "values", value_bytes=size, map_bytes=1 << 26, sync=True)
    found: list[bytes] = []
    assert again.read(1, lambda value: found.append(bytes(value)))
    assert found == [b"a" * size]
    assert again.close(10)
    leave.set()
    for thread in threads():
        thread.join(10)
    assert not threads()


def test_where_the_system_has_no_such_call_nothing_is_started(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writeback, "_sync_file_range", None)
    behind = Writeback(file)
    with behind.during(LARGE):
        assert not threads()
    behind.close(10)


def test_without_a_descriptor_commits_go_on_without_hints(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an opening nor a commit fails for want of a hint, and the thread that could not begin has ended."""
    hints = Hints()
    monkeypatch.setattr(writeback, "_sync_file_range", hints)
    before = len(os.listdir("/proc/self/fd"))
    file.unlink()
    behind = Writeback(file)
    for _ in range(2):
        with behind.during(LARGE):
            for thread in threads():
                thread.join(10)
            assert not threads()

    behind.close(10)
    assert not hints.seen.acquire(blocking=False)
    assert len(os.listdir("/proc/self/fd")) == before
