"""The admin part on TCP: an address, and a token that not everybody knows."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

from tiercache.config import Config
from tiercache.errors import InvalidConfig, SocketRefused

_LEAST_TOKEN = 16


def token_of(config: Config) -> str | None:
    """Return the bearer token that `admin_token_file` holds, None without one.

    Raises InvalidConfig when the file can't be read, can be read by others, or holds no token of at least 16 characters.
    """
    if config.admin_token_file is None:
        return None
    path = Path(config.admin_token_file).expanduser()
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            token = file.read(4096).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"admin_token_file: {path}: {error}", field="admin_token_file", value=str(path)) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise InvalidConfig(
            f"admin_token_file: {path} has mode {stat.S_IMODE(mode):04o}; others must have no part in it (0600)",
            field="admin_token_file",
            value=str(path),
        )
    if len(token) < _LEAST_TOKEN:
        raise InvalidConfig(
            f"admin_token_file: {path} must hold a token of at least {_LEAST_TOKEN} characters",
            field="admin_token_file",
            value=str(path),
        )
    return token


def open_tcp(address: str) -> socket.socket:
    """Return a socket bound to `address`, as `host:port`. Raises SocketRefused."""
    host, _, port = address.rpartition(":")
    try:
        [(family, kind, protocol, _, place), *_] = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise SocketRefused(f"admin: {address}: {error.strerror or error}", address=address, errno=error.errno) from error
    return listener
