"""What a process holds of the system, and what a test has left behind."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

PATIENCE = 20.0
"""Seconds that threads and children get to end after a test; only a test that leaks waits that long."""

SHM = Path("/dev/shm")
# Opened once a process, and kept by the libraries that opened them.
_KEPT = re.compile(r"/dev/(urandom|random|nvidia|dri)|/proc/|/sys/|.*\.(so|py|pyc|zip|whl)(\.|$)")
_KEPT_THREADS = re.compile(r"pytest[_-]timeout|Hypothesis|tqdm|pydevd|raylet")


class Held(NamedTuple):
    """What this process holds of the system, by kind."""

    descriptors: Counter[str]
    threads: frozenset[threading.Thread]
    children: frozenset[int]
    mapped: int
    shared: frozenset[str]

    @classmethod
    def now(cls) -> Held:
        return cls(_descriptors(), frozenset(threading.enumerate()), _children(), _mapped_memfds(), _shared())

    def since(self, before: Held) -> list[str]:
        """Return what is held now and was not `before`, one line each."""
        lines = [f"{more} open {kind}" for kind, more in (self.descriptors - before.descriptors).items()]
        lines += [f"thread {thread.name}" for thread in self.threads - before.threads if _counts(thread)]
        lines += [f"child process {pid}: {_command(pid)}" for pid in self.children - before.children if _child_counts(pid)]
        if self.mapped > before.mapped:
            lines.append(f"{self.mapped - before.mapped} mappings of memfds")
        lines += [f"{SHM / name}" for name in self.shared - before.shared if not _used_elsewhere(name)]
        return lines


def left_behind(before: Held, *, patience: float = PATIENCE) -> list[str]:
    """Return what is held now and was not `before`, one line each, when garbage is gone and `patience` seconds have passed.

    An exception that was looked at holds its traceback, the frames of that their variables, and one of these the exception: what
    was in them goes with a collection, which takes seconds in a large process on a busy machine. The last look is one after it.
    """
    deadline = time.monotonic() + patience
    wait = 0.01
    leaks = Held.now().since(before)
    while leaks:
        last = time.monotonic() >= deadline
        gc.collect()  # only now: it costs more than most tests
        leaks = Held.now().since(before)
        if last:
            break
        if leaks:
            time.sleep(wait)
            wait = min(1.5 * wait, 0.5)
    return leaks


def _descriptors() -> Counter[str]:
    kinds: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # the descriptor that listed the folder, closed by now
            continue
        if not _KEPT.match(target):
            kinds[re.sub(r":\[\d+\]$", "", target)] += 1
    return kinds


def _counts(thread: threading.Thread) -> bool:
    # Dummies are native threads (torch's, CUDA's) that once called into Python.
    return thread.is_alive() and not isinstance(thread, threading._DummyThread) and not _KEPT_THREADS.match(thread.name)


def _children() -> frozenset[int]:
    pids: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        try:
            pids.update(map(int, Path(f"/proc/self/task/{thread}/children").read_text().split()))
        except OSError:  # the thread ended, or the kernel has no such file
            continue
    return frozenset(pids)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def _child_counts(pid: int) -> bool:
    # One that ended and was not waited for has no command line, but it is there; multiprocessing keeps its two on purpose.
    return Path(f"/proc/{pid}").exists() and not re.search(r"resource_tracker|forkserver", _command(pid))


def _mapped_memfds() -> int:
    return Path("/proc/self/maps").read_bytes().count(b"/memfd:")


def _shared() -> frozenset[str]:
    return frozenset(os.listdir(SHM)) if SHM.is_dir() else frozenset()


def _used_elsewhere(name: str) -> bool:
    """Whether another process, none of our children, has the entry open or mapped, or it is gone: then it is not ours."""
    path = SHM / name
    if not path.exists():
        return True
    ours = {os.getpid(), *_children()}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in ours:
            continue
        try:
            if str(path) in (entry / "maps").read_text() or any(os.readlink(fd) == str(path) for fd in (entry / "fd").iterdir()):
                return True
        except OSError:  # ended, or not ours to read
            continue
    return False
