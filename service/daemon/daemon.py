"""The daemon: one cache, its sockets, its sessions, from start to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from aiohttp import WSMsgType, web

from tiercache.config import Config
from tiercache.service import wire
from tiercache.service.address import DESCRIPTORS_SUFFIX, beside, socket_path
from tiercache.service.daemon.admin import Admin, bearers_only, peers_only
from tiercache.service.daemon.descriptors import Descriptors
from tiercache.service.daemon.house import House
from tiercache.service.daemon.notify import notify
from tiercache.service.daemon.outbox import Outbox
from tiercache.service.daemon.peers import Watch, connection_of, peer_of, pidfd_of
from tiercache.service.daemon.session import Session
from tiercache.service.daemon.sockets import Sockets
from tiercache.service.daemon.tcp import open_tcp, token_of
from tiercache.service.finishing import Finishing
from tiercache.service.inprocess import TierCache
from tiercache.service.stack import Seams
from tiercache.sizes import parse_size

log = logging.getLogger(__name__)

_GRACE = 1.0
"""Seconds between the end of a connection and that of its process's memory, where no pidfd tells."""
_REQUESTS_END = 5.0
"""Seconds that running requests get when the daemon stops."""
_MORE_CONNECTIONS = 64
"""Connections that are no sessions."""


class Daemon:
    """Serves one cache on one socket; an async context manager.

    Entering binds the sockets first, so that `/health` answers `starting` while memory is allocated. Leaving stops in order: no
    new sessions, a notice to those that are there, running requests end (bounded), sessions end, what is not durable is written
    down, names are removed. `seams` is for tests.
    """

    def __init__(self, config: Config, socket: str | os.PathLike[str] | None = None, *, seams: Seams | None = None) -> None:
        self.config = config
        self.path = socket_path(socket if socket is not None else config.socket)
        self.cache = TierCache(config, seams=seams)
        self.house = House(config, self.cache, os.fspath(beside(self.path, DESCRIPTORS_SUFFIX)))
        self.state = "starting"
        self.began = time.monotonic()
        self._sockets: Sockets | None = None
        self._runners: list[web.AppRunner] = []
        self._servers: list[asyncio.Server] = []
        self._descriptors: Descriptors | None = None
        self._handling: set[asyncio.Task[object]] = set()

    # --- beginning and end ------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Start. Raises InvalidConfig, SocketRefused and what `TierCache` raises; nothing is left behind then."""
        try:
            token = token_of(self.config)
            self._sockets = Sockets.open(self.path)
            await self._listen(self._sockets.sessions, token=None)
            if self.config.admin is not None:
                await self._listen(open_tcp(self.config.admin), token=token)
            notify(STATUS="allocating memory")
            # To the end, whoever cancels: what a thread allocates is given back when it is there.
            await Finishing("tiercache-start").outlast(self.cache.__aenter__())
            most = 2 * self.config.limits.sessions + _MORE_CONNECTIONS
            self._descriptors = Descriptors(self._sockets.descriptors, self.house, most=most)
        except BaseException:
            self.state = "failed"
            await self.cache.close()
            await self._shut()
            raise
        self.state = "serving"
        notify(READY=1, STATUS=f"serving at {self.path}")
        log.info("serving", extra={"socket": str(self.path), "boot": self.house.boot.hex(), "pid": os.getpid()})
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop."""
        await self.stop()

    async def stop(self) -> None:
        """Stop in order. May be called twice."""
        if self.state in ("draining", "stopped"):
            return
        self.state, self.house.draining = "draining", True
        notify(STOPPING=1, STATUS="writing down what is not durable")
        log.info("draining", extra={"sessions": len(self.house.sessions)})
        try:
            for session in self.house.sessions:
                session.tell(wire.Draining(self.config.drain_seconds))
            await asyncio.gather(*(session.finish(_REQUESTS_END) for session in self.house.sessions))
            for task in list(self._handling):
                task.cancel()
            if self._handling:
                await asyncio.wait(list(self._handling))
            if self._descriptors is not None:
                self._descriptors.close()
            self.house.close()
            await self.cache.close()
        finally:
            await self._shut()
        log.info("stopped")

    async def _shut(self) -> None:
        self.state = "stopped"
        for server in self._servers:
            server.close()
        for runner in self._runners:
            await runner.cleanup()
        self._servers.clear()
        self._runners.clear()
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None

    async def _listen(self, listener: socket.socket, *, token: str | None) -> None:
        local = listener.family == socket.AF_UNIX
        app = web.Application()
        Admin(self).add_to(app, peers_only if token is None else bearers_only(token))
        if local:
            app.router.add_get(wire.SESSION_PATH, peers_only(self._session))
        runner = web.AppRunner(app, access_log=None, handle_signals=False, keepalive_timeout=30, shutdown_timeout=1.0)
        await runner.setup()
        self._runners.append(runner)
        most = self.config.limits.sessions + _MORE_CONNECTIONS

        def make() -> asyncio.Protocol:
            server = runner.server
            return _Refusing() if server is None or len(server.connections) >= most else server()

        loop = asyncio.get_running_loop()
        listen = loop.create_unix_server if local else loop.create_server
        self._servers.append(await listen(make, sock=listener))

    # --- sessions ---------------------------------------------------------------------------------------------------------

    async def _session(self, request: web.Request) -> web.StreamResponse:
        """Serve one session, from its WebSocket's beginning to its end."""
        transport = request.transport
        if self.state != "serving" or transport is None:
            raise web.HTTPServiceUnavailable(text=f"the daemon is {self.state}\n")
        with connection_of(transport) as connection:
            peer, pidfd = peer_of(connection), pidfd_of(connection)
        watch = Watch(pidfd, grace=_GRACE)
        task = asyncio.current_task()
        assert task is not None
        ws = web.WebSocketResponse(max_msg_size=self.house.most_frame, compress=False, timeout=1.0)
        try:
            await ws.prepare(request)
        except BaseException:
            watch.close()
            raise

        def overrun() -> None:
            self.house.counts.overrun += 1
            session.quit = "it does not read"
            transport.abort()

        outbox = Outbox(ws.send_bytes, transport.get_write_buffer_size, overrun, most=parse_size(self.config.limits.queued_bytes))
        session = Session(self.house, watch, outbox, pid=peer.pid)
        log.info("session begun", extra={"session": session.number, "pid": peer.pid})
        self._handling.add(task)
        why = "closed"
        try:
            why = await self._converse(session, ws)
        except ConnectionError:
            why = "gone"
        except asyncio.CancelledError:
            if not self.house.draining:
                raise
            why = "draining"
        finally:
            self._handling.discard(task)
            await session.end()
            log.info("session ended", extra={"session": session.number, "why": session.quit or why})
        if not transport.is_closing():
            with contextlib.suppress(ConnectionError):
                await ws.close(code=1001 if why == "draining" else 1000)
        return ws

    async def _converse(self, session: Session, ws: web.WebSocketResponse) -> str:
        """Take the session's frames until it ends; return why it did."""
        while session.quit is None:
            message = await ws.receive()
            if message.type is WSMsgType.BINARY:
                await session.receive(message.data)
            elif message.type is WSMsgType.TEXT:
                await session.receive(b"")
            elif message.type is WSMsgType.ERROR:
                return f"a frame that can't be taken: {message.data}"
            else:
                return "closed"
        return session.quit


class _Refusing(asyncio.Protocol):
    """Closes a connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


@contextlib.asynccontextmanager
async def serve(
    config: Config, socket: str | os.PathLike[str] | None = None, *, seams: Seams | None = None
) -> AsyncIterator[Daemon]:
    """Run a daemon of `config` on the socket at the path `socket` for as long as the block lasts."""
    async with Daemon(config, socket, seams=seams) as daemon:
        yield daemon
