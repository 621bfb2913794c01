"""Pages of 2 MiB come behind a start: bytes stay, mappings stay, and a stop is a stop."""

from __future__ import annotations

import mmap
import os
import threading

import numpy as np
import pytest

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
    """All whole 2 MiB are brought together, and a mapping enters them at once."""
    memory = HostMemory(3 * HUGE_PAGE + 8192)
    pages = HugePages([memory])
    pages.wait()

    if not pages.done:
        pytest.skip("this kernel does not bring pages together on request")
    assert pages.done == 3 * HUGE_PAGE
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
