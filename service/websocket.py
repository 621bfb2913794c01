"""RFC 6455 without a socket: messages out of a stream of bytes, and the heads of frames. For both ends of a session."""

from __future__ import annotations

import base64
import hashlib

import numpy as np
from numpy.typing import NDArray

from tiercache.errors import InvalidFrame

CONTINUED, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
NORMAL, GOING_AWAY, PROTOCOL_ERROR, TOO_BIG = 1000, 1001, 1002, 1009
"""Why a connection is closed."""
_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_FINAL, _CONTROL, _MASKED, _RESERVED = 0x80, 0x08, 0x80, 0x70
# Masking keeps a browser's page from writing a chosen request into a proxy on the way. There is neither on a Unix socket, so
# our own client's mask is the one that changes nothing.
_NO_MASK = bytes(4)
_MOST_CONTROL = 125


Message = tuple[int, bytes]
"""A whole message, or a control frame: its kind, `BINARY`, `TEXT`, `CLOSE`, `PING` or `PONG`, and what it says; or `PART`."""
PART: Message = (CONTINUED, b"")
"""A part of a message that is not whole yet, and says nothing by itself."""


class Messages:
    """Takes bytes as they come and gives messages: `feed`, then `next` until there is none.

    With `masked` every frame has to be masked, as those of a client are, else none may be. A message may be `limit` bytes long.
    What is kept is never more than one message and what was fed last. A part that ends no message is given as `PART`: who takes so
    many messages in a turn takes no more frames, of which a read may hold tens of thousands.
    """

    def __init__(self, *, limit: int, masked: bool) -> None:
        self._limit = limit
        self._masked = _MASKED if masked else 0
        self._buffer: bytes | bytearray = b""
        self._at = 0
        self._parts = bytearray()
        self._kind = CONTINUED  # of the message whose beginning is in `_parts`; else there is none

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the stream."""
        if self._at == len(self._buffer):
            self._buffer = data  # as a rule one whole frame: not copied
        elif isinstance(self._buffer, bytearray):
            del self._buffer[: self._at]
            self._buffer += data
        else:
            self._buffer = bytearray(self._buffer[self._at :])
            self._buffer += data
        self._at = 0

    @property
    def pending(self) -> int:
        """How many bytes have been fed that belong to no message yet that was given."""
        return len(self._buffer) - self._at

    def next(self) -> Message | None:
        """Return the next message that is whole; None when there is none.

        Raises InvalidFrame for bytes that break the protocol, with the reason to close as its field `code`: nothing that comes
        after them can be understood.
        """
        buffer, at = self._buffer, self._at
        have = len(buffer) - at
        if have < 2:
            return None
        first, size = buffer[at], buffer[at + 1]
        if first & _RESERVED:
            raise _broken("a frame of an extension")
        if size & _MASKED != self._masked:
            raise _broken("a masked frame" if size & _MASKED else "a frame that is not masked")
        size &= ~_MASKED
        start = at + 2
        if size >= 126:
            start += 2 if size == 126 else 8
            if have < start - at:
                return None
            size = int.from_bytes(buffer[at + 2 : start], "big")
        kind = first & 0x0F
        if kind & _CONTROL:
            if size > _MOST_CONTROL or not first & _FINAL:
                raise _broken(f"a control frame of {size} bytes, or in parts")
        elif size + len(self._parts) > self._limit:
            raise InvalidFrame(f"a message of {size + len(self._parts)} bytes; the limit is {self._limit}", code=TOO_BIG)
        if self._masked:
            start += 4
        end = start + size
        if len(buffer) < end:
            return None
        payload = buffer[start:end] if isinstance(buffer, bytes) else bytes(memoryview(buffer)[start:end])
        if self._masked and buffer[start - 4 : start] != _NO_MASK:
            payload = _unmasked(payload, bytes(buffer[start - 4 : start]))
        self._at = end
        if first == _FINAL | BINARY and not self._kind:
            return BINARY, payload
        if kind in (CLOSE, PING, PONG):
            return kind, payload
        return self._join(kind, payload, final=bool(first & _FINAL))

    def _join(self, kind: int, payload: bytes, *, final: bool) -> Message:
        """Take a frame of data; return the message that it ends, or `PART`."""
        if kind not in (CONTINUED, TEXT, BINARY) or (kind == CONTINUED) != (self._kind != CONTINUED):
            raise _broken(f"a frame of kind {kind} where none can be")
        self._parts += payload  # not a list of parts: empty ones would be kept without an end
        self._kind = kind or self._kind
        if not final:
            return PART
        whole = self._kind, bytes(self._parts)
        self._parts.clear()
        self._kind = CONTINUED
        return whole


def frame(kind: int, payload: bytes, *, masked: bool) -> bytes:
    """Return one whole frame; `masked`, as a client's has to be, with a mask that changes nothing."""
    size = len(payload)
    mask = _MASKED if masked else 0
    if size < 126:
        head = bytes((_FINAL | kind, mask | size))
    elif size < 1 << 16:
        head = bytes((_FINAL | kind, mask | 126, size >> 8, size & 0xFF))
    else:
        head = bytes((_FINAL | kind, mask | 127)) + size.to_bytes(8, "big")
    return head + _NO_MASK + payload if masked else head + payload


def accept_of(key: bytes) -> bytes:
    """Return what a server answers to a client's handshake key."""
    return base64.b64encode(hashlib.sha1(key + _MAGIC, usedforsecurity=False).digest())


def _broken(what: str) -> InvalidFrame:
    return InvalidFrame(what, code=PROTOCOL_ERROR)


def _unmasked(payload: bytes, mask: bytes) -> bytes:
    words = -(-len(payload) // 4)
    padded: NDArray[np.uint32] = np.frombuffer(payload + bytes(4 * words - len(payload)), "<u4") ^ np.frombuffer(mask, "<u4")
    return padded.tobytes()[: len(payload)]
