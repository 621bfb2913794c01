"""Words that every part of the house uses: tiers, and the identity of a stored block."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Tier(enum.IntEnum):
    """A place for blocks; a larger value is a faster tier, so `Tier.HBM > Tier.DRAM > Tier.SSD`.

    The numbers are written to disk and sent over the wire. They leave gaps, so that a tier can be put between two.
    """

    SSD = 10
    DRAM = 20
    HBM = 30

    def __str__(self) -> str:
        return self.name


class Identity(NamedTuple):
    """Whose bytes a slot holds: what a keyed tier writes beside them, and compares on every read.

    `namespace`, `key` and `parent` are 32-byte digests (`tiercache.keys`); the parent of a chain's first block is 32 zero
    bytes. `symbol` is the block's part of the packed key: its token ids as little-endian 32-bit integers, or a 32-byte digest
    that an engine handed over. `checksum` is the xxh3-64 of the block's bytes in block-first order.
    """

    namespace: bytes
    group: int
    shard: int
    key: bytes
    parent: bytes
    symbol: bytes
    checksum: int
