"""Host memory that other processes can map: allocated for real, of fixed size, and gone when the last process that maps it is."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiercache.errors import Closed, MemoryRefused
from tiercache.sizes import format_size

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14."""
_STEP = 16 << 20
"""Bytes whose pages are entered at once: 8 ms."""
PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")

Allocate = Callable[[int, int, int], None]
"""`os.posix_fallocate` or what a test puts in its place: (descriptor, offset, length)."""


class HostMemory:
    """A memfd of `size` bytes, mapped shared. It has no name in any file system, so nothing is left behind by a killed process.

    Its pages are allocated before the constructor returns, because a size alone promises nothing: with too little memory the
    first write to a page would be a bus error, in this process or in a client. It is sealed against every change of size, so
    that no process that gets the descriptor can cause one either. Fresh memory is zeros.

    Raises MemoryRefused, naming the size, when the memory can't be had; no descriptor is left open then. The sum over several
    is the caller's to check first, with `require_memory`.
    """

    def __init__(self, size: int, *, name: str = "tiercache", allocate: Allocate = os.posix_fallocate) -> None:
        if size < 1:
            raise MemoryRefused(f"host memory must have at least one byte, not {size}", size=size)
        # Asked for more than there is, the kernel would allocate until something is killed.
        require_memory(size)
        try:
            descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise _refused(size, error) from error
        try:
            # Before there is a byte in it: a memfd begins with 0777. Readers get descriptors that can't write (`open_readonly`);
            # the mode keeps one of the same user from getting a writable one by opening it again through /proc unless it means to.
            os.fchmod(descriptor, 0o400)
            allocate(descriptor, 0, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            mapping = mmap.mmap(descriptor, size)
            _populate(mapping)
        except OSError as error:
            os.close(descriptor)
            raise _refused(size, error) from error
        except BaseException:
            os.close(descriptor)
            raise
        self._size = size
        self._descriptor = descriptor
        self._array: NDArray[np.uint8] | None = np.frombuffer(mapping, np.uint8)
        self._shut = weakref.finalize(self, os.close, descriptor)

    @property
    def size(self) -> int:
        """Bytes."""
        return self._size

    @property
    def descriptor(self) -> int:
        """The memfd, open for reading and writing, for passing on to those who may write. Raises Closed after `close`."""
        self._require_open()
        return self._descriptor

    @property
    def array(self) -> NDArray[np.uint8]:
        """All bytes, `[size]`, in place. A view keeps the mapping alive beyond `close`. Raises Closed after `close`."""
        array = self._array
        if array is None:
            raise Closed("the host memory is closed")
        return array

    def open_readonly(self) -> int:
        """Return a new descriptor that can't map the memory for writing; the caller closes it. Raises Closed after `close`."""
        self._require_open()
        return os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Close the descriptor and let go of the mapping. May be called twice.

        Views that still exist stay readable and writable: the mapping, and the descriptor that Python's mmap keeps for it, go
        with the last of them. (Unmapping under a view would be a crash at its next use, so it is never done.)
        """
        self._array = None
        self._shut()

    def _require_open(self) -> None:
        if self._array is None:
            raise Closed("the host memory is closed")


def _populate(mapping: mmap.mmap) -> None:
    """Enter all pages: here it costs 0.5 s/GiB, one by one as copies first touch them 0.6 to 3 s/GiB.

    (2 cores of an AMD EPYC, Linux 6.18, November 2026.) In steps: Python maps and advises without letting other threads run, and
    a loop in one of them has `/health` to answer meanwhile. A kernel before Linux 5.14 knows no such advice, and enters each
    page when it is touched.
    """
    try:
        for start in range(0, len(mapping), _STEP):
            mapping.madvise(_POPULATE_WRITE, start, min(_STEP, len(mapping) - start))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


class MemoryLimit(NamedTuple):
    """The least of what bounds this process's memory: `bytes`, and the file that says so."""

    bytes: int
    source: str


def memory_limit(*, proc: Path = PROC, cgroup: Path = CGROUP) -> MemoryLimit | None:
    """Return the least of the machine's memory and the limits of the process's control groups up to the root, version 1 and 2.

    None when no file tells. Files that are absent, unreadable or say `max` bound nothing.
    """
    limits = [MemoryLimit(count, str(file)) for file in _limit_files(proc, cgroup) if (count := _number(file)) is not None]
    total = _memory_total(proc / "meminfo")
    if total is not None:
        limits.append(MemoryLimit(total, str(proc / "meminfo")))
    return min(limits, default=None)


def require_memory(need: int, *, proc: Path = PROC, cgroup: Path = CGROUP) -> None:
    """Raise MemoryRefused, naming need and limit, if `need` bytes are more than the limit of the process.

    `need` is the sum over all host tiers. Beyond a control group's limit the kernel kills; it gives no error to report.
    """
    limit = memory_limit(proc=proc, cgroup=cgroup)
    if limit is not None and need > limit.bytes:
        asked = f"{format_size(need)} ({need} bytes) of host memory are asked for"
        message = f"{asked}; the limit is {format_size(limit.bytes)} ({limit.source})"
        raise MemoryRefused(message, need=need, limit=limit.bytes, source=limit.source)


def _limit_files(proc: Path, cgroup: Path) -> Iterator[Path]:
    """Yield the files that may bound the process. In a container its group's path may lie outside of what is mounted."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except (OSError, ValueError):
        lines = []
    for line in [*lines, "0::/", "1:memory:/"]:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            roots, name = [cgroup, cgroup / "unified"], "memory.max"
        elif "memory" in controllers.split(","):
            roots, name = [cgroup / "memory"], "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for root in roots:
            for depth in range(len(parts), -1, -1):
                yield root.joinpath(*parts[:depth]) / name


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except (OSError, ValueError):
        return None
    return int(text) if text.isdecimal() else None


def _memory_total(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except (OSError, ValueError):
        return None
    for line in lines:
        words = line.split()
        if len(words) >= 2 and words[0] == "MemTotal:" and words[1].isdecimal():
            return int(words[1]) * 1024
    return None


def _refused(size: int, error: OSError) -> MemoryRefused:
    reason = error.strerror or str(error)
    return MemoryRefused(f"{format_size(size)} ({size} bytes) of host memory can't be had: {reason}", size=size, errno=error.errno)
