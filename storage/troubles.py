"""What goes wrong between a cache and its stores, until it goes right again: for who asks how the cache does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from tiercache.clock import Clock
from tiercache.errors import StoreError, StoreFull
from tiercache.transfer import Discard, Transfer

WRITE, READ, FORGET = "write", "read", "delete"
"""What a durable store is asked to do with blocks."""
COPY = "copy"
"""What a device is asked to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A row of failures of one kind of work at one tier. Times are the clock's.

    It holds the last error's text, not the error: a traceback would keep the memory of the blocks.
    """

    act: str
    since: float
    """When the first of the row failed."""
    last: float
    count: int
    error: str
    """The name of the last error's class."""
    full: str | None
    """What was full: `disk`, `map`, `transaction` or `busy`; None when it was not for want of room."""
    text: str
    next_try: float | None
    """Until when nothing is planned into the tier; None where nothing is held back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """Moves that ended without a report, and what they keep until a restart."""

    since: float
    """When the first of them died."""
    count: int
    text: str
    slots: Counter[int]
    """By tier position: a copy may still touch them."""


class Troubles:
    """The failures of one stack's moves that no later success has answered."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rows: dict[tuple[int, str], Trouble] = {}
        self.death: Death | None = None

    @property
    def rows(self) -> dict[tuple[int, str], Trouble]:
        """The troubles, by tier position and kind of work."""
        return dict(self._rows)

    def now(self) -> float:
        """Return the time by which troubles are dated."""
        return self._clock.now()

    def failed(self, position: int, act: str, error: StoreError, *, retry: float | None = None) -> None:
        """Note that a work failed; `retry` is how many seconds the store is left alone."""
        now = self._clock.now()
        before = self._rows.get((position, act))
        self._rows[position, act] = Trouble(
            act=act,
            since=now if before is None else before.since,
            last=now,
            count=1 if before is None else before.count + 1,
            error=type(error).__name__,
            full=error.fields.get("kind", "disk") if isinstance(error, StoreFull) else None,
            text=str(error),
            next_try=None if retry is None else now + retry,
        )

    def worked(self, position: int, act: str) -> None:
        """Note that a work of the kind was done: what failed before it is over."""
        self._rows.pop((position, act), None)

    def died(self, work: Transfer | Discard, cause: str) -> None:
        """Note that a move ended without saying what became of it."""
        slots = Counter({work.to: work.count} if isinstance(work, Transfer) else {work.position: len(work.slots)})
        if self.death is None:
            self.death = Death(since=self._clock.now(), count=1, text=cause, slots=slots)
        else:
            self.death = replace(self.death, count=self.death.count + 1, text=cause, slots=self.death.slots + slots)
