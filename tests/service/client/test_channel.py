"""The WebSocket of a client: frames of every size, in pieces, and what ends it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import WSMsgType, web

from tiercache.service.client.channel import Channel
from tiercache.service.client.counts import Counts

LIMIT = 1 << 20


@asynccontextmanager
async def served(path: Path, serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[None]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()
            await writer.wait_closed()

    server = await asyncio.start_unix_server(handle, path)
    async with server:
        yield


@asynccontextmanager
async def opened(
    path: Path, counts: Counts | None = None
) -> AsyncIterator[tuple[Channel, asyncio.Queue[bytes], asyncio.Queue[str]]]:
    messages: asyncio.Queue[bytes] = asyncio.Queue()
    ends: asyncio.Queue[str] = asyncio.Queue()
    _, channel = await asyncio.get_running_loop().create_unix_connection(
        lambda: Channel(counts or Counts(), messages.put_nowait, ends.put_nowait, limit=LIMIT), str(path)
    )
    try:
        yield channel, messages, ends
    finally:
        await channel.close()


@asynccontextmanager
async def echo(path: Path) -> AsyncIterator[None]:
    """A WebSocket server of another make that sends back what it gets."""

    async def handle(request: web.Request) -> web.WebSocketResponse:
        answer = web.WebSocketResponse(max_msg_size=0)
        await answer.prepare(request)
        await answer.ping(b"there?")
        async for message in answer:
            if message.type is WSMsgType.BINARY:
                await answer.send_bytes(message.data)
        return answer

    application = web.Application()
    application.router.add_get("/x", handle)
    runner = web.AppRunner(application, handle_signals=False)
    await runner.setup()
    await web.UnixSite(runner, str(path)).start()
    try:
        yield
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 65_535, 65_536, LIMIT])
async def test_messages_of_every_size_come_back(short_path: Path, size: int) -> None:
    """Each of the three forms of a frame's length, at its ends; every byte sent and received is counted."""
    message, counts = bytes(range(256)) * (size // 256) + bytes(size % 256), Counts()
    async with echo(short_path / "s"), opened(short_path / "s", counts) as (channel, messages, _):
        await channel.shake_hands("/x")
        channel.send(message)
        channel.send(b"second")

        assert await messages.get() == message
        assert await messages.get() == b"second"
    assert counts.sent > size and counts.received > size


def handshake(reader: bytes) -> bytes:
    import base64
    import hashlib

    key = next(line.split(b": ")[1] for line in reader.split(b"\r\n") if line.startswith(b"Sec-WebSocket-Key"))
    accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    return b"HTTP/1.1 101 Switching Protocols\r\nsec-websocket-accept: " + accept + b"\r\n\r\n"


async def test_a_message_may_come_in_any_pieces(short_path: Path) -> None:
    """Byte by byte, in fragments, with a ping in between."""
    frames = b"\x02\x03abc" + b"\x89\x01p" + b"\x00\x02de" + b"\x80\x01f" + b"\x82\x7e\x00\x02gh"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for byte in handshake(await reader.readuntil(b"\r\n\r\n")) + frames:
            writer.write(bytes([byte]))
            await writer.drain()
        assert await reader.readexactly(7) == b"\x8a\x81\0\0\0\0p"
        await reader.read()

    async with served(short_path / "s", serve), opened(short_path / "s") as (channel, messages, _):
        await channel.shake_hands("/x")

        assert [await messages.get(), await messages.get()] == [b"abcdef", b"gh"]


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"\x82\x85\0\0\0\0hello", "masked"),
        (b"\x81\x02hi", "kind 1"),
        (b"\x80\x02hi", "kind 0"),
        (b"\x02\x01a\x82\x01b", "kind 2"),
        (struct.pack("!BBQ", 0x82, 127, LIMIT + 1), "the limit is"),
        (struct.pack("!BBQ", 0x82, 127, 1 << 63), "the limit is"),
        (b"\x88\x02\x03\xe8", "ended the session"),
        (b"", "closed the connection"),
    ],
)
async def test_what_can_not_be_ends_the_channel(short_path: Path, frame: bytes, reason: str) -> None:
    """The reason is told once, whatever follows."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(handshake(await reader.readuntil(b"\r\n\r\n")) + frame + b"\x82\x01x" * bool(frame))
        await writer.drain()
        if frame:
            await reader.read()

    async with served(short_path / "s", serve), opened(short_path / "s") as (channel, messages, ends):
        await channel.shake_hands("/x")

        assert reason in await ends.get()
        assert messages.empty()
    assert ends.empty()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nsec-websocket-accept: x\r\n\r\n",
        b"",
        b"x" * 100_000,
    ],
)
async def test_another_answer_is_no_session(short_path: Path, answer: bytes) -> None:
    """A refusal, another protocol, an end, or no end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)

    async with served(short_path / "s", serve), opened(short_path / "s") as (channel, _, _):
        with pytest.raises(ConnectionError):
            await channel.shake_hands("/x")


async def test_an_end_of_file_is_the_end_though_something_waits_to_be_written(short_path: Path) -> None:
    """The daemon reads nothing any more and keeps the socket: no reply can come, and nothing has to be waited for."""
    over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(handshake(await reader.readuntil(b"\r\n\r\n")))
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        writer.write_eof()
        await over.wait()

    async with served(short_path / "s", serve), opened(short_path / "s") as (channel, _, ends):
        try:
            await channel.shake_hands("/x")
            while not channel.queued:
                channel.send(bytes(LIMIT))
            async with asyncio.timeout(20):
                assert await ends.get() == "the daemon closed the connection"
                await channel.close()
        finally:
            over.set()
