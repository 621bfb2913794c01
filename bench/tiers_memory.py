"""Tiers of memory: what they hold, blocks in and out of each, and between the two."""

from __future__ import annotations

from collections.abc import Sequence

from tiercache.bench.calibrate import memcpy_rates
from tiercache.bench.figures import Goal
from tiercache.bench.run import Run
from tiercache.bench.tiers_scene import EXACT, Scene, demote, opened
from tiercache.bench.timing import awaited, quiet
from tiercache.config import Config
from tiercache.types import Tier

_GIB = 1 << 30


async def measure_memory(run: Run, size: int) -> None:
    """Measure put and get of HBM and DRAM, and demote and promote between them, in calls of 1, 8, 64 and all blocks."""
    scene = Scene(size, run.pick(4 << 20, 256 << 20))
    for blocks, calls, rounds in scene.counts(least=run.pick(2, 5)):
        total = blocks * calls * size
        rates: list[float] = memcpy_rates(total, size, rounds=3)
        times: dict[str, list[float]] = {}
        for _ in range(rounds):
            for tier in (Tier.HBM, Tier.DRAM):
                _extend(times, await _put_and_get(scene, tier, blocks, calls))
            _extend(times, await _down_and_up(scene, blocks, calls))
            rates += memcpy_rates(total, size, rounds=1)
        rates += memcpy_rates(total, size, rounds=2)
        _report(run, scene, blocks, times, rates)


async def _put_and_get(scene: Scene, tier: Tier, blocks: int, calls: int) -> dict[str, list[float]]:
    prompts = scene.prompts(calls, blocks)
    async with opened(scene, Config.of(**{tier.name.lower(): scene.room}, **EXACT)) as (kv, _):
        with quiet():
            puts = [await awaited(lambda one=prompt: scene.insert(kv, one)) for prompt in prompts]  # type: ignore[misc]
            gets = [await awaited(lambda one=prompt: scene.gather(kv, one)) for prompt in prompts]  # type: ignore[misc]
        await scene.compare(kv, prompts[0])
    return {f"into {tier}": puts, f"out of {tier}": gets}


async def _down_and_up(scene: Scene, blocks: int, calls: int) -> dict[str, list[float]]:
    prompts = scene.prompts(calls, blocks)
    async with opened(scene, Config.of(hbm=scene.room, dram=scene.room, **EXACT)) as (kv, stack):
        for prompt in prompts:
            await scene.insert(kv, prompt)
        with quiet():
            down = [await awaited(lambda: demote(stack, blocks)) for _ in prompts]
            assert stack.cache.residency.slots[0].free >= calls * blocks
            up = [await awaited(lambda one=prompt: kv.prefetch(one)) for prompt in prompts]  # type: ignore[misc]
        await stack.traffic.settle()
        await scene.compare(kv, prompts[-1])
    return {"HBM to DRAM": down, "DRAM to HBM": up}


def _report(run: Run, scene: Scene, blocks: int, times: dict[str, list[float]], rates: Sequence[float]) -> None:
    count = blocks * scene.size
    for way, found in times.items():
        alone = run.reference("memcpy", [count / rate for rate in rates])
        run.add("move", found, "s", at={"way": way, "block bytes": scene.size, "blocks": blocks}, reference=alone)
        if blocks == scene.blocks:
            goal = Goal(key="copy-out", at_least=0.8) if way == "out of DRAM" else None
            beside = run.reference("memcpy", rates)
            at: dict[str, str | int | float] = {"way": way, "block bytes": scene.size}
            run.add("rate", [count / each for each in found], "B/s", at=at, reference=beside, goal=goal)


def _extend(times: dict[str, list[float]], more: dict[str, list[float]]) -> None:
    for way, found in more.items():
        times.setdefault(way, []).extend(found)
