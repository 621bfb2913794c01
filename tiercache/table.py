"""The block table: where every block is, as columns."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tiercache.tree import BLOCK_IDS

NOWHERE = -1
_FIRST_ROWS = 256
_FEW = 32
"""Up to here a loop over single items costs less than the fixed price of numpy's calls."""


def rows(blocks: array[int]) -> NDArray[np.intp]:
    """Return block ids as an index into the table's columns.

    As machine words: numpy takes an index of another width five times as long, since it converts it in pieces.
    """
    return np.frombuffer(blocks, dtype=np.int32).astype(np.intp) if len(blocks) else np.empty(0, dtype=np.intp)


class BlockTable:
    """One row a block: its slot in every tier, checksum, durable key, owner and generation.

    Block ids are row numbers and are used again; a row's generation is bumped when its block is freed, so that who
    remembers (id, generation) sees whether it is still the same block. Group and shard are 0 in this version; a block with
    several shards has the same slot number in each shard's arena.
    """

    def __init__(self, tiers: int) -> None:
        self.slot = np.full((tiers, _FIRST_ROWS), NOWHERE, dtype=np.int32)
        """`[tiers, rows]`: the slot that holds the block in a tier, or NOWHERE."""
        self.checksum = np.zeros(_FIRST_ROWS, dtype=np.uint64)
        self.generation = np.zeros(_FIRST_ROWS, dtype=np.uint32)
        self.owner = np.full(_FIRST_ROWS, NOWHERE, dtype=np.int32)
        """Number of the node that names the block, or NOWHERE while it is only reserved."""
        self.key = np.zeros((_FIRST_ROWS, 32), dtype=np.uint8)
        """Durable key; all zero until the block first goes to a keyed tier."""
        self._used = 0
        self._free: list[int] = []

    @property
    def live(self) -> int:
        """How many blocks exist."""
        return self._used - len(self._free)

    def allocate(self, count: int) -> array[int]:
        """Return ids for `count` new blocks, which are nowhere yet."""
        kept = max(0, len(self._free) - count)
        ids = array(BLOCK_IDS, self._free[kept:])
        del self._free[kept:]
        fresh = count - len(ids)
        if fresh:
            self._grow(self._used + fresh)
            ids.extend(range(self._used, self._used + fresh))
            self._used += fresh
        return ids

    def place(self, blocks: array[int], position: int, slots: Sequence[int], checksums: Sequence[int], owner: int) -> None:
        """Write down where new blocks lie in one tier, their checksums, and the number of the node that names them."""
        if len(blocks) <= _FEW:
            there, sums, owners = self.slot[position].data, self.checksum.data, self.owner.data
            for block, slot, checksum in zip(blocks, slots, checksums, strict=True):
                there[block] = slot
                sums[block] = checksum
                owners[block] = owner
            return
        index = rows(blocks)
        self.slot[position][index] = slots
        self.checksum[index] = checksums
        self.owner[index] = owner

    def free(self, blocks: array[int]) -> None:
        """Give the ids back; their slots must have been taken out before."""
        index = rows(blocks)
        assert (self.slot[:, index] == NOWHERE).all()
        self.generation[index] += 1
        self.owner[index] = NOWHERE
        self.key[index] = 0
        self._free.extend(blocks)

    def slots(self, blocks: array[int], position: int) -> list[int]:
        """Return the slots of `blocks` in the tier at `position`."""
        found: list[int] = self.slot[position, rows(blocks)].tolist()
        return found

    def keys(self, blocks: array[int]) -> list[bytes]:
        """Return the durable keys of `blocks`."""
        data = self.key[rows(blocks)].tobytes()
        return [data[i : i + 32] for i in range(0, len(data), 32)]

    @property
    def bytes(self) -> int:
        """Bytes that the columns take."""
        return sum(column.nbytes for column in (self.slot, self.checksum, self.generation, self.owner, self.key))

    def _grow(self, need: int) -> None:
        have = self.checksum.size
        if need <= have:
            return
        more = max(need, have + have // 2) - have
        self.slot = np.concatenate([self.slot, np.full((self.slot.shape[0], more), NOWHERE, dtype=np.int32)], axis=1)
        self.checksum = np.concatenate([self.checksum, np.zeros(more, dtype=np.uint64)])
        self.generation = np.concatenate([self.generation, np.zeros(more, dtype=np.uint32)])
        self.owner = np.concatenate([self.owner, np.full(more, NOWHERE, dtype=np.int32)])
        self.key = np.concatenate([self.key, np.zeros((more, 32), dtype=np.uint8)])
