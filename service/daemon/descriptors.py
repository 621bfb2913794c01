"""The socket that hands out descriptors: a session's token comes in, the daemon's memory goes out, by SCM_RIGHTS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket

import msgspec

from tiercache.errors import Closed, JoinRefused, LimitReached, TierCacheError
from tiercache.service import wire, wire_memory
from tiercache.service.daemon.house import House
from tiercache.service.daemon.peers import Watch, peer_of

log = logging.getLogger(__name__)

_MOST_REQUEST = 4096


class Descriptors:
    """Answers on the listening socket until `close`.

    A connection counts among the daemon's; one that is too many is told so and closed, and one that was not handed anything
    within `patience` seconds is closed.
    """

    def __init__(self, listener: socket.socket, house: House, *, patience: float) -> None:
        self._listener = listener
        self._house = house
        self._patience = patience
        self._links: dict[socket.socket, set[Watch]] = {}
        self._silent: dict[socket.socket, asyncio.TimerHandle] = {}
        self._unmapped: set[socket.socket] = set()
        house.connections.add(lambda: len(self._links), links=True)
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    def close(self) -> None:
        """Take no more connections, and close those that stand. Their memory stays mapped where it is."""
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        for link in list(self._links):
            self._drop(link)

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptor left: who asks next is told the same, and nothing else suffers
            log.warning("no connection for descriptors could be taken: %s", error.strerror)
            return
        link.setblocking(False)
        if not peer_of(link).may_enter():
            link.close()
            return
        if not self._house.connections.has_room(link=True):
            with link, contextlib.suppress(OSError):
                self._refuse(link, "LimitReached", self._house.connections.refusal)
            return
        self._links[link] = set()
        loop = asyncio.get_running_loop()
        self._silent[link] = loop.call_later(self._patience, self._drop, link)
        loop.add_reader(link.fileno(), self._read, link)

    def _read(self, link: socket.socket) -> None:
        try:
            packet = link.recv(_MOST_REQUEST)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._drop(link)
            return
        try:
            self._answer(link, packet)
        except OSError:  # it does not read, or is gone
            self._drop(link)

    def _answer(self, link: socket.socket, packet: bytes) -> None:
        try:
            asked = wire_memory.fetches.decode(packet)
            if isinstance(asked, wire_memory.Unmapped):
                self._unmapped.add(link)
                return
            self._unmapped.discard(link)
            session = self._house.session(asked.token)
            if session is None:
                raise JoinRefused("the token is no living session's: it is wrong, or that session has ended")
            if len(self._links[link]) >= self._house.config.limits.sessions and session.watch not in self._links[link]:
                raise LimitReached("too many sessions on one connection")
            opened, names = self._open()
        except msgspec.MsgspecError as error:
            self._refuse(link, "InvalidFrame", str(error))
            return
        except TierCacheError as error:
            self._refuse(link, type(error).__name__, str(error))
            return
        try:
            house = self._house.cache
            writable = [memory.descriptor for memory in house.memory]
            socket.send_fds(link, [wire.encoder.encode(wire_memory.Handed(names))], [*opened, *writable])
        finally:
            for descriptor in opened:
                os.close(descriptor)
        self._heard(link)
        if session.watch not in self._links[link]:
            self._links[link].add(session.watch)
            session.watch.link()

    def _open(self) -> tuple[list[int], list[str]]:
        """Return new read-only descriptors, and the names of all that are handed out: these, then the writable ones."""
        cache = self._house.cache
        generations = cache.generations
        if generations is None:
            raise Closed("no tier of this daemon can be mapped")
        sources = [generations, *cache.memory]
        opened: list[int] = []
        try:
            for memory in sources:
                opened.append(memory.open_readonly())  # noqa: PERF401 - what is open already is to be closed on failure
        except BaseException:
            for descriptor in opened:
                os.close(descriptor)
            raise
        count = len(cache.memory)
        return opened, [
            wire_memory.GENERATIONS,
            *(wire_memory.memory_name(number, writable=False) for number in range(count)),
            *(wire_memory.memory_name(number, writable=True) for number in range(count)),
        ]

    def _refuse(self, link: socket.socket, kind: str, message: str) -> None:
        link.send(wire.encoder.encode(wire.Failed(id=0, kind=kind, message=message)))

    def _heard(self, link: socket.socket) -> None:
        """Let the connection stand, however long it says nothing now: its end will say something."""
        timer = self._silent.pop(link, None)
        if timer is not None:
            timer.cancel()

    def _drop(self, link: socket.socket) -> None:
        self._heard(link)
        asyncio.get_running_loop().remove_reader(link.fileno())
        link.close()
        unmapped = link in self._unmapped
        self._unmapped.discard(link)
        for watch in self._links.pop(link):
            watch.unlink(unmapped=unmapped)
