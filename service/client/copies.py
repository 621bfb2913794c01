"""Copies between mapped slots and the client's own memory, on worker threads.

A slot that the daemon gives to somebody else gets its next generation first. So a copy is the block that was asked for if the
generation is the expected one *after* it. The checksum is the guard against everything else: it is computed after the copy too, in
the slot, where the block is one run and still in the processor's cache. A slot that changed before its copy or under it, and kept
its generation, is still another one after it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiercache.errors import StoreError, WorkerDied
from tiercache.kernels.host import Bytes, copy_run, scatter_tokens
from tiercache.service.client.mapping import Arena, Slots
from tiercache.service.wire import Place, place_table
from tiercache.storage.checksum import checksum
from tiercache.storage.layouts import runs

LOST = "lost"
ROTTEN = "checksum"
DIED = "died"
"""The thread that copied or checked died."""
FAILED = "device"
"""The device failed the copy."""


def fault_of(error: StoreError) -> str:
    """Return why a copy by way of a device came to nothing."""
    return DIED if isinstance(error, WorkerDied) else FAILED


def is_there(arenas: Sequence[Slots], place: Place) -> bool:
    """Return whether the block is still in its slot."""
    return arenas[place.position].generations[place.slot] == place.generation


def require_places(arenas: Sequence[Slots], packed: bytes) -> None:
    """Raise ValueError unless `packed` are places in what is mapped."""
    table = place_table(packed)
    if not len(table):
        return
    positions, slots = table["position"], table["slot"]
    highest = int(np.maximum.reduce(positions))
    if highest < len(arenas):
        if np.maximum.reduce(slots) < min(arena.capacity for arena in arenas[: highest + 1]):
            return
        capacities = np.array([arena.capacity for arena in arenas], np.int64)
        if (slots < capacities[positions]).all():
            return
    raise ValueError("a block lies where nothing is mapped")


def gather(arenas: Sequence[Arena], places: Sequence[Place], into: Bytes) -> tuple[int, str | None]:
    """Copy blocks one after the other into `into`, `[planes, len(places) * unit_bytes]`, and verify each.

    Returns how many leading ones are good, and why the next one is not.
    """
    unit = into.shape[1] // len(places)
    for low, high in runs(places, len(into) * unit):
        first = places[low]
        blocks = arenas[first.position].slots[first.slot : first.slot + high - low]
        copy_run(blocks, into[:, low * unit : high * unit])
        for number in range(low, high):
            reason = _fault(arenas, places[number], blocks[number - low])
            if reason is not None:
                return number, reason
    return len(places), None


def verify(arenas: Sequence[Arena], places: Sequence[Place]) -> tuple[int, str | None]:
    """Check blocks where they lie; returns as `gather` does."""
    for number, place in enumerate(places):
        reason = _fault(arenas, place, arenas[place.position].slots[place.slot])
        if reason is not None:
            return number, reason
    return len(places), None


def layer(arenas: Sequence[Arena], places: Sequence[Place], low: int, into: Bytes) -> bool:
    """Copy the planes from `low` on of every block into `into`, `[parts, len(places) * unit_bytes]`.

    Returns whether all blocks were there to the end. Nothing is verified: a checksum covers whole blocks (see `verify`).
    """
    unit = into.shape[1] // len(places)
    high = low + len(into)
    for first, end in runs(places, len(into) * unit):
        place = places[first]
        blocks = arenas[place.position].slots[place.slot : place.slot + end - first, low:high]
        copy_run(blocks, into[:, first * unit : end * unit])
    return all(is_there(arenas, place) for place in places)


def _fault(arenas: Sequence[Arena], place: Place, block: Bytes) -> str | None:
    """Return why what lies in a slot is not the block that was asked for, if it is not."""
    found = checksum(block)
    if not is_there(arenas, place):
        return LOST
    return None if found == place.checksum else ROTTEN


def scatter(tensor: Bytes, first: int, slots: Sequence[Bytes]) -> list[int]:
    """Fill reserved slots from block `first` of `tensor` on; return the checksums of what lies there now."""
    sums: list[int] = []
    for number, block in enumerate(slots, first):
        unit = block.shape[1]
        scatter_tokens(tensor, number, block, token_bytes=unit)
        sums.append(checksum(block))
    return sums


def seal(slots: Sequence[Bytes]) -> list[int]:
    """Return the checksums of slots that were filled in place."""
    return [checksum(block) for block in slots]
