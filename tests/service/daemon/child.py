"""A client in a process of its own: `child.py SOCKET PHASE MAPPED`. It goes as far as PHASE, says so, and waits to be killed.

Phases: hello, match, in-place, reserve, write (in the middle of a block), commit. A line on its standard input makes it drop
its session and live on. With MAPPED `yes` it fetches descriptors, and keeps that connection.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import mmap
import os
import socket
import sys
from typing import Any

import aiohttp

from tiercache.keys import pack_tokens
from tiercache.service import wire, wire_memory

NAMESPACE = {"model": "m", "weights": "sha256:1"}
SPEC = {"layers": 4, "kv_heads": 1, "head_dim": 32, "dtype": "float16", "block_size": 16}
PLANE = 1024
"""Bytes of one plane of a block; in layer-first memory the first planes of all slots come first."""


async def main(path: str, phase: str, *, mapped: bool) -> None:
    """Go as far as `phase`."""
    held, new = (whole(json.loads(sys.stdin.readline())) for _ in range(2))
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=path)) as http,
        http.ws_connect(f"http://daemon{wire.SESSION_PATH}") as ws,
    ):
        numbers = itertools.count(1)

        async def call(kind: type[Any], **fields: Any) -> Any:
            await ws.send_bytes(wire.encoder.encode(kind(id=next(numbers), **fields)))
            while isinstance(frame := wire.answers.decode(await ws.receive_bytes()), wire.Notice):
                continue
            assert not isinstance(frame, wire.Failed), frame
            return frame

        welcome = await call(wire.Hello, version=wire.VERSION)
        opened = await call(wire.Open, namespace=NAMESPACE, spec=SPEC)
        link, memory = map_writable(welcome, opened) if mapped else (None, bytearray(1))

        async def go() -> None:
            if phase == "hello":
                return
            hit = await call(wire.Match, kv=opened.kv, prompt=held)
            if phase == "match":
                return
            await call(wire.InPlace, lease=hit.lease)
            if phase == "in-place":
                return
            room = await call(wire.Reserve, kv=opened.kv, prompt=new)
            if phase == "reserve":
                return
            if mapped:
                place = wire.unpack_places(room.places)[0]
                memory[place.slot * PLANE + 1] = 7
            if phase == "write":
                return
            await call(wire.Commit, reservation=room.reservation, upto=1, checksums=bytes(8))

        await go()
        print("there", flush=True)
        sys.stdin.readline()
    print("dropped", flush=True)
    sys.stdin.readline()
    del link


def map_writable(welcome: wire.Welcome, opened: wire.Opened) -> tuple[Any, Any]:
    """Map the first tier to be written; return the connection that brought it, to be kept, and the bytes."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(welcome.descriptors)
    link.send(wire.encoder.encode(wire_memory.Fetch(welcome.token)))
    packet, descriptors, _, _ = socket.recv_fds(link, 65536, wire_memory.MOST_DESCRIPTORS)
    names = wire_memory.handed.decode(packet)
    assert isinstance(names, wire_memory.Handed)
    wanted = names.names.index(wire_memory.memory_name(opened.arenas[0].memory, writable=True))
    memory = mmap.mmap(descriptors[wanted], 0)
    for descriptor in descriptors:
        os.close(descriptor)
    return link, memory


def whole(tokens: list[int]) -> wire.Prompt:
    """Return a prompt that says all of its tokens."""
    return wire.Prompt(tokens[0] % 1000, None, 0, pack_tokens(tokens, limit=1 << 20))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], mapped=sys.argv[3] == "yes"))
