"""What the tests run under judges what a test left, not how long the machine took to see it."""

from __future__ import annotations

import gc
from typing import Any

from tests.leaks import Held, left_behind
from tiercache.storage.memory import HostMemory


def test_memory_in_a_cycle_is_not_left_behind_however_long_a_collection_takes() -> None:
    """A collection that ends after the deadline still counts: what it freed is free."""
    before = Held.now()
    gc.disable()
    try:
        cycle: list[Any] = [HostMemory(4096)]
        cycle.append(cycle)
        del cycle
        held = Held.now().since(before)
        leaks = left_behind(before, patience=0.0)
    finally:
        gc.enable()

    assert held and not leaks


def test_memory_that_somebody_holds_is_told() -> None:
    """A view of memory that was closed keeps its mapping, and the file with it."""
    before = Held.now()
    memory = HostMemory(4096, name="held")
    view = memory.array
    memory.close()

    leaks = left_behind(before, patience=0.0)
    del view

    assert any("memfd:held" in line for line in leaks) and any("mapping" in line for line in leaks)
