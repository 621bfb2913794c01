"""Time, handed in: what decides by the clock takes one of these, so that a test can move it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A clock that only goes forward."""

    def now(self) -> float:
        """Return seconds since some fixed moment."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Return seconds since some fixed moment."""
        return time.monotonic()
