"""What the measurements of tiers share: layouts, prompts with their bytes, and moves that nobody's request asks for."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercache.bench.cold import chill
from tiercache.bench.run import Run
from tiercache.config import Config
from tiercache.service import tensors
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV
from tiercache.service.stack import Stack
from tiercache.spec import KVSpec, Namespace

SPACE = Namespace(model="bench", weights="none")
_SPECS = {
    64 << 10: KVSpec(layers=8, kv_heads=2, head_dim=64, dtype="float16"),
    256 << 10: KVSpec(layers=32, kv_heads=2, head_dim=64, dtype="float16"),
    512 << 10: KVSpec(layers=32, kv_heads=4, head_dim=64, dtype="float16"),
    1 << 20: KVSpec(layers=32, kv_heads=8, head_dim=64, dtype="float16"),
    4 << 20: KVSpec(layers=32, kv_heads=16, head_dim=128, dtype="float16"),
}
SIZES = tuple(_SPECS)
"""Bytes of a block."""
EXACT: dict[str, Any] = {
    "lease_share": 1.0,
    "admit_ms": 600_000,
    "promote_ms": 600_000,
    "watermark_low": 0.0,
    "watermark_high": 0.0,
}
"""Nothing moves but what is measured."""
_MOST_CALLS = 100

Prompt = NDArray[np.int32]


class Scene:
    """Prompts of one block size, `total` bytes of KV at once, and what belongs to each."""

    def __init__(self, size: int, total: int) -> None:
        self.spec = _SPECS[size]
        assert self.spec.block_bytes == size
        self.size = size
        self.blocks = max(2, total // size)
        """Blocks of one long prompt; a tier has room for so many and one more."""
        self.room = (self.blocks + 1) * size
        items = int(np.prod(self.spec.shape(self.spec.block_size * self.blocks)))
        rows = np.random.default_rng(0).integers(0, 30_000, items, dtype=np.uint16)
        self.kv = rows.view(np.float16).reshape(self.spec.shape(-1))
        self.out: Any = tensors.empty(self.spec, self.spec.block_size * self.blocks)
        """Such memory as the cache itself hands out. Touched: page faults are not the cache's.

        Not an array of numpy's own: a large one begins 16 bytes behind a page, and slots begin on one. A processor then takes a
        load of a row for one of what it has just stored, as only the upper bits of the addresses differ; that costs a third of
        the rate.
        """
        self.out.zero_()
        self._numbers: Iterator[int] = iter(range(1, 1 << 14))

    def counts(self, *, least: int) -> list[tuple[int, int, int]]:
        """Return the cases as blocks a call, calls a round and rounds, so that each case has at least `least` calls."""
        found: list[tuple[int, int, int]] = []
        for blocks in (1, 8, 64):
            calls = min(_MOST_CALLS, self.blocks // blocks)
            if calls > 1:
                found.append((blocks, calls, -(-least // calls)))
        return [*found, (self.blocks, 1, least)]

    def prompts(self, count: int, blocks: int) -> list[Prompt]:
        """Return prompts of `blocks` blocks that share nothing with any other."""
        tokens = blocks * self.spec.block_size
        return [np.arange(tokens, dtype=np.int32) + (next(self._numbers) << 17) for _ in range(count)]

    def bytes_of(self, prompt: Prompt) -> Any:
        """Return the KV of a prompt: another part of the same array for each of several."""
        blocks = len(prompt) // self.spec.block_size
        first = (int(prompt[0]) >> 17) * blocks % (self.blocks - blocks + 1) * self.spec.block_size
        return self.kv[:, :, first : first + len(prompt)]

    async def insert(self, kv: LocalKV, prompt: Prompt) -> None:
        """Store a prompt, all of it."""
        stored = await kv.insert(prompt, self.bytes_of(prompt))
        assert stored.stored == len(prompt)

    async def gather(self, kv: LocalKV, prompt: Prompt) -> Any:
        """Copy a prompt's KV out, all of it."""
        async with kv.match(prompt) as hit:
            found = await hit.gather(self.out)
        assert found.shape[2] == len(prompt)
        return found

    async def compare(self, kv: LocalKV, prompt: Prompt) -> None:
        """Copy a prompt's KV out and compare every byte."""
        found = (await self.gather(kv, prompt)).numpy()
        assert np.array_equal(found.view(np.uint16), self.bytes_of(prompt).view(np.uint16)), "wrong bytes"


@asynccontextmanager
async def opened(scene: Scene, config: Config) -> AsyncIterator[tuple[LocalKV, Stack]]:
    """Open a cache for the scene's blocks."""
    async with TierCache(config) as cache:
        kv = await cache.open(SPACE, scene.spec)
        [stack] = cache.stacks
        yield kv, stack


async def demote(stack: Stack, blocks: int) -> None:
    """Make the fastest tier have `blocks` more free slots, by moving the least recently used ones down."""
    pool = stack.cache.residency.slots[0]
    want = min(pool.free + blocks, pool.capacity)
    while pool.free < want:
        flights = stack.mover.start(stack.cache.moves.make_room(0, want))
        assert flights or pool.free >= want, "nothing can go down"
        for flight in flights:
            await flight.wait()


def ssd_config(scene: Scene, directory: Path, **more: Any) -> Config:
    """Return DRAM for the scene and an SSD tier that is never short of room."""
    return Config.of(dram=scene.room, ssd=4 * scene.room + (64 << 20), directory=str(directory), **{**EXACT, **more})


async def check(run: Run, size: int) -> None:
    """Send blocks through every tier, close, open cold, and compare every byte, before anything is timed."""
    scene = Scene(size, 8 * size)
    directory = run.folder / "check"
    config = Config.of(hbm=scene.room, dram=scene.room, ssd=8 * scene.room, directory=str(directory), **EXACT)
    prompts = scene.prompts(2, scene.blocks // 2)
    async with opened(scene, config) as (kv, stack):
        for prompt in prompts:
            await scene.insert(kv, prompt)
        await _compare_all(scene, kv, prompts)
        await demote(stack, scene.blocks)
        await _compare_all(scene, kv, prompts)
        for prompt in prompts:
            assert await kv.flush(prompt) == len(prompt)
    chill(directory)
    async with opened(scene, config) as (kv, _):
        await _compare_all(scene, kv, prompts)


async def _compare_all(scene: Scene, kv: LocalKV, prompts: Sequence[Prompt]) -> None:
    for prompt in prompts:
        scene.out.zero_()
        await scene.compare(kv, prompt)
