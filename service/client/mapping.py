"""The daemon's memory in this process: descriptors by SCM_RIGHTS, mapped read-only, and reserved slots writable.

Nothing here can end in a signal. The memory is memfds that can't shrink, so a mapping outlives the daemon; and a mapping goes
with the last array that looks into it, never before.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from tiercache.service import wire, wire_memory
from tiercache.spec import Geometry
from tiercache.storage.layouts import (
    SLOT_ALIGNMENT,
    SlotPlanes,
    block_first,
    block_first_capacity,
    block_first_slot_bytes,
    layer_first,
    layer_first_capacity,
)

Bytes = NDArray[np.uint8]
Grip = object
"""What a view keeps alive; its end is noticed by weak references."""

_MOST_PACKET = 64 * 1024
_UNMAPPED = wire.encoder.encode(wire_memory.Unmapped())
_LAYOUTS: dict[str, tuple[Callable[[Bytes, Geometry], SlotPlanes], Callable[[Geometry, int], int]]] = {
    "block-first": (block_first, block_first_capacity),
    "layer-first": (layer_first, layer_first_capacity),
}


class Ending(Protocol):
    """Who is told that a session has ended."""

    def end(self) -> None:
        """The session has ended."""
        ...


class Memory:
    """What one session was handed: descriptors, and the connection they came by.

    That connection is open for as long as an array looks into the memory, because its end tells the daemon that nobody does.
    Methods raise OSError for what the daemon did not hand over or can't be mapped.
    """

    def __init__(self, channel: socket.socket, boot: bytes) -> None:
        self.boot = boot
        """Which run of the daemon it is of."""
        self._channel = channel
        self._descriptors: dict[str, int] = {}
        self._maps: dict[str, Bytes] = {}
        self._ends: weakref.WeakSet[Ending] = weakref.WeakSet()
        self._shut = weakref.finalize(self, _shut, channel, self._descriptors, os.getpid())
        self._shut.atexit = False

    @property
    def channel(self) -> int:
        """The descriptor of the connection."""
        return self._channel.fileno()

    @classmethod
    async def connect(cls, path: str, boot: bytes) -> Memory:
        """Connect to the socket of descriptors at `path`, which a run of the daemon has named."""
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            await asyncio.get_running_loop().sock_connect(channel, path)
        except BaseException:
            channel.close()
            raise
        return cls(channel, boot)

    async def fetch(self, token: bytes) -> int:
        """Ask for the descriptors of a session and keep those that are new; return how many bytes went to and fro."""
        loop = asyncio.get_running_loop()
        asked = wire.encoder.encode(wire_memory.Fetch(token))
        await loop.sock_sendall(self._channel, asked)
        await _until_readable(loop, self._channel)
        packet, descriptors, flags, _ = socket.recv_fds(
            self._channel, _MOST_PACKET, wire_memory.MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
        )
        try:
            self._keep(packet, descriptors, flags)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return len(asked) + len(packet)

    def has(self, at: wire.ArenaAt) -> bool:
        """Return whether the descriptors of an arena are here."""
        own = [] if at.layout == wire.DEVICE_LAYOUT else [wire_memory.memory_name(at.memory, writable=False)]
        return {wire_memory.GENERATIONS, *own} <= self._descriptors.keys()

    def generations(self, at: wire.ArenaAt) -> memoryview:
        """Return the generations of an arena's slots, by slot. Raises ValueError for what can't be."""
        pages = self.readable(wire_memory.GENERATIONS)
        if not (0 <= at.generations <= len(pages) - 4 * at.slots and at.generations % 4 == 0 and at.slots > 0):
            raise ValueError(f"{at.slots} generations are no part of what was mapped: {at}")
        # A memoryview's items cost half of what an array's do, and one is read after every copy.
        return pages.data[at.generations : at.generations + 4 * at.slots].cast("I")

    def tell_end(self, whom: Ending) -> None:
        """Let `whom` know when the session ends, if it still lives then."""
        self._ends.add(whom)

    def end(self) -> None:
        """Note the end of the session. What is mapped stays mapped while somebody looks into it."""
        for one in list(self._ends):
            one.end()

    def readable(self, name: str) -> Bytes:
        """Return all bytes of a descriptor, read-only."""
        if name not in self._maps:
            self._maps[name] = np.frombuffer(mmap.mmap(self._descriptor(name), 0, prot=mmap.PROT_READ), np.uint8)
        return self._maps[name]

    def writable(self, memory: int, offset: int, length: int, *, populate: bool = True) -> Bytes:
        """Return bytes of a memory to be written; `offset` lies on a page. Each call maps anew.

        `populate` enters the pages at once: one by one, as they are first written, they cost more than the copy.
        """
        descriptor = self._descriptor(wire_memory.memory_name(memory, writable=True))
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        return np.frombuffer(mmap.mmap(descriptor, length, flags=flags, offset=offset), np.uint8)

    def _keep(self, packet: bytes, descriptors: Sequence[int], flags: int) -> None:
        if not packet or flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            raise ConnectionError("the daemon handed no descriptors over")
        try:
            answer = wire_memory.handed.decode(packet)
        except msgspec.MsgspecError as error:
            raise ConnectionError(f"the answer with descriptors can't be read: {error}") from error
        if isinstance(answer, wire.Failed):
            raise ConnectionError(f"descriptors were refused: {answer.kind}: {answer.message}")
        if len(answer.names) != len(descriptors):
            raise ConnectionError(f"{len(answer.names)} descriptors were announced, {len(descriptors)} came")
        for name, descriptor in zip(answer.names, descriptors, strict=True):
            if name not in self._descriptors:
                self._descriptors[name] = os.dup(descriptor)

    def _descriptor(self, name: str) -> int:
        if name not in self._descriptors:
            raise ConnectionError(f"the daemon handed no descriptor of {name!r} over")
        return self._descriptors[name]


class Slots(Protocol):
    """One tier's slots, wherever they lie."""

    @property
    def capacity(self) -> int:
        """How many there are."""
        ...

    @property
    def generations(self) -> memoryview:
        """The generation of each, as it is now."""
        ...


class Arena:
    """One tier's slots as this process sees them: `slots[slot]` is `[planes, unit_bytes]`, read-only.

    Raises ValueError if what the daemon says of the arena can't be.
    """

    def __init__(self, memory: Memory, at: wire.ArenaAt, geometry: Geometry) -> None:
        if at.layout not in _LAYOUTS:
            raise ValueError(f"the layout {at.layout!r} is not known")
        lay_out, capacity = _LAYOUTS[at.layout]
        whole = memory.readable(wire_memory.memory_name(at.memory, writable=False))
        inside = at.offset >= 0 and at.length >= 0 and at.offset + at.length <= len(whole) and at.offset % SLOT_ALIGNMENT == 0
        if not inside or not 0 < at.slots <= capacity(geometry, at.length):
            raise ValueError(f"{at.slots} slots of {geometry.block_bytes} bytes are no part of what was mapped: {at}")
        self._memory = memory
        self._at = at
        self._geometry = geometry
        self._lay_out = lay_out
        self._whole: SlotPlanes | None = None
        self.readable = whole[at.offset : at.offset + at.length]
        """All of its bytes, read-only, from the first slot on."""
        self.slots = lay_out(self.readable, geometry)
        self.capacity = at.slots
        self.generations = memory.generations(at)

    @property
    def memory(self) -> Memory:
        """What the arena lies in."""
        return self._memory

    @property
    def slot_bytes(self) -> int | None:
        """The distance between two slots, each in one piece; None where the planes of a slot lie among those of others."""
        return block_first_slot_bytes(self._geometry) if self._at.layout == "block-first" else None

    def writable(self, slots: Sequence[int]) -> list[Bytes]:
        """Return reserved slots in place, each `[planes, unit_bytes]`; they stay mapped as long as one of the arrays lives.

        Block-first, only these slots are mapped, a run of neighbours at once. Layer-first, where the planes of a slot lie among
        those of all others, it is the arena. Raises OSError.
        """
        if self._at.layout == "layer-first":
            planes = self._writable_arena()
            return [planes[slot] for slot in slots]
        stride = block_first_slot_bytes(self._geometry)
        found: dict[int, Bytes] = {}
        for first, count in _runs(sorted(slots)):
            run = self._memory.writable(self._at.memory, self._at.offset + first * stride, count * stride)
            found.update(zip(range(first, first + count), block_first(run, self._geometry), strict=True))
        return [found[slot] for slot in slots]

    def _writable_arena(self) -> SlotPlanes:
        if self._whole is None:
            region = self._memory.writable(self._at.memory, self._at.offset, self._at.length, populate=False)
            self._whole = self._lay_out(region, self._geometry)
        return self._whole

    def in_place(self, slot: int, low: int, high: int, grip: Grip) -> Bytes:
        """Return planes `low` to `high` of a slot; what is made of the array keeps `grip` and the memory alive."""
        planes = self.slots[slot][low:high]
        return np.asarray(_Held(planes, (grip, self._memory)))


class _Held:
    """An array's memory together with what must live as long as somebody looks into it.

    numpy keeps the object that an array was made of, through every slice and through torch's tensors; an attribute of an array
    would be lost with its first slice.
    """

    def __init__(self, planes: Bytes, kept: object) -> None:
        self._kept = planes, kept
        # torch has no read-only tensors and warns of each. The mapping itself refuses writes.
        self.__array_interface__ = {**planes.__array_interface__, "data": (planes.__array_interface__["data"][0], False)}


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """Return runs of neighbours in ascending slots, as first slot and count."""
    starts = [0, *(place for place, (left, right) in enumerate(pairwise(slots), 1) if right != left + 1), len(slots)]
    return [(slots[low], high - low) for low, high in pairwise(starts)] if slots else []


async def _until_readable(loop: asyncio.AbstractEventLoop, channel: socket.socket) -> None:
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(channel, _wake, ready)
    try:
        await ready
    finally:
        loop.remove_reader(channel)


def _wake(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _shut(channel: socket.socket, descriptors: dict[str, int], pid: int) -> None:
    if os.getpid() == pid:  # a forked child has no say in what its parent's device does
        with contextlib.suppress(OSError):
            channel.send(_UNMAPPED)
    channel.close()
    for descriptor in descriptors.values():
        os.close(descriptor)
