"""How a client keeps what it holds: one small frame for all of it, now and then, and how sure it may be of a lease meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Renewal:
    """Calls `renew` every third of a term while anything is held that has to be renewed. Without a term nothing has to be.

    Times are the machine's monotonic ones, which go on while this process is stopped. What the daemon counts from is later than
    what is counted from here, before the request was sent; so who is sure by this is right, unless the daemon does not read for a
    third of a term what lies in its socket. It looks at that itself, and takes nothing for lost then.
    """

    def __init__(self, renew: Callable[[], None]) -> None:
        self.term = 0.0
        """Seconds that a lease stands without a renewal; 0 when for ever."""
        self._renew = renew
        self._loop = asyncio.get_running_loop()
        self._held: dict[int, float] = {}
        self._heard = float("-inf")
        self._timer: asyncio.TimerHandle | None = None

    def take(self, number: int, sent: float) -> None:
        """Note a lease or a reservation that was asked for at `sent`."""
        self._held.setdefault(number, sent)
        if self._timer is None:
            self._arrange()

    def drop(self, number: int) -> None:
        """Note that one has not to be renewed any more."""
        self._held.pop(number, None)

    def heard(self, sent: float) -> None:
        """Note that the daemon has taken a renewal that was sent at `sent`."""
        self._heard = max(self._heard, sent)

    def is_sure(self, number: int) -> bool:
        """Return whether the daemon still holds it, and will for another third of a term."""
        sent = self._held.get(number)
        if not self.term:
            return True
        return sent is not None and time.monotonic() < max(sent, self._heard) + self.term * 2 / 3

    def end(self) -> None:
        """Renew no more."""
        self._held.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arrange(self) -> None:
        if self.term:
            self._timer = self._loop.call_later(self.term / 3, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._held:
            self._arrange()
            self._renew()
