"""The checksum of a block depends on its bytes and their order, and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tiercache.errors import Untrusted
from tiercache.storage.checksum import checksum, verify

units = st.sampled_from([1, 7, 64, 240, 4096, 8191, 8192, 9000, 12288])


def layer_first(block: NDArray[np.uint8], slots: int, slot: int) -> NDArray[np.uint8]:
    planes, unit = block.shape
    arena = np.full((planes, slots, unit), 0xA5, np.uint8)
    arena[:, slot] = block
    return arena[:, slot]


@given(planes=st.integers(1, 6), unit=units, slots=st.integers(1, 4), data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_one_block_has_one_checksum_in_every_layout(planes: int, unit: int, slots: int, data: st.DataObject, seed: int) -> None:
    """Block-first, layer-first and hashed in one shot: xxh3-64, seed 0, of the same bytes."""
    block = np.random.default_rng(seed).integers(0, 256, (planes, unit), dtype=np.uint8)
    slot = data.draw(st.integers(0, slots - 1))

    contiguous, strided = checksum(block), checksum(layer_first(block, slots, slot))

    assert contiguous == xxhash.xxh3_64_intdigest(block.tobytes())
    assert strided == contiguous


@given(unit=units, data=st.data(), seed=st.integers(0, 2**32 - 1))
def test_every_byte_counts(unit: int, data: st.DataObject, seed: int) -> None:
    """Another value of any one byte is another checksum, in both layouts."""
    block = np.random.default_rng(seed).integers(0, 256, (4, unit), dtype=np.uint8)
    good = checksum(block)
    plane, byte = data.draw(st.integers(0, 3)), data.draw(st.integers(0, unit - 1))

    block[plane, byte] ^= data.draw(st.integers(1, 255))

    assert checksum(block) != good
    assert checksum(layer_first(block, 3, 1)) != good


def test_the_order_of_planes_counts() -> None:
    """Two planes that changed places are another block."""
    block = np.arange(4 * 9000, dtype=np.uint32).astype(np.uint8).reshape(4, 9000)
    block[1] ^= 0xFF

    assert checksum(block[[0, 2, 1, 3]]) != checksum(block)


def test_verify_names_the_place_and_both_checksums() -> None:
    """A mismatch is Untrusted with a reason for the counters, and says where and what; a match says nothing."""
    block = np.zeros((2, 64), np.uint8)
    good = checksum(block)
    verify(block, good, "DRAM slot 7")

    with pytest.raises(Untrusted, match="DRAM slot 7") as caught:
        verify(block, good ^ 1, "DRAM slot 7")

    assert caught.value.reason == "checksum"
    assert caught.value.fields["expected"] == good ^ 1
    assert caught.value.fields["found"] == good
