"""The durable tier: demotions to it, and promotions from it, cold and warm, each beside O_DIRECT in turns."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from tiercache.bench.cold import chill
from tiercache.bench.figures import Goal
from tiercache.bench.rawdisk import RawDisk
from tiercache.bench.run import Run
from tiercache.bench.tiers_scene import Prompt, Scene, demote, opened, ssd_config
from tiercache.bench.timing import awaited, quiet
from tiercache.service.kv import LocalKV

_GOAL_BYTES = 512 << 10
_NEW, _OVER = "DRAM to SSD, file grows", "DRAM to SSD, pages reused"
_COLD, _WARM = "SSD to DRAM, cold", "SSD to DRAM, warm"
_KEYS = {_NEW: "ssd-demote", _OVER: "ssd-demote", _COLD: "ssd-promote"}


async def measure_disk(run: Run, size: int) -> None:
    """Measure demote and promote in calls of 1, 8, 64 and all blocks."""
    scene = Scene(size, run.pick(4 << 20, 256 << 20))
    for blocks, calls, rounds in scene.counts(least=run.pick(2, 6)):
        with RawDisk.of(run.folder, total=blocks * size, piece=size) as raw:
            if raw is None and blocks == scene.blocks:
                run.note(f"no O_DIRECT in {run.folder}: moves to SSD and back have no reference")
            turns = _Turns(scene, raw)
            for _ in range(rounds):
                await turns.take(run, calls, blocks, once=max(1, 6 // rounds))
            _report(run, scene, blocks, turns)


class _Turns:
    """Samples of moves and of the disk itself, taken in turns."""

    def __init__(self, scene: Scene, raw: RawDisk | None) -> None:
        self._scene = scene
        self.raw = raw
        self.times: dict[str, list[float]] = {_NEW: [], _OVER: [], _COLD: [], _WARM: []}
        self.direct: dict[str, list[float]] = {_NEW: [], _OVER: [], _COLD: []}
        self.cached: dict[str, list[float]] = {_OVER: [], _COLD: []}

    async def take(self, run: Run, calls: int, blocks: int, *, once: int) -> None:
        """Make `calls` moves of each kind, of `blocks` blocks, with `once` passes of the raw disk before each kind."""
        scene, directory = self._scene, run.folder / "ssd"
        config = ssd_config(scene, directory)
        prompts: list[Prompt] = []
        async with opened(scene, config) as (kv, stack):
            for way in (_NEW, _OVER):
                for prompt in prompts:
                    await kv.delete(prompt)
                prompts = scene.prompts(calls, blocks)
                for prompt in prompts:
                    await scene.insert(kv, prompt)
                self._calibrate(way, once)
                with quiet():
                    self.times[way] += [await awaited(lambda: demote(stack, blocks)) for _ in prompts]
        chill(directory)
        self._calibrate(_COLD, once)
        async with opened(scene, config) as (kv, stack):
            self.times[_COLD] += await self._lift(kv, prompts)
            await scene.compare(kv, prompts[-1])
            await demote(stack, blocks * len(prompts))  # what is clean is only dropped
            self.times[_WARM] += await self._lift(kv, prompts)
        shutil.rmtree(directory)

    async def _lift(self, kv: LocalKV, prompts: Sequence[Prompt]) -> list[float]:
        with quiet():
            times = [await awaited(lambda one=prompt: kv.prefetch(one)) for prompt in prompts]  # type: ignore[misc]
        for prompt in prompts:
            assert await kv.prefetch(prompt) == len(prompt)
        return times

    def _calibrate(self, way: str, once: int) -> None:
        raw = self.raw
        if raw is None:
            return
        direct = {_NEW: raw.best_growth, _OVER: raw.best_write, _COLD: raw.best_read}[way]
        self.direct[way] += [direct() for _ in range(once)]
        if way in self.cached:
            cached = raw.read_cached if way == _COLD else raw.write_cached
            self.cached[way] += [cached() for _ in range(once)]


def _report(run: Run, scene: Scene, blocks: int, turns: _Turns) -> None:
    count, raw = blocks * scene.size, turns.raw
    for way, found in turns.times.items():
        at: dict[str, str | int | float] = {"way": way, "block bytes": scene.size}
        direct = turns.direct.get(way, []) if raw is not None else []
        alone = run.reference("O_DIRECT", direct) if direct else None
        run.add("move", found, "s", at={**at, "blocks": blocks}, reference=alone)
        if blocks != scene.blocks:
            continue
        beside = run.reference("O_DIRECT", [count / each for each in direct]) if direct else None
        key = _KEYS.get(way)
        goal = Goal(key=key, at_least=0.8) if key is not None and scene.size >= _GOAL_BYTES else None
        run.add("rate", [count / each for each in found], "B/s", at=at, reference=beside, goal=goal)
        if beside is not None and way in turns.cached:
            run.add("page cache", [count / each for each in turns.cached[way]], "B/s", at=at, reference=beside)
