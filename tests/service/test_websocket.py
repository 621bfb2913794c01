"""RFC 6455 without a socket: whatever pieces the bytes come in, the messages are the same, and what breaks the rules is told."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import pytest

from tiercache.errors import InvalidFrame
from tiercache.service.websocket import (
    BINARY,
    CLOSE,
    CONTINUED,
    PART,
    PING,
    PONG,
    PROTOCOL_ERROR,
    TEXT,
    TOO_BIG,
    Messages,
    frame,
)

LIMIT = 200_000
SIZES = (0, 1, 3, 4, 5, 124, 125, 126, 127, 1000, 65_535, 65_536, LIMIT)


def written(first: int, payload: bytes, mask: bytes | None) -> bytes:
    """Return a frame as another program would write it: with any mask, and any of the three forms of the length that fits."""
    size, bit = len(payload), 0x80 if mask is not None else 0
    if size < 126:
        head = struct.pack("!BB", first, bit | size)
    elif size < 1 << 16:
        head = struct.pack("!BBH", first, bit | 126, size)
    else:
        head = struct.pack("!BBQ", first, bit | 127, size)
    if mask is None:
        return head + payload
    return head + mask + bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))


def conversation(draw: random.Random, *, masked: bool) -> tuple[bytes, list[tuple[int, bytes]]]:
    """Return a stream of frames, some of them parts of messages with control frames between, and what it says."""

    def mask() -> bytes | None:
        return draw.choice((bytes(4), draw.randbytes(4))) if masked else None

    stream, said = b"", []
    for _ in range(draw.randrange(1, 8)):
        kind = draw.choice((BINARY, BINARY, BINARY, TEXT, PING, PONG))
        if kind in (PING, PONG):
            payload = draw.randbytes(draw.randrange(126))
            stream += written(0x80 | kind, payload, mask())
            said.append((kind, payload))
            continue
        payload = draw.randbytes(draw.choice((0, 1, 5, 125, 126, 700, 70_000)))
        cuts = sorted(draw.randrange(len(payload) + 1) for _ in range(draw.choice((0, 0, 1, 3))))
        bounds = [0, *cuts, len(payload)]
        for number in range(len(bounds) - 1):
            last = number == len(bounds) - 2
            part = payload[bounds[number] : bounds[number + 1]]
            stream += written((0x80 if last else 0) | (kind if number == 0 else CONTINUED), part, mask())
            if not last and draw.random() < 0.3:
                stream += written(0x80 | PING, b"between", mask())
                said.append((PING, b"between"))
        said.append((kind, payload))
    return stream, said


def heard(messages: Messages, pieces: Iterator[bytes]) -> list[tuple[int, bytes]]:
    found = []
    for piece in pieces:
        messages.feed(piece)
        while (message := messages.next()) is not None:
            if message is not PART:
                found.append(message)
    return found


def cut(draw: random.Random, stream: bytes) -> Iterator[bytes]:
    """Cut a stream anywhere: between frames, in their heads, into single bytes."""
    at = 0
    while at < len(stream):
        size = draw.choice((1, 2, 3, 7, 130, 5000, 100_000))
        yield stream[at : at + size]
        at += size


@pytest.mark.parametrize("masked", [True, False])
def test_pieces_of_any_size_say_the_same(seed: int, masked: bool) -> None:
    """Two hundred conversations, each cut anew."""
    for number in range(200):
        draw = random.Random(seed * 1000 + number)
        stream, said = conversation(draw, masked=masked)
        messages = Messages(limit=LIMIT, masked=masked)

        assert heard(messages, cut(draw, stream)) == said
        assert messages.pending == 0


def test_bytes_that_mean_nothing_end_in_messages_or_an_error(seed: int) -> None:
    """Conversations with bytes changed, and noise: nothing but InvalidFrame is raised, and what is kept is bounded."""
    for number in range(500):
        draw = random.Random(seed * 1000 + number)
        stream = bytearray(conversation(draw, masked=True)[0] if number % 2 else draw.randbytes(draw.randrange(1, 3000)))
        for _ in range(draw.randrange(1, 4)):
            stream[draw.randrange(min(len(stream), 64))] = draw.randrange(256)
        messages = Messages(limit=LIMIT, masked=True)
        code = None
        try:
            for kind, payload in heard(messages, cut(draw, bytes(stream))):
                assert kind in (BINARY, TEXT, CLOSE, PING, PONG) and len(payload) <= LIMIT
        except InvalidFrame as error:
            code = error.fields["code"]

        assert code in (None, PROTOCOL_ERROR, TOO_BIG)
        assert messages.pending <= LIMIT + 14 + 100_000


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("masked", [True, False])
def test_what_is_written_is_read(size: int, masked: bool) -> None:
    """Each form of the length, at its ends."""
    payload = bytes(range(256)) * (size // 256) + bytes(size % 256)
    messages = Messages(limit=LIMIT, masked=masked)
    messages.feed(frame(BINARY, payload, masked=masked) + frame(PING, b"!", masked=masked))

    assert messages.next() == (BINARY, payload)
    assert messages.next() == (PING, b"!")
    assert messages.next() is None


MASK = b"\x01\x02\x03\x04"
BROKEN = {
    "not masked": (b"\x82\x00", PROTOCOL_ERROR),
    "an extension": (written(0xC2, b"", MASK), PROTOCOL_ERROR),
    "an unknown kind": (written(0x83, b"", MASK), PROTOCOL_ERROR),
    "an unknown control kind": (written(0x8B, b"", MASK), PROTOCOL_ERROR),
    "a ping in parts": (written(PING, b"", MASK), PROTOCOL_ERROR),
    "a long ping": (b"\x89\xfe\x00\x7e", PROTOCOL_ERROR),
    "an end of nothing": (written(0x80, b"", MASK), PROTOCOL_ERROR),
    "two beginnings": (written(BINARY, b"a", MASK) + written(0x80 | BINARY, b"b", MASK), PROTOCOL_ERROR),
    "too long": (struct.pack("!BBQ", 0x82, 0xFF, LIMIT + 1), TOO_BIG),
    "far too long": (struct.pack("!BBQ", 0x82, 0xFF, (1 << 64) - 1), TOO_BIG),
    "too long in parts": (written(BINARY, bytes(LIMIT), MASK) + written(0x80, b"x", MASK), TOO_BIG),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_the_rules_is_told(name: str) -> None:
    """At the latest when the frame is whole; a length that is too long at once, before any of it is kept."""
    stream, code = BROKEN[name]
    messages = Messages(limit=LIMIT, masked=True)

    with pytest.raises(InvalidFrame) as caught:
        heard(messages, iter([stream]))
    assert caught.value.fields["code"] == code


def test_empty_parts_are_not_kept() -> None:
    """However many there are of them; each is given by itself, so that who takes them can stop after some."""
    messages = Messages(limit=LIMIT, masked=True)
    messages.feed(written(BINARY, b"a", MASK) + written(CONTINUED, b"", MASK) * 1000 + written(0x80, b"b", MASK))

    assert [messages.next() for _ in range(1001)] == [PART] * 1001
    assert messages.next() == (BINARY, b"ab")
    assert len(messages._parts) == 0


def test_a_ping_within_the_longest_message_is_no_part_of_it() -> None:
    """The limit is of the message; a control frame between its parts has its own."""
    messages = Messages(limit=LIMIT, masked=True)
    stream = written(BINARY, bytes(LIMIT), MASK) + written(0x80 | PING, b"there?", MASK) + written(0x80, b"", MASK)

    assert heard(messages, iter([stream])) == [(PING, b"there?"), (BINARY, bytes(LIMIT))]
