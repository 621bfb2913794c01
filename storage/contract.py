"""What every tier's store does: one contract, and siblings that fulfil it.

A store keeps the bytes of blocks of one geometry in numbered slots. It does not decide anything: which slot is whose is the
core's business (`tiercache.cache`). All methods block; the mover calls them from worker threads, never from the event loop.
Two calls never touch one slot at the same time (the transfer that owns the slot sees to it), but calls for different slots
do run at once, so a store is thread-safe across slots.

`tests/storage/test_store_contract.py` is the suite that each implementation passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tiercache.errors import StoreError
from tiercache.spec import Geometry
from tiercache.types import Identity, Tier

Planes = NDArray[np.uint8]
"""One block as `[planes, unit_bytes]` bytes, of any stride between planes; each plane is contiguous."""

Blocks = NDArray[np.uint8]
"""Blocks as `[blocks, planes, unit_bytes]` bytes, of any stride between blocks and planes; each plane is contiguous."""


class Put(NamedTuple):
    """One block to store: `source` must not change until the call returns."""

    slot: int
    identity: Identity
    source: Planes


class Outcome(NamedTuple):
    """What became of one Put: stored at a cost of `charge` units (`FULL_CHARGE` uncompressed), or not, and why."""

    charge: int
    error: StoreError | None = None


FULL_CHARGE = 4


class Store(Protocol):
    """The slots of one tier for blocks of one geometry."""

    @property
    def tier(self) -> Tier:
        """The tier whose slots these are."""
        ...

    @property
    def geometry(self) -> Geometry:
        """The shape of the blocks that fit a slot."""
        ...

    @property
    def capacity(self) -> int:
        """How many slots there are; slots are numbered from 0."""
        ...

    @property
    def durable(self) -> bool:
        """Whether what is stored outlives the process."""
        ...

    def view(self, slot: int) -> Planes | None:
        """Return the slot's bytes in place, or None where they are not addressable (a disk).

        The view is valid for as long as the caller owns the slot or holds a lease on its block.
        """
        ...

    def views(self, first: int, count: int) -> Blocks | None:
        """Return `count` neighbouring slots from `first` on in place, `[count, planes, unit_bytes]`, or None as `view` does."""
        ...

    def fetch(self, slot: int, identity: Identity, into: Planes) -> None:
        """Copy the block in `slot` into `into` and verify what was copied against `identity`.

        Raises Untrusted when slot and identity do not belong together or the checksum differs; `into` is then undefined.
        """
        ...

    def put(self, items: Sequence[Put]) -> list[Outcome]:
        """Store `items`, in order, and return one outcome for each.

        The source is verified against its checksum on the way in (`Untrusted`, reason `checksum`: it was rotten before).
        A failure at one item fails all later ones (reason `order`): items of one call are a chain, and a chain is stored
        from its root. On a durable store an item is stored when its bytes and its metadata are both safe from kill -9.
        """
        ...

    def discard(self, slots: Sequence[int]) -> None:
        """Forget what `slots` hold. On a durable store it is forgotten for good when the call returns."""
        ...

    def sync(self) -> None:
        """Make everything that was put so far safe from power loss."""
        ...

    def close(self) -> None:
        """Give the store's resources back. May be called twice."""
        ...
