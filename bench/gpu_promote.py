"""Part of `bench gpu`: a hit in DRAM brought up by the product's core, mover and copier, for an 8B-class model's KV."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from tiercache.bench.gpu_bench import Bench
from tiercache.bench.gpu_house import DRAM, HBM, House, house
from tiercache.bench.gpu_rig import random_bytes
from tiercache.bench.timing import quiet
from tiercache.spec import Geometry

_PIECE = 1 << 30
"""Bytes of the pinned copy that a promotion is compared with, as often as its bytes need."""


class Model(NamedTuple):
    """32 layers, 8 KV heads of 128, bf16: 128 KiB a token, 2 MiB a block of 16."""

    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    item: int = 2
    block_size: int = 16

    @property
    def geometry(self) -> Geometry:
        """The shape of its blocks."""
        unit = self.block_size * self.kv_heads * self.head_dim * self.item
        return Geometry(layers=self.layers, parts=2, unit_bytes=unit, symbol_bytes=4 * self.block_size)


def measure(bench: Bench) -> None:
    """Measure."""
    asyncio.run(_measure(bench, bench.pick(Model(layers=4, kv_heads=1), Model()), bench.pick((128, 256), (1024, 8192, 32768))))


async def _measure(bench: Bench, model: Model, lengths: tuple[int, ...]) -> None:
    geometry = model.geometry
    slots = max(lengths) // model.block_size
    stage_blocks = max(1, (32 << 20) // geometry.block_bytes)
    async with house(bench.rig, geometry, hbm=slots, dram=slots, stages=4, stage_blocks=min(stage_blocks, slots)) as made:
        first = 0
        for tokens in lengths:
            count = tokens // model.block_size
            # What was there before makes room, so that each length begins with slots that were freed in some order.
            made.cache.clear(made.space)
            made.fill(first, count)
            await _promotions(bench, made, tokens, first, count)
            first += count


async def _promotions(bench: Bench, made: House, tokens: int, first: int, count: int) -> None:
    size = count * made.geometry.block_bytes
    device = bench.rig.device
    piece = min(size, _PIECE)
    stream, flat, host = device.stream(), device.allocate(piece), device.pinned(piece)
    host[:] = random_bytes(bench.draw, piece)

    def pieces() -> None:
        for _ in range(0, size, piece):
            stream.write(host, flat, 0)

    def copy() -> list[float]:
        return bench.samples(lambda: bench.rig.wall(stream, pieces))

    await made.promote(first, count)
    bench.check(f"{tokens} tokens came up byte for byte", made.is_exact(first, count, HBM))
    await made.demote(count)
    times = []
    with bench.run.beside("a pinned copy of as many bytes", copy) as beside, quiet():
        for _ in range(bench.pick(1, 7)):
            times.append(await made.promote(first, count))
            await made.demote(count)
    at: dict[str, str | int | float] = {"tokens": tokens, "bytes": size}
    bench.add("promotion, whole", [one.whole for one in times], "s", at=at, reference=beside.reference)
    bench.add("promotion, until layer 0 is there", [one.first for one in times], "s", at=at, reference=beside.reference)

    await made.promote(first, count)
    made.forget_dram(first, count)
    moved = sum(transfer.count for transfer in await made.demote(count))
    exact = made.is_exact(first, count, DRAM)
    bench.check(f"{tokens} tokens went down byte for byte", exact and moved == count, f"{moved} blocks by a copy")
