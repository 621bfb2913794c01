"""A session's connection, once HTTP has let go of it: frames are answered within the callback that received their bytes."""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Callable
from typing import Protocol

from aiohttp import hdrs, web

from tiercache.errors import InvalidFrame
from tiercache.service import websocket
from tiercache.service.websocket import BINARY, CLOSE, PING, TEXT, Messages

_AT_ONCE = 128
"""Frames that are answered before others of the loop have their turn."""
_GOOD_BYE = 1.0
"""Seconds that a client has to answer the end of its session."""


class Ear(Protocol):
    """Who answers what comes."""

    quit: str | None
    """Why the session is to end, once it is."""

    def receive(self, data: bytes) -> None:
        """Take one message."""
        ...


class Valve(Protocol):
    """Who waits while the connection is full."""

    def pressed(self) -> None:
        """The connection is full."""
        ...

    def relieved(self) -> None:
        """The connection takes messages again."""
        ...


class Line(asyncio.Protocol):
    """A WebSocket in the place of the web server's protocol of the same transport, which still counts it and is told of its end.

    `upgrade` makes it; `begin` says who hears the messages. `overrun` and `stalled` are called when the client is given up.
    """

    def __init__(self, server: web.RequestHandler, transport: asyncio.Transport, *, limit: int) -> None:
        self._server = server
        self._transport = transport
        self._messages = Messages(limit=limit, masked=True)
        self._loop = asyncio.get_running_loop()
        self._ear: Ear | None = None
        self._valve: Valve | None = None
        self._over: asyncio.Future[str] = self._loop.create_future()
        self._gone = asyncio.Event()
        self._pong: bytes | None = None
        self._code = websocket.NORMAL
        self._deaf = False
        self._dismissed = False
        self._said = False
        self.full = False
        """Whether what is written now would wait."""
        self.on_overrun: Callable[[], None] = _nothing
        self.on_stall: Callable[[], None] = _nothing

    @classmethod
    async def upgrade(cls, request: web.Request, transport: asyncio.Transport, *, limit: int) -> tuple[Line, web.StreamResponse]:
        """Answer the handshake and take the connection over; return it, and what the web server takes for the answer.

        Raises HTTPBadRequest for a request that is no handshake.
        """
        answer = web.StreamResponse(
            status=101,
            headers={hdrs.UPGRADE: "websocket", hdrs.CONNECTION: "upgrade", hdrs.SEC_WEBSOCKET_ACCEPT: _accept(request)},
        )
        answer.force_close()
        await answer.prepare(request)
        line = cls(request.protocol, transport, limit=limit)
        # In one step: what came behind the handshake is handed over first, and what comes after it goes here.
        request.protocol.set_parser(line)  # type: ignore[arg-type]
        transport.set_protocol(line)
        return line, answer

    def begin(self, ear: Ear, valve: Valve) -> None:
        """Let `ear` hear the messages, and `valve` when the connection is full."""
        self._ear, self._valve = ear, valve
        self._take()

    async def over(self) -> str:
        """Wait until no more messages will be heard; return why."""
        return await self._over

    def finish(self, why: str) -> None:
        """Hear no more messages."""
        if not self._over.done():
            self._over.set_result(why)

    async def close(self, *, going_away: bool) -> None:
        """Say good-bye, and wait a moment for the answer. What the client does not read by then is dropped."""
        self.finish("closed")
        code = websocket.GOING_AWAY if going_away else self._code
        self._frame(CLOSE, code.to_bytes(2, "big"))
        self._said = True
        if self._dismissed:
            self._transport.close()
        try:
            async with asyncio.timeout(_GOOD_BYE):
                await self._gone.wait()
        except TimeoutError:
            pass
        finally:
            # Also where it closes itself, after the client's end of file: that waits until the client has read everything.
            self._transport.abort()

    # --- for the outbox ---------------------------------------------------------------------------------------------------

    def write(self, message: bytes) -> None:
        """Write one message. Nothing is written any more where the connection is gone."""
        self._frame(BINARY, message)

    def overrun(self) -> None:
        """End the session: too much waits."""
        self.on_overrun()
        self._abort("it does not read")

    def stalled(self) -> None:
        """End the session: a reply has waited too long."""
        self.on_stall()
        self._abort("it has not read for too long")

    # --- what the web server calls until it is out of the way -------------------------------------------------------------

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        """Keep what came behind the handshake."""
        self._messages.feed(data)
        return False, b""

    def feed_eof(self) -> None:
        """Do nothing: `connection_lost` says it."""

    # --- what the loop calls ----------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Answer the messages that are whole."""
        if not self._deaf:
            self._messages.feed(data)
            self._take()

    def eof_received(self) -> None:
        """End the session; the transport closes itself."""
        self.finish("closed")

    def connection_lost(self, exc: Exception | None) -> None:
        """Say that this is the end."""
        self.finish("closed" if exc is None else "gone")
        self._deaf = True
        self._gone.set()
        self._server.connection_lost(exc)

    def pause_writing(self) -> None:
        """Let what is to be written wait."""
        self.full = True
        if self._valve is not None:
            self._valve.pressed()

    def resume_writing(self) -> None:
        """Write what waits."""
        self.full = False
        pong, self._pong = self._pong, None
        if pong is not None:
            self._frame(websocket.PONG, pong)
        if self._valve is not None:
            self._valve.relieved()

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        ear, over, following = self._ear, self._over, self._messages.next
        if ear is None:
            return
        try:
            for _ in range(_AT_ONCE):
                message = following()
                if message is None:
                    return
                kind, payload = message
                if kind in (BINARY, TEXT):
                    if not over.done():
                        ear.receive(payload if kind == BINARY else b"")
                        if ear.quit is not None:
                            self.finish(ear.quit)
                elif kind == PING:
                    self._answer_ping(payload)
                elif kind == CLOSE:
                    self._dismiss()
                    return
        except InvalidFrame as error:
            self._deaf, self._code = True, error.fields["code"]
            self.finish(f"a frame that can't be taken: {error}")
            return
        if self._messages.pending and not self._transport.is_closing():
            # A client may have sent thousands of small ones at once.
            self._transport.pause_reading()
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()
            if not self._deaf:
                self._take()

    def _answer_ping(self, payload: bytes) -> None:
        if self.full:
            self._pong = payload  # the last ping is answered for those before it
        else:
            self._frame(websocket.PONG, payload)

    def _dismiss(self) -> None:
        """The client has said good-bye, first or in answer to ours."""
        self._deaf = self._dismissed = True
        if self._said:
            self._transport.close()
        self.finish("closed")

    def _frame(self, kind: int, payload: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(websocket.frame(kind, payload, masked=False))

    def _abort(self, why: str) -> None:
        if self._ear is not None:
            self._ear.quit = why
        self._transport.abort()


def _accept(request: web.Request) -> str:
    """Return the answer to a handshake. Raises HTTPBadRequest for what is none."""
    headers = request.headers
    key = headers.get(hdrs.SEC_WEBSOCKET_KEY, "").strip()
    try:
        sound = len(base64.b64decode(key, validate=True)) == 16
    except (binascii.Error, ValueError):
        sound = False
    tokens = {token.strip().lower() for token in headers.get(hdrs.CONNECTION, "").split(",")}
    if headers.get(hdrs.UPGRADE, "").strip().lower() != "websocket" or "upgrade" not in tokens or not sound:
        raise web.HTTPBadRequest(text="a session is a WebSocket, and this is no handshake of one\n")
    if headers.get(hdrs.SEC_WEBSOCKET_VERSION, "").strip() != "13":
        raise web.HTTPBadRequest(text="a WebSocket of version 13 is spoken here\n", headers={hdrs.SEC_WEBSOCKET_VERSION: "13"})
    return websocket.accept_of(key.encode()).decode()


def _nothing() -> None:
    """Do nothing."""
