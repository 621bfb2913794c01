"""Pages of 2 MiB for memory that clients map: a writer maps what it reserved, and entering small pages costs more than the copy.

Linux gives memfds small pages unless an administrator says otherwise. On request (MADV_COLLAPSE, Linux 6.1) it brings 512 of them
together, whatever was said; mappings in all processes stay valid, and bytes where they are. That takes 2 to 4 s/GiB (2 cores of an
AMD EPYC, Linux 6.18, November 2026), too long for a start, so it goes on behind one.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Sequence

from tiercache.storage.memory import HostMemory

HUGE_PAGE = 2 << 20
"""Bytes."""
_COLLAPSE = 25
"""MADV_COLLAPSE."""
_LAST = 19
"""The priority of what has all the time in the world, as `nice` counts."""
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


class HugePages:
    """Gives memories pages of 2 MiB, one after the other, in a thread of the lowest priority, until all is done or `close`.

    What the kernel can't bring together (pinned pages, no 2 MiB in one piece) stays as it is; a kernel that doesn't know how ends
    it at the first. What does not fill 2 MiB is left alone. `close` may wait for one page, some milliseconds.
    """

    def __init__(self, memories: Sequence[HostMemory]) -> None:
        self._stop = threading.Event()
        self.done = 0
        """Bytes that have pages of 2 MiB."""
        # Descriptors of the thread's own: a memory may be closed before it has ended.
        sizes = [(os.dup(memory.descriptor), memory.size - memory.size % HUGE_PAGE) for memory in memories]
        self._thread = threading.Thread(target=self._run, args=(sizes,), name="tiercache-pages", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until there is nothing more to do."""
        self._thread.join()

    def close(self) -> None:
        """Stop. May be called twice."""
        self._stop.set()
        self._thread.join()

    def _run(self, sizes: Sequence[tuple[int, int]]) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LAST)
        try:
            for descriptor, size in sizes:
                if size and not self._stop.is_set():
                    self._enlarge(descriptor, size)
        finally:
            for descriptor, _ in sizes:
                os.close(descriptor)

    def _enlarge(self, descriptor: int, size: int) -> None:
        """Map `size` bytes where a page of 2 MiB may begin, which Python's mmap does not promise, and go through them.

        Calls go by ctypes, which lets other threads run meanwhile; Python's madvise does not.
        """
        libc = _libc()
        length = size + HUGE_PAGE
        room = libc.mmap(None, length, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if room == _FAILED:
            return
        try:
            start = -(-room // HUGE_PAGE) * HUGE_PAGE
            # Within what was just reserved: nobody else's mapping is replaced.
            if libc.mmap(start, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, descriptor, 0) != start:
                return
            for offset in range(0, size, HUGE_PAGE):
                if self._stop.is_set():
                    return
                if libc.madvise(start + offset, HUGE_PAGE, _COLLAPSE) == 0:
                    self.done += HUGE_PAGE
                elif ctypes.get_errno() == errno.EINVAL and not self.done:
                    return
        finally:
            libc.munmap(room, length)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = (address, size, number, number, number, ctypes.c_long), address
    libc.madvise.argtypes = (address, size, number)
    libc.munmap.argtypes = (address, size)
    return libc
