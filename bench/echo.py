"""The bare round trip: a server that answers so many bytes with so many, on the loop and the kind of socket of the daemon.

`python -m tiercache.bench.echo SOCKET` is the server. A request begins with its own length and that of the answer, eight bytes
each, little-endian; nothing else of it is looked at. No task, no stream, no copy that the loop does not make by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import cast

from tiercache.bench.served import environment, looped, python
from tiercache.service.demo.tether import tie_to

_HEAD = struct.Struct("<QQ")
_START = 30.0


class _Server(asyncio.Protocol):
    """Counts a request's bytes and answers."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._left = 0
        self._answer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        if not self._left:
            self._left, size = _HEAD.unpack_from(data)
            if size != len(self._answer):
                self._answer = bytes(size)
        self._left -= len(data)
        if self._left <= 0:
            self._transport.write(self._answer)


class Echo(asyncio.Protocol):
    """One connection with the server: `ask` sends a request and waits for all of the answer."""

    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._left = 0
        self._answered: asyncio.Future[None] | None = None
        self._requests: dict[tuple[int, int], bytes] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        """Count the answer's bytes."""
        self._left -= len(data)
        if self._left <= 0 and self._answered is not None:
            self._answered.set_result(None)
            self._answered = None

    async def ask(self, sent: int, received: int) -> None:
        """Send `sent` bytes, 16 at least, and wait for `received` of them."""
        assert self._transport is not None
        request = self._requests.get((sent, received))
        if request is None:
            request = self._requests[sent, received] = _HEAD.pack(sent, received) + bytes(sent - _HEAD.size)
        self._left = received
        answered = self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await answered

    def close(self) -> None:
        """End the connection."""
        assert self._transport is not None
        self._transport.close()


@contextmanager
def serving() -> Iterator[Path]:
    """Run the server in a process of its own for as long as the block lasts; gives its socket."""
    with tempfile.TemporaryDirectory(prefix="tcb") as place:
        path = Path(place) / "e"
        process = subprocess.Popen(python("-m", "tiercache.bench.echo", str(os.getpid()), str(path)), env=environment())
        try:
            end = time.monotonic() + _START
            while not path.exists():
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError("the echo server did not start")
                time.sleep(0.005)
            yield path
        finally:
            process.terminate()
            process.wait()


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[Echo]:
    """Connect to the server at `path`."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):  # bound, and not listening yet
            _, echo = await asyncio.get_running_loop().create_unix_connection(Echo, str(path))
            break
    try:
        yield echo
    finally:
        echo.close()


async def _serve(path: str) -> None:
    server = await asyncio.get_running_loop().create_unix_server(_Server, path)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        tie_to(int(sys.argv[1]))
        looped(lambda: _serve(sys.argv[2]))
