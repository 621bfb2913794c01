"""A WebSocket on a Unix socket, from the client's side: as much of RFC 6455 as a session needs.

A reply reaches who waits for it within the callback that received its bytes, and a request is written before the call that
sends it returns, so that `Hit.view` can say what it is about to do without awaiting anything.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import struct
from collections.abc import Callable
from typing import cast

from tiercache.service.client.counts import Counts

_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONTINUED, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
_FINAL, _MASKED = 0x80, 0x80
# Masking keeps a browser's page from writing a chosen request into a proxy on the way. There is neither on a Unix socket, so
# the mask is the one that changes nothing.
_NO_MASK = bytes(4)
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
        self._limit = limit
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._parts: list[bytes] | None = None
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
        self._accept = base64.b64encode(hashlib.sha1(key + _MAGIC, usedforsecurity=False).digest())
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
                self._frame(_CLOSE, struct.pack("!H", 1000))
            # With a peer that does not read, closing would wait for it.
            if self._transport.get_write_buffer_size():
                self._transport.abort()
            else:
                self._transport.close()
        self._finish(reason)

    # --- sending ----------------------------------------------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        """Write a message; what the socket does not take at once is queued."""
        self._frame(_BINARY, message)

    @property
    def descriptor(self) -> int:
        """The socket's descriptor; -1 without one."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        return -1 if sock is None else int(sock.fileno())

    @property
    def queued(self) -> int:
        """Bytes that the socket has not taken yet."""
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def _frame(self, code: int, payload: bytes) -> None:
        size = len(payload)
        if size < 126:
            head = bytes((_FINAL | code, _MASKED | size))
        elif size < 1 << 16:
            head = struct.pack("!BBH", _FINAL | code, _MASKED | 126, size)
        else:
            head = struct.pack("!BBQ", _FINAL | code, _MASKED | 127, size)
        self._write(head + _NO_MASK + payload)

    def _write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._counts.sent += len(data)
            self._transport.write(data)

    # --- what the loop calls ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # one in all but name: uvloop's is no subclass

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
        self._buffer += data
        if self._shaken is not None and not self._read_header():
            return
        at = 0
        while self._ended is None:
            end = self._read_frame(at)
            if end is None:
                break
            at = end
        del self._buffer[:at]

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _read_header(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MOST_HEADER:
                self.end("the answer to the handshake does not end")
            return False
        status, *lines = bytes(self._buffer[:end]).split(b"\r\n")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        if b" 101 " not in status + b" " or fields.get(b"sec-websocket-accept") != self._accept:
            self.crowded = status.startswith(b"HTTP/1.1 429 ")
            self.end(f"no session there: {status[:100].decode(errors='replace')}")
            return False
        del self._buffer[: end + 4]
        shaken, self._shaken = self._shaken, None
        if shaken is not None and not shaken.done():
            shaken.set_result(None)
        return True

    def _read_frame(self, at: int) -> int | None:
        """Take the frame that begins at `at` of the buffer and return where it ends; None when it is not whole yet."""
        buffer = self._buffer
        if len(buffer) < at + 2:
            return None
        first, size = buffer[at], buffer[at + 1]
        start = at + 2
        if size == 126:
            start += 2
            size = int.from_bytes(buffer[at + 2 : start], "big")
        elif size == 127:
            start += 8
            size = int.from_bytes(buffer[at + 2 : start], "big")
        elif size & _MASKED:
            self.end("a masked frame from the daemon")
            return None
        if len(buffer) < start:
            return None
        if size > self._limit:
            self.end(f"a frame of {size} bytes; the limit is {self._limit}")
            return None
        end = start + size
        if len(buffer) < end:
            return None
        self._take(first, bytes(memoryview(buffer)[start:end]))
        return end

    def _take(self, first: int, payload: bytes) -> None:
        code = first & 0x0F
        if code == _PING:
            self._frame(_PONG, payload)
        elif code == _CLOSE:
            self.end("the daemon ended the session")
        elif code == _BINARY and self._parts is None:
            if first & _FINAL:
                self._on_message(payload)
            else:
                self._parts = [payload]
        elif code == _CONTINUED and self._parts is not None:
            self._parts.append(payload)
            if sum(map(len, self._parts)) > self._limit:
                self.end(f"a message of more than {self._limit} bytes")
            elif first & _FINAL:
                parts, self._parts = self._parts, None
                self._on_message(b"".join(parts))
        elif code != _PONG:
            self.end(f"a frame of kind {code}")

    def _finish(self, reason: str) -> None:
        if self._ended is not None:
            return
        self._ended = reason
        shaken, self._shaken = self._shaken, None
        if shaken is not None and not shaken.done():
            shaken.set_exception(ConnectionError(reason))
        self._on_end(reason)
