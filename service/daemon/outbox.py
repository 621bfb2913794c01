"""What goes to one client: never more than it reads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable
from typing import Protocol

from tiercache.service.daemon.terms import Terms

_AT_ONCE = 16 * 1024
"""Bytes; a larger message may wait for the client to read, and never does so where requests are read."""


class Line(Protocol):
    """The connection that messages go to."""

    def write(self, message: bytes) -> Awaitable[None]:
        """Write one message; wait while the connection is full. Raises ConnectionError when it is gone."""
        ...

    def pressed(self) -> int:
        """Return how many bytes the connection holds."""
        ...

    def overrun(self) -> None:
        """Take note that more waits than may."""
        ...

    def stalled(self) -> None:
        """Take note that a message waits longer than it may."""
        ...


class Outbox:
    """Messages to a client, in order. What it does not read waits here, up to `most` bytes and `seconds`.

    With more bytes, or when one message is not taken in that time, the line is told, once, and nothing more is written.
    """

    def __init__(self, line: Line, terms: Terms, *, most: int, seconds: float) -> None:
        self._line = line
        self._terms = terms
        self._most = most
        self._seconds = seconds
        self._since: float | None = None
        self._queue: deque[bytes] = deque()
        self._bytes = 0
        self._wake = asyncio.Event()
        self._closed = False
        self._busy = False
        self._drained = asyncio.Event()
        self._drained.set()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="tiercache-outbox")

    async def send(self, message: bytes) -> None:
        """Write a message without a detour when nothing stands before it; otherwise as `put` does."""
        if self._busy or self._queue or self._closed or len(message) > _AT_ONCE or self._line.pressed():
            self.put(message)
        else:
            await self._line.write(message)

    def put(self, message: bytes) -> None:
        """Let a message be written after those before it."""
        if self._closed:
            return
        if self._bytes > self._most:
            self.close()
            self._line.overrun()
            return
        self._queue.append(message)
        self._bytes += len(message)
        self._drained.clear()
        self._wake.set()

    async def drain(self) -> None:
        """Wait until all is written, or will never be."""
        await self._drained.wait()

    def close(self) -> None:
        """Write no more."""
        self._closed = True
        self._since = None
        self._queue.clear()
        self._drained.set()
        self._task.cancel()
        self._terms.forget(self)

    # --- time -------------------------------------------------------------------------------------------------------------

    def due(self) -> float | None:
        """Return when the message that waits has waited too long."""
        return None if self._since is None else self._since + self._seconds

    def expire(self, now: float) -> None:
        """Give a client up that does not read."""
        self.close()
        self._line.stalled()

    async def wait_closed(self) -> None:
        """Wait until nothing is written any more. Call after `close`."""
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                message = self._queue.popleft()
                self._busy = True
                self._since = self._terms.now()
                self._terms.watch(self)
                try:
                    await self._line.write(message)
                except ConnectionError:
                    self._closed = True
                    self._queue.clear()
                finally:
                    self._busy = False
                    self._since = None
                    self._bytes -= len(message)
            self._drained.set()
