"""How the blocks of one geometry lie in a run of host memory: what daemon and clients must agree on, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tiercache.spec import Geometry

SLOT_ALIGNMENT = 4096
"""Bytes; what a writer maps of a block-first arena starts on a page, and holds no byte of another slot."""

SlotPlanes = NDArray[np.uint8]
"""All slots as `[slots, planes, unit_bytes]` bytes, in place; `[slot]` is one block."""


RUN_BYTES = 512 << 10
"""How much is copied at once of blocks that are checked afterwards: little enough to be still in a processor's cache then."""


class Placed(Protocol):
    """Where a block lies: which tier, and which slot of it."""

    @property
    def position(self) -> int:
        """The tier."""

    @property
    def slot(self) -> int:
        """The slot."""


def runs(places: Sequence[Placed], block_bytes: int) -> Iterator[tuple[int, int]]:
    """Go through `places`, at least one, in runs of neighbouring slots of one tier, of `RUN_BYTES` or one block at most.

    A run is given as its first place and the first one after it.
    """
    most = max(1, RUN_BYTES // block_bytes)
    low, position, slot = 0, places[0].position, places[0].slot
    for high, place in enumerate(places):
        if high - low == most or place.slot != slot + high - low or place.position != position:
            yield low, high
            low, position, slot = high, place.position, place.slot
    yield low, len(places)


def block_first_slot_bytes(geometry: Geometry) -> int:
    """Return the distance between two slots of block-first memory: the block, padded to `SLOT_ALIGNMENT`."""
    return -(-geometry.block_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def block_first_capacity(geometry: Geometry, length: int) -> int:
    """Return how many slots fit `length` bytes of block-first memory."""
    return length // block_first_slot_bytes(geometry)


def block_first(memory: NDArray[np.uint8], geometry: Geometry) -> SlotPlanes:
    """Return the slots of block-first memory `[slots, layers, parts, unit_bytes]`; each block is contiguous and padded.

    `memory` is the arena's bytes, `[length]`; what remains after the last whole slot is not used.
    """
    stride = block_first_slot_bytes(geometry)
    slots = len(memory) // stride
    padded = memory[: slots * stride].reshape(slots, stride)
    return padded[:, : geometry.block_bytes].reshape(slots, geometry.planes, geometry.unit_bytes)


def layer_first_capacity(geometry: Geometry, length: int) -> int:
    """Return how many slots fit `length` bytes of layer-first memory, which has no padding."""
    return length // geometry.block_bytes


def layer_first(memory: NDArray[np.uint8], geometry: Geometry) -> SlotPlanes:
    """Return the slots of layer-first memory `[layers, parts, slots, unit_bytes]`; the planes of a block lie far apart.

    `memory` is the arena's bytes, `[length]`; what remains after the last whole slot is not used.
    """
    slots = len(memory) // geometry.block_bytes
    arena = memory[: slots * geometry.block_bytes].reshape(geometry.planes, slots, geometry.unit_bytes)
    return arena.transpose(1, 0, 2)
