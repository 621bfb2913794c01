"""The block table: ids, generations, slots, and how the columns grow."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from tiercache.table import NOWHERE, BlockTable, rows
from tiercache.tree import BLOCK_IDS


def test_new_blocks_are_nowhere() -> None:
    """An id says nothing about a place until a slot is written beside it."""
    table = BlockTable(3)
    blocks = table.allocate(3)

    assert blocks.tolist() == [0, 1, 2]
    assert table.live == 3
    assert [table.slots(blocks, tier) for tier in range(3)] == [[NOWHERE] * 3] * 3
    assert table.keys(blocks) == [bytes(32)] * 3


def test_ids_are_used_again_under_a_new_generation() -> None:
    """Who remembers (id, generation) sees that another block has the id now."""
    table = BlockTable(1)
    blocks = table.allocate(4)
    table.key[1] = 7
    table.owner[1] = 3
    table.free(blocks[1:3])
    again = table.allocate(3)

    assert sorted(again) == [1, 2, 4]
    assert table.generation[rows(array(BLOCK_IDS, [0, 1, 2, 4]))].tolist() == [0, 1, 1, 0]
    assert table.keys(array(BLOCK_IDS, [1])) == [bytes(32)]
    assert table.owner[1] == NOWHERE
    assert table.live == 5


def test_a_block_with_a_slot_is_not_freed() -> None:
    """The slots go first; else two owners would have them."""
    table = BlockTable(2)
    blocks = table.allocate(2)
    table.slot[1, 1] = 5

    with pytest.raises(AssertionError):
        table.free(blocks)


def test_the_columns_grow_and_keep_what_they_hold() -> None:
    """Growth is by half, so that many small steps cost no more than one."""
    table = BlockTable(2)
    first = table.allocate(10)
    table.slot[0, rows(first)] = np.arange(10)
    table.checksum[rows(first)] = 2**64 - 1
    before = table.bytes
    table.allocate(100_000)

    assert table.slots(first, 0) == list(range(10))
    assert table.slots(first, 1) == [NOWHERE] * 10
    assert set(table.checksum[rows(first)].tolist()) == {2**64 - 1}
    assert table.generation.size == table.owner.size == table.slot.shape[1] == table.key.shape[0] == table.checksum.size
    assert table.bytes > before


def test_no_blocks_are_no_rows() -> None:
    """An empty run is an index like any other."""
    table = BlockTable(1)

    assert rows(array(BLOCK_IDS)).size == 0
    assert table.allocate(0).tolist() == table.slots(array(BLOCK_IDS), 0) == []
    assert table.keys(array(BLOCK_IDS)) == []


@pytest.mark.parametrize("count", [1, 40])
def test_a_place_is_written_into_every_column(count: int) -> None:
    """Few rows are written one by one, many at once."""
    table = BlockTable(2)
    other, blocks = table.allocate(1), table.allocate(count)

    table.place(blocks, 1, range(7, 7 + count), [2**64 - 1 - block for block in blocks], 5)

    assert table.slots(blocks, 1) == [*range(7, 7 + count)] and table.slots(blocks, 0) == [NOWHERE] * count
    assert table.checksum[rows(blocks)].tolist() == [2**64 - 1 - block for block in blocks]
    assert set(table.owner[rows(blocks)].tolist()) == {5}
    assert table.slots(other, 1) == [NOWHERE] and table.owner[rows(other)].tolist() == [NOWHERE]
