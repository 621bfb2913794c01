"""What every test runs under: leaks are failures, seeds are shown, Hypothesis has one set of rules."""

from __future__ import annotations

import asyncio
import inspect
import os
import secrets
import time
import zlib
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.leaks import PATIENCE, Held, left_behind

# A time limit measures the machine, not the code: none. `ci` repeats the same examples, so that a red run is a red change.
_RULES = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("local", _RULES, derandomize=False)
settings.register_profile("ci", _RULES, derandomize=True, database=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "local"))

_FAILED = pytest.StashKey[bool]()


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
    if leaks := left_behind(before):
        pytest.fail("left behind: " + "; ".join(leaks), pytrace=False)


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
