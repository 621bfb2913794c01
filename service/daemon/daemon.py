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
from tiercache.service.daemon.admin import MOST_BODY, Admin, bearers_only, peers_only
from tiercache.service.daemon.connections import Refusing, require_descriptors
from tiercache.service.daemon.descriptors import Descriptors
from tiercache.service.daemon.heartbeat import Heartbeat
from tiercache.service.daemon.house import House
from tiercache.service.daemon.notify import notify
from tiercache.service.daemon.outbox import Outbox
from tiercache.service.daemon.peers import Watch, connection_of, peer_of, pidfd_of
from tiercache.service.daemon.session import Session
from tiercache.service.daemon.sockets import Sockets
from tiercache.service.daemon.tcp import open_tcp, token_of
from tiercache.service.inprocess import TierCache
from tiercache.service.stack import Seams
from tiercache.sizes import parse_size
from tiercache.storage.finishing import Finishing
from tiercache.storage.huge_pages import HugePages

log = logging.getLogger(__name__)

_GRACE = 1.0
"""Seconds between the end of a connection and that of its process's memory, where no pidfd tells."""
_LINGER = 1.0
"""Seconds for which what is left of a request that was answered before it ended is read away."""
_REQUESTS_END = 5.0
"""Seconds that running requests get when the daemon stops."""


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
        clock = (seams or Seams()).clock
        self.house = House(config, self.cache, os.fspath(beside(self.path, DESCRIPTORS_SUFFIX)), clock)
        self.heartbeat = Heartbeat(self._beat)
        self._doubtful = 0.0
        self.state = "starting"
        self.began = time.monotonic()
        self._sockets: Sockets | None = None
        self._runners: list[web.AppRunner] = []
        self._servers: list[asyncio.Server] = []
        self._descriptors: Descriptors | None = None
        self._pages: HugePages | None = None
        self._handling: set[asyncio.Task[object]] = set()
        self._ending = Finishing("tiercache-session-end")

    # --- beginning and end ------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Start. Raises InvalidConfig, SocketRefused and what `TierCache` raises; nothing is left behind then."""
        try:
            token = token_of(self.config)
            require_descriptors(self.house.connections.most, self.config.limits.sessions)
            self._sockets = Sockets.open(self.path)
            self.heartbeat.start()
            await self._listen(self._sockets.sessions, token=None)
            if self.config.admin is not None:
                await self._listen(open_tcp(self.config.admin), token=token)
            notify(STATUS="allocating memory")
            # To the end, whoever cancels: what a thread allocates is given back when it is there.
            await Finishing("tiercache-start").outlast(self.cache.__aenter__())
            self._descriptors = Descriptors(self._sockets.descriptors, self.house, patience=self.config.limits.idle_seconds)
        except BaseException:
            self.state = "failed"
            await self.cache.close()
            await self._shut()
            raise
        if self.config.device == "cpu":  # a device's driver holds its pages where they are
            self._pages = HugePages(self.cache.memory)
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
        if self._pages is not None:
            self._pages.stop()  # what it does now may outlast the cache: it has descriptors of its own
        try:
            for session in self.house.sessions:
                session.tell(wire.Draining(self.config.drain_seconds))
            await asyncio.gather(*(session.finish(_REQUESTS_END) for session in self.house.sessions))
            for task in list(self._handling):
                task.cancel()
            if self._handling:
                await asyncio.wait(list(self._handling))
            await self._ending.wait()
            if self._descriptors is not None:
                self._descriptors.close()
            self.house.close()
            await self.cache.close()
        finally:
            await self._shut()
        log.info("stopped")

    async def _shut(self) -> None:
        self.state = "stopped"
        self.heartbeat.stop()
        for server in self._servers:
            server.close()
        for runner in self._runners:
            await runner.cleanup()
        self._servers.clear()
        self._runners.clear()
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None

    def _beat(self, lag: float) -> None:
        """Look for what was not renewed or read in time, unless it may be this process that was away.

        After a long stop the clients' renewals lie in the sockets, unread: they get time to be read first.
        """
        self.cache.examiner.lateness.note(lag)
        limits, now = self.config.limits, time.monotonic()
        third = min(limits.lease_seconds, limits.write_seconds) / 3
        if lag > third:
            self._doubtful = now + third
        if now >= self._doubtful:
            self.house.terms.sweep()

    async def _listen(self, listener: socket.socket, *, token: str | None) -> None:
        local = listener.family == socket.AF_UNIX
        app = web.Application(client_max_size=MOST_BODY)
        Admin(self).add_to(app, peers_only if token is None else bearers_only(token))
        if local:
            app.router.add_get(wire.SESSION_PATH, peers_only(self._session))
        # An idle connection and one that has not asked for anything yet end by the same clock.
        idle = self.config.limits.idle_seconds
        runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            keepalive_timeout=idle,
            lingering_time=_LINGER,
            shutdown_timeout=1.0,
        )
        await runner.setup()
        self._runners.append(runner)
        server, connections = runner.server, self.house.connections
        assert server is not None, "a runner has its server from its set-up on"
        loop = asyncio.get_running_loop()
        # The server knows of a connection a moment after it was made; several may be made in that moment.
        coming: set[web.RequestHandler] = set()
        connections.add(lambda: len({*server.connections, *coming}))

        def make() -> asyncio.Protocol:
            if not connections.has_room():
                return Refusing(connections.refusal, connections.lingering)
            handler = server()
            coming.add(handler)
            loop.call_soon(loop.call_soon, coming.discard, handler)
            return handler

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

        line, limits = _Line(self.house, ws, transport), self.config.limits
        outbox = Outbox(line, self.house.terms, most=parse_size(limits.queued_bytes), seconds=limits.write_seconds)
        session = line.session = Session(self.house, watch, outbox, pid=peer.pid)
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
            # Half an end would hold its leases for ever: whoever cancels this handler, the end is waited for.
            await self._ending.outlast(session.end())
            log.info("session ended", extra={"session": session.number, "why": session.quit or why})
        if not transport.is_closing():
            with contextlib.suppress(ConnectionError):
                await ws.close(code=1001 if why == "draining" else 1000)
        return ws

    async def _converse(self, session: Session, ws: web.WebSocketResponse) -> str:
        """Take the session's frames until it ends; return why it did."""
        idle = self.config.limits.idle_seconds
        try:
            async with asyncio.timeout(idle) as patience:
                return await self._take_frames(session, ws, patience)
        except TimeoutError:
            return f"no hello within {idle:g} s"

    async def _take_frames(self, session: Session, ws: web.WebSocketResponse, patience: asyncio.Timeout) -> str:
        greeted = False
        while session.quit is None:
            if not greeted and self.house.session(session.token) is session:
                greeted = True
                patience.reschedule(None)
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


class _Line:
    """A session's WebSocket, as its outbox sees it."""

    def __init__(self, house: House, ws: web.WebSocketResponse, transport: asyncio.Transport) -> None:
        self._house = house
        self._ws = ws
        self._transport = transport
        self.session: Session | None = None

    async def write(self, message: bytes) -> None:
        """Write one message; wait while the connection is full."""
        await self._ws.send_bytes(message)

    def pressed(self) -> int:
        """Return how many bytes the connection holds."""
        return self._transport.get_write_buffer_size()

    def overrun(self) -> None:
        """End the session: too much waits."""
        self._house.counts.overrun += 1
        self._abort("it does not read")

    def stalled(self) -> None:
        """End the session: a reply has waited too long."""
        self._house.counts.stalled += 1
        self._abort("it has not read for too long")

    def _abort(self, why: str) -> None:
        if self.session is not None:
            self.session.quit = why
        self._transport.abort()


@contextlib.asynccontextmanager
async def serve(
    config: Config, socket: str | os.PathLike[str] | None = None, *, seams: Seams | None = None
) -> AsyncIterator[Daemon]:
    """Run a daemon of `config` on the socket at the path `socket` for as long as the block lasts."""
    async with Daemon(config, socket, seams=seams) as daemon:
        yield daemon
