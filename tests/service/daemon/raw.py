"""A client with nothing between it and the wire: frames as they are, descriptors as they come."""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import aiohttp
import msgspec
import numpy as np

from tests.oracle import Bytes, oracle_kv
from tests.seams import Rig
from tests.service.caches import SPACE, SPEC, small
from tiercache.config import Config
from tiercache.keys import pack_tokens
from tiercache.service import wire, wire_memory
from tiercache.service.address import beside
from tiercache.service.daemon.daemon import Daemon
from tiercache.spec import KVSpec, Namespace
from tiercache.storage.checksum import checksum
from tiercache.storage.layouts import block_first, layer_first

R = TypeVar("R")
PATIENCE = 20.0
"""Seconds after which a test that waits for what never comes gives up. No test waits that long on purpose."""


def names_in(folder: Path) -> list[str]:
    """Return what lies in a folder."""
    return sorted(os.listdir(folder))


def packed(tokens: Sequence[int]) -> bytes:
    """Return token ids as they go over the wire."""
    return pack_tokens(tokens, limit=1 << 26)


def whole(tokens: Sequence[int], *, number: int = 1) -> wire.Prompt:
    """Return a prompt that says all of its tokens."""
    return wire.Prompt(number, None, 0, packed(tokens))


class Handed(NamedTuple):
    """Descriptors by name, and the connection that brought them."""

    link: socket.socket
    names: dict[str, int]

    def close(self) -> None:
        """Close all. May be called twice."""
        if self.link.fileno() >= 0:
            self.link.close()
            for descriptor in self.names.values():
                os.close(descriptor)


class Raw:
    """One session, or the beginning of one."""

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self.ws = ws
        self.notices: deque[wire.Notice] = deque()
        self.handed: list[Handed] = []
        self._numbers = itertools.count(1)
        self.welcome: wire.Welcome

    async def send(self, kind: type[wire.Request], **fields: Any) -> int:
        """Send a request and return its number."""
        number = next(self._numbers)
        await self.ws.send_bytes(wire.encoder.encode(kind(id=number, **fields)))
        return number

    async def frame(self) -> wire.Reply | wire.Notice:
        """Return the next frame."""
        async with asyncio.timeout(PATIENCE):
            return wire.answers.decode(await self.ws.receive_bytes())

    async def reply(self, number: int) -> wire.Reply:
        """Return the reply to a request; what comes before it must be notices."""
        while True:
            frame = await self.frame()
            if isinstance(frame, wire.Reply):
                assert frame.id == number, f"{frame} where the reply to {number} was due"
                return frame
            self.notices.append(frame)

    async def notice(self) -> wire.Notice:
        """Return the next notice."""
        if self.notices:
            return self.notices.popleft()
        frame = await self.frame()
        assert not isinstance(frame, wire.Reply), frame
        return frame

    async def call(self, expected: type[R], kind: type[wire.Request], **fields: Any) -> R:
        """Send a request and return its reply, which must be of type `expected`."""
        answer = await self.reply(await self.send(kind, **fields))
        assert isinstance(answer, expected), answer
        return answer

    async def refused(self, kind: type[wire.Request], **fields: Any) -> str:
        """Send a request that must fail and return the kind of its error."""
        return (await self.call(wire.Failed, kind, **fields)).kind

    async def garbage(self, data: bytes) -> wire.Failed:
        """Send bytes and return the error that is the answer."""
        await self.ws.send_bytes(data)
        answer = await self.frame()
        assert isinstance(answer, wire.Failed), answer
        return answer

    async def hello(self, join: bytes | None = None) -> wire.Welcome:
        """Begin the session."""
        self.welcome = await self.call(wire.Welcome, wire.Hello, version=wire.VERSION, join=join)
        return self.welcome

    async def open(self, space: Namespace = SPACE, spec: KVSpec = SPEC) -> wire.Opened:
        """Open a namespace."""
        return await self.call(
            wire.Opened, wire.Open, namespace=msgspec.to_builtins(space), spec=msgspec.to_builtins(spec), shard=0
        )

    async def ended(self) -> bool:
        """Wait until the daemon has closed the session; return whether it did it by the rules."""
        async with asyncio.timeout(PATIENCE):
            while True:
                message = await self.ws.receive()
                if message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSING):
                    return message.type is aiohttp.WSMsgType.CLOSE
                if message.type is aiohttp.WSMsgType.ERROR:
                    return False


async def fetched(raw: Raw, *, token: bytes | None = None) -> Handed:
    """Fetch the descriptors of a session; none when they are refused. They are closed with the session's connection at last."""
    loop = asyncio.get_running_loop()
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    await loop.sock_connect(link, raw.welcome.descriptors)
    await loop.sock_sendall(link, wire.encoder.encode(wire_memory.Fetch(token if token is not None else raw.welcome.token)))
    readable = asyncio.Event()
    loop.add_reader(link, readable.set)
    async with asyncio.timeout(PATIENCE):
        await readable.wait()
    loop.remove_reader(link)
    packet, descriptors, _, _ = socket.recv_fds(link, 65536, wire_memory.MOST_DESCRIPTORS)
    answer = wire_memory.handed.decode(packet)
    names = answer.names if isinstance(answer, wire_memory.Handed) else []
    handed = Handed(link, dict(zip(names, descriptors, strict=True)))
    raw.handed.append(handed)
    return handed


def slots_of(handed: Handed, at: wire.ArenaAt, spec: KVSpec = SPEC, *, writable: bool = False) -> Bytes:
    """Map an arena and return its slots, `[slots, planes, unit_bytes]`."""
    descriptor = handed.names[wire_memory.memory_name(at.memory, writable=writable)]
    mode = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    memory = np.frombuffer(mmap.mmap(descriptor, 0, prot=mode), np.uint8)[at.offset : at.offset + at.length]
    lay_out = {"block-first": block_first, "layer-first": layer_first}[at.layout]
    return lay_out(memory, spec.geometry)


def blocks_of(tokens: Sequence[int], *, space: Namespace = SPACE, spec: KVSpec = SPEC) -> list[Bytes]:
    """Return the bytes of each whole block of a prompt, `[planes, unit_bytes]`."""
    planes = oracle_kv(space, spec, list(tokens))
    unit = spec.geometry.unit_bytes
    return [np.ascontiguousarray(planes[:, at : at + unit]) for at in range(0, planes.shape[1] // unit * unit, unit)]


async def stored(raw: Raw, opened: wire.Opened, handed: Handed, tokens: Sequence[int], **fields: Any) -> int:
    """Reserve, write and commit the blocks of a prompt that are not there; return how many were committed."""
    room = await raw.call(wire.Reserved, wire.Reserve, kv=opened.kv, prompt=whole(tokens), **fields)
    sums = fill(opened, handed, room, tokens)
    done = await raw.call(
        wire.Count, wire.Commit, reservation=room.reservation, upto=len(sums), checksums=np.array(sums, "<u8").tobytes()
    )
    await raw.call(wire.Done, wire.Close, reservation=room.reservation)
    return done.count


def fill(opened: wire.Opened, handed: Handed, room: wire.Reserved, tokens: Sequence[int]) -> list[int]:
    """Write reserved slots and return the checksums."""
    sums = []
    for place, block in zip(wire.unpack_places(room.places), blocks_of(tokens)[room.present :], strict=False):
        slot = slots_of(handed, opened.arenas[place.position], writable=True)[place.slot]
        slot[:] = block
        sums.append(checksum(slot))
    return sums


def are_exact(opened: wire.Opened, handed: Handed, places: bytes, tokens: Sequence[int]) -> int:
    """Compare the blocks at `places` with what they must be; return how many there are."""
    found = wire.unpack_places(places)
    for place, block in zip(found, blocks_of(tokens), strict=False):
        assert np.array_equal(slots_of(handed, opened.arenas[place.position])[place.slot], block)
    return len(found)


@asynccontextmanager
async def daemon_of(folder: Path, config: Config | None = None, rig: Rig | None = None) -> AsyncIterator[Daemon]:
    """A daemon in this process, whose books must be right in the end."""
    rig = rig or Rig()
    async with Daemon(config or small(), folder / "d.sock", seams=rig.seams()) as daemon:
        yield daemon
        rig.release()
        await daemon.cache.check()


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[Raw]:
    """A connection that has not said hello."""
    connector = aiohttp.UnixConnector(path=str(path))
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        http.ws_connect(f"http://daemon{wire.SESSION_PATH}", max_msg_size=0) as ws,
    ):
        raw = Raw(ws)
        try:
            yield raw
        finally:
            for handed in raw.handed:
                handed.close()


@asynccontextmanager
async def session_at(path: Path, *, join: bytes | None = None) -> AsyncIterator[Raw]:
    """A session."""
    async with connected(path) as raw:
        await raw.hello(join)
        yield raw


def descriptors_path(path: Path) -> Path:
    """Return where descriptors are handed out beside the socket at `path`."""
    return beside(path, ".fd")
