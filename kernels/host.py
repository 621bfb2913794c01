"""The movers of block bytes on the host: the reference for those of a device, and what runs where there is none.

A block is `[planes, unit_bytes]` bytes, `planes = layers * parts`; each plane is contiguous and the stride between planes is
free, so block-first and layer-first memory look the same here. A runner's tensor `[layers, parts, tokens, kv_heads, head_dim]`
is seen as `[planes, tokens * token_bytes]` bytes. Every call is numpy's copy of rows: it releases the GIL, and returns when
the bytes are where they belong.

Rows stay bytes: numpy copies each contiguous row with one memmove, and views of wider items measured the same. What does
count is that the rows of both sides start on 64-byte boundaries; off them the C library's copy of a row can lose half its
speed (seen with glibc 2.36 on AMD EPYC). numpy's own allocations are only 16-byte aligned: `empty_bytes` gives aligned ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tiercache.errors import InvalidTensor

Bytes = NDArray[np.uint8]

ALIGNMENT = 4096
"""Bytes; the page size, so that what is allocated here can also be pinned or written with O_DIRECT."""


def empty_bytes(*shape: int) -> Bytes:
    """Return a new contiguous uint8 array of `shape`, its content undefined, that starts on a page boundary."""
    count = 1
    for size in shape:
        count *= size
    memory: Bytes = np.empty(count + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + count].reshape(shape)


def copy_block(source: Bytes, into: Bytes) -> None:
    """Copy one block, `[planes, unit_bytes]` on both sides, whatever the stride between planes.

    Raises InvalidTensor, and copies nothing, if the shapes differ or either is not bytes.
    """
    _require_same(source, into)
    np.copyto(into, source)


def copy_run(blocks: Bytes, into: Bytes) -> None:
    """Copy blocks that lie one after the other, `[count, planes, unit_bytes]`, into `[planes, count * unit_bytes]`, in one call.

    Raises InvalidTensor, and copies nothing, if shapes do not fit or either is not bytes.
    """
    shape = (blocks.shape[1], blocks.shape[0] * blocks.shape[2]) if blocks.ndim == 3 else ()
    if into.shape != shape or blocks.dtype != np.uint8 or into.dtype != np.uint8:
        raise InvalidTensor(f"blocks of {blocks.dtype} {blocks.shape} do not fill {into.dtype} {into.shape}")
    count, planes, unit = blocks.shape
    np.copyto(into.reshape(planes, count, unit), blocks.transpose(1, 0, 2))


def gather(arena: Bytes, slots: Sequence[int], into: Bytes) -> None:
    """Copy blocks out of layer-first memory: `into[i]` becomes the block in `slots[i]`.

    `arena` is `[planes, slots, unit_bytes]`, `into` block-first `[len(slots), planes, unit_bytes]`. Raises InvalidTensor, and
    copies nothing, if shapes do not fit, either is not bytes, or a slot does not exist.
    """
    _require_batch(arena, slots, into)
    for place, slot in enumerate(slots):
        np.copyto(into[place], arena[:, slot])


def scatter(source: Bytes, arena: Bytes, slots: Sequence[int]) -> None:
    """Copy blocks into layer-first memory: the block in `slots[i]` becomes `source[i]`.

    `source` is block-first `[len(slots), planes, unit_bytes]`, `arena` `[planes, slots, unit_bytes]`. Raises InvalidTensor, and
    copies nothing, if shapes do not fit, either is not bytes, or a slot does not exist.
    """
    _require_batch(arena, slots, source)
    for place, slot in enumerate(slots):
        np.copyto(arena[:, slot], source[place])


def gather_tokens(block: Bytes, tensor: Bytes, at: int, *, token_bytes: int, tokens: int | None = None) -> None:
    """Copy the first `tokens` tokens of a block (all when None) into a tensor, to token `at` and on.

    `block` is `[planes, block_size * token_bytes]`, `tensor` `[planes, its tokens * token_bytes]`. Raises InvalidTensor, and
    copies nothing, if shapes do not fit or the tokens do not lie within both.
    """
    here, there = _token_rows(block, tensor, at, token_bytes, tokens)
    np.copyto(there, here)


def scatter_tokens(tensor: Bytes, at: int, block: Bytes, *, token_bytes: int, tokens: int | None = None) -> None:
    """Copy token `at` and on of a tensor over the first `tokens` tokens of a block (all when None).

    Shapes and errors are those of `gather_tokens`.
    """
    here, there = _token_rows(block, tensor, at, token_bytes, tokens)
    np.copyto(here, there)


def _token_rows(block: Bytes, tensor: Bytes, at: int, token_bytes: int, tokens: int | None) -> tuple[Bytes, Bytes]:
    if block.dtype != np.uint8 or tensor.dtype != np.uint8 or block.ndim != 2 or tensor.ndim != 2 or len(block) != len(tensor):
        raise InvalidTensor(f"a block of {block.dtype} {block.shape} does not belong to a tensor of {tensor.dtype} {tensor.shape}")
    count = block.shape[1] if tokens is None else tokens * token_bytes
    start = at * token_bytes
    # Slices forgive what lies outside and then broadcast; so the ends are checked, not left to numpy.
    if token_bytes < 1 or at < 0 or not 0 <= count <= block.shape[1] or start + count > tensor.shape[1]:
        raise InvalidTensor(
            f"{count} bytes at token {at} of {token_bytes} bytes do not lie within a block of {block.shape[1]} and a tensor of "
            f"{tensor.shape[1]} bytes a plane",
            at=at,
            tokens=tokens,
        )
    return block[:, :count], tensor[:, start : start + count]


def _require_same(source: Bytes, into: Bytes) -> None:
    # numpy would stretch one plane over many, and widen bytes to other types, without a word.
    if source.shape != into.shape or source.ndim != 2 or source.dtype != np.uint8 or into.dtype != np.uint8:
        raise InvalidTensor(f"a block of {source.dtype} {source.shape} is not one of {into.dtype} {into.shape}")


def _require_batch(arena: Bytes, slots: Sequence[int], blocks: Bytes) -> None:
    wanted = (len(slots), arena.shape[0], arena.shape[-1])
    if arena.ndim != 3 or blocks.shape != wanted or arena.dtype != np.uint8 or blocks.dtype != np.uint8:
        what = f"{blocks.dtype} {blocks.shape}"
        raise InvalidTensor(f"{len(slots)} blocks in {what} do not fit an arena of {arena.dtype} {arena.shape}")
    for slot in slots:
        if not 0 <= slot < arena.shape[1]:
            raise InvalidTensor(f"slot {slot} does not exist; the slots are 0 to {arena.shape[1] - 1}", slot=slot)
