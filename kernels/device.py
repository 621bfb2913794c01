"""What a device can do, as the storage layer asks for it: memory, copies on streams, events between them.

Every copy is *enqueued*: the call returns at once, and the copy reads its source and writes its destination when the stream
comes to it. Until an event that was recorded after it has happened, both belong to the copy. Copies of one stream happen in the
order in which they were enqueued; between two streams there is no order but by `Stream.wait`.

The device's pool is layer-first, `[planes, slots, unit_bytes]`, as attention kernels want it. What crosses the bus is block-first
and contiguous, so gather and scatter are the device's own work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tiercache.kernels.host import Bytes


class Memory(Protocol):
    """A run of the device's memory."""

    @property
    def size(self) -> int:
        """Bytes."""
        ...


@dataclass(frozen=True, slots=True)
class Pool:
    """Slots in device memory, layer-first `[planes, slots, unit_bytes]`."""

    memory: Memory
    planes: int
    slots: int
    unit_bytes: int


class Event(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Block the calling thread, not the interpreter, until all that was enqueued before the event has happened.

        Raises StoreError when a copy before it failed: then nothing that was copied is to be believed.
        """
        ...


class Stream(Protocol):
    """Work of a device in order. Each method enqueues; any thread may call, one at a time."""

    def gather(self, pool: Pool, slots: Sequence[int], into: Memory) -> None:
        """Copy the blocks in `slots` into `into`, block-first `[len(slots), planes, unit_bytes]`."""
        ...

    def scatter(self, source: Memory, pool: Pool, slots: Sequence[int], *, first: int, planes: int) -> None:
        """Copy planes `first` to `first + planes` into the blocks in `slots`; `source` is `[len(slots), planes, unit_bytes]`."""
        ...

    def read(self, source: Memory, at: int, into: Bytes) -> None:
        """Copy from byte `at` of device memory into contiguous host memory."""
        ...

    def write(self, source: Bytes, into: Memory, at: int) -> None:
        """Copy contiguous host memory to byte `at` of device memory and on."""
        ...

    def record(self) -> Event:
        """Return the event that happens when all that is enqueued now has happened."""
        ...

    def wait(self, event: Event) -> None:
        """Let what is enqueued from now on begin only after `event`; the caller does not wait."""
        ...


class Device(Protocol):
    """One device."""

    def allocate(self, size: int) -> Memory:
        """Return `size` bytes of the device's memory, content undefined. Raises MemoryRefused."""
        ...

    def pinned(self, *shape: int) -> Bytes:
        """Return host memory that copies need no detour for, content undefined. Raises MemoryRefused."""
        ...

    def register(self, memory: Bytes) -> None:
        """Pin host memory where it lies, until `unregister`. Raises MemoryRefused; the device then works as before."""
        ...

    def unregister(self, memory: Bytes) -> None:
        """Undo `register` of exactly that memory."""
        ...

    def stream(self) -> Stream:
        """Return a new stream."""
        ...
