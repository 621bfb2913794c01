"""The KV memory of an engine, which allocated it itself: which of its bytes are which of a block, whatever the layout.

A block in a tier is `[layers, parts, block_size, kv_heads, head_dim]`. An engine keeps a tensor a layer, with axes in an order of
its own and strides between them. Such a tensor is seen here as *rows*: the longest runs of bytes that lie together in both. A block
of a layer is a list of rows, so that a copy is one gather or one scatter of rows, on the host and on a device alike, and what a
tier holds is the same whichever engine wrote it. Where K of a block lies in one piece a row is that piece; where heads come before
tokens, or K and V are packed in the last axis, it is one head of one token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiercache.errors import InvalidTensor
from tiercache.kernels.host import Bytes
from tiercache.spec import ITEM_BYTES, KVSpec

Numbers = NDArray[np.int64]

_PACKED = "(kv dim)"
LAYOUTS = (
    "kv block token head dim",
    "block kv token head dim",
    "kv block head token dim",
    "block kv head token dim",
    "block token head (kv dim)",
    "block head token (kv dim)",
)
"""The axes of one layer's tensor, first to last; `(kv dim)` is one axis with K's and then V's numbers of a head."""
LATENT_LAYOUTS = ("block token dim", "block token head dim", "block head token dim")
"""The same where a token has one vector a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRows:
    """One layer as rows of `row_bytes`, counted from the beginning of its tensor. `Geometry` says parts and bytes of a block."""

    row_bytes: int
    rows: int
    """How many there are from the first to the last that is the layer's; those between may be another's."""
    blocks: int
    stride: int
    """Rows from a block to the next."""
    block: Numbers
    """The rows of block 0, in the order in which a tier keeps their bytes."""

    @property
    def span(self) -> int:
        """Bytes from the first to the last of the layer."""
        return self.rows * self.row_bytes

    def of(self, blocks: Numbers) -> Numbers:
        """Return the rows of blocks, one block after the other."""
        return (blocks[:, None] * self.stride + self.block).reshape(-1)


def layout_of(shape: Sequence[int], spec: KVSpec, layout: str | None) -> str:
    """Return the layout of a layer's tensor of this shape: the one that fits, or `layout` if it does.

    Raises InvalidTensor when none fits, and when several do and nobody said which.
    """
    known = LATENT_LAYOUTS if spec.latent else LAYOUTS
    if layout is not None and layout not in known:
        raise InvalidTensor(f"layout {layout!r} is none of {', '.join(known)}", found=layout, expected=known)
    fitting = [name for name in known if _fits(shape, spec, name)]
    if layout is not None:
        fitting = [name for name in fitting if name == layout]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise InvalidTensor(
            f"a layer of shape {tuple(shape)} may be {' or '.join(fitting)}: say which by layout=",
            found=tuple(shape),
            expected=tuple(fitting),
        )
    wanted = {name: tuple(_expected(spec, name)) for name in (known if layout is None else (layout,))}
    listed = "; ".join(f"{name}: {_shown(sizes)}" for name, sizes in wanted.items())
    raise InvalidTensor(f"a layer has shape {tuple(shape)}; expected {listed}", found=tuple(shape), expected=wanted)


def layer_rows(shape: Sequence[int], strides: Sequence[int], spec: KVSpec, layout: str) -> LayerRows:
    """Return the rows of a layer's tensor, whose layout is `layout`; strides are in bytes.

    Raises InvalidTensor, naming the strides, where the numbers of a head do not lie together, or two blocks share bytes.
    """
    item = ITEM_BYTES[spec.dtype]
    axes = _axes(shape, strides, spec, layout)
    apart = sorted((stride, size) for size, stride in [(spec.head_dim, axes["dim"][1]), *_outer(axes)] if size > 1)
    inner = item
    for stride, size in apart:
        if stride < inner:
            raise _wrong(shape, strides, layout, "what is to be two places is one")
        inner = stride * (size - 1) + inner
    if spec.head_dim > 1 and axes["dim"][1] != item:
        raise _wrong(shape, strides, layout, "the numbers of a head must be contiguous")
    run = spec.head_dim * item
    outer = [axes[name] for name in ("head", "token", "kv")]
    while outer and (outer[0][0] == 1 or outer[0][1] == run):
        run *= outer.pop(0)[0]
    row = math.gcd(run, *(stride for size, stride in [*outer, axes["block"]] if size > 1))
    offsets: Numbers = np.zeros(1, np.int64)
    for size, stride in reversed(outer):
        offsets = (offsets[:, None] + np.arange(size) * stride).reshape(-1)
    offsets = (offsets[:, None] + np.arange(0, run, row)).reshape(-1)
    blocks, step = axes["block"]
    return LayerRows(
        row_bytes=row,
        rows=inner // row,
        blocks=blocks,
        stride=step // row if blocks > 1 else 0,
        block=offsets // row,
    )


def put(memory: Bytes, rows: LayerRows, blocks: Numbers, planes: Bytes) -> None:
    """Copy `planes`, `[len(blocks), parts, unit_bytes]`, into blocks of a layer whose tensor begins with `memory`'s first byte.

    One call of numpy's, without the interpreter, however many blocks there are.
    """
    memory.reshape(rows.rows, rows.row_bytes)[rows.of(blocks)] = planes.reshape(-1, rows.row_bytes)


def take(memory: Bytes, rows: LayerRows, blocks: Numbers, into: Bytes) -> None:
    """Copy blocks of a layer into `into`, contiguous `[len(blocks), parts, unit_bytes]`; otherwise as `put`."""
    # `clip` because any other way of treating numbers out of range copies twice; they were checked.
    np.take(memory.reshape(rows.rows, rows.row_bytes), rows.of(blocks), 0, into.reshape(-1, rows.row_bytes), mode="clip")


def places_of(rows: LayerRows, address: int) -> tuple[Numbers, Numbers]:
    """Return where each run of bytes of a layer at `address` begins, and where it ends."""
    block = np.sort(rows.block)
    first = np.flatnonzero(np.diff(block, prepend=-2) != 1)
    begins, ends = block[first], block[np.append(first[1:], len(block)) - 1] + 1
    blocks = np.arange(rows.blocks)[:, None] * rows.stride
    return (
        address + (blocks + begins).reshape(-1) * rows.row_bytes,
        address + (blocks + ends).reshape(-1) * rows.row_bytes,
    )


# --- inside ---------------------------------------------------------------------------------------------------------------


def _expected(spec: KVSpec, layout: str) -> list[int | None]:
    """Return the sizes of a layout's axes; None for the blocks."""
    sizes: dict[str, int | None] = {
        "block": None,
        "kv": spec.parts,
        "token": spec.block_size,
        "head": spec.kv_heads,
        "dim": spec.head_dim,
        "packed": spec.parts * spec.head_dim,
    }
    return [sizes[name] for name in _names(layout)]


def _names(layout: str) -> list[str]:
    return layout.replace(_PACKED, "packed").split()


def _fits(shape: Sequence[int], spec: KVSpec, layout: str) -> bool:
    sizes = _expected(spec, layout)
    return len(sizes) == len(shape) and all(
        found >= 1 if wanted is None else found == wanted for found, wanted in zip(shape, sizes, strict=True)
    )


def _shown(sizes: Sequence[int | None]) -> str:
    return "[" + ", ".join("blocks" if size is None else str(size) for size in sizes) + "]"


def _axes(shape: Sequence[int], strides: Sequence[int], spec: KVSpec, layout: str) -> dict[str, tuple[int, int]]:
    """Return size and stride of every axis by name."""
    axes = {"kv": (1, 0), "head": (1, 0)} | {
        name: (size, stride) for name, size, stride in zip(_names(layout), shape, strides, strict=True)
    }
    if "packed" in axes:
        _, stride = axes.pop("packed")
        axes["dim"] = (spec.head_dim, stride)
        axes["kv"] = (spec.parts, spec.head_dim * stride)
    return axes


def _outer(axes: dict[str, tuple[int, int]]) -> list[tuple[int, int]]:
    return [axes[name] for name in ("head", "token", "kv", "block")]


def _wrong(shape: Sequence[int], strides: Sequence[int], layout: str, why: str) -> InvalidTensor:
    return InvalidTensor(
        f"a layer {layout!r} of shape {tuple(shape)} has strides of {tuple(strides)} bytes: {why}", found=tuple(strides)
    )
