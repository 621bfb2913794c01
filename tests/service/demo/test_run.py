"""The demo from its options to its exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.service.demo.conftest import AGAIN, Turns, printed
from tiercache.errors import Refused
from tiercache.service import runners
from tiercache.service.demo import run as module
from tiercache.service.demo.run import Options, run
from tiercache.service.demo.screen import Screen
from tiercache.service.runners.model import Loaded

pytestmark = pytest.mark.usefixtures("handlers")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, empty."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def small(tiny: Loaded, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo with the tiny model and one scene."""
    monkeypatch.setattr(runners, "load_model", lambda *_, **__: tiny, raising=False)
    monkeypatch.setattr(module, "scenes", lambda *_: [Turns()])
    monkeypatch.setattr(module, "AGAIN", AGAIN)


@pytest.mark.usefixtures("small")
def test_yes_is_status_0_and_leaves_nothing(console: Console, temporary: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"

    status = run(Options(json=out), console)

    found = json.loads(out.read_text())
    assert (status, found["verdict"]) == (0, {"yes": True, "reasons": []})
    assert len(found["requests"]) == 12
    assert all(found["moved_blocks"].values())
    assert list(temporary.iterdir()) == []


@pytest.mark.usefixtures("small")
def test_no_is_status_1(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Screen, "summary", lambda *_: False)

    assert run(Options(), console) == 1


@pytest.mark.usefixtures("small")
def test_a_directory_that_was_named_stays(console: Console, tmp_path: Path) -> None:
    folder = tmp_path / "mine"

    status = run(Options(directory=folder), console)

    assert status == 0
    assert any(folder.iterdir())
    assert str(folder) in printed(console).replace("\n", "")


@pytest.mark.usefixtures("small")
def test_a_temporary_directory_can_be_kept(console: Console, temporary: Path) -> None:
    run(Options(keep=True), console)

    assert len(list(temporary.iterdir())) == 1


def press(screen: Screen, *_: object) -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("moment", ["stage", "begin", "scene", "asking", "outcome", "tiers", "closing", "closed", "summary"])
def test_ctrl_c_leaves_nothing_and_says_one_line(
    console: Console, temporary: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Whatever is being done; what is left of threads, descriptors and memory the fixtures of every test see."""
    monkeypatch.setattr(Screen, moment, press)

    status = run(Options(), console)

    assert status == 130
    assert printed(console).splitlines()[-1] == "interrupted"
    assert list(temporary.iterdir()) == []


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
        env=os.environ | {"TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"},
        cwd=temporary,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("real_tokenizer")
def test_the_whole_demo_says_yes(temporary: Path) -> None:
    with _demo(temporary) as demo:
        out, _ = demo.communicate()

    assert (demo.returncode, list(temporary.iterdir())) == (0, [])
    assert out.splitlines()[-1].startswith("Yes: ")


@pytest.mark.slow
@pytest.mark.usefixtures("real_tokenizer")
@pytest.mark.parametrize("moment", ["loading", "Model:", "review 2", "Closed and opened again"])
def test_the_real_demo_is_interrupted(temporary: Path, moment: str) -> None:
    with _demo(temporary) as demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if moment in line:
                break
        demo.send_signal(signal.SIGINT)
        rest = demo.stdout.read()

    # Where the signal meets source text that is being executed, Python ends itself by the signal: 130 to a shell, too.
    assert demo.returncode in (130, -signal.SIGINT)
    assert rest.splitlines()[-1] == "interrupted" and "Traceback" not in rest
    assert list(temporary.iterdir()) == []
