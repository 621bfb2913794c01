"""A device whose copies happen late: when somebody waits for an event, or when its owner says so, in an order that can be chosen.

Its memory is the host's. It keeps every promise of `tiercache.kernels.device` and no more: between two streams there is no order
but by events, what is enqueued reads its source when it is its turn, and memory that is gone by then is a fault that `wait` raises.
So what orders its copies wrongly is seen to do so, on any machine. It measures nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from tiercache.errors import InvalidTensor, MemoryRefused, StoreError
from tiercache.kernels import host
from tiercache.kernels.device import LEAST_EXPORT, Event, Memory, Pool, Stream, require_fork, require_slots, rows_of
from tiercache.kernels.host import Bytes, empty_bytes

POISON = 0xD7
"""What memory holds before anything is written to it."""
PATIENCE = 20.0
"""Seconds after which a wait that nobody ends fails."""


class LazyMemory:
    """Memory of the device in place: `bytes` hold what keeps them alive, `descriptor` is the memfd of what can be exported."""

    def __init__(self, memory: Bytes, descriptor: int | None = None) -> None:
        self.bytes = memory
        self.descriptor = descriptor
        if descriptor is not None:
            weakref.finalize(self, os.close, descriptor)

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.bytes)


class LazyEvent:
    """A point in a stream."""

    def __init__(self, device: LazyDevice) -> None:
        self._device = device
        self.happened = False

    def wait(self) -> None:
        """Do what work there is until the event has happened; while the device is held, wait for who does it."""
        self._device.wait_for(self)


class LazyShared:
    """Stands for an event between processes: the lazy device's work is done by this process alone, so recording it waits."""

    def __init__(self, device: LazyDevice, handle: bytes | None) -> None:
        self._device = device
        self._handle = handle or b"recorded"
        self.happened = True

    def handle(self) -> bytes:
        """Return a word."""
        return self._handle

    def record(self, stream: Stream) -> None:
        """Wait for the stream."""
        stream.record().wait()

    def wait(self) -> None:
        """Return: what its owner has told of has happened."""


class _Work:
    """Something enqueued: a copy, an event that happens, or an event without which the stream does not go on."""

    __slots__ = ("after", "call", "event", "needs")

    def __init__(
        self,
        call: Callable[[], None] | None = None,
        *,
        event: LazyEvent | None = None,
        after: LazyEvent | LazyShared | None = None,
        needs: Sequence[weakref.ref[Bytes]] = (),
    ) -> None:
        self.call, self.event, self.after, self.needs = call, event, after, needs


class LazyStream:
    """Work in order, none of it done when it is enqueued."""

    def __init__(self, device: LazyDevice) -> None:
        self._device = device
        self.work: deque[_Work] = deque()

    def gather(self, pool: Pool, slots: Sequence[int], into: Memory) -> None:
        """Enqueue the reference's gather of the blocks in `slots`."""
        require_slots(pool, slots)
        blocks = _part(into, 0, len(slots) * pool.planes * pool.unit_bytes).reshape(len(slots), pool.planes, pool.unit_bytes)
        chosen = list(slots)
        self._enqueue(lambda: host.gather(pool_array(pool), chosen, blocks), [])

    def scatter(self, source: Memory, pool: Pool, slots: Sequence[int], *, first: int, planes: int) -> None:
        """Enqueue the reference's scatter into planes of the blocks in `slots`."""
        require_slots(pool, slots)
        rows = _part(source, 0, len(slots) * planes * pool.unit_bytes).reshape(len(slots), planes, pool.unit_bytes)
        if first < 0 or planes < 1 or first + planes > pool.planes:
            raise InvalidTensor(f"planes {first} to {first + planes} of {pool.planes} do not exist", first=first, planes=planes)
        chosen = list(slots)
        self._enqueue(lambda: host.scatter(rows, pool_array(pool)[first : first + planes], chosen), [])

    def copy(self, pool: Pool, origins: Sequence[int], targets: Sequence[int]) -> None:
        """Enqueue a copy of whole blocks within the pool."""
        require_fork(pool, origins, targets)
        pairs = list(zip(origins, targets, strict=True))

        def copy() -> None:
            blocks = pool_array(pool)
            for origin, target in pairs:
                blocks[:, target] = blocks[:, origin]

        self._enqueue(copy, [])

    def read(self, source: Memory, at: int, into: Bytes) -> None:
        """Enqueue a copy to host memory."""
        device, (owner, rows) = _part(source, at, into.size), self._rows(into)

        def copy() -> None:
            for number, row in enumerate(rows(owner())):
                np.copyto(row, device[number * len(row) :][: len(row)])

        self._enqueue(copy, [owner])

    def write(self, source: Bytes, into: Memory, at: int) -> None:
        """Enqueue a copy from host memory."""
        device, (owner, rows) = _part(into, at, source.size), self._rows(source)

        def copy() -> None:
            for number, row in enumerate(rows(owner())):
                np.copyto(device[number * len(row) :][: len(row)], row)

        self._enqueue(copy, [owner])

    def call(self, work: Callable[[], None]) -> None:
        """Enqueue work of any kind, in the place of a kernel that is not the product's."""
        self._enqueue(work, [])

    def record(self) -> LazyEvent:
        """Record an event."""
        event = LazyEvent(self._device)
        with self._device.turn:
            self._device.recorded += 1
            self.work.append(_Work(event=event))
        return event

    def wait(self, event: Event) -> None:
        """Let the stream wait for an event; the caller does not."""
        assert isinstance(event, LazyEvent | LazyShared)
        with self._device.turn:
            self.work.append(_Work(after=event))

    def _rows(self, memory: Bytes) -> tuple[weakref.ref[Bytes], Callable[[Bytes | None], list[Bytes]]]:
        """Return who owns the memory, unheld, and what finds its rows there, as a device sees them: by their address."""
        count, length, distance = rows_of(memory)
        address = memory.__array_interface__["data"][0]
        self._device.require_pinned_whole(address, (count - 1) * distance + length)

        def rows(owner: Bytes | None) -> list[Bytes]:
            assert isinstance(owner, np.ndarray)
            flat = owner.reshape(-1).view(np.uint8)
            start = address - flat.__array_interface__["data"][0]
            return [flat[start + row * distance :][:length] for row in range(count)]

        return weakref.ref(_owner(memory)), rows

    def _enqueue(self, copy: Callable[[], None], needs: Sequence[weakref.ref[Bytes]]) -> None:
        with self._device.turn:
            self._device.enqueued += 1
        if self._device.fails_after is not None and self._device.enqueued > self._device.fails_after:
            raise StoreError("the device takes no more work", device=True)
        with self._device.turn:
            self.work.append(_Work(copy, needs=needs))


class LazyDevice:
    """All streams of one device. Work is done in an order drawn from `seed`, by whoever waits, unless it is `held`."""

    def __init__(self, seed: int) -> None:
        self.turn = threading.RLock()
        self.held = False
        """While true, a wait does no work: the owner does, by `step` and `run`."""
        self.enqueued = 0
        """Copies that were asked for."""
        self.recorded = 0
        """Events that were."""
        self.waited = 0
        """Times that a thread waited for an event."""
        self.fails_after: int | None = None
        """From which piece of work on enqueueing fails."""
        self.choose: Callable[[list[LazyStream]], LazyStream] = random.Random(seed).choice
        self.streams: list[LazyStream] = []
        self._adopted: dict[int, LazyStream] = {}
        self.allocated = 0
        """Bytes of what can be exported."""
        self.registered: list[tuple[int, int]] = []
        """Address and size of what is pinned."""
        self.most_registered: int | None = None
        """How many pieces can be pinned at once."""
        self._happened = threading.Condition(self.turn)
        self._broken: str | None = None

    name = "lazy"
    tensors = "cpu"
    uuid = b"the lazy device "

    def allocate(self, size: int) -> LazyMemory:
        """Return poisoned memory, that of a memfd where it is large enough to be exported."""
        if size < LEAST_EXPORT:
            memory = LazyMemory(empty_bytes(size))
        else:
            descriptor = os.memfd_create("tiercache-lazy", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, size)
            memory = LazyMemory(_mapped(descriptor, size), descriptor)
            self.allocated += size
            weakref.finalize(memory, self._freed, size)
        memory.bytes[:] = POISON
        return memory

    def pinned(self, *shape: int) -> Bytes:
        """Return poisoned host memory."""
        memory = empty_bytes(*shape)
        memory[...] = POISON
        return memory

    def register(self, memory: Bytes, *, readonly: bool = False) -> None:
        """Remember what is pinned.

        Raises MemoryRefused for one more than `most_registered`, and for memory that can't be written and is not said to be so.
        """
        if not memory.flags.writeable and not readonly:
            raise MemoryRefused(f"{memory.nbytes} bytes can't be pinned for writing: they are mapped read-only")
        if len(self.registered) == self.most_registered:
            raise MemoryRefused(f"{memory.nbytes} bytes can't be pinned")
        place = (memory.__array_interface__["data"][0], memory.nbytes)
        if any(place[0] < at + size and at < sum(place) for at, size in self.registered):
            raise MemoryRefused(f"{memory.nbytes} bytes are pinned already, or a part of them")
        self.registered.append(place)

    def unregister(self, memory: Bytes) -> None:
        """Undo `register`."""
        self.registered.remove((memory.__array_interface__["data"][0], memory.nbytes))

    def require_pinned_whole(self, address: int, size: int) -> None:
        """Raise StoreError for memory of which a part is pinned: a driver refuses what goes over the end of what it registered."""
        for at, length in self.registered:
            if address < at + length and at < address + size and not (at <= address and address + size <= at + length):
                raise StoreError(f"a copy of {size} bytes goes over the end of what was pinned by one call")

    def stream(self) -> LazyStream:
        """Return a new stream."""
        stream = LazyStream(self)
        self.streams.append(stream)
        return stream

    def adopt(self, pointer: int) -> LazyStream:
        """Return a stream of another library: there is one by each pointer."""
        with self.turn:
            if pointer not in self._adopted:
                self._adopted[pointer] = self.stream()
            return self._adopted[pointer]

    def _freed(self, size: int) -> None:
        self.allocated -= size

    def borrow(self, address: int, size: int, owner: object) -> LazyMemory:
        """Return host memory at an address in place."""
        return LazyMemory(np.asarray(_Held((ctypes.c_uint8 * size).from_address(address), owner)))

    def part(self, memory: Memory, at: int, size: int) -> LazyMemory:
        """Return a part of memory in place. Raises InvalidTensor."""
        return LazyMemory(np.asarray(_Held(_part(memory, at, size), memory)))

    def array(self, memory: Memory, *shape: int) -> Bytes:
        """Return memory in place as an array. Raises InvalidTensor."""
        return np.asarray(_Held(_part(memory, 0, int(np.prod(shape))).reshape(shape), memory))

    def export(self, memory: Memory) -> bytes:
        """Return where the memfd is found. Raises InvalidTensor for memory that has none."""
        if not isinstance(memory, LazyMemory) or memory.descriptor is None:
            raise InvalidTensor(f"{memory.size} bytes are no memory of their own: less than {LEAST_EXPORT} can't be exported")
        return f"{os.getpid()}:{memory.descriptor}".encode()

    def open(self, handle: bytes, size: int) -> LazyMemory:
        """Map the memfd of another process, or of this one. Raises MemoryRefused."""
        process, _, descriptor = handle.decode().partition(":")
        try:
            opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise MemoryRefused(f"opening a handle refused by the device: {error.strerror}") from error
        try:
            return LazyMemory(_mapped(opened, size))
        except (OSError, ValueError) as error:
            raise MemoryRefused(f"opening a handle refused by the device: {error}") from error
        finally:
            os.close(opened)

    def event(self, handle: bytes | None = None) -> LazyShared:
        """Return an event for two processes: here it has happened as soon as its owner has recorded it."""
        return LazyShared(self, handle)

    def step(self) -> bool:
        """Do one piece of work of a stream that can go on, and return whether there was one."""
        with self._happened:
            ready = [stream for stream in self.streams if self._can_go_on(stream)]
            if not ready:
                return False
            work = self.choose(ready).work.popleft()
            if work.call is not None:
                if any(needed() is None for needed in work.needs):
                    self._broken = "a copy's memory was given back before the copy"
                else:
                    work.call()
            if work.event is not None:
                work.event.happened = True
                self._happened.notify_all()
            return True

    def run(self) -> None:
        """Do all work there is."""
        while self.step():
            pass

    def wait_for(self, event: LazyEvent) -> None:
        """Stand in `Event.wait`. Raises StoreError for an event that never happens, or a copy whose memory was gone."""
        with self._happened:
            self.waited += 1
            while not event.happened and not self.held and self.step():
                pass
            if not self._happened.wait_for(lambda: event.happened, PATIENCE):
                raise StoreError("an event that never happens was waited for", device=True)
            if self._broken is not None:
                raise StoreError(self._broken, device=True)

    def _can_go_on(self, stream: LazyStream) -> bool:
        return bool(stream.work) and (stream.work[0].after is None or stream.work[0].after.happened)


def pool_array(pool: Pool) -> Bytes:
    """Return a lazy device's pool in place, `[planes, slots, unit_bytes]`."""
    return _part(pool.memory, 0, pool.planes * pool.slots * pool.unit_bytes).reshape(pool.planes, pool.slots, pool.unit_bytes)


class _Held:
    """An array's memory together with what must live as long as somebody looks into it."""

    def __init__(self, memory: object, owner: object) -> None:
        self._kept = memory, owner
        self.__array_interface__ = np.asarray(memory).__array_interface__


def _mapped(descriptor: int, size: int) -> Bytes:
    return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)


def _bytes(memory: Memory) -> Bytes:
    assert isinstance(memory, LazyMemory)
    return memory.bytes


def _part(memory: Memory, at: int, size: int) -> Bytes:
    if at < 0 or at + size > memory.size:
        raise InvalidTensor(f"{at + size} bytes do not fit device memory of {memory.size}", value=at + size, limit=memory.size)
    return _bytes(memory)[at : at + size]


def _owner(array: Bytes) -> Bytes:
    """Return the array that owns the memory, or the one next to an owner of another kind, such as a mapping."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array
