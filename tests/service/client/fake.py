"""A daemon of few words: real sockets, real shared memory, and answers that a test writes.

It keeps no books. By default it says what a daemon with nothing in its cache would; a test replaces the answer to a kind of
request with another frame, with bytes that are none, or with silence (None).
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import WSMsgType, web
from numpy.typing import NDArray

from tests.oracle import oracle_kv
from tiercache.kernels.host import gather_tokens
from tiercache.service import wire, wire_memory
from tiercache.spec import KVSpec, Namespace
from tiercache.storage.checksum import checksum
from tiercache.storage.layouts import block_first, block_first_slot_bytes, layer_first
from tiercache.storage.memory import HostMemory

SPEC = KVSpec(layers=4, kv_heads=1, head_dim=32, dtype="float16", block_size=16)
SPACE = Namespace(model="m", weights="sha256:1")
SIZE = SPEC.block_size
SLOTS = 16
PATIENCE = 30.0
"""Seconds after which what a test waits for never comes."""

Answer = Callable[[Any], "bytes | wire.Reply | Sequence[wire.Reply | wire.Notice] | None"]


async def turn() -> None:
    """Let everything run that can."""
    await asyncio.sleep(0)


async def until(true: Callable[[], bool]) -> None:
    """Wait until something has become true."""
    async with asyncio.timeout(PATIENCE):
        while not true():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.001)


class FakeDaemon:
    """One arena of `SLOTS` slots of `SPEC`, at `path`; `asked` lists all requests."""

    def __init__(self, directory: Path, *, layout: str = "block-first", boot: bytes = b"boot 1") -> None:
        self.path = directory / "s"
        self.descriptors = directory / "d"
        self.address = f"unix://{self.path}"
        self.peers = 0
        self.unmapped = 0
        """How many of those that went said that they touch nothing any more."""
        self.boot = boot
        self.limits = {"tokens": 1 << 20}
        self.memory = HostMemory(SLOTS * block_first_slot_bytes(SPEC.geometry))
        self.pages = HostMemory(4096)
        self.generations: NDArray[np.uint32] = self.pages.array.view(np.uint32)
        self.lay_out(layout)
        self.asked: list[wire.Request] = []
        self.arrived = asyncio.Condition()
        self.answers: dict[type, Answer] = {}
        self.sockets: set[web.WebSocketResponse] = set()
        self.received = 0

    def lay_out(self, layout: str) -> None:
        """Have slots of this layout from now on."""
        self.layout = layout
        self.slots = (block_first if layout == "block-first" else layer_first)(self.memory.array, SPEC.geometry)

    def close(self) -> None:
        """Let go of the memory."""
        del self.slots, self.generations
        self.memory.close()
        self.pages.close()

    def arena(self) -> wire.ArenaAt:
        """Return where the slots lie."""
        return wire.ArenaAt("DRAM", self.layout, 0, 0, self.memory.size, SLOTS, 0)

    # --- what a test says -------------------------------------------------------------------------------------------------

    def fill(self, tokens: Sequence[int], slots: Sequence[int]) -> bytes:
        """Put the oracle's blocks of `tokens` into slots; return their places, packed."""
        planes = oracle_kv(SPACE, SPEC, list(tokens))
        unit = SPEC.geometry.unit_bytes
        sums = []
        for number, slot in enumerate(slots):
            gather_tokens(planes[:, number * unit : (number + 1) * unit], self.slots[slot], 0, token_bytes=unit)
            sums.append(checksum(self.slots[slot]))
        return self.places(slots, sums)

    def places(self, slots: Sequence[int], sums: Sequence[int] | None = None) -> bytes:
        """Return the places of slots as they are now."""
        generations = self.generations[list(slots)].tolist()
        return wire.pack_places([0] * len(slots), list(slots), generations, sums or [0] * len(slots))

    def holds(self, tokens: Sequence[int], slots: Sequence[int], *, lifting: bool = False, told: bool = True) -> None:
        """Answer every match with these blocks."""
        packed = self.fill(tokens, slots)
        self.answers[wire.Match] = lambda asked: wire.Leased(
            id=asked.id,
            lease=asked.id,
            blocks=len(slots),
            tiers={"DRAM": len(slots)},
            lifting=lifting,
            places=packed if told else None,
        )
        self.answers[wire.Ready] = lambda asked: wire.Places(id=asked.id, places=packed)

    async def until(self, kind: type, count: int = 1) -> None:
        """Wait until so many requests of a kind have come."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: self.count(kind) >= count)

    def count(self, kind: type) -> int:
        """Return how many requests of a kind have come."""
        return sum(isinstance(request, kind) for request in self.asked)

    async def say(self, *frames: wire.Reply | wire.Notice | bytes) -> None:
        """Send frames unasked, to every session."""
        for each in self.sockets:
            for frame in frames:
                await each.send_bytes(frame if isinstance(frame, bytes) else wire.encoder.encode(frame))

    async def hang_up(self) -> None:
        """End all sessions."""
        for each in list(self.sockets):
            await each.close()

    # --- what a client sees -----------------------------------------------------------------------------------------------

    async def session(self, request: web.Request) -> web.WebSocketResponse:
        """Serve a session."""
        answer = web.WebSocketResponse(max_msg_size=0)
        await answer.prepare(request)
        self.sockets.add(answer)
        try:
            async for message in answer:
                if message.type is WSMsgType.BINARY:
                    self.received += len(message.data)
                    await self._hear(answer, wire.requests.decode(message.data))
        finally:
            self.sockets.discard(answer)
        return answer

    async def _hear(self, answer: web.WebSocketResponse, asked: wire.Request) -> None:
        self.asked.append(asked)
        async with self.arrived:
            self.arrived.notify_all()
        reply = self.answers[type(asked)](asked) if type(asked) in self.answers else self._plain(asked)
        for frame in reply if isinstance(reply, list | tuple) else [reply]:
            if frame is not None:
                await answer.send_bytes(frame if isinstance(frame, bytes) else wire.encoder.encode(frame))

    def _plain(self, asked: wire.Request) -> wire.Reply:
        match asked:
            case wire.Hello():
                return wire.Welcome(
                    id=asked.id,
                    version=wire.VERSION,
                    boot=self.boot,
                    session=1,
                    token=b"token",
                    descriptors=str(self.descriptors),
                    limits=self.limits,
                )
            case wire.Open():
                at = self.arena()
                return wire.Opened(id=asked.id, kv=1, tiers=[at.tier, "SSD"], arenas=[at])
            case wire.Match():
                return wire.Leased(id=asked.id, lease=asked.id, blocks=0, tiers={}, lifting=False, places=b"")
            case wire.Ready():
                return wire.Places(id=asked.id, places=b"")
            case wire.Reserve():
                return wire.Reserved(id=asked.id, reservation=asked.id, present=0, pending=0, places=b"")
            case wire.Check():
                return wire.Audited(id=asked.id, counts={}, faults=[])
            case wire.Commit() | wire.Flush() | wire.Prefetch() | wire.Pin() | wire.Delete() | wire.Clear() | wire.Covered():
                return wire.Count(id=asked.id, count=0)
            case _:
                return wire.Done(id=asked.id)

    async def hand_out(self, listener: socket.socket) -> None:
        """Serve descriptors."""
        loop = asyncio.get_running_loop()
        serving: set[asyncio.Task[None]] = set()
        try:
            while True:
                peer, _ = await loop.sock_accept(listener)
                serving.add(loop.create_task(self._hand_to(peer)))
        finally:
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)

    async def _hand_to(self, peer: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self.peers += 1
        with peer:
            while packet := await loop.sock_recv(peer, 4096):
                if isinstance(wire_memory.fetches.decode(packet), wire_memory.Unmapped):
                    self.unmapped += 1
                    continue
                own = [self.pages.open_readonly(), self.memory.open_readonly()]
                names = [
                    wire_memory.GENERATIONS,
                    wire_memory.memory_name(0, writable=False),
                    wire_memory.memory_name(0, writable=True),
                ]
                try:
                    socket.send_fds(peer, [wire.encoder.encode(wire_memory.Handed(names))], [*own, self.memory.descriptor])
                finally:
                    for descriptor in own:
                        os.close(descriptor)
        self.peers -= 1


@asynccontextmanager
async def serving(daemon: FakeDaemon) -> AsyncIterator[FakeDaemon]:
    """Serve a fake daemon's sockets."""
    application = web.Application()
    application.router.add_get(wire.SESSION_PATH, daemon.session)
    runner = web.AppRunner(application, handle_signals=False)
    await runner.setup()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    daemon.descriptors.unlink(missing_ok=True)
    listener.bind(str(daemon.descriptors))
    listener.listen(16)
    handing = asyncio.create_task(daemon.hand_out(listener))
    site = web.UnixSite(runner, str(daemon.path))
    await site.start()
    try:
        yield daemon
    finally:
        await daemon.hang_up()
        handing.cancel()
        await asyncio.gather(handing, return_exceptions=True)
        listener.close()
        await runner.cleanup()
        daemon.path.unlink(missing_ok=True)
