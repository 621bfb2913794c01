"""The codec: lossless and bounded."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from tests.storage.blocks import contiguous, strided
from tiercache.errors import Untrusted
from tiercache.spec import Geometry
from tiercache.storage.codec import Codec

GEOMETRY = Geometry(layers=4, parts=2, unit_bytes=8192, symbol_bytes=64)
SIZE = GEOMETRY.block_bytes


def bfloat16(seed: int) -> NDArray[np.uint8]:
    """A block of normally distributed values, as a model's are, in bfloat16."""
    words = np.random.default_rng(seed).standard_normal(SIZE // 2, dtype=np.float32).view("<u4") >> 16
    return words.astype("<u2").view(np.uint8).reshape(GEOMETRY.planes, GEOMETRY.unit_bytes)


def claiming(size: int) -> bytes:
    """A frame whose header claims `size` bytes of content, in eight bytes, single segment, with one short raw block."""
    return b"\x28\xb5\x2f\xfd" + b"\xe0" + size.to_bytes(8, "little") + (1 | 16 << 3).to_bytes(3, "little") + bytes(16)


@pytest.mark.parametrize("room", [contiguous, strided])
@pytest.mark.parametrize("item_bytes", [1, 2, 4])
def test_blocks_come_back_exact(item_bytes: int, room: object, seed: int) -> None:
    """Whatever the width of the planes and the layout of the target, all bytes are the same."""
    codec = Codec(SIZE)
    block = bfloat16(seed)
    into = strided(GEOMETRY) if room is strided else contiguous(GEOMETRY)

    codec.decompress(codec.compress(block, item_bytes), item_bytes, into)

    assert into.tobytes() == block.tobytes()


def test_planes_are_what_makes_bfloat16_small(seed: int) -> None:
    """Split into planes a block fits seven tenths of its size; unsplit it does not fit three quarters."""
    codec = Codec(SIZE)
    block = bfloat16(seed)

    assert len(codec.compress(block, 2)) < SIZE * 7 // 10
    assert len(codec.compress(block, 1)) > SIZE * 3 // 4


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\0" * 100,
        claiming(1 << 40),
        claiming(SIZE + 1),
        claiming(SIZE),
        zstandard.compress(bytes(SIZE - 1), 1),
        zstandard.compress(bytes(SIZE), 1)[:-1],
        zstandard.compress(bytes(SIZE), 1) + b"\0",
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(SIZE)),
    ],
    ids=["empty", "zeros", "1 TiB", "one more", "too short", "one less", "cut", "more after it", "size unknown"],
)
def test_a_bad_frame_is_untrusted_and_takes_no_memory(frame: bytes) -> None:
    """Nothing but Untrusted is raised, and no more than a few blocks are allocated, whatever a frame claims."""
    codec = Codec(SIZE)
    into = contiguous(GEOMETRY)

    tracemalloc.start()
    try:
        with pytest.raises(Untrusted) as caught:
            codec.decompress(frame, 2, into)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert caught.value.reason == "codec"
    assert peak < 8 * SIZE
