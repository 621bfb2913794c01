"""When the time of something is up: kept in order, so that looking costs what is due and nothing for what is not."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Protocol

from tiercache.clock import Clock


class Timed(Protocol):
    """Something whose time may run out."""

    def due(self) -> float | None:
        """Return when the first of it is due; None when nothing is. It is asked again then, not before."""
        ...

    def expire(self, now: float) -> None:
        """End what is due by `now`."""
        ...


class Terms:
    """What may run out, by when it is due. Each has one entry at most, which is corrected only when it comes up.

    So renewing costs nothing here, however much is renewed.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._order: list[tuple[float, int, Timed]] = []
        self._entered: dict[Timed, int] = {}
        self._count = 0

    def now(self) -> float:
        """Return the time by which terms are measured."""
        return self._clock.now()

    def watch(self, timed: Timed) -> None:
        """Look after `timed` from now on, until nothing of it is due any more. Doing it again does nothing."""
        if timed not in self._entered:
            self._enter(timed)

    def forget(self, timed: Timed) -> None:
        """Look after it no more."""
        if self._entered.pop(timed, None) is not None:
            self._order = [entry for entry in self._order if entry[2] is not timed]
            self._order.sort()

    def sweep(self) -> None:
        """End everything whose time is up."""
        now = self._clock.now()
        up = []
        while self._order and self._order[0][0] <= now:
            up.append(heappop(self._order)[2])
            del self._entered[up[-1]]
        for timed in up:  # each once, whatever it says afterwards: the next sweep asks again
            due = timed.due()
            if due is not None and due <= now:
                timed.expire(now)
            self._enter(timed)

    def _enter(self, timed: Timed) -> None:
        due = timed.due()
        if due is not None:
            self._count += 1
            self._entered[timed] = self._count
            heappush(self._order, (due, self._count, timed))
