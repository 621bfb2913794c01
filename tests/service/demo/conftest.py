"""A demo that takes seconds: a tiny model with random weights, scenes of random prompts, and daemons in processes of their own."""

from __future__ import annotations

import io
import os
import random
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from tests.service.runners.conftest import Letters
from tests.service.runners.tiny import tiny_llama
from tiercache.config import Config
from tiercache.service.demo.places import Places
from tiercache.service.demo.screen import Screen
from tiercache.service.demo.workload import Ask, Request
from tiercache.service.runners.model import Loaded
from tiercache.service.runners.packaged import packaged_model
from tiercache.spec import Namespace


@dataclass
class Turns:
    """Prompts that share beginnings, more of them than HBM and DRAM hold, some greedy and some sampled."""

    title: str = "Turns: random prompts"
    requests: int = 10
    replies: list[list[list[int]]] = field(default_factory=list)

    async def play(self, ask: Ask) -> None:
        chance = random.Random(5)
        for chat in range(self.requests // 2):
            stem = [chance.randrange(97) for _ in range(200 + chat)]
            for turn in range(2):
                prompt = (*stem, *(chance.randrange(97) for _ in range(40 * turn)))
                seeds = (1, 2) if turn else ()
                self.replies.append(await ask(Request(label=f"chat {chat}.{turn}", prompt=prompt, limit=3, seeds=seeds, stop=())))


AGAIN = ("chat 0.0", "chat 0.1")


@pytest.fixture(scope="session")
def tiny() -> Loaded:
    return Loaded(tiny_llama(layers=2), Letters(), Namespace(model="tiny", weights="sha256:none"))


@pytest.fixture(scope="session")
def real_tokenizer() -> Any:
    """The packaged model's tokenizer; the first session on a machine downloads and converts the model."""
    return AutoTokenizer.from_pretrained(packaged_model(), local_files_only=True)


@pytest.fixture
def console() -> Console:
    """A console that is no terminal, 80 columns wide; what was printed is in `console.file`."""
    return Console(file=io.StringIO(), width=80, highlight=False)


@pytest.fixture
def screen(console: Console) -> Iterator[Screen]:
    with Screen(console) as screen:
        yield screen


@pytest.fixture
def handlers() -> Iterator[None]:
    """Put the handlers of signals back that an interruption leaves ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, empty; sockets go there as well."""
    folder = tmp_path / "t"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


def small_places(directory: Path) -> Places:
    """Return places in which a daemon with a little memory can be started."""
    places = Places.choose(directory)
    places.prepare(Config.of(dram="1 MiB", ssd="4 MiB", directory=str(places.tier), drain_seconds=1.0))
    return places


def left_of(place: Path) -> list[str]:
    """Return what is left of a folder: itself, and the processes whose command line names it."""
    found = [str(place)] if place.exists() else []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:  # it ended meanwhile
            continue
        if os.fsencode(place) in command:
            found.append(f"process {entry.name}: {command.replace(bytes(1), b' ').decode(errors='replace')}")
    return found


def printed(console: Console) -> str:
    """Return what was printed."""
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()
