"""A session's connection below its messages: pieces, masks, pings, what comes before its time, and what breaks the protocol."""

from __future__ import annotations

import asyncio
import base64
import random
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.service.caches import small
from tests.service.client.fake import until
from tests.service.daemon.raw import PATIENCE, daemon_of, session_at
from tests.service.test_websocket import written
from tiercache.config import Limits
from tiercache.service import websocket, wire
from tiercache.service.daemon.line import Line
from tiercache.service.websocket import BINARY, CLOSE, PING, PONG, TEXT, Messages

KEY = base64.b64encode(bytes(16)).decode()
ASKED = (
    f"GET {wire.SESSION_PATH} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"
    f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {KEY}\r\n\r\n"
).encode()


class Wire:
    """A connection of bytes, and the messages that come on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.messages = Messages(limit=1 << 24, masked=False)

    async def message(self) -> tuple[int, bytes] | None:
        """Return the next message; None at the end."""
        async with asyncio.timeout(PATIENCE):
            while (found := self.messages.next()) is None:
                piece = await self.reader.read(65_536)
                if not piece:
                    return None
                self.messages.feed(piece)
            return found

    async def reply(self) -> wire.Reply | wire.Notice:
        """Return the next frame of the session."""
        found = await self.message()
        assert found is not None and found[0] == BINARY, found
        return wire.answers.decode(found[1])


@asynccontextmanager
async def plain(path: Path, sent: bytes = ASKED) -> AsyncIterator[tuple[Wire, bytes]]:
    """Send bytes to a daemon; gives the connection and the head of its answer."""
    reader, writer = await asyncio.open_unix_connection(path)
    try:
        writer.write(sent)
        async with asyncio.timeout(PATIENCE):
            head = await reader.readuntil(b"\r\n\r\n")
        yield Wire(reader, writer), head
    finally:
        writer.close()


def said(number: int, mask: bytes, kind: type[wire.Request] = wire.Hello, **fields: object) -> bytes:
    """Return the frame of a request."""
    return written(0x80 | BINARY, wire.encoder.encode(kind(id=number, **fields)), mask)  # type: ignore[arg-type]


def hello(number: int, mask: bytes = b"mask") -> bytes:
    """Return the frame of a hello."""
    return said(number, mask, version=wire.VERSION)


async def test_frames_in_any_pieces_get_one_reply_each(folder: Path, seed: int) -> None:
    """Masked by anything, in parts, with pings between: replies come in order, one a request."""
    draw = random.Random(seed)
    async with daemon_of(folder) as daemon, plain(daemon.path) as (line, head):
        assert head.startswith(b"HTTP/1.1 101 ") and websocket.accept_of(KEY.encode()) in head
        line.writer.write(hello(1))
        assert isinstance(await line.reply(), wire.Welcome)
        stream = b""
        for number in range(2, 402):
            request = wire.encoder.encode(wire.Renew(id=number) if number % 3 else wire.Release(id=number, lease=number))
            at = draw.randrange(len(request) + 1)
            stream += written(BINARY, request[:at], draw.randbytes(4)) + written(0x80 | PING, b"%d" % number, draw.randbytes(4))
            stream += written(0x80, request[at:], draw.randbytes(4))
        at = 0
        while at < len(stream):
            size = draw.choice((1, 2, 5, 30, 1000))
            line.writer.write(stream[at : at + size])
            await asyncio.sleep(0)
            at += size
        replies: list[int] = []
        pongs: list[int] = []
        while len(replies) < 400:
            message = await line.message()
            assert message is not None
            if message[0] == PONG:
                pongs.append(int(message[1]))
            else:
                replies.append(wire.answers.decode(message[1]).id)  # type: ignore[union-attr]

        assert replies == list(range(2, 402)) and pongs == sorted(pongs)


async def test_thousands_of_frames_at_once_let_others_have_their_turn(folder: Path) -> None:
    """Each is answered; another session's request comes in between."""
    async with daemon_of(folder) as daemon, plain(daemon.path) as (line, _), session_at(daemon.path) as raw:
        line.writer.write(hello(1) + b"".join(said(number, b"mask", wire.Renew) for number in range(2, 5002)))
        await raw.call(wire.Done, wire.Renew)
        assert daemon.house.counts.requests["Renew"] < 5001
        numbers = [(await line.reply()).id for _ in range(5001)]  # type: ignore[union-attr]

        assert numbers == list(range(1, 5002))


async def test_what_comes_behind_the_handshake_is_not_lost(folder: Path) -> None:
    """A client that does not wait for the answer to it, as it should."""
    async with daemon_of(folder) as daemon, plain(daemon.path, ASKED + hello(7)[:9]) as (line, _):
        line.writer.write(hello(7)[9:])
        welcome = await line.reply()

        assert isinstance(welcome, wire.Welcome) and welcome.id == 7


async def test_text_is_answered_and_the_session_goes_on(folder: Path) -> None:
    """As a frame that can't be read, whatever it says."""
    async with daemon_of(folder) as daemon, plain(daemon.path) as (line, _):
        line.writer.write(hello(1) + written(0x80 | TEXT, b"\xff hello", b"mask") + said(2, b"mask", wire.Renew))

        assert isinstance(await line.reply(), wire.Welcome)
        answer = await line.reply()
        assert isinstance(answer, wire.Failed) and (answer.kind, answer.id) == ("InvalidFrame", 0)
        assert await line.reply() == wire.Done(2)


BROKEN = {
    "not masked": (b"\x82\x01x", websocket.PROTOCOL_ERROR),
    "an extension": (b"\xc2\x80mask", websocket.PROTOCOL_ERROR),
    "a long ping": (b"\x89\xfe\x01\x00", websocket.PROTOCOL_ERROR),
    "too long": (struct.pack("!BBQ", 0x82, 0xFF, 1 << 62), websocket.TOO_BIG),
    "good-bye": (written(0x80 | CLOSE, b"\x03\xe8", b"mask"), websocket.NORMAL),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_what_breaks_the_protocol_ends_the_session_alone(folder: Path, name: str) -> None:
    """With the code that says why; what was asked before is answered, what comes after is not, and the daemon lives on."""
    stream, code = BROKEN[name]
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw, plain(daemon.path) as (line, _):
        line.writer.write(hello(1))
        welcome = await line.reply()
        assert isinstance(welcome, wire.Welcome)
        [session] = [one for one in daemon.house.sessions if one.token == welcome.token]
        line.writer.write(said(2, b"mask", wire.Renew) + stream + said(3, b"mask", wire.Renew))

        assert await line.reply() == wire.Done(2)
        assert await line.message() == (CLOSE, struct.pack("!H", code))
        assert await line.message() is None
        async with asyncio.timeout(PATIENCE):
            await session.done.wait()
        await raw.call(wire.Done, wire.Renew)


@pytest.mark.parametrize(
    "missing",
    [
        b"Upgrade: websocket\r\n",
        b"Connection: keep-alive, Upgrade\r\n",
        b"Sec-WebSocket-Version: 13\r\n",
        f"Sec-WebSocket-Key: {KEY}\r\n".encode(),
    ],
)
async def test_what_is_no_handshake_gets_an_answer(folder: Path, missing: bytes) -> None:
    """In HTTP."""
    async with daemon_of(folder) as daemon, plain(daemon.path, ASKED.replace(missing, b"")) as (_, head):
        assert head.startswith(b"HTTP/1.1 400 ")
        assert not daemon.house.sessions


async def test_pings_that_nobody_reads_cost_nothing(folder: Path) -> None:
    """Their answers are not kept: while the connection is full the last one is enough."""
    async with daemon_of(folder, small(limits=Limits(queued_bytes="64 KiB"))) as daemon, plain(daemon.path) as (line, _):
        line.writer.write(hello(1))
        assert isinstance(await line.reply(), wire.Welcome)
        line.writer.transport.pause_reading()  # type: ignore[attr-defined]
        [handler] = daemon._runners[0].server.connections  # type: ignore[union-attr]
        transport = handler.transport
        for number in range(6000):
            line.writer.write(websocket.frame(PING, b"%0100d" % number, masked=True))
            if number % 100 == 0:
                await line.writer.drain()
                assert transport.get_write_buffer_size() < 128 * 1024  # type: ignore[union-attr]
        line.writer.write(said(2, b"mask", wire.Renew))
        line.writer.transport.resume_reading()  # type: ignore[attr-defined]
        last = 0
        while (message := await line.message()) is not None and message[0] == PONG:
            last = int(message[1])

        assert last == 5999 and message is not None and wire.answers.decode(message[1]) == wire.Done(2)


async def test_a_client_that_ends_its_half_and_reads_nothing_is_let_go(folder: Path) -> None:
    """What waits for it is dropped: its connection would be kept for as long as it pleases."""
    async with daemon_of(folder) as daemon, plain(daemon.path) as (line, _):
        line.writer.write(hello(1))
        assert isinstance(await line.reply(), wire.Welcome)
        line.writer.transport.pause_reading()  # type: ignore[attr-defined]
        [handler] = daemon._runners[0].server.connections  # type: ignore[union-attr]
        transport = handler.transport
        assert transport is not None
        while not transport.get_write_buffer_size():
            line.writer.write(websocket.frame(PING, b"%0125d" % 0, masked=True) * 100)
            await line.writer.drain()
        line.writer.write_eof()

        await until(lambda: not daemon._runners[0].server.connections)  # type: ignore[union-attr]
        assert not daemon.house.sessions


async def test_a_good_bye_to_a_session_that_ends_is_answered(folder: Path) -> None:
    """Also where it came in one piece with what the session ends for."""
    async with daemon_of(folder) as daemon, plain(daemon.path) as (line, _):
        line.writer.write(said(1, b"mask", version=99) + written(0x80 | CLOSE, b"\x03\xe8", b"mask"))
        refusal = await line.reply()

        assert isinstance(refusal, wire.Failed) and refusal.kind == "VersionMismatch"
        assert await line.message() == (CLOSE, b"\x03\xe8")
        assert await line.message() is None


async def test_parts_without_an_end_let_others_have_their_turn(folder: Path) -> None:
    """Tens of thousands of empty ones fit into one read, and are no message."""
    async with daemon_of(folder) as daemon, plain(daemon.path) as (line, _), session_at(daemon.path) as raw:
        line.writer.write(hello(1))
        assert isinstance(await line.reply(), wire.Welcome)
        line.writer.write(written(BINARY, b"", b"mask") + written(0, b"", b"mask") * 40_000)
        await raw.call(wire.Done, wire.Renew)
        handlers = daemon._runners[0].server.connections  # type: ignore[union-attr]
        lines = [handler.transport.get_protocol() for handler in handlers if handler.transport is not None]
        assert any(one._messages.pending for one in lines if isinstance(one, Line))
        request = wire.encoder.encode(wire.Renew(id=2))
        line.writer.write(written(0x80, request, b"mask"))

        assert await line.reply() == wire.Done(2)
