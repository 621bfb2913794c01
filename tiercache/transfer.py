"""One move of blocks, with an explicit state. The core plans it, the mover executes it, the core commits it."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tiercache.changes import Reason
from tiercache.errors import StoreError
from tiercache.tree import Node


class State(enum.Enum):
    """Where a transfer stands. It owns its destination slots from RESERVED until it is DONE."""

    RESERVED = "reserved"
    COPYING = "copying"
    DONE = "done"


@dataclass(slots=True, eq=False, kw_only=True)
class Transfer:
    """Blocks of one chain, from the slots they lie in to slots reserved in the tier at position `to`.

    `sources` is the tier position each block is read from and `slots_from` its slot there; `slots_to` are the reserved slots.
    `drop_from` says which tier loses its copy of which blocks once they have arrived (a demotion): the last `drop_count`
    blocks. `symbols` is the blocks' part of the packed key and `parent_key` the durable key of the block before the first one,
    where the destination writes keys; `keys` are the blocks' own, if they have them.
    """

    number: int
    end: Node
    blocks: array[int]
    generations: NDArray[np.uint32]
    sources: list[int]
    slots_from: list[int]
    to: int
    slots_to: list[int]
    checksums: list[int]
    symbols: bytes
    stride: int
    namespace: bytes
    parent_key: bytes
    keys: list[bytes] | None
    reason: Reason
    drop_from: int | None = None
    drop_count: int = 0
    parting: Node | None = None
    """Whose child the first of the dropped nodes is."""
    state: State = State.RESERVED

    @property
    def count(self) -> int:
        """How many blocks move."""
        return len(self.blocks)


@dataclass(slots=True, eq=False, kw_only=True)
class Discard:
    """Slots of a durable tier whose records go before the slots are free."""

    number: int
    position: int
    slots: list[int]
    state: State = State.RESERVED


Work = Transfer | Discard
"""What the mover executes."""


@dataclass(slots=True, kw_only=True)
class Report:
    """What became of a transfer: how many leading blocks arrived, and why not more.

    `rotten` says that the source of the first block that did not arrive is worth nothing: its bytes failed their check, or can't be
    read though others can; otherwise the source is as good as before. `unread` says that nothing at all can be read where it
    lies. `keys` and `charges` are what a keyed, compressing store computed for the blocks that arrived.

    The error loses its traceback here, and so do those that it came from: their frames hold the memory of the blocks, which
    would then outlive the cache, until a collection.
    """

    arrived: int
    error: StoreError | None = None
    rotten: bool = False
    unread: bool = False
    keys: list[bytes] = field(default_factory=list)
    charges: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        error: BaseException | None = self.error
        while error is not None and error.__traceback__ is not None:
            error.__traceback__ = None
            error = error.__cause__ or error.__context__
