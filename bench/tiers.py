"""What each tier holds, and how blocks go in, out, down and up, beside a memcpy and the raw disk of the same run.

Everything goes through the face of one cache in this process. A demotion alone is what the core plans when a tier is to have more
free slots. A cold promotion comes from files whose pages were dropped while nobody had them open.
"""

from __future__ import annotations

import asyncio
import gc

from tiercache.bench.plot import Plot
from tiercache.bench.run import Run
from tiercache.bench.tiers_disk import measure_disk
from tiercache.bench.tiers_fill import measure_fill
from tiercache.bench.tiers_memory import measure_memory
from tiercache.bench.tiers_scene import SIZES, check
from tiercache.bench.tiers_store import measure_store

GOAL_RATIO = 0.8
PLOTS = (
    Plot(
        "tiers-disk",
        "DRAM to SSD and back, beside O_DIRECT: one long prompt",
        ("rate", "page cache"),
        x="block bytes",
        series=("name", "way"),
        of="ratio",
        limit=GOAL_RATIO,
        chosen=lambda figure: "SSD" in str(figure.at["way"]) and "warm" not in str(figure.at["way"]),
    ),
    Plot(
        "tiers-memory",
        "In, out, and between memories, beside memcpy: one long prompt",
        ("rate",),
        x="block bytes",
        series=("way",),
        of="ratio",
        limit=GOAL_RATIO,
        chosen=lambda figure: "SSD" not in str(figure.at["way"]),
    ),
    Plot(
        "tiers-memory-latency",
        "One call in memory, by the blocks that it moves, each of 1 MiB",
        ("move",),
        x="blocks",
        series=("way",),
        chosen=lambda figure: figure.at["block bytes"] == 1 << 20 and "SSD" not in str(figure.at["way"]),
    ),
    Plot(
        "tiers-disk-latency",
        "One call to SSD or back, by the blocks that it moves, each of 1 MiB",
        ("move",),
        x="blocks",
        series=("way",),
        chosen=lambda figure: figure.at["block bytes"] == 1 << 20 and "SSD" in str(figure.at["way"]),
    ),
    Plot(
        "tiers-fill",
        "Eight blocks of 1 MiB into a tier, by how full it is",
        ("fill",),
        x="percent full",
        series=("way",),
        log=False,
    ),
)


def measure(run: Run) -> None:
    """Measure memory tiers, the durable one, how both do near their limit, and the store alone."""
    sizes = run.pick(SIZES[::3], SIZES)
    steps = [(step, size) for size in sizes for step in (check, measure_memory, measure_disk)]
    for step, size in run.track(steps, "tiers"):
        asyncio.run(step(run, size))
        gc.collect()
    asyncio.run(measure_fill(run))
    measure_store(run)
