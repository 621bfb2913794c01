"""The demo from its options to its exit status: model, places, daemon, play, verdict; and an end that leaves nothing behind."""

from __future__ import annotations

import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from tiercache.errors import TierCacheError
from tiercache.service import runners
from tiercache.service.demo.interrupt import Interrupts
from tiercache.service.demo.places import Places
from tiercache.service.demo.play import Player, scenes
from tiercache.service.demo.result import Result
from tiercache.service.demo.screen import Screen, show_log
from tiercache.service.demo.sidecar import Sidecar
from tiercache.service.demo.workload import AGAIN

if TYPE_CHECKING:
    from tiercache.service.runners import Loaded

YES, NO, REFUSED = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What can be said on the command line."""

    model: str | None = None
    """A folder, a GGUF file or a name on the hub; None: the packaged small model."""
    threads: int = 1
    seed: int = 0
    directory: Path | None = None
    """Where the SSD tier and the daemon's configuration and log lie; it stays. None: a temporary directory."""
    keep: bool = False
    """Keep the temporary directory."""
    json: Path | None = None
    """Where to write what was found."""


def run(options: Options, console: Console) -> int:
    """Run the demo and return the exit status: 0 yes, 1 no, 2 when it can't run, 128 + signal when it was interrupted.

    Must be called in the main thread. Whatever ends it, the daemon, its socket and memory, the directory and threads are given
    back, and an interruption says one line.
    """
    with Interrupts() as interrupts:
        try:
            return _run(options, console, interrupts)
        except KeyboardInterrupt:
            console.print("interrupted", style="bold")
            return interrupts.status
        except TierCacheError as error:
            console.print(f"The demo can't run: {error}", style="bold red", markup=False)
            show_log(console, error.fields.get("log", ()))
            return REFUSED
        except ModuleNotFoundError as error:
            console.print(f"The demo needs {error.name}: install tiercache[runner].", style="bold red", markup=False)
            return REFUSED


def _run(options: Options, console: Console, interrupts: Interrupts) -> int:
    kept = options.directory is not None or options.keep
    places = Places.choose(options.directory)
    with interrupts.temporary(places.directory, keep=kept), interrupts.temporary(places.run, keep=False):
        began = time.perf_counter()
        with Screen(console) as screen:
            screen.stage("loading PyTorch and transformers", None)
            loaded = runners.load_model(options.model, threads=options.threads, progress=screen.stage)
            sidecar = Sidecar(places)
            player = Player(loaded, screen, sidecar=sidecar, scenes=scenes(loaded.tokenizer, options.seed), labels=AGAIN)
            result = interrupts.run(player.play())
        if result.broken is not None:
            screen.log(sidecar.last_lines())
        yes = screen.summary(result, time.perf_counter() - began)
        if options.json is not None:
            _write(options.json, result, options, loaded)
        if kept:
            console.print(f"The SSD tier, and the daemon's configuration and log, stay in {places.directory}", markup=False)
    return YES if yes else NO


def _write(path: Path, result: Result, options: Options, loaded: Loaded) -> None:
    found = result.to_json() | {
        "model": loaded.namespace.model,
        "weights": loaded.namespace.weights,
        "threads": options.threads,
        "seed": options.seed,
        "machine": {"python": platform.python_version(), "system": platform.platform(), "cpus": os.cpu_count()},
    }
    path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
