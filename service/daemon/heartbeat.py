"""How late the daemon's loop is: a tick every few milliseconds, and how long after its time it came."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable

INTERVAL = 0.025
"""Seconds between ticks. What holds the loop for a time T makes a tick late by between T - INTERVAL and T: so this is also the
error of the figure, a quarter of the 100 ms above which a gap is a fault; and at 40 a second, some 20 us each, a tick costs a
thousandth of a core."""

EDGES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper ends, in seconds, of the classes that lags are counted in; a last class has none."""


class Heartbeat:
    """Ticks from `start` to `stop`, and calls `beat` with each tick's lag in seconds.

    A tick arranges for the next one before it does anything else: what `beat` raises goes to the loop's exception handler, and
    the heart goes on.
    """

    def __init__(self, beat: Callable[[float], None]) -> None:
        self._beat = beat
        self._timer: asyncio.TimerHandle | None = None
        self.longest = 0.0
        """The largest lag so far, in seconds."""
        self.total = 0.0
        """The sum of all lags."""
        self.counts = [0] * (len(EDGES) + 1)
        """Ticks by the class of their lag."""

    @property
    def ticks(self) -> int:
        """How many there were."""
        return sum(self.counts)

    def start(self) -> None:
        """Begin."""
        self._arrange(asyncio.get_running_loop())

    def stop(self) -> None:
        """End. May be called twice."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arrange(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(INTERVAL, self._tick, loop, time.monotonic() + INTERVAL)

    def _tick(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        lag = max(0.0, time.monotonic() - due)
        self._arrange(loop)
        self.longest = max(self.longest, lag)
        self.total += lag
        self.counts[bisect_left(EDGES, lag)] += 1
        self._beat(lag)
