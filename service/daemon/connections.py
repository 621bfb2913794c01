"""How many connections stand at once, on all of the daemon's sockets together, and what one is told that is too many."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable
from typing import cast

from tiercache.errors import InvalidConfig

log = logging.getLogger(__name__)

_SPARE = 128
"""Descriptors for what is no connection: the disk's files, memory, the listening sockets, and what is open for a moment."""
_MOST_LINGERING = 32
"""Connections that were refused and are not closed yet; they are among what is spare."""
_LINGER = 1.0
"""Seconds for which one of them may yet ask for something."""


class Connections:
    """At most `most` connections. Each socket counts its own, and asks before it takes another one.

    `links` of them are kept for descriptors: a session that was let in is not to find its memory out of reach behind a crowd.
    """

    def __init__(self, most: int, links: int) -> None:
        self.most = most
        self._links = links
        self.refused = 0
        """How many were too many, in all."""
        self.lingering: set[Refusing] = set()
        """Those that were refused and are not closed yet."""
        self._counts: list[Callable[[], int]] = []
        self._count_links: Callable[[], int] = lambda: 0
        self._full = False

    @property
    def standing(self) -> int:
        """How many there are now."""
        return sum(count() for count in self._counts)

    def add(self, count: Callable[[], int], *, links: bool = False) -> None:
        """Let a socket's connections, as `count` says them, be among those that are bounded."""
        self._counts.append(count)
        if links:
            self._count_links = count

    def has_room(self, *, link: bool = False) -> bool:
        """Return whether one more, or one `link` for descriptors, may stand; one that may not is counted as refused."""
        kept = 0 if link else max(0, self._links - self._count_links())
        full = self.standing >= self.most - kept
        if full and not self._full:
            log.warning("connections are refused: %d stand", self.most)
        self._full = full
        self.refused += full
        return not full

    @property
    def refusal(self) -> str:
        """What one that is too many is told."""
        return f"too many connections; the limit is {self.most} (limits.connections), {self._links} of them for descriptors"


class Refusing(asyncio.Protocol):
    """Tells a connection, in HTTP, that it is one too many, and closes it.

    Who has not yet asked when it is closed may find that, and not the answer: so it is closed when it has asked, or after a
    moment. `lingering` are those that are waited for; when they are many, too, this one is closed at once.
    """

    def __init__(self, why: str, lingering: set[Refusing]) -> None:
        text = f"{why}\n".encode()
        head = f"HTTP/1.1 429 Too Many Requests\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(text)}\r\n"
        self._answer = f"{head}Retry-After: 1\r\nConnection: close\r\n\r\n".encode() + text
        self._lingering = lingering
        self._stream: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Answer before anything was asked: what is not read holds nothing."""
        self._stream = cast(asyncio.Transport, transport)  # it is one in all but name: uvloop's is no subclass
        self._stream.write(self._answer)
        if len(self._lingering) >= _MOST_LINGERING:
            self._stream.close()
            return
        self._lingering.add(self)
        self._timer = asyncio.get_running_loop().call_later(_LINGER, self._stream.close)

    def data_received(self, data: bytes) -> None:
        """Close: it has asked."""
        if self._stream is not None:
            self._stream.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._lingering.discard(self)
        if self._timer is not None:
            self._timer.cancel()


def require_descriptors(connections: int, sessions: int) -> None:
    """See to it that so many connections leave the rest of the daemon the descriptors that it needs.

    A session has one more than its connections, for its process. Where the process may have fewer, its own limit is raised.
    Raises InvalidConfig when it can't be raised that far: a flood of connections would end in a disk that can't be written.
    """
    need = connections + sessions + _SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < need:
        raise InvalidConfig(
            f"limits.connections: {connections} connections and {sessions} sessions need {need} descriptors; this process may have "
            f"{hard} (ulimit -Hn)",
            field="limits.connections",
            value=connections,
        )
    if soft != resource.RLIM_INFINITY and soft < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
