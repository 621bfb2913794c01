"""What goes to one client: never more than it reads."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

_AT_ONCE = 16 * 1024
"""Bytes; a larger message may wait for the client to read, and never does so where requests are read."""


class Outbox:
    """Messages to a client, in order. What it does not read waits here, up to `most` bytes; with more, `on_full` is called, once.

    `write` writes one message and waits while the connection is full, `pressed` says how many bytes the connection holds.
    """

    def __init__(
        self, write: Callable[[bytes], Awaitable[None]], pressed: Callable[[], int], on_full: Callable[[], None], *, most: int
    ) -> None:
        self._write = write
        self._pressed = pressed
        self._on_full = on_full
        self._most = most
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
        if self._busy or self._queue or self._closed or len(message) > _AT_ONCE or self._pressed():
            self.put(message)
        else:
            await self._write(message)

    def put(self, message: bytes) -> None:
        """Let a message be written after those before it."""
        if self._closed:
            return
        if self._bytes > self._most:
            self.close()
            self._on_full()
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
        self._queue.clear()
        self._drained.set()
        self._task.cancel()

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
                try:
                    await self._write(message)
                except ConnectionError:
                    self._closed = True
                    self._queue.clear()
                finally:
                    self._busy = False
                    self._bytes -= len(message)
            self._drained.set()
