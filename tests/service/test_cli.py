"""The command line: what it offers, and that it is quick to say so."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.tree import pyproject
from tiercache import __version__
from tiercache.service import cli


def tiercache(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "tiercache.service.cli", *arguments],
        cwd=cwd,
        env=os.environ | {"COLUMNS": "80", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_console_script_is_this_one() -> None:
    assert pyproject()["project"]["scripts"]["tiercache"] == f"{cli.__name__}:{cli.main.__name__}"


def test_version_says_the_version(tmp_path: Path) -> None:
    done = tiercache("version", cwd=tmp_path)

    assert (done.returncode, done.stdout.split()[:2]) == (0, ["tiercache", f"{__version__},"])


@pytest.mark.parametrize("arguments", [["version"], ["--help"], ["demo", "--help"], ["serve", "--help"], ["bench", "--help"]])
def test_telling_what_there_is_needs_no_model(arguments: list[str], tmp_path: Path) -> None:
    """Torch and transformers take seconds to import."""
    done = tiercache(*arguments, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert not {"torch", "transformers"} & imported


@pytest.mark.parametrize("option", ["--model", "--threads", "--seed", "--directory", "--keep", "--json"])
def test_demo_lists_its_options(option: str, tmp_path: Path) -> None:
    assert option in tiercache("demo", "--help", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--no-such"],
        ["demo", "--threads", "0"],
        ["serve", "--dram", "much"],
        ["serve", "--log-level", "loud"],
        ["bench", "nothing"],
        ["nonsense"],
    ],
)
def test_a_wrong_word_is_status_2_and_no_traceback(arguments: list[str], tmp_path: Path) -> None:
    done = tiercache(*arguments, cwd=tmp_path)

    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = tiercache("demo", "--model", "./no-such-folder", cwd=tmp_path)

    assert done.returncode == 2
    assert "The demo can't run" in done.stdout and "Traceback" not in done.stdout + done.stderr


def test_ctrl_c_while_it_starts_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("importlib.import_module", interrupted)
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main()
    finally:
        signal.signal(signal.SIGINT, before)

    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
