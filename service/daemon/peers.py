"""Who is at the other end of a Unix socket, and when that process can't touch our memory any more."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from typing import NamedTuple

_CREDENTIALS = struct.Struct("3i")
_SO_PEERPIDFD = 77
"""Linux 6.5: a pidfd of the process that connected, also where its number has been given to another one since."""


class Peer(NamedTuple):
    """The process that connected; `pid` is 0 where it lives in another PID namespace."""

    pid: int
    uid: int

    def may_enter(self) -> bool:
        """Return whether it is of this user, or root."""
        return self.uid in (os.getuid(), 0)


def connection_of(transport: asyncio.Transport) -> socket.socket:
    """Return the transport's socket, duplicated, for the caller to close: not every loop's own can be asked for credentials."""
    return socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))


def peer_of(connection: socket.socket) -> Peer:
    """Return who connected."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return Peer(pid, uid)


def pidfd_of(connection: socket.socket) -> int | None:
    """Return a pidfd of the process that connected, for the caller to close; None where the system gives none."""
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass
    pid = peer_of(connection).pid
    try:
        return os.pidfd_open(pid) if pid else None
    except OSError:
        return None


class Watch:
    """What one session's process may still touch, from the session's end until it no longer can.

    While a connection for descriptors was open for the session, its end decides: the kernel closes it after the process's
    memory is gone, a client that lives closes it after its last mapping, and a forked child that inherited the mappings
    inherited the connection, too. Without one the process itself is watched, by `pidfd`. Without that, `grace` seconds pass.

    Where a device works for the process (`on_device`), an end of the connection that was not announced is no more than the death of
    the process, whose device may go on until the driver has closed what it had open: then `pidfd` decides as well.

    A watch belongs to the loop's thread.
    """

    def __init__(self, pidfd: int | None, *, grace: float) -> None:
        self._pidfd = pidfd
        self._grace = grace
        self._links = 0
        self._linked = False
        self._unmapped = True
        self.on_device = False
        """Whether slots that the process may write lie on a device."""
        self._calls: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self.over = asyncio.Event()
        """Set when nothing is kept back, any more or at all."""

    def link(self) -> None:
        """Note that a connection for descriptors stands."""
        self._links += 1
        self._linked = True

    def unlink(self, *, unmapped: bool = False) -> None:
        """Note that one has ended, and whether the process had said that no device works for it any more."""
        self._links -= 1
        self._unmapped = self._unmapped and unmapped
        if self._calls and not self._links:
            if self._pidfd is None:
                self._wait()
            elif self._may_go_on:
                self._watch(self._pidfd)
            else:
                self._ended()

    def begin(self, calls: list[Callable[[], None]]) -> None:
        """Call each of `calls` when the process can't touch anything any more: at once, or later. To be called once."""
        self._calls = calls
        if not calls:
            self.close()
        elif self._linked:
            if not self._links and not self._may_go_on:
                self._ended()
            elif not self._links and self._pidfd is not None:
                self._watch(self._pidfd)
            elif not self._links:
                self._wait()
        elif self._pidfd is not None:
            self._watch(self._pidfd)
        else:
            self._wait()

    @property
    def waiting(self) -> bool:
        """Whether something is still kept back."""
        return bool(self._calls)

    def close(self) -> None:
        """Watch no more, and call nothing. May be called twice."""
        self._calls = []
        self.over.set()
        if self._timer is not None:
            self._timer.cancel()
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    @property
    def _may_go_on(self) -> bool:
        return self.on_device and not self._unmapped

    def _watch(self, pidfd: int) -> None:
        asyncio.get_running_loop().add_reader(pidfd, self._ended)

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._grace, self._ended)

    def _ended(self) -> None:
        for call in self._calls:
            call()
        self.close()
