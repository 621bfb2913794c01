"""A WebSocket on a Unix socket, from the client's side: as much of RFC 6455 as a session needs.

A reply reaches who waits for it within the callback that received its bytes, and a request is written before the call that
sends it returns, so that `Hit.view` can say what it is about to do without awaiting anything.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Callable
from typing import cast

from tiercache.errors import InvalidFrame
from tiercache.service import websocket
from tiercache.service.client.counts import Counts
from tiercache.service.websocket import BINARY, CLOSE, CONTINUED, PING, PONG, Messages

_MOST_HEADER = 64 * 1024


class Channel(asyncio.Protocol):
    """Messages of bytes in both directions.

    `on_message` is called with every message, `on_end` once, with a reason, when there will be no more; both on the loop.
    A message of more than `limit` bytes ends the channel.
    """

    def __init__(self, counts: Counts, on_message: Callable[[bytes], None], on_end: Callable[[str], None], *, limit: int) -> None:
        self._counts = counts
        self._on_message = on_message
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._header = bytearray()
        self._messages = Messages(limit=limit, masked=False)
        loop = asyncio.get_running_loop()
        self._shaken: asyncio.Future[None] | None = loop.create_future()
        self._accept = b""
        self._gone: asyncio.Future[None] = loop.create_future()
        self._ended: str | None = None
        self.crowded = False
        """Whether the daemon has too many connections to take this one."""

    # --- beginning and end ------------------------------------------------------------------------------------------------

    async def shake_hands(self, target: str) -> None:
        """Ask for `target` as a WebSocket. Raises ConnectionError when the answer is another one."""
        key = base64.b64encode(os.urandom(16))
        self._accept = websocket.accept_of(key)
        self._write(
            f"GET {target} HTTP/1.1\r\nHost: tiercache\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key.decode()}\r\n\r\n".encode()
        )
        if self._shaken is not None:
            await self._shaken

    async def close(self) -> None:
        """Say good-bye and wait until the connection is gone. What could not be written yet is dropped."""
        if self._transport is not None and not self._transport.is_closing():
            self.end("closed")
        await self._gone

    def end(self, reason: str) -> None:
        """End the channel without waiting."""
        if self._transport is not None and not self._transport.is_closing():
            if self._shaken is None:
                self._frame(CLOSE, websocket.NORMAL.to_bytes(2, "big"))
            # With a peer that does not read, closing would wait for it.
            if self._transport.get_write_buffer_size():
                self._transport.abort()
            else:
                self._transport.close()
        self._finish(reason)

    # --- sending ----------------------------------------------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        """Write a message; what the socket does not take at once is queued."""
        self._frame(BINARY, message)

    @property
    def descriptor(self) -> int:
        """The socket's descriptor; -1 without one."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        return -1 if sock is None else int(sock.fileno())

    @property
    def queued(self) -> int:
        """Bytes that the socket has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def _frame(self, kind: int, payload: bytes) -> None:
        self._write(websocket.frame(kind, payload, masked=True))

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._counts.sent += len(data)
            self._transport.write(data)

    # --- what the loop calls ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # one in all but name: uvloop's is no subclass

    def eof_received(self) -> None:
        """End: no reply can come any more, though what waits to be written may wait for ever."""
        if self._transport is not None and self._transport.get_write_buffer_size():
            self._transport.abort()
        self._finish("the daemon closed the connection")

    def connection_lost(self, exc: Exception | None) -> None:
        """Say that this is the end."""
        self._finish("the daemon closed the connection" if exc is None else str(exc))
        if not self._gone.done():
            self._gone.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Take the frames that are whole."""
        self._counts.received += len(data)
        if self._ended is not None:
            return
        if self._shaken is None:
            self._messages.feed(data)
        else:
            self._header += data
            if not self._read_header():
                return
        try:
            while (message := self._messages.next()) is not None:
                kind, payload = message
                if kind == BINARY:
                    self._on_message(payload)
                elif kind == PING:
                    self._frame(PONG, payload)
                elif kind == CLOSE:
                    self.end("the daemon ended the session")
                elif kind not in (PONG, CONTINUED):
                    self.end(f"a message of kind {kind}")
                if self._is_over():
                    return
        except InvalidFrame as error:
            self.end(str(error))

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _read_header(self) -> bool:
        end = self._header.find(b"\r\n\r\n")
        if end < 0:
            if len(self._header) > _MOST_HEADER:
                self.end("the answer to the handshake does not end")
            return False
        status, *lines = bytes(self._header[:end]).split(b"\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        if b" 101 " not in status + b" " or fields.get(b"sec-websocket-accept") != self._accept:
            self.crowded = status.startswith(b"HTTP/1.1 429 ")
            self.end(f"no session there: {status[:100].decode(errors='replace')}")
            return False
        self._messages.feed(bytes(self._header[end + 4 :]))
        self._header.clear()
        shaken, self._shaken = self._shaken, None
        if shaken is not None and not shaken.done():
            shaken.set_result(None)
        return True

    def _is_over(self) -> bool:
        return self._ended is not None

    def _finish(self, reason: str) -> None:
        if self._ended is not None:
            return
        self._ended = reason
        shaken, self._shaken = self._shaken, None
        if shaken is not None and not shaken.done():
            shaken.set_exception(ConnectionError(reason))
        self._on_end(reason)
