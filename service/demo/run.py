"""The demo from its options to its exit status: model, directory, play, verdict; and an end that leaves nothing behind."""

from __future__ import annotations

import json
import os
import platform
import secrets
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tiercache.errors import TierCacheError
from tiercache.service import runners
from tiercache.service.demo.interrupt import Interrupts
from tiercache.service.demo.play import Player, scenes
from tiercache.service.demo.result import Result
from tiercache.service.demo.screen import Screen
from tiercache.service.demo.workload import AGAIN
from tiercache.service.report import total

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
    """Where the SSD tier lies; it stays. None: a temporary directory."""
    keep: bool = False
    """Keep the temporary directory."""
    json: Path | None = None
    """Where to write what was found."""


def run(options: Options, console: Console) -> int:
    """Run the demo and return the exit status: 0 yes, 1 no, 2 when it can't run, 128 + signal when it was interrupted.

    Must be called in the main thread. Whatever ends it, directory, memory and threads are given back, and an interruption says
    one line.
    """
    with Interrupts() as interrupts:
        try:
            return _run(options, console, interrupts)
        except KeyboardInterrupt:
            console.print("interrupted", style="bold")
            return interrupts.status
        except TierCacheError as error:
            console.print(f"The demo can't run: {error}", style="bold red", markup=False)
            return REFUSED
        except ModuleNotFoundError as error:
            console.print(f"The demo needs {error.name}: install tiercache[runner].", style="bold red", markup=False)
            return REFUSED


def _run(options: Options, console: Console, interrupts: Interrupts) -> int:
    kept = options.directory is not None or options.keep
    directory = options.directory or Path(tempfile.gettempdir()) / f"tiercache-demo-{os.getpid()}-{secrets.token_hex(4)}"
    with interrupts.temporary(directory, keep=kept):
        began = time.perf_counter()
        with Screen(console) as screen:
            screen.stage("loading PyTorch and transformers", None)
            loaded = runners.load_model(options.model, threads=options.threads, progress=screen.stage)
            player = Player(
                loaded,
                screen,
                directory=str(directory),
                scenes=scenes(loaded.tokenizer, options.seed),
                labels=AGAIN,
            )
            result = interrupts.run(player.play())
        yes = screen.summary(result, time.perf_counter() - began)
        if options.json is not None:
            _write(options.json, result, options, loaded)
        if kept:
            console.print(f"The SSD tier stays in {directory}", markup=False)
    return YES if yes else NO


def _write(path: Path, result: Result, options: Options, loaded: Loaded) -> None:
    report = total(result.lives)
    reasons = result.reasons(report)
    found: dict[str, Any] = {
        "verdict": {"yes": not reasons, "reasons": reasons},
        "model": loaded.namespace.model,
        "weights": loaded.namespace.weights,
        "threads": options.threads,
        "seed": options.seed,
        "machine": {"python": platform.python_version(), "system": platform.platform(), "cpus": os.cpu_count()},
        "requests": [{"scene": scene, **outcome.to_json()} for scene, outcome in result.outcomes],
        "tiers": [
            {
                "tier": tier.tier.name,
                "used_blocks": tier.used,
                "capacity_blocks": tier.capacity,
                "block_bytes": tier.block_bytes,
                "tokens": tier.tokens,
                "asked_tokens": tier.queries,
                "found_tokens": tier.hits,
                "tokens_per_gib": tier.tokens_per_gib,
            }
            for tier in report.tiers
        ],
        "moved_blocks": {f"{source}->{target}": count for source, target, count in report.moves() + report.leaps()},
        "evicted_blocks": report.evicted,
        "reopened_seconds": result.reopened_seconds,
        "faults": dict(result.faults),
        "audit": result.audit,
    }
    path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
