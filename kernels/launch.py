"""How the kernels of `blocks.cu` are launched: widths, shapes and limits, checked before anything runs. Knows no device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tiercache.errors import InvalidTensor

SOURCE = Path(__file__).with_name("blocks.cu")
OPTIONS = ("--std=c++17",)
NAMES = tuple(f"{name}_{width}" for name in ("gather", "scatter", "copy") for width in (16, 8))
"""All kernels in the source."""

_THREADS = 256
_MOST_BLOCKS = 4096
"""Blocks of threads; enough to fill any device several times, and each goes on to further rows."""
_MOST = (1 << 31) - 1


class Launch(NamedTuple):
    """One launch: the width of a vector in bytes, vectors a row, rows, and the shape of grid and block."""

    width: int
    vectors: int
    rows: int
    grid: int
    block: tuple[int, int]


def plan(*, unit_bytes: int, planes: int, pool_slots: int, slots: Sequence[int], addresses: Sequence[int]) -> Launch:
    """Return how to launch a copy of `planes` planes of the blocks in `slots`.

    A row is one plane of one block, `unit_bytes` long. The vector is the widest of 16 and 8 bytes that divides a row and every
    one of `addresses`, the beginnings of the memory involved. Raises InvalidTensor for rows or addresses that 8 does not divide,
    a slot that does not exist, or more rows, slots or vectors than an index of 31 bits reaches.
    """
    if slots and not (min(slots) >= 0 and max(slots) < pool_slots):
        slot = next(slot for slot in slots if not 0 <= slot < pool_slots)
        raise InvalidTensor(f"slot {slot} does not exist; the slots are 0 to {pool_slots - 1}", slot=slot, slots=pool_slots)
    measures = [unit_bytes, *addresses]
    width = next((width for width in (16, 8) if all(value % width == 0 for value in measures)), None)
    if width is None or unit_bytes < 1:
        wrong = next((value for value in measures if value % 8 or value < 1), unit_bytes)
        raise InvalidTensor(f"a row of {unit_bytes} bytes at {wrong:#x} is no whole number of 8-byte vectors", value=wrong, limit=8)
    rows, vectors = planes * len(slots), unit_bytes // width
    for name, value in (("rows", rows), ("slots", pool_slots), ("vectors a row", vectors)):
        if value > _MOST:
            raise InvalidTensor(f"{value} {name}; the limit of one launch is {_MOST}", value=value, limit=_MOST)
    across = 1
    while across < min(vectors, _THREADS):
        across *= 2
    down = _THREADS // across
    return Launch(width, vectors, rows, max(1, min(-(-rows // down), _MOST_BLOCKS)), (across, down))
