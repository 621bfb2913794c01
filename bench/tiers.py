"""What each tier holds and how fast blocks go in, out, down and up, beside a memcpy and the raw disk of the same run.

Everything goes through the face of one cache; a demotion alone is what the core plans when all of a tier is to be free. Rates count
the KV's bytes once. A promotion from SSD is measured cold: cache closed, files closed, their pages dropped, opened again.
"""

from __future__ import annotations

import asyncio
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercache.bench.calibrate import Disk, disk_rates, memcpy_rate
from tiercache.config import Config
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV
from tiercache.service.report import reports
from tiercache.service.stack import Stack
from tiercache.sizes import format_size
from tiercache.spec import KVSpec, Namespace
from tiercache.types import Tier

SPACE = Namespace(model="bench", weights="none")
SPECS = (
    KVSpec(layers=8, kv_heads=2, head_dim=64, dtype="float16"),  # 64 KiB
    KVSpec(layers=32, kv_heads=2, head_dim=64, dtype="float16"),  # 256 KiB
    KVSpec(layers=32, kv_heads=8, head_dim=64, dtype="float16"),  # 1 MiB
    KVSpec(layers=32, kv_heads=8, head_dim=128, dtype="float16"),  # 2 MiB
)
_SINGLES = 20
_EXACT: dict[str, Any] = {"lease_share": 1.0, "admit_ms": 600_000, "watermark_low": 0.0, "watermark_high": 0.0}
"""Nothing moves but what is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One operation on blocks of one size: the median time of one block alone, and the rate of many at once."""

    block_bytes: int
    operation: str
    block_seconds: float | None
    """None where the operation is only measured on many blocks."""
    bytes_per_second: float
    reference: str
    reference_bytes_per_second: float | None
    """None where the reference can't be measured here."""

    @property
    def ratio(self) -> float | None:
        """The rate as a fraction of the reference's."""
        return self.bytes_per_second / self.reference_bytes_per_second if self.reference_bytes_per_second else None

    def to_json(self) -> dict[str, Any]:
        """Return the figure as plain values."""
        return {**asdict(self), "ratio": self.ratio}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What fits a tier of `bytes` bytes."""

    tier: str
    block_bytes: int
    bytes: int
    blocks: int
    tokens_per_gib: int


def measure(folder: Path | None, *, quick: bool) -> tuple[list[Figure], list[Capacity]]:
    """Measure every operation for every block size; `folder` is where the disk is measured, a temporary one by default."""
    figures: list[Figure] = []
    capacities: list[Capacity] = []
    total = (16 if quick else 128) << 20
    for spec in SPECS[:: 2 if quick else 1]:
        with tempfile.TemporaryDirectory(prefix="tiercache-bench-", dir=folder) as scratch:
            memcpy = memcpy_rate(total, spec.block_bytes)
            disk = disk_rates(Path(scratch), total, spec.block_bytes)
            run = _Run(spec, Path(scratch) / "ssd", total // spec.block_bytes, memcpy, disk)
            asyncio.run(run.measure())
        figures += run.figures
        capacities += run.capacities
        gc.collect()
    return figures, capacities


class _Run:
    """The measurements of one block size."""

    def __init__(self, spec: KVSpec, directory: Path, blocks: int, memcpy: float, disk: Disk | None) -> None:
        self.figures: list[Figure] = []
        self.capacities: list[Capacity] = []
        self._spec = spec
        self._directory = directory
        self._blocks = blocks
        self._memcpy = memcpy
        self._disk = disk
        self._numbers = iter(range(1 << 30))
        items = int(np.prod(spec.shape(spec.block_size * blocks)))
        self._kv = np.random.default_rng(0).integers(0, 30_000, items, dtype=np.uint16).view(np.float16).reshape(spec.shape(-1))

    async def measure(self) -> None:
        """Measure memory tiers first, then the durable one, on files of its own."""
        for tier in (Tier.HBM, Tier.DRAM):
            await self._put_and_get(tier)
        await self._between_memories()
        await self._disk_ways()

    async def _put_and_get(self, tier: Tier) -> None:
        room = (self._blocks + _SINGLES + 2) * self._spec.block_bytes
        async with TierCache(Config.of(**{tier.name.lower(): room}, **_EXACT)) as cache:
            kv = await cache.open(SPACE, self._spec)
            [report] = reports(cache)
            self.capacities += [
                Capacity(
                    tier=each.tier.name,
                    block_bytes=each.block_bytes,
                    bytes=each.capacity_bytes,
                    blocks=each.capacity,
                    tokens_per_gib=each.tokens_per_gib,
                )
                for each in report.tiers
            ]
            singles = [self._prompt(1) for _ in range(_SINGLES)]
            many = self._prompt(self._blocks)
            puts = [await _timed(lambda one=one: self._insert(kv, one)) for one in singles]  # type: ignore[misc]
            put = await _timed(lambda: self._insert(kv, many))
            out = np.ones(self._spec.shape(len(many)), np.float16)  # touched: page faults are not the cache's
            gets = [await _timed(lambda one=one: _gather(kv, one, out)) for one in singles]  # type: ignore[misc]
            get = min([await _timed(lambda: _gather(kv, many, out)) for _ in range(3)])
        self._add(f"put {tier}", puts, put, "memcpy", self._memcpy)
        self._add(f"get {tier}", gets, get, "memcpy", self._memcpy)

    async def _between_memories(self) -> None:
        room = self._blocks * self._spec.block_bytes
        async with TierCache(Config.of(hbm=room, dram=2 * room, **_EXACT)) as cache:
            kv = await cache.open(SPACE, self._spec)
            [stack] = cache.stacks
            many = self._prompt(self._blocks)
            await self._insert(kv, many)
            down = await _timed(lambda: _demote_all(stack))
            assert not reports(cache)[0].tiers[0].used
            up = await _timed(lambda: kv.prefetch(many))
            await cache.settle()
            assert reports(cache)[0].tiers[0].used == self._blocks
        self._add("demote HBM→DRAM", (), down, "memcpy", self._memcpy)
        self._add("promote DRAM→HBM", (), up, "memcpy", self._memcpy)

    async def _disk_ways(self) -> None:
        room = (self._blocks + 1) * self._spec.block_bytes
        config = Config.of(dram=room, ssd=4 * room + (64 << 20), directory=str(self._directory), **_EXACT)
        many = self._prompt(self._blocks)
        async with TierCache(config) as cache:
            kv = await cache.open(SPACE, self._spec)
            await self._insert(kv, many)
            down = await _timed(lambda: kv.flush(many))
        for file in self._directory.rglob("*"):
            if file.is_file():
                drop_pages(file)
        async with TierCache(config) as cache:
            kv = await cache.open(SPACE, self._spec)
            up = await _timed(lambda: kv.prefetch(many))
            assert reports(cache)[0].tiers[0].used == self._blocks
        self._add("demote DRAM→SSD", (), down, "disk", self._disk.write if self._disk else None)
        self._add("promote SSD→DRAM, cold", (), up, "disk", self._disk.read if self._disk else None)

    def _prompt(self, blocks: int) -> NDArray[np.int32]:
        """Return a prompt that shares nothing with any other."""
        return np.arange(blocks * self._spec.block_size, dtype=np.int32) + (next(self._numbers) << 16)

    async def _insert(self, kv: LocalKV, prompt: NDArray[np.int32]) -> None:
        stored = await kv.insert(prompt, self._kv[:, :, : len(prompt)])
        assert stored.stored == len(prompt)

    def _add(self, operation: str, singles: Sequence[float], many: float, reference: str, rate: float | None) -> None:
        self.figures.append(
            Figure(
                block_bytes=self._spec.block_bytes,
                operation=operation,
                block_seconds=statistics.median(singles) if singles else None,
                bytes_per_second=self._blocks * self._spec.block_bytes / many,
                reference=reference,
                reference_bytes_per_second=rate,
            )
        )


def drop_pages(path: Path) -> None:
    """Write the file's dirty pages and drop all of its pages from memory."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def table(figures: Sequence[Figure]) -> str:
    """Return the figures as a table for people."""
    lines = [f"{'block':>9}  {'operation':<23}{'one block':>11}{'rate/s':>12}{'reference/s':>13}  of it"]
    for figure in figures:
        alone = f"{figure.block_seconds * 1e6:.0f} µs" if figure.block_seconds is not None else "·"
        rate = figure.reference_bytes_per_second
        limit = format_size(int(rate)) if rate else "·"
        ratio = f"{figure.ratio:.2f} {figure.reference}" if figure.ratio is not None else f"no raw {figure.reference}"
        lines.append(
            f"{format_size(figure.block_bytes):>9}  {figure.operation:<23}{alone:>11}"
            f"{format_size(int(figure.bytes_per_second)):>12}{limit:>13}  {ratio}"
        )
    return "\n".join(lines)


async def _demote_all(stack: Stack) -> None:
    """Empty the fastest tier into the one below."""
    pool = stack.cache.residency.slots[0]
    while pool.free < pool.capacity:
        for flight in stack.mover.start(stack.cache.moves.make_room(0, pool.capacity)):
            await flight.wait()


async def _gather(kv: LocalKV, prompt: NDArray[np.int32], out: Any) -> None:
    async with kv.match(prompt) as hit:
        found = await hit.gather(out)
    assert found.shape[2] == len(prompt)


async def _timed(call: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await call()
    return time.perf_counter() - began
