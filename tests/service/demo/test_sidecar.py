"""The demo's daemon is a process of its own, and ends with the demo."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.demo.conftest import small_places
from tiercache.errors import Refused
from tiercache.service.client.client import BackOff, connect
from tiercache.service.demo.places import Places
from tiercache.service.demo.sidecar import Sidecar

AT_ONCE = BackOff(first=0.01, most=0.02)


@pytest.fixture
def places(tmp_path: Path, temporary: Path) -> Places:
    """Places of a daemon with a little memory."""
    return small_places(tmp_path / "mine")


def is_there(pid: int) -> bool:
    """Return whether there is such a process."""
    return Path(f"/proc/{pid}").exists()


def hang(pid: int) -> None:
    """Stop a child. It is waited for: of two signals the lower number is taken first, and a later SIGTERM would end it."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)


async def test_it_is_another_process_each_time(places: Places) -> None:
    """Another one than ours, the one that listens, out of reach of our terminal; one client outlives the first."""
    async with Sidecar(places) as sidecar:
        await sidecar.start()
        async with connect(sidecar.address, deadline=60.0, back_off=AT_ONCE) as client:
            boot = await sidecar.serves(client, after=None)
            first, listener, session = sidecar.pid, sidecar.listener(), os.getsid(sidecar.pid)
            await sidecar.stop()
            names = list(places.run.iterdir())
            await sidecar.start()
            second_boot = await sidecar.serves(client, after=boot)
            second = sidecar.pid

    assert len({first, second, os.getpid()}) == 3
    assert (listener, session) == (first, first)
    assert second_boot != boot
    assert names == []
    assert not is_there(second)


async def test_one_that_cannot_start_says_why(places: Places) -> None:
    """The end of its log comes along."""
    places.tier.write_text("a file")

    async with Sidecar(places) as sidecar:
        await sidecar.start()
        async with connect(sidecar.address, back_off=AT_ONCE) as client:
            with pytest.raises(Refused, match=f"daemon {sidecar.pid} ended by itself, with status 1") as refused:
                await sidecar.serves(client, after=None)

    assert str(places.tier) in refused.value.fields["log"][-1]


async def test_one_that_does_not_stop_is_killed(places: Places) -> None:
    """After a while, and it is said."""
    async with Sidecar(places, patience=0.2) as sidecar:
        await sidecar.start()
        hang(sidecar.pid)
        with pytest.raises(Refused, match=r"did not stop within 0\.2 s"):
            await sidecar.stop()
        fate = await sidecar.fate()

    assert fate == f"daemon {sidecar.pid} was ended by signal 9 (Killed)"
    assert not is_there(sidecar.pid)


async def test_one_that_has_not_begun_cannot_be_stopped(places: Places) -> None:
    """Nor is there anything to end."""
    async with Sidecar(places) as sidecar:
        with pytest.raises(Refused, match="not started"):
            await sidecar.stop()

    assert sidecar.pid == 0


def test_it_ends_when_the_demo_is_killed(places: Places) -> None:
    """By SIGKILL, so that nothing of the demo's own can end it; it stops in order, and takes its sockets away."""
    script = str(Path(__file__).with_name("parent.py"))
    with subprocess.Popen([sys.executable, script, str(places.directory), str(places.run)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
        ended, _, _ = select.select([pidfd], [], [], 60.0)
        if not ended:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)

    assert ended
    assert list(places.run.iterdir()) == []
    assert places.log.read_text().splitlines()[-1].count('"stopped"') == 1


def test_a_daemon_whose_parent_is_gone_does_not_begin() -> None:
    """It could not be told of an end that came before it listened."""
    command = [sys.executable, "-P", "-m", "tiercache.service.demo.tether", str(os.getppid()), "version"]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (1, "")
