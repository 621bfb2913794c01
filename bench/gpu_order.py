"""Part of `bench gpu`: copies behind something slow, slots and stages that are used again, order by events in both directions."""

from __future__ import annotations

import asyncio
import gc
import time

import numpy as np

from tiercache.bench.gpu_bench import Bench
from tiercache.bench.gpu_house import DRAM, HBM, house
from tiercache.bench.gpu_rig import random_bytes
from tiercache.kernels.device import Memory, Pool, Stream
from tiercache.kernels.host import Bytes
from tiercache.spec import Geometry

SLOW = 0.1
"""Seconds for which a stream is kept busy."""
BLOCKS = 64
_LAYERS = 16


def measure(bench: Bench) -> None:
    """Check, and measure what a computation hides of a promotion."""
    bench.rig.busy(bench.rig.device.stream(), 1e-6)  # compiled before it matters
    for down_first in (True, False):
        _crossing(bench, down_first=down_first)
    _stage_reused(bench)
    asyncio.run(_through_two_stages(bench))
    _overlap(bench)


class _Lane:
    """A stream, its stage on the device, and its memory on the host."""

    def __init__(self, bench: Bench, size: int) -> None:
        self.stream: Stream = bench.rig.device.stream()
        self.stage: Memory = bench.rig.device.allocate(size)
        self.host: Bytes = bench.rig.device.pinned(size)


def _crossing(bench: Bench, *, down_first: bool) -> None:
    """One way behind something slow, the other after it by an event; and without the event, so that the fault is known to show."""
    what = "a slot is filled anew after it was read" if down_first else "a slot is read after it was filled"
    outcomes: list[bool] = []
    for ordered in (True, False):
        unit, planes = 4096, 8
        device = bench.rig.device
        pool = Pool(device.allocate(planes * 4 * unit), planes, 4, unit)
        old, new = random_bytes(bench.draw, pool.memory.size), random_bytes(bench.draw, planes * unit)
        bench.rig.poke(old, pool.memory)
        before = old.reshape(planes, 4, unit)[:, 2].tobytes()
        down, up = _Lane(bench, new.size), _Lane(bench, new.size)
        up.host[:] = new
        first, second = (down, up) if down_first else (up, down)
        bench.rig.busy(first.stream, SLOW)
        for lane in (first, second):
            if lane is down:
                lane.stream.gather(pool, [2], lane.stage)
                lane.stream.read(lane.stage, 0, lane.host)
            else:
                lane.stream.write(lane.host, lane.stage, 0)
                lane.stream.scatter(lane.stage, pool, [2], first=0, planes=planes)
            if lane is first and ordered:
                second.stream.wait(first.stream.record())
        second.stream.record().wait()
        first.stream.record().wait()
        arrived = down.host.tobytes()
        filled = bench.rig.peek(pool.memory).reshape(planes, 4, unit)[:, 2].tobytes() == new.tobytes()
        outcomes.append(filled and arrived == (before if down_first else new.tobytes()))
    bench.check(f"{what}, by an event", outcomes[0])
    if bench.rig.dry:
        return  # which order the lazy device takes without an event is drawn
    bench.check(f"{what}: without the event the fault shows", not outcomes[1])


def _stage_reused(bench: Bench) -> None:
    """A stage goes from a stream that is slow to read it to another that fills it, by its event."""
    size = 1 << 20
    down, up = _Lane(bench, size), _Lane(bench, size)
    content, other = random_bytes(bench.draw, size), random_bytes(bench.draw, size)
    stage = bench.rig.device.allocate(size)
    bench.rig.poke(content, stage)
    up.host[:] = other
    bench.rig.busy(down.stream, SLOW)
    down.stream.read(stage, 0, down.host)
    up.stream.wait(down.stream.record())
    up.stream.write(up.host, stage, 0)
    up.stream.record().wait()
    exact = np.array_equal(down.host, content) and np.array_equal(bench.rig.peek(stage), other)
    bench.check("a stage is filled anew after it was read, by its event", exact)


async def _through_two_stages(bench: Bench) -> None:
    """Begun while every stream is busy: demotions of many prompts through two stages of a block, and all of them up again."""
    geometry = Geometry(layers=4, parts=2, unit_bytes=8192, symbol_bytes=64)
    async with house(bench.rig, geometry, hbm=BLOCKS, dram=BLOCKS, stages=2, stage_blocks=1) as made:
        for block in range(BLOCKS):
            made.fill(block, 1)
        for block in range(BLOCKS):
            await made.promote(block, 1)
        for block in range(BLOCKS):
            made.forget_dram(block, 1)
        for stream in bench.rig.streams():
            bench.rig.busy(stream, SLOW)
        ends = [stream.record() for stream in bench.rig.streams()]
        demoting = asyncio.create_task(made.demote(BLOCKS))
        await asyncio.sleep(0)
        gc.collect(0)
        in_time = not any(bench.rig.is_done(end) for end in ends)
        moved = sum(transfer.count for transfer in await demoting)
        exact = all(made.is_exact(block, 1, DRAM) for block in range(BLOCKS))
        bench.check("demotions behind busy streams are exact", exact and moved == BLOCKS, f"{moved} through two stages")
        bench.check("they had begun before the streams were free", in_time or bench.rig.dry)
        for block in range(BLOCKS):
            await made.promote(block, 1)
        bench.check("and promotions", all(made.is_exact(block, 1, HBM) for block in range(BLOCKS)))


def _overlap(bench: Bench) -> None:
    """Layers come up on one stream; on another each is computed on after its own event, for as long as it took to come."""
    device, unit = bench.rig.device, 32768
    blocks = bench.pick(4, 512)
    pool = Pool(device.allocate(_LAYERS * 2 * blocks * unit), _LAYERS * 2, blocks, unit)
    layer_bytes = blocks * 2 * unit
    source = device.pinned(_LAYERS, layer_bytes)
    source[:] = random_bytes(bench.draw, *source.shape)
    up, compute = device.stream(), device.stream()
    stage = device.allocate(layer_bytes)
    slots = list(range(blocks))
    back = device.allocate(pool.memory.size)

    def copies(pace: float, *, computing: bool) -> None:
        for layer in range(_LAYERS):
            up.write(source[layer], stage, 0)
            up.scatter(stage, pool, slots, first=2 * layer, planes=2)
            if computing:
                compute.wait(up.record())
                bench.rig.busy(compute, pace, wide=True)
        if computing:
            compute.gather(pool, slots, back)

    def both(pace: float) -> float:
        began = time.perf_counter()
        copies(pace, computing=True)
        compute.record().wait()
        return time.perf_counter() - began

    alone = bench.samples(lambda: bench.rig.wall(up, lambda: copies(0.0, computing=False)))
    pace = sorted(alone)[len(alone) // 2] / _LAYERS
    together = bench.samples(lambda: both(pace))
    middle = sorted(together)[len(together) // 2]
    expected = source.reshape(_LAYERS, blocks, 2, unit).transpose(1, 0, 2, 3).reshape(blocks, _LAYERS * 2, unit)
    exact = np.array_equal(bench.rig.peek(back).reshape(expected.shape), expected)
    bench.check("a reader that waits for each layer's event reads all of it", exact)
    at: dict[str, str | int | float] = {"layers": _LAYERS, "bytes": _LAYERS * layer_bytes}
    bench.add("layers up, alone", alone, "s", at=at)
    bench.add("layers up, a computation of the same length behind each", together, "s", at=at)
    # One after the other would take twice as long as the copies alone; side by side, one layer more than they.
    share = middle / (pace * _LAYERS)
    bench.check("computing hides copying", bench.rig.dry or share < 1.5, f"{share:.2f} of the copies alone")
