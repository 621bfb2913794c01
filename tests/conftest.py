"""What every test runs under: leaks are failures, seeds are shown, Hypothesis has one set of rules."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import re
import secrets
import threading
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings

# A time limit measures the machine, not the code: none. `ci` repeats the same examples, so that a red run is a red change.
_RULES = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("local", _RULES, derandomize=False)
settings.register_profile("ci", _RULES, derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "local"))

PATIENCE = 2.0
"""Seconds that threads and children get to end after a test; only a test that leaks waits that long."""

SHM = Path("/dev/shm")
_FAILED = pytest.StashKey[bool]()
# Opened once a process, and kept by the libraries that opened them.
_KEPT = re.compile(r"/dev/(urandom|random|nvidia|dri)|/proc/|/sys/|.*\.(so|py|pyc|zip|whl)(\.|$)")
_KEPT_THREADS = re.compile(r"pytest[_-]timeout|Hypothesis|tqdm|pydevd|raylet")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="the seed of the `seed` fixture, as a failed test showed it")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[_FAILED] = True
    return report


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """An integer for the test's random choices, new in each run and shown when the test fails; `--seed` repeats it."""
    given = request.config.getoption("--seed")
    if given is None:
        run = request.config.getoption("randomly_seed", default=None)
        given = zlib.crc32(f"{run}:{request.node.nodeid}".encode()) if isinstance(run, int) else secrets.randbits(32)
    print(f"seed: {given}   (repeat with --seed={given})")
    return int(given)


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


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves descriptors, threads, children, memfds, shared memory or asyncio tasks behind.

    It is set up before a test's other fixtures, and thus judges after all of them have cleaned up. A test that failed
    anyway is not judged: its traceback keeps its locals alive.
    """
    before = Held.now()
    yield
    if request.node.stash.get(_FAILED, False):
        return
    deadline = time.monotonic() + PATIENCE
    wait = 0.01
    while leaks := Held.now().since(before):
        gc.collect()  # only now: it costs more than most tests
        if time.monotonic() > deadline:
            pytest.fail("left behind: " + "; ".join(leaks), pytrace=False)
        time.sleep(wait)
        wait *= 1.5


@pytest.fixture(autouse=True)
def no_leaks_in_loop(no_leaks: None, request: pytest.FixtureRequest) -> None:
    """Put an async test's event loop inside `no_leaks`, so that the loop is closed before that one judges."""
    if _is_async(request.function):
        request.getfixturevalue("no_pending_tasks")


@pytest.fixture
async def no_pending_tasks(request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Fail an async test after which tasks still run: the loop would cancel them without a word."""
    yield
    if request.node.stash.get(_FAILED, False):
        return
    deadline = time.monotonic() + PATIENCE
    while pending := asyncio.all_tasks() - {asyncio.current_task()}:
        if time.monotonic() > deadline:
            pytest.fail("still pending: " + "; ".join(f"{task.get_name()} in {task.get_coro()}" for task in pending), pytrace=False)
        await asyncio.sleep(0.001)


def _is_async(function: object) -> bool:
    given = getattr(function, "hypothesis", None)  # what @given wraps
    return inspect.iscoroutinefunction(getattr(given, "inner_test", function))


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


@pytest.fixture(scope="session")
def tests_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that holds nothing but a link to the tests: with the checkout itself, `import kernels` would find ours."""
    folder = tmp_path_factory.mktemp("importable")
    (folder / "tests").symlink_to(Path(__file__).parent)
    return folder


@pytest.fixture(autouse=True)
def tests_can_be_imported(tests_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes that a test starts import the tests' own modules."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tests_folder), os.environ.get("PYTHONPATH")])))
