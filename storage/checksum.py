"""The checksum of a block: xxh3-64 of its bytes in block-first order, whatever order they lie in."""

from __future__ import annotations

import numpy as np
import xxhash

from tiercache.errors import Untrusted
from tiercache.storage.contract import Planes

_SMALL_PLANE = 8192
"""Bytes. Below it the fixed price of one update a plane is more than that of bringing the block together first."""


def checksum(planes: Planes) -> int:
    """Return the xxh3-64, seed 0, of `planes` (`[planes, unit_bytes]` bytes, any stride between planes) in block-first order.

    Releases the GIL while it reads. One block has one checksum in every layout.
    """
    if planes.flags.c_contiguous:
        return xxhash.xxh3_64_intdigest(planes.data)
    if planes.shape[1] < _SMALL_PLANE:
        return xxhash.xxh3_64_intdigest(np.ascontiguousarray(planes).data)
    state = xxhash.xxh3_64()
    for plane in planes:
        state.update(plane.data)
    return state.intdigest()


def verify(planes: Planes, expected: int, place: str) -> None:
    """Compare the checksum of `planes` with `expected`; raise Untrusted, reason `checksum`, naming `place` if they differ."""
    found = checksum(planes)
    if found != expected:
        raise Untrusted("checksum", f"{place}: the checksum is {found:016x}, not {expected:016x}", expected=expected, found=found)
