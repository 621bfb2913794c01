"""How late the event loop has been of late: told by who measures it, for who asks how the cache does."""

from __future__ import annotations

from typing import NamedTuple

from tiercache.clock import Clock

LAG_SECONDS = 0.25
"""By how much the event loop may be late."""
TOLD_SECONDS = 60.0
"""How long it is told that it was later."""


class Late(NamedTuple):
    """Times at which the loop was too late, each less than `TOLD_SECONDS` after the one before. Times are the clock's."""

    since: float
    last: float
    worst: float
    """By how many seconds it was late at most."""


class Lateness:
    """What the loop's heartbeat found. Nothing is late where nobody measures."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._late: Late | None = None

    def note(self, seconds: float) -> None:
        """Take note that a tick of the loop came so many seconds after its time."""
        if seconds <= LAG_SECONDS:
            return
        now, before = self._clock.now(), self.recent()
        self._late = Late(now, now, seconds) if before is None else Late(before.since, now, max(before.worst, seconds))

    def recent(self) -> Late | None:
        """Return when the loop was too late in the last minute; None if it was not."""
        late = self._late
        return late if late is not None and self._clock.now() - late.last < TOLD_SECONDS else None
