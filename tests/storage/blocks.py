"""Blocks for tests of stores: chains whose bytes come from the oracle, with the identities that a store compares."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.oracle import oracle_block
from tiercache.keys import ROOT_KEY, block_keys
from tiercache.spec import Geometry
from tiercache.storage.checksum import checksum
from tiercache.storage.contract import Put
from tiercache.storage.metadata import Loaded
from tiercache.types import Identity

POISON = 0xA5


class Block(NamedTuple):
    """One block of a chain: whose it is, and its bytes, contiguous `[planes, unit_bytes]`."""

    identity: Identity
    planes: NDArray[np.uint8]

    def at(self, slot: int) -> Put:
        """The block as something to put into `slot`."""
        return Put(slot, self.identity, self.planes)


def chain(geometry: Geometry, count: int, *, seed: int = 0, namespace: bytes = b"n" * 32) -> list[Block]:
    """Return the first `count` blocks of the prompt that `seed` makes."""
    stride = geometry.symbol_bytes
    tokens = np.random.default_rng(seed).integers(0, 2**31, count * stride // 4, dtype="<i4").tobytes()
    keys = block_keys(namespace, ROOT_KEY, tokens, stride)
    blocks = []
    for place, key in enumerate(keys):
        end = (place + 1) * stride
        planes = oracle_block(namespace, tokens[:end], geometry)
        parent = keys[place - 1] if place else ROOT_KEY
        symbol = tokens[end - stride : end]
        blocks.append(Block(Identity(namespace, 0, 0, key, parent, symbol, checksum(planes)), planes))
    return blocks


def identity_at(loaded: Loaded, place: int) -> Identity:
    """Return the identity of the block at `place` of the columns."""
    return Identity(
        loaded.namespaces[place],
        int(loaded.groups[place]),
        int(loaded.shards[place]),
        loaded.keys[place],
        loaded.parents[place],
        loaded.symbols[place],
        loaded.checksums[place],
    )


def contiguous(geometry: Geometry) -> NDArray[np.uint8]:
    """Return poisoned room for one block, block-first."""
    return np.full((geometry.planes, geometry.unit_bytes), POISON, np.uint8)


def strided(geometry: Geometry) -> NDArray[np.uint8]:
    """Return poisoned room for one block, layer-first between two neighbours; its `base` holds all three."""
    arena = np.full((geometry.planes, 3, geometry.unit_bytes), POISON, np.uint8)
    return arena[:, 1]
