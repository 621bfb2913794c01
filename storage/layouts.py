"""How the blocks of one geometry lie in a run of host memory: what daemon and clients must agree on, byte for byte."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiercache.spec import Geometry

SLOT_ALIGNMENT = 4096
"""Bytes; what a writer maps of a block-first arena starts on a page, and holds no byte of another slot."""

SlotPlanes = NDArray[np.uint8]
"""All slots as `[slots, planes, unit_bytes]` bytes, in place; `[slot]` is one block."""


def block_first_slot_bytes(geometry: Geometry) -> int:
    """Return the distance between two slots of block-first memory: the block, padded to `SLOT_ALIGNMENT`."""
    return -(-geometry.block_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def block_first(memory: NDArray[np.uint8], geometry: Geometry) -> SlotPlanes:
    """Return the slots of block-first memory `[slots, layers, parts, unit_bytes]`; each block is contiguous and padded.

    `memory` is the arena's bytes, `[length]`; what remains after the last whole slot is not used.
    """
    stride = block_first_slot_bytes(geometry)
    slots = len(memory) // stride
    padded = memory[: slots * stride].reshape(slots, stride)
    return padded[:, : geometry.block_bytes].reshape(slots, geometry.planes, geometry.unit_bytes)


def layer_first(memory: NDArray[np.uint8], geometry: Geometry) -> SlotPlanes:
    """Return the slots of layer-first memory `[layers, parts, slots, unit_bytes]`; the planes of a block lie far apart.

    `memory` is the arena's bytes, `[length]`; what remains after the last whole slot is not used.
    """
    slots = len(memory) // geometry.block_bytes
    arena = memory[: slots * geometry.block_bytes].reshape(geometry.planes, slots, geometry.unit_bytes)
    return arena.transpose(1, 0, 2)
