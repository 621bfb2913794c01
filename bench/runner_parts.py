"""The parts of the runner's bench, in order: recomputing, hits, misses; each in a daemon, and in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from tiercache.bench.figures import Reference
from tiercache.bench.run import Run
from tiercache.bench.runner_hits import GOAL_TOKENS, Hits, Plan, Setting
from tiercache.bench.runner_house import Beside, InProcess
from tiercache.bench.runner_misses import Misses
from tiercache.bench.runner_passes import Passes
from tiercache.bench.runner_subject import NEW, Subject, subject
from tiercache.service.runners.packaged import packaged_folder

LENGTHS = (512, 1024, 2048, 4096)
DAEMON, PROCESS = "daemon", "in process"


def measure(run: Run) -> None:
    """Measure everything."""
    folder = packaged_folder()
    if not run.quick and not folder.is_dir():
        run.note(f"the packaged model is not in {folder}: `tiercache demo` brings it there; nothing was measured")
        return
    with subject(real=not run.quick) as one:
        computed = recompute(run, one)
        asyncio.run(hits(run, one, (DAEMON, PROCESS)))
        add_recomputed(run, computed)
        asyncio.run(misses(run, one, (DAEMON, PROCESS)))


def recompute(run: Run, one: Subject) -> dict[int, list[float]]:
    """Return how long prompts take from the beginning, by their tokens before the last 32."""
    lengths = run.pick((64, 128), (512, GOAL_TOKENS))
    room = one.room(lengths[-1] + NEW)
    found: dict[int, list[float]] = {}
    for tokens in lengths:
        found[tokens] = []
        for number in run.track(range(run.pick(2, 5)), f"recomputing {tokens} tokens"):
            prompt = one.prompt(number, tokens + NEW)
            room.resize(0)
            began = time.perf_counter()
            one.first_logits(prompt, room)
            found[tokens].append(time.perf_counter() - began)
    return found


def add_recomputed(run: Run, computed: Mapping[int, list[float]]) -> None:
    """Add what `recompute` found, beside the hits of a daemon that were measured after it."""
    for tokens, times in computed.items():
        hit = [each for each in run.figures if each.name == "first token" and each.at == _at(tokens, "DRAM", DAEMON)]
        reference = Reference("hit in DRAM", hit[0].value) if hit else None
        run.add("first token", times, "s", at=_at(tokens, "nothing", "none"), reference=reference)


def _at(tokens: int, place: str, cache: str) -> dict[str, str | int | float]:
    return {"tokens": tokens, "KV from": place, "cache": cache}


async def hits(run: Run, one: Subject, caches: tuple[str, ...]) -> None:
    """Measure what hits add."""
    some = Plan(run.pick((64, 128), LENGTHS), rounds=run.pick(2, 5), rounds_at_goal=run.pick(2, 15))
    few = Plan(run.pick((64,), (GOAL_TOKENS,)), rounds=run.pick(2, 5), rounds_at_goal=run.pick(2, 15))
    kv = one.computed(some.lengths[-1])
    settings = (
        Setting(DAEMON, Beside, run.folder / "daemon", some),
        Setting(PROCESS, InProcess, run.folder / "process", few),
    )
    for setting in settings:
        if setting.name in caches:
            setting.folder.mkdir()
            with Passes(one.model) as passes:
                await Hits(run, one, passes, kv).measure(setting)


async def misses(run: Run, one: Subject, caches: tuple[str, ...]) -> None:
    """Measure what the cache costs when nothing hits."""
    with Passes(one.model) as passes:
        each = Misses(run, one, passes, rounds=run.pick(3, 15), new=run.pick(4, 16))
        for name, house in ((DAEMON, Beside), (PROCESS, InProcess)):
            if name in caches:
                folder = run.folder / f"misses {name}"
                folder.mkdir()
                await each.measure(Setting(name, house, folder, Plan((), 0, 0)), run.pick((48, 96), (64, 256)))
