"""Things that are costly to make and can be used again, such as a driver's events, lent as long as somebody holds the loan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Loan(Generic[T]):
    """`thing` is the holder's until nobody holds the loan any more. Then, and no sooner, it may be lent again."""

    __slots__ = ("_spare", "thing")

    def __init__(self, thing: T, spare: deque[T]) -> None:
        self.thing = thing
        self._spare = spare

    def __del__(self) -> None:
        self._spare.append(self.thing)


class Rotation(Generic[T]):
    """As many things as were ever lent at once, made by `make`; what has rested longest is lent first. Threads may share one.

    An event that is recorded again must have no waiter left: he would wait for the later point, behind work that is not his. A
    waiter holds the loan, so he has gone when the event comes back. (A stream that waits for an event does not hold it, and need
    not: drivers order it after the record before the wait, whatever becomes of the event.)
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._spare: deque[T] = deque()

    def lend(self) -> Loan[T]:
        """Return a loan of a thing that nobody else holds."""
        try:
            thing = self._spare.popleft()
        except IndexError:
            thing = self._make()
        return Loan(thing, self._spare)
