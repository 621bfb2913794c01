"""How a tier takes blocks when it is half full and when it is nearly full, and how much fits it."""

from __future__ import annotations

import shutil
from collections import deque

from tiercache.bench.calibrate import memcpy_rates
from tiercache.bench.rawdisk import RawDisk
from tiercache.bench.run import Run
from tiercache.bench.tiers_scene import EXACT, SIZES, Prompt, Scene, opened
from tiercache.bench.timing import awaited
from tiercache.config import Config
from tiercache.types import Tier

_SIZE = 1 << 20
_BLOCKS = 8
"""Of one call."""
_LEVELS = (50, 80, 95)
"""Percent full; at the last, room is made by eviction."""
_LOW = 0.05
_GIB = 1 << 30


async def measure_fill(run: Run) -> None:
    """Measure DRAM and SSD at each level, and how many tokens a GiB of each tier holds."""
    room = run.pick(24, 512) * _SIZE
    calls = run.pick(3, 60)
    for tier in (Tier.DRAM, Tier.SSD):
        for level in _LEVELS:
            await _at_level(run, tier, level, room, calls)
    for size in SIZES:
        await _capacity(run, size)


async def _at_level(run: Run, tier: Tier, level: int, room: int, calls: int) -> None:
    """Time calls at one level, which deleting keeps below the last one, and eviction there."""
    scene = Scene(_SIZE, _BLOCKS * _SIZE)
    evict = level > 100 * (1 - 2 * _LOW)
    marks = {"watermark_low": _LOW, "watermark_high": _LOW} if evict else {}
    sizes = {"dram": room} if tier is Tier.DRAM else {"dram": 4 * scene.room, "ssd": room, "directory": str(run.folder / "fill")}
    kept: deque[Prompt] = deque()
    times: list[float] = []
    with RawDisk.of(run.folder, total=_BLOCKS * _SIZE, piece=_SIZE) as raw:
        beside: list[float] = []
        async with opened(scene, Config.of(**{**EXACT, **sizes, **marks})) as (kv, stack):
            pool = stack.cache.residency.slots[-1]
            while pool.capacity - pool.free + _BLOCKS <= pool.capacity * level / 100:
                kept += scene.prompts(1, _BLOCKS)
                await scene.insert(kv, kept[-1])
                await kv.flush(kept[-1])
            for _ in range(calls):
                [prompt] = scene.prompts(1, _BLOCKS)
                kept.append(prompt)
                if tier is Tier.SSD:
                    await scene.insert(kv, prompt)
                    beside += [raw.best_write()] if raw is not None else []
                    times.append(await awaited(lambda one=prompt: kv.flush(one)))  # type: ignore[misc]
                else:
                    beside += [_BLOCKS * _SIZE / rate for rate in memcpy_rates(_BLOCKS * _SIZE, _SIZE, rounds=1)]
                    times.append(await awaited(lambda one=prompt: scene.insert(kv, one)))  # type: ignore[misc]
                if not evict:
                    await kv.delete(kept.popleft())
                await stack.traffic.settle()
            found = (pool.capacity - pool.free) / pool.capacity * 100
            assert abs(found - level) < run.pick(40, 5), f"{found:.0f} % full instead of {level} %"
            await scene.compare(kv, kept[-1])
            await kv.clear()
    shutil.rmtree(run.folder / "fill", ignore_errors=True)
    name = "O_DIRECT" if tier is Tier.SSD else "memcpy"
    reference = run.reference(name, beside) if beside else None
    run.add("fill", times, "s", at={"way": f"into {tier}", "percent full": level}, reference=reference)


async def _capacity(run: Run, size: int) -> None:
    """Say how many tokens a GiB of each tier holds, beside what the KV's own bytes would allow."""
    scene = Scene(size, 2 * size)
    room, tokens = run.pick(64, 256) << 20, scene.spec.block_size
    plain = run.reference("the KV's bytes alone", [float(_GIB * tokens // size)])
    config = Config.of(hbm=room, dram=room, ssd=room, directory=str(run.folder / "fill"), **EXACT)
    async with opened(scene, config) as (_, stack):
        for tier, pool in zip(stack.cache.tiers, stack.cache.residency.slots, strict=True):
            held = pool.capacity * tokens * (_GIB / room)
            run.add("tokens a GiB", [held], "1", at={"tier": str(tier), "block bytes": size}, reference=plain)
    shutil.rmtree(run.folder / "fill")
