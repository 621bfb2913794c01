"""Pages of 2 MiB come behind a start: bytes stay, mappings stay, and a stop is a stop."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading

import numpy as np
import pytest

from tiercache.storage import huge_pages
from tiercache.storage.huge_pages import HUGE_PAGE, HugePages
from tiercache.storage.memory import HostMemory


def test_bytes_and_mappings_stay_while_pages_grow() -> None:
    """Who reads or writes through another mapping meanwhile sees nothing of it, and no byte is another one after it."""
    memory = HostMemory(4 * HUGE_PAGE + 4096)
    told = np.random.default_rng(1).integers(0, 256, memory.size, dtype=np.uint8)
    memory.array[:] = told
    other = np.frombuffer(mmap.mmap(memory.descriptor, memory.size), np.uint8)
    stop = threading.Event()
    faults: list[int] = []

    def write() -> None:
        while not stop.is_set():
            other[:100] += 1
            told[:100] += 1
            faults.extend(np.flatnonzero(memory.array[:100] != told[:100]))

    writer = threading.Thread(target=write)
    writer.start()
    pages = HugePages([memory])
    pages.wait()
    stop.set()
    writer.join()

    assert not faults
    assert np.array_equal(memory.array, told)
    assert np.array_equal(other, told)
    assert os.fstat(memory.descriptor).st_blocks * 512 >= memory.size
    pages.close()
    memory.close()


def test_pages_are_huge_where_the_kernel_can() -> None:
    """Whole 2 MiB are brought together, as many as the kernel finds room for in one piece."""
    memory = HostMemory(3 * HUGE_PAGE + 8192)
    pages = HugePages([memory])
    pages.wait()

    if not pages.done:
        pytest.skip("this kernel does not bring pages together on request")
    assert pages.done in (HUGE_PAGE, 2 * HUGE_PAGE, 3 * HUGE_PAGE)
    pages.close()
    memory.close()


def test_memory_may_be_closed_first_and_closing_twice_is_once() -> None:
    memory = HostMemory(8 * HUGE_PAGE)
    pages = HugePages([memory])

    memory.close()
    pages.close()
    pages.close()

    assert not any(thread.name == "tiercache-pages" for thread in threading.enumerate())


def test_too_little_for_a_page_is_left_alone() -> None:
    memory = HostMemory(HUGE_PAGE - 4096)
    pages = HugePages([memory])
    pages.wait()

    assert pages.done == 0
    pages.close()
    memory.close()


class Refusing:
    """A kernel that maps, and answers every request for a large page with `code`."""

    def __init__(self, code: int) -> None:
        self._code = code
        self._libc = huge_pages._libc()
        self.mmap, self.munmap = self._libc.mmap, self._libc.munmap
        self.asked = 0

    def madvise(self, *_: int) -> int:
        self.asked += 1
        ctypes.set_errno(self._code)
        return -1


@pytest.mark.parametrize(("code", "most"), [(errno.EINVAL, 1), (errno.ENOMEM, 16), (errno.EAGAIN, 16)])
def test_a_kernel_that_goes_on_refusing_is_asked_no_more(code: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not know how, once; where there is no room in one piece, not for every page of all memories."""
    refusing = Refusing(code)
    monkeypatch.setattr(huge_pages, "_libc", lambda: refusing)
    memories = [HostMemory(20 * HUGE_PAGE), HostMemory(4 * HUGE_PAGE)]
    pages = HugePages(memories)
    pages.wait()

    assert (pages.done, refusing.asked) == (0, most)
    for memory in memories:
        memory.close()


def test_stop_waits_for_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that the kernel takes long for keeps nobody; after it nothing more is begun."""
    slow = Refusing(errno.EAGAIN)
    entered, leave = threading.Event(), threading.Event()

    def madvise(*asked: int) -> int:
        entered.set()
        assert leave.wait(30)
        return Refusing.madvise(slow, *asked)

    monkeypatch.setattr(slow, "madvise", madvise)
    monkeypatch.setattr(huge_pages, "_libc", lambda: slow)
    memory = HostMemory(4 * HUGE_PAGE)
    pages = HugePages([memory])
    assert entered.wait(10)

    pages.stop()
    memory.close()

    leave.set()
    pages.close()
    assert slow.asked == 1


@pytest.mark.parametrize("lacking", ["descriptor", "thread", "priority"])
def test_what_can_not_be_had_is_done_without(lacking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large pages are a gain and no more: nothing is raised, and no descriptor stays open."""
    memories = [HostMemory(HUGE_PAGE), HostMemory(HUGE_PAGE)]
    before = len(os.listdir("/proc/self/fd"))
    given = iter([os.dup(memories[0].descriptor)])

    def dup(_: int) -> int:
        try:
            return next(given)
        except StopIteration:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from None

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread") if lacking == "thread" else PermissionError

    with monkeypatch.context() as patch:
        if lacking == "descriptor":
            patch.setattr(os, "dup", dup)
        else:
            os.close(next(given))
            owner, name = (threading.Thread, "start") if lacking == "thread" else (os, "setpriority")
            patch.setattr(owner, name, refuse)
        pages = HugePages(memories)
        pages.close()

    assert pages.done == 0
    assert len(os.listdir("/proc/self/fd")) == before
    for memory in memories:
        memory.close()
