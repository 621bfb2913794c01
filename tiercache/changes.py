"""What happened to blocks: one value for each committed change."""

from __future__ import annotations

import enum
from array import array
from typing import NamedTuple

from tiercache.types import Tier


class Reason(enum.Enum):
    """Why a block changed its place."""

    __hash__ = object.__hash__  # that of Enum is a call in Python, and every change is counted by its reason

    INSERT = "insert"
    PROMOTE = "promote"
    DEMOTE = "demote"
    COPY = "copy"
    """A clean copy was written below; the fastest copy stays."""
    TRIM = "trim"
    """A spare copy, below the fastest one, was dropped for room."""
    EVICT = "evict"
    """Left the last tier, for room."""
    DROP = "drop"
    """Evicted from above the last tier, because the tier below could not take it in time."""
    DELETE = "delete"
    UNTRUSTED = "untrusted"
    """Removed because its bytes failed a check, or because a block before it did."""
    RESTORE = "restore"


class Change(NamedTuple):
    """One committed change of a run of blocks: the fastest tier that held them, before and after."""

    seq: int
    namespace: bytes
    blocks: array[int]
    before: Tier | None
    after: Tier | None
    reason: Reason
