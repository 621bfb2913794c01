"""The programs there are. Each is a module with `measure(run)` and `PLOTS`, loaded when it is asked for: some need torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tiercache.bench.plot import Plot
from tiercache.bench.run import Run

NAMES: dict[str, str] = {
    "tree": "the index alone: match, insert, split, evict, as it grows; beside SGLang's trees where they are installed",
    "tiers": "put, get, demote and promote of every tier, cold and warm; beside memcpy and O_DIRECT",
    "restart": "from exec to the first correct hit, as the store grows",
    "service": "the daemon and its client: matches beside a bare round trip, many sessions, what holds the loop",
    "runner": "a real model: what a hit adds to a pass, by tier and length, and what the cache costs when nothing hits",
    "peer": "store and retrieve, in memory and on disk, beside LMCache where it is installed",
}

ON_DISK = ("tiers", "runner", "peer")
"""Those that read files which are no longer in memory, and so need a folder on a disk."""


class Program(NamedTuple):
    """One subject that is measured."""

    name: str
    measure: Callable[[Run], None]
    plots: Sequence[Plot]


def load(name: str) -> Program:
    """Return the program called `name`, one of `NAMES`."""
    module = importlib.import_module(f"tiercache.bench.{name}")
    return Program(name, module.measure, module.PLOTS)
