"""The programs there are. Each is a module with `measure(run)` and `PLOTS`, loaded when it is asked for: some need torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tiercache.bench.plot import Plot
from tiercache.bench.run import Run

NAMES: dict[str, str] = {
    "tree": "the index alone: match, insert, split, evict, as it grows; beside SGLang's trees where they are installed",
    "peer": "store and retrieve, in memory and on disk, beside LMCache where it is installed",
}


class Program(NamedTuple):
    """One subject that is measured."""

    name: str
    measure: Callable[[Run], None]
    plots: Sequence[Plot]


def load(name: str) -> Program:
    """Return the program called `name`, one of `NAMES`."""
    module = importlib.import_module(f"tiercache.bench.{name}")
    return Program(name, module.measure, module.PLOTS)
