"""A device whose copies happen late: when somebody waits for an event, or when a test says so, in an order that the test chooses.

It keeps every promise of `tiercache.kernels.device` and no more: between two streams there is no order but by events, what is
enqueued reads its source when it is its turn, and memory that is gone by then is a fault that `wait` raises.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from tiercache.errors import MemoryRefused, StoreError
from tiercache.kernels.device import Event, Memory, Pool
from tiercache.kernels.host import Bytes, empty_bytes

POISON = 0xD7
PATIENCE = 20.0
"""Seconds after which a wait that nobody ends fails."""


class FakeMemory:
    """Device memory, poisoned at first."""

    def __init__(self, size: int) -> None:
        self.bytes: Bytes = np.full(size, POISON, np.uint8)

    @property
    def size(self) -> int:
        return len(self.bytes)


class FakeEvent:
    """A point in a stream."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.happened = False

    def wait(self) -> None:
        self._device.wait_for(self)


class _Work:
    """Something enqueued: a copy that needs `after` to have happened, or an event that happens."""

    __slots__ = ("after", "call", "event", "needs")

    def __init__(
        self,
        call: Callable[[], None] | None = None,
        *,
        event: FakeEvent | None = None,
        after: FakeEvent | None = None,
        needs: Sequence[weakref.ref[Bytes]] = (),
    ) -> None:
        self.call, self.event, self.after, self.needs = call, event, after, needs


class FakeStream:
    """Work in order, none of it done when it is enqueued."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.work: deque[_Work] = deque()

    def gather(self, pool: Pool, slots: Sequence[int], into: Memory) -> None:
        blocks = _bytes(into)[: len(slots) * pool.planes * pool.unit_bytes].reshape(len(slots), pool.planes, pool.unit_bytes)
        slots = list(slots)

        def copy() -> None:
            for place, slot in enumerate(slots):
                blocks[place] = pool_array(pool)[:, slot]

        self._enqueue(copy, [])

    def scatter(self, source: Memory, pool: Pool, slots: Sequence[int], *, first: int, planes: int) -> None:
        rows = _bytes(source)[: len(slots) * planes * pool.unit_bytes].reshape(len(slots), planes, pool.unit_bytes)
        slots = list(slots)

        def copy() -> None:
            for place, slot in enumerate(slots):
                pool_array(pool)[first : first + planes, slot] = rows[place]

        self._enqueue(copy, [])

    def read(self, source: Memory, at: int, into: Bytes) -> None:
        device, owner, size = _bytes(source)[at : at + into.nbytes], weakref.ref(_owner(into)), into.nbytes
        address = into.__array_interface__["data"][0]
        assert into.flags.c_contiguous and len(device) == size

        def copy() -> None:
            np.copyto(_at(owner, address, size), device)

        self._enqueue(copy, [owner])

    def write(self, source: Bytes, into: Memory, at: int) -> None:
        device, owner, size = _bytes(into)[at : at + source.nbytes], weakref.ref(_owner(source)), source.nbytes
        address = source.__array_interface__["data"][0]
        assert source.flags.c_contiguous and len(device) == size

        def copy() -> None:
            np.copyto(device, _at(owner, address, size))

        self._enqueue(copy, [owner])

    def record(self) -> FakeEvent:
        event = FakeEvent(self._device)
        with self._device.turn:
            self.work.append(_Work(event=event))
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, FakeEvent)
        with self._device.turn:
            self.work.append(_Work(after=event))

    def _enqueue(self, copy: Callable[[], None], needs: Sequence[weakref.ref[Bytes]]) -> None:
        self._device.enqueued += 1
        if self._device.fails_after is not None and self._device.enqueued > self._device.fails_after:
            raise StoreError("the device takes no more work")
        with self._device.turn:
            self.work.append(_Work(copy, needs=needs))


class FakeDevice:
    """All streams of one device. Work is done in an order drawn from `seed`, by whoever waits, unless it is `held`."""

    def __init__(self, seed: int) -> None:
        self.turn = threading.RLock()
        self.held = False
        """While true, a wait does no work: the test does, by `step` and `run`."""
        self.enqueued = 0
        self.fails_after: int | None = None
        """From which piece of work on enqueueing fails."""
        self.choose: Callable[[list[FakeStream]], FakeStream] = random.Random(seed).choice
        self.streams: list[FakeStream] = []
        self.registered: list[tuple[int, int]] = []
        """Address and size of what is pinned."""
        self.most_registered: int | None = None
        self._happened = threading.Condition(self.turn)
        self._broken: str | None = None

    def allocate(self, size: int) -> FakeMemory:
        return FakeMemory(size)

    def pinned(self, *shape: int) -> Bytes:
        memory = empty_bytes(*shape)
        memory[...] = POISON
        return memory

    def register(self, memory: Bytes) -> None:
        if len(self.registered) == self.most_registered:
            raise MemoryRefused(f"{memory.nbytes} bytes can't be pinned")
        place = (memory.__array_interface__["data"][0], memory.nbytes)
        assert all(place[0] >= at + size or at >= sum(place) for at, size in self.registered), "pinned twice"
        self.registered.append(place)

    def unregister(self, memory: Bytes) -> None:
        self.registered.remove((memory.__array_interface__["data"][0], memory.nbytes))

    def stream(self) -> FakeStream:
        stream = FakeStream(self)
        self.streams.append(stream)
        return stream

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

    def wait_for(self, event: FakeEvent) -> None:
        """Stand in `Event.wait`."""
        with self._happened:
            while not event.happened and not self.held and self.step():
                pass
            if not self._happened.wait_for(lambda: event.happened, PATIENCE):
                raise AssertionError("an event that never happens was waited for")
            if self._broken is not None:
                raise StoreError(self._broken)

    def _can_go_on(self, stream: FakeStream) -> bool:
        return bool(stream.work) and (stream.work[0].after is None or stream.work[0].after.happened)


def pool_array(pool: Pool) -> Bytes:
    """Return the pool in place, `[planes, slots, unit_bytes]`."""
    return _bytes(pool.memory).reshape(pool.planes, pool.slots, pool.unit_bytes)


def _bytes(memory: Memory) -> Bytes:
    assert isinstance(memory, FakeMemory)
    return memory.bytes


def _owner(array: Bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return the array that owns the memory, or the one next to an owner of another kind, such as a mapping."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _at(owner: weakref.ref[Bytes], address: int, size: int) -> Bytes:
    """Return the bytes at an address of the owner's memory, as a device sees them: without holding the owner."""
    memory = owner()
    assert isinstance(memory, np.ndarray)
    flat = memory.reshape(-1).view(np.uint8)
    start = address - flat.__array_interface__["data"][0]
    return flat[start : start + size]
