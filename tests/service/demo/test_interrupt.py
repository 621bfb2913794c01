"""The first Ctrl-C unwinds, further ones wait."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.service.demo.conftest import left_of, small_places
from tiercache.service.client.client import connect
from tiercache.service.demo.interrupt import Interrupts
from tiercache.service.demo.sidecar import Sidecar

pytestmark = pytest.mark.usefixtures("handlers")


def press(number: signal.Signals = signal.SIGINT) -> None:
    signal.raise_signal(number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_plain_code_is_left_by_keyboard_interrupt(number: signal.Signals) -> None:
    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        press(number)

    assert interrupts.status == 128 + number


def test_a_second_signal_is_ignored() -> None:
    """While the first one's unwinding cleans up, and after it."""

    def press_twice() -> None:
        try:
            press()
        finally:
            press()

    with Interrupts(), pytest.raises(KeyboardInterrupt):
        press_twice()

    press()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_without_a_signal_the_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT)

    with Interrupts() as interrupts:
        assert signal.getsignal(signal.SIGINT) != before

    assert signal.getsignal(signal.SIGINT) is before
    assert interrupts.caught is None


def test_a_coroutine_is_cancelled_and_waited_for() -> None:
    steps: list[str] = []

    async def main() -> None:
        try:
            press()
            await asyncio.Event().wait()
        finally:
            press()
            await asyncio.sleep(0)
            steps.append("cleaned up")

    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        interrupts.run(main())

    assert steps == ["cleaned up"]


def test_what_a_coroutine_returns_comes_back() -> None:
    async def main() -> int:
        return 7

    with Interrupts() as interrupts:
        assert interrupts.run(main()) == 7


def test_a_held_block_runs_to_its_end() -> None:
    steps: list[str] = []

    def hold(interrupts: Interrupts) -> None:
        with interrupts.held():
            press()
            steps.append("after the signal")

    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        hold(interrupts)

    assert steps == ["after the signal"]


@pytest.mark.parametrize("moment", ["starting", "serving", "stopping"])
def test_the_daemon_ends_too(tmp_path: Path, temporary: Path, moment: str) -> None:
    """In order even when a second signal comes meanwhile; nothing is left that names its directory."""
    places = small_places(tmp_path / "mine")

    async def main() -> None:
        async with Sidecar(places) as sidecar:
            if moment == "starting":
                press()
            try:
                await sidecar.start()
                async with connect(sidecar.address, deadline=60.0) as client:
                    await sidecar.serves(client, after=None)
                    press()
                    await (sidecar.stop() if moment == "stopping" else asyncio.Event().wait())
            finally:
                press()

    def work(interrupts: Interrupts) -> None:
        with interrupts.temporary(places.directory, keep=False), interrupts.temporary(places.run, keep=False):
            interrupts.run(main())

    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        work(interrupts)

    assert left_of(places.directory) == left_of(places.run) == []


@pytest.mark.parametrize("keep", [True, False])
def test_a_temporary_directory_stays_only_if_it_is_kept(tmp_path: Path, keep: bool) -> None:
    folder = tmp_path / "tier"

    def work(interrupts: Interrupts) -> None:
        with interrupts.temporary(folder, keep=keep) as here:
            (here / "inside").mkdir(parents=True)
            press()

    with Interrupts() as interrupts, pytest.raises(KeyboardInterrupt):
        work(interrupts)

    assert folder.exists() is keep
