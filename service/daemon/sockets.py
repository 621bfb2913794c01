"""The daemon's two sockets on disk: nobody else's from the first instant, and never another daemon's."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import Self

from tiercache.errors import SocketRefused
from tiercache.service.address import DESCRIPTORS_SUFFIX, LOCK_SUFFIX, beside
from tiercache.storage.directory import make_private

_MODE = 0o600
_BACKLOG = 128


class Sockets:
    """Two listening sockets under one name, made by `open`: `sessions`, a stream, and `descriptors`, of packets.

    A lock on a file beside them belongs to the daemon that lives: who gets it may replace what a dead one left, and nobody else
    looks at the sockets themselves, so that two daemons that start at once can't both replace them.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self._bound: list[tuple[Path, os.stat_result]] = []
        self.sessions = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self.descriptors = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Take the lock beside `path` and bind both sockets, with mode 0600 whatever the umask is.

        Makes the folder, for this user alone, where there is none. Raises SocketRefused, naming the path, when a daemon lives
        there, when what lies there is no socket, or when the folder can't be used.
        """
        try:
            make_private(path.parent)
            _require_own(path.parent)
            lock = _lock(beside(path, LOCK_SUFFIX))
        except OSError as error:
            raise SocketRefused(f"{path}: {error.strerror}", path=str(path), errno=error.errno) from error
        found = cls(path, lock)
        try:
            found._bind(found.sessions, path)
            found._bind(found.descriptors, beside(path, DESCRIPTORS_SUFFIX))
        except OSError as error:
            found.close()
            raise SocketRefused(f"{path}: {error.strerror}", path=str(path), errno=error.errno) from error
        except BaseException:
            found.close()
            raise
        return found

    def _bind(self, listener: socket.socket, path: Path) -> None:
        _make_way(path, listener.type)
        # The file gets the descriptor's mode less the umask: there is no moment in which others could connect.
        os.fchmod(listener.fileno(), _MODE)
        listener.bind(os.fspath(path))
        self._bound.append((path, os.lstat(path)))
        os.chmod(path, _MODE)  # a umask that takes from the owner, too
        listener.listen(_BACKLOG)

    def close(self) -> None:
        """Close both, remove their names unless they are another's by now, and let the lock go. May be called twice."""
        self.sessions.close()
        self.descriptors.close()
        for path, made in self._bound:
            try:
                if os.path.samestat(os.lstat(path), made):
                    path.unlink()
            except OSError:
                continue  # gone, or not ours to remove
        self._bound.clear()
        if self._lock >= 0:
            beside(self.path, LOCK_SUFFIX).unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = -1


def _require_own(folder: Path) -> None:
    """Refuse a folder where others could put a socket in the place of ours."""
    found = folder.stat()
    writable = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    if found.st_uid not in (os.getuid(), 0) or writable:
        raise SocketRefused(f"{folder}: others than this user can change the folder of the socket", path=str(folder))


def _lock(path: Path) -> int:
    """Return a descriptor that holds the lock at `path`."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _MODE)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Who ends removes the file while it holds the lock: a lock on a file without that name locks nobody out.
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise SocketRefused(f"{path.with_suffix('')}: a daemon lives there", path=str(path.with_suffix(""))) from error
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _make_way(path: Path, kind: int) -> None:
    """Remove the socket that a dead daemon left at `path`."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketRefused(f"{path}: what lies there is no socket", path=str(path))
    with socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:
            pass  # it lives, and has much to do
        except ConnectionRefusedError:
            path.unlink()
            return
    raise SocketRefused(f"{path}: another program listens there", path=str(path))
