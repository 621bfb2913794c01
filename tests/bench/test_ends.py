"""A benchmark that is killed leaves no process behind, and one that can't run says so before it measures."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tiercache.bench.__main__ import main
from tiercache.bench.served import environment

_CHILD = """
import os, shutil, subprocess
from tiercache.bench import echo, served, tied
other = tied.command(shutil.which("tail"), "-f", "/dev/null")
with served.Served(dram=1 << 22) as daemon, echo.serving() as path, subprocess.Popen(other, env=served.environment()):
    print(daemon.pid, flush=True)
    input()
"""


def test_a_benchmark_that_is_killed_takes_what_it_started_along() -> None:
    """SIGKILL of the process that measures ends its daemon, its echo, and a peer's own server."""
    command = [sys.executable, "-P", "-c", _CHILD]
    child = subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    assert int(child.stdout.readline()) > 0
    started = [int(line) for line in Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()]
    watches = [os.pidfd_open(pid) for pid in started]

    child.kill()
    child.wait()

    assert len(started) == 3
    for watch in watches:
        _until_ended(watch)
        os.close(watch)
    child.stdin.close()
    child.stdout.close()


_ENDED = """
import sys
from tiercache.bench import __main__ as bench
class Waiting:
    name, plots = "tree", ()
    def measure(run):
        print(run.folder, flush=True)
        input()
bench.load = lambda name: Waiting
bench.main(["tree", "--directory", sys.argv[1]])
"""


def test_a_benchmark_that_is_told_to_end_leaves_nothing_in_the_folder(tmp_path: Path) -> None:
    """SIGTERM in the middle of measuring."""
    command = [sys.executable, "-P", "-c", _ENDED, str(tmp_path)]
    child = subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    assert Path(child.stdout.readline().strip()).parent == tmp_path

    child.terminate()
    status = child.wait()

    assert status == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())
    child.stdin.close()
    child.stdout.close()


def _until_ended(watch: int) -> None:
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    assert poll.poll(20_000), "a process lives on"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["tree", "--directory", "{}/none"], "--directory {}/none is no folder"),
        (["tiers", "--quick", "--directory", "/dev/shm"], "/dev/shm lies in memory (tmpfs)"),
        (["tree", "--out", "{}/file"], "--out {}/file is no folder"),
        (["tree", "--out", "{}", "--page", "{}/none/page.md"], "--page {}/none/page.md is no file"),
        (["tree", "--out", "{}", "--page", "{}/page.md"], "one can't be read"),
    ],
)
def test_folders_that_cannot_be_are_named_before_anything_is_measured(
    arguments: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the option and the folder; the status is 2."""
    (tmp_path / "file").touch()
    (tmp_path / "old.json").write_text("{}")

    with pytest.raises(SystemExit) as ended:
        main([argument.format(tmp_path) for argument in arguments])

    assert ended.value.code == 2
    assert named.format(tmp_path) in capsys.readouterr().err
