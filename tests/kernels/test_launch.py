"""Launch shapes and limits."""

from __future__ import annotations

import pytest

from tiercache.errors import InvalidTensor
from tiercache.kernels.launch import plan


@pytest.mark.parametrize(
    ("unit", "block"), [(8, (1, 256)), (16, (1, 256)), (48, (4, 64)), (4096, (256, 1)), (32768, (256, 1))], ids=str
)
def test_short_rows_share_a_block_of_threads(unit: int, block: tuple[int, int]) -> None:
    """A row takes a power of two of threads, at most all of a block; the rest of the block takes other rows."""
    assert plan(unit_bytes=unit, planes=4, pool_slots=9, slots=[1, 2], addresses=[0, 256]).block == block


@pytest.mark.parametrize("slot", [-1, 9, 1 << 31])
def test_a_slot_that_does_not_exist_is_named(slot: int) -> None:
    """With the slots that do."""
    with pytest.raises(InvalidTensor, match=f"slot {slot} does not exist; the slots are 0 to 8"):
        plan(unit_bytes=16, planes=4, pool_slots=9, slots=[0, slot], addresses=[0])


@pytest.mark.parametrize(("unit", "address"), [(12, 0), (16, 4), (0, 0), (1, 0)])
def test_what_eight_does_not_divide_is_refused(unit: int, address: int) -> None:
    """A row or an address that no vector fits is named."""
    with pytest.raises(InvalidTensor, match="8-byte vectors"):
        plan(unit_bytes=unit, planes=4, pool_slots=9, slots=[0], addresses=[0, address])


def test_an_address_of_eight_bytes_makes_the_vector_narrow() -> None:
    """Sixteen bytes are read from a boundary of sixteen only."""
    assert plan(unit_bytes=32, planes=4, pool_slots=9, slots=[0], addresses=[0, 24]).width == 8


@pytest.mark.parametrize(
    ("planes", "pool_slots", "unit", "what"),
    [(1 << 31, 1, 16, "rows"), (1, 1 << 31, 16, "slots"), (1, 1, 1 << 35, "vectors a row")],
    ids=["rows", "slots", "vectors"],
)
def test_what_an_index_does_not_reach_is_refused(planes: int, pool_slots: int, unit: int, what: str) -> None:
    """With the number and the limit."""
    with pytest.raises(InvalidTensor, match=f"{1 << 31} {what}; the limit of one launch is {(1 << 31) - 1}"):
        plan(unit_bytes=unit, planes=planes, pool_slots=pool_slots, slots=[0], addresses=[0])


def test_a_large_copy_fits_any_grid() -> None:
    """A million rows are spread over a bounded number of blocks of threads."""
    how = plan(unit_bytes=32768, planes=64, pool_slots=1 << 20, slots=range(1 << 14), addresses=[0])

    assert how.rows == 1 << 20 and how.grid == 4096
