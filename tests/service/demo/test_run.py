"""The demo from its options to its exit status."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.service.demo.conftest import AGAIN, Turns, left_of, printed
from tiercache.config import Config
from tiercache.errors import AuditFailed, Refused
from tiercache.service import runners
from tiercache.service.client.client import Client
from tiercache.service.demo import run as module
from tiercache.service.demo.run import Options, run
from tiercache.service.demo.screen import Screen
from tiercache.service.demo.sidecar import Sidecar
from tiercache.service.runners.model import Loaded

pytestmark = pytest.mark.usefixtures("handlers")


@pytest.fixture
def small(tiny: Loaded, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo with the tiny model and one scene."""
    monkeypatch.setattr(runners, "load_model", lambda *_, **__: tiny, raising=False)
    monkeypatch.setattr(module, "scenes", lambda *_: [Turns()])
    monkeypatch.setattr(module, "AGAIN", AGAIN)


def killed(screen: Screen, *_: object) -> None:
    """Kill the daemon that was started last, where the demo shows something, and wait for its end."""
    child = int(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()[-1])
    os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)


@pytest.mark.usefixtures("small")
def test_yes_is_status_0_and_leaves_nothing(console: Console, temporary: Path, tmp_path: Path) -> None:
    """No file, no socket, no process; and what was found goes to a file."""
    out = tmp_path / "out.json"

    status = run(Options(json=out), console)

    found = json.loads(out.read_text())
    assert (status, found["verdict"]) == (0, {"yes": True, "reasons": []})
    assert len(found["requests"]) == 12
    assert all(found["moved_blocks"].values())
    assert found["processes"]["demo"] == os.getpid()
    assert len({os.getpid(), *(life["pid"] for life in found["processes"]["daemons"])}) == 3
    assert all(f"process {life['pid']}, boot {life['boot'][:8]}" in printed(console) for life in found["processes"]["daemons"])
    assert all(found["bytes"].values())
    assert list(temporary.iterdir()) == [] and left_of(temporary) == [str(temporary)]


@pytest.mark.usefixtures("small")
def test_no_is_status_1_and_a_directory_that_was_named_stays(
    console: Console, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here because the audit finds a fault. A daemon can be run on what stays."""

    async def check(_: Client) -> Any:
        raise AuditFailed("slot 3 is owned twice", faults=["slot 3 is owned twice"])

    monkeypatch.setattr(Client, "check", check)
    folder = tmp_path / "mine"

    status = run(Options(directory=folder), console)

    assert status == 1
    assert "No: the audit found: slot 3 is owned twice" in printed(console)
    assert str(folder) in printed(console).replace("\n", "")
    assert Config.from_toml(folder / "daemon.toml").path == folder / "ssd" and (folder / "ssd").is_dir()
    assert (folder / "daemon.log").read_text().count('"stopped"') == 2
    assert list(temporary.iterdir()) == []


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "moment", ["outcome", *(pytest.param(name, marks=pytest.mark.slow) for name in ("serving", "scene", "tiers", "restarted"))]
)
def test_a_daemon_that_is_killed_means_no(
    console: Console, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The verdict names its end, and the end of its log is shown; a temporary directory can be kept."""
    monkeypatch.setattr(Screen, moment, killed)
    out = tmp_path / "out.json"

    status = run(Options(keep=True, json=out), console)

    text = " ".join(printed(console).split())
    [kept] = temporary.iterdir()
    found = json.loads(out.read_text())
    assert status == 1
    assert found["verdict"]["reasons"][0].endswith("was ended by signal 9 (Killed)")
    assert len(found["requests"]) == {"outcome": 1, "serving": 0, "scene": 0}.get(moment, 10)  # no more are asked
    assert "was ended by signal 9 (Killed)." in text and "The end of the daemon's log:" in text and '"serving"' in text
    assert "Traceback" not in text
    assert {"daemon.log", "daemon.toml", "ssd"} == {entry.name for entry in kept.iterdir()}
    assert left_of(kept) == [str(kept)]


@pytest.mark.usefixtures("small")
def test_a_daemon_that_cannot_start_is_said_with_its_log(console: Console, temporary: Path, tmp_path: Path) -> None:
    """There is no verdict then: status 2."""
    (tmp_path / "ssd").write_text("a file")

    status = run(Options(directory=tmp_path), console)

    assert status == 2
    assert "The demo can't run: daemon" in printed(console) and f"{tmp_path}/ssd" in printed(console).replace("\n", "")
    assert "Traceback" not in printed(console)
    assert list(temporary.iterdir()) == []


def press(screen: Screen, *_: object) -> None:
    signal.raise_signal(signal.SIGINT)


async def terminate(sidecar: Sidecar) -> None:
    signal.raise_signal(signal.SIGTERM)


_OFTEN = ("stage", "outcome", "restarted")
_RARELY = ("begin", "serving", "scene", "asking", "tiers", "stopping", "stopped", "summary")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("moment", [*_OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in _RARELY)])
def test_ctrl_c_leaves_nothing_and_says_one_line(
    console: Console, temporary: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Whatever is being done; what is left of threads, descriptors and memory the fixtures of every test see."""
    monkeypatch.setattr(Screen, moment, press)

    status = run(Options(), console)

    assert status == 130
    assert printed(console).splitlines()[-1] == "interrupted"
    assert list(temporary.iterdir()) == [] and left_of(temporary) == [str(temporary)]


@pytest.mark.usefixtures("small")
def test_sigterm_ends_the_demo_alike(console: Console, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own status; here while the daemon is being waited for."""
    monkeypatch.setattr(Sidecar, "require_running", terminate)

    status = run(Options(), console)

    assert status == 128 + signal.SIGTERM
    assert list(temporary.iterdir()) == [] and left_of(temporary) == [str(temporary)]


def refused(*_: object, **__: object) -> Loaded:
    raise Refused("there is no such model")


def missing(*_: object, **__: object) -> Loaded:
    raise ModuleNotFoundError("No module named 'transformers'", name="transformers")


@pytest.mark.usefixtures("temporary")
@pytest.mark.parametrize(("load", "words"), [(refused, "there is no such model"), (missing, "install tiercache[runner]")])
def test_a_model_that_cannot_be_had_is_one_line(
    console: Console, monkeypatch: pytest.MonkeyPatch, load: Callable[..., Loaded], words: str
) -> None:
    monkeypatch.setattr(runners, "load_model", load, raising=False)

    status = run(Options(model="nowhere"), console)

    assert status == 2
    assert words in printed(console)
    assert "Traceback" not in printed(console)


def _demo(temporary: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tiercache.service.cli", "demo"],
        env=os.environ | {"TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"},  # XDG_RUNTIME_DIR, too, is `temporary`
        cwd=temporary,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("real_tokenizer")
def test_the_whole_demo_says_yes(temporary: Path) -> None:
    with _demo(temporary) as demo:
        out, _ = demo.communicate()

    assert (demo.returncode, list(temporary.iterdir())) == (0, [])
    assert out.splitlines()[-1].startswith("Yes: ")
    assert left_of(temporary) == [str(temporary)]


@pytest.mark.slow
@pytest.mark.usefixtures("real_tokenizer")
@pytest.mark.parametrize("moment", ["loading", "Model:", "review 2", "Restart:", "Asked again"])
def test_the_real_demo_is_interrupted(temporary: Path, moment: str) -> None:
    """By its terminal, which tells every process of the group: the daemon is in none of it."""
    with _demo(temporary) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if moment in line:
                break
        os.killpg(demo.pid, signal.SIGINT)
        rest = demo.stdout.read()

    # Where the signal meets source text that is being executed, Python ends itself by the signal: 130 to a shell, too.
    assert demo.returncode in (130, -signal.SIGINT)
    assert rest.splitlines()[-1] == "interrupted" and "Traceback" not in rest
    assert list(temporary.iterdir()) == [] and left_of(temporary) == [str(temporary)]
