"""What goes to one client: never more than it reads."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from tiercache.service.daemon.terms import Terms


class Line(Protocol):
    """The connection that messages go to."""

    full: bool
    """Whether what is written now would wait."""

    def write(self, message: bytes) -> None:
        """Write one message, or nothing where the connection is gone."""
        ...

    def overrun(self) -> None:
        """Take note that more waits than may."""
        ...

    def stalled(self) -> None:
        """Take note that a message waits longer than it may."""
        ...


class Outbox:
    """Messages to a client, in order. What it does not read waits here, up to `most` bytes and `seconds`.

    With more bytes, or when one message is not taken in that time, the line is told, once, and nothing more is written. The line
    says when it is full (`pressed`), at the earliest with the message that fills it, and when it no longer is (`relieved`).
    """

    def __init__(self, line: Line, terms: Terms, *, most: int, seconds: float) -> None:
        self._line = line
        self._terms = terms
        self._most = most
        self._seconds = seconds
        self._since: float | None = None
        self._queue: deque[bytes] = deque()
        self._bytes = 0
        self._closed = False
        self._drained = asyncio.Event()
        self._drained.set()

    def put(self, message: bytes) -> None:
        """Write a message, after those before it."""
        if self._closed:
            return
        if not self._queue and not self._line.full:
            self._line.write(message)
            return
        if self._bytes > self._most:
            self.close()
            self._line.overrun()
            return
        self._queue.append(message)
        self._bytes += len(message)
        self._drained.clear()

    async def drain(self) -> None:
        """Wait until all is written, or will never be."""
        await self._drained.wait()

    def close(self) -> None:
        """Write no more."""
        self._closed = True
        self._since = None
        self._queue.clear()
        self._drained.set()
        self._terms.forget(self)

    # --- what the line says -----------------------------------------------------------------------------------------------

    def pressed(self) -> None:
        """Note that the message that was written last waits for the client."""
        if not self._closed:
            self._since = self._terms.now()
            self._terms.watch(self)

    def relieved(self) -> None:
        """Write what waits, as far as it is taken."""
        self._since = None
        while self._queue and not self._line.full:
            message = self._queue.popleft()
            self._bytes -= len(message)
            self._line.write(message)
        if not self._queue:
            self._drained.set()

    # --- time -------------------------------------------------------------------------------------------------------------

    def due(self) -> float | None:
        """Return when the message that waits has waited too long."""
        return None if self._since is None else self._since + self._seconds

    def expire(self, now: float) -> None:
        """Give a client up that does not read."""
        self.close()
        self._line.stalled()
