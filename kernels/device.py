"""What a device can do, as the storage layer asks for it: memory, copies on streams, events between them.

Every copy is *enqueued*: the call returns at once, and the copy reads its source and writes its destination when the stream
comes to it. Until an event that was recorded after it has happened, both belong to the copy. A
StoreError of a device has the field `device`, which tells it from those of a disk. Copies of one stream happen in the
order in which they were enqueued; between two streams there is no order but by `Stream.wait`.

The device's pool is layer-first, `[planes, slots, unit_bytes]`, as attention kernels want it. What crosses the bus is block-first
and contiguous, so gather and scatter are the device's own work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tiercache.errors import InvalidTensor
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

    def copy(self, pool: Pool, origins: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the blocks in `origins` over those in `targets`: a fork within the pool. Raises InvalidTensor.

        The copies of one call have no order among themselves, so each target is named once, and none is an origin.
        """
        ...

    def read(self, source: Memory, at: int, into: Bytes) -> None:
        """Copy from byte `at` of device memory and on into host memory, `[bytes]` or `[rows, bytes]`.

        On the device the rows follow one another; on the host each is contiguous, and the distance between two is free. It is one
        call of the driver however many rows there are. All of it is pinned by one call of `register`, or nothing of it is.
        """
        ...

    def write(self, source: Bytes, into: Memory, at: int) -> None:
        """Copy host memory to byte `at` of device memory and on; `source` is what `into` is to `read`."""
        ...

    def record(self) -> Event:
        """Return the event that happens when all that is enqueued now has happened."""
        ...

    def wait(self, event: Event) -> None:
        """Let what is enqueued from now on begin only after `event`; the caller does not wait."""
        ...


class SharedEvent(Event, Protocol):
    """A point in a stream for two processes, which its owner records again and again; who waits means the last record by then.

    So he must be told that it was recorded before he waits. Records of one stream are in order: who waits for a later one than he
    was told of waits longer, and for all that he was told of.
    """

    def handle(self) -> bytes:
        """Return 64 bytes at most, by which another process opens it."""
        ...

    def record(self, stream: Any) -> None:
        """Let it happen when all that is enqueued on `stream` now has happened; its owner's to call."""
        ...


def require_fork(pool: Pool, origins: Sequence[int], targets: Sequence[int]) -> None:
    """Raise InvalidTensor unless the blocks in `origins` can be copied over those in `targets` in any order."""
    if len(origins) != len(targets) or set(origins) & set(targets) or len(set(targets)) != len(targets):
        raise InvalidTensor(f"{len(origins)} slots can't be copied to {len(targets)}: each target once, none an origin")
    require_slots(pool, origins)
    require_slots(pool, targets)


def require_slots(pool: Pool, slots: Sequence[int]) -> None:
    """Raise InvalidTensor if one of the slots does not exist."""
    for slot in slots:
        if not 0 <= slot < pool.slots:
            raise InvalidTensor(f"slot {slot} does not exist; the slots are 0 to {pool.slots - 1}", slot=slot, slots=pool.slots)


def rows_of(host: Bytes) -> tuple[int, int, int]:
    """Return how many rows host memory for `read` and `write` has, their length, and the distance between two, in bytes.

    Rows that lie one behind the other are one row. Raises InvalidTensor for memory of more dimensions, rows that are not
    contiguous, or rows that overlap or run backwards.
    """
    if host.dtype != np.uint8 or host.ndim not in (1, 2) or (host.shape[-1] > 1 and host.strides[-1] != 1):
        raise InvalidTensor(f"host memory of {host.dtype} {host.shape} and strides {host.strides} is no rows of bytes")
    if host.flags.c_contiguous:
        return 1, host.size, host.size
    count, length = host.shape
    if host.strides[0] < length:
        raise InvalidTensor(f"rows of {length} bytes at a distance of {host.strides[0]} overlap", value=host.strides[0])
    return count, length, host.strides[0]


LEAST_EXPORT = 2 << 20
"""Bytes. A driver makes smaller allocations parts of one piece of this size, and a handle would open all of it."""


class Device(Protocol):
    """One device, and what of it can be handed to other libraries and other processes."""

    @property
    def name(self) -> str:
        """What a configuration calls it, such as `cuda:0`."""
        ...

    @property
    def tensors(self) -> str:
        """Where torch's tensors lie whose memory is this device's, in torch's words."""
        ...

    @property
    def uuid(self) -> bytes:
        """Which device it is, 16 bytes: two processes may number the same one differently."""
        ...

    def allocate(self, size: int) -> Memory:
        """Return `size` bytes of the device's memory, content undefined. Raises MemoryRefused."""
        ...

    def pinned(self, *shape: int) -> Bytes:
        """Return host memory that copies need no detour for, content undefined. Raises MemoryRefused."""
        ...

    def register(self, memory: Bytes, *, readonly: bool = False) -> None:
        """Pin host memory where it lies, until `unregister`; `readonly` is for what this process has mapped so.

        Raises MemoryRefused; the device then works as before.
        """
        ...

    def unregister(self, memory: Bytes) -> None:
        """Undo `register` of exactly that memory."""
        ...

    def stream(self) -> Stream:
        """Return a new stream."""
        ...

    def adopt(self, pointer: int) -> Stream:
        """Return another library's stream by the driver's pointer to it. It is that library's: it must outlive what is enqueued."""
        ...

    def borrow(self, address: int, size: int, owner: object) -> Memory:
        """Return memory of this device that another library allocated; it holds `owner`, which keeps the memory alive."""
        ...

    def part(self, memory: Memory, at: int, size: int) -> Memory:
        """Return `size` bytes of `memory` from byte `at` on, in place; it holds `memory`. Raises InvalidTensor."""
        ...

    def array(self, memory: Memory, *shape: int) -> Any:
        """Return memory in place as an array of bytes that other libraries take without a copy (DLPack); it holds `memory`.

        Raises InvalidTensor for a shape that is larger than the memory.
        """
        ...

    def export(self, memory: Memory) -> bytes:
        """Return 64 bytes at most by which another process opens memory that `allocate` returned; who has them can write all of it.

        Raises InvalidTensor for less than `LEAST_EXPORT` bytes.
        """
        ...

    def open(self, handle: bytes, size: int) -> Memory:
        """Return another process's memory in place, closed when nobody here holds it. Raises MemoryRefused."""
        ...

    def event(self, handle: bytes | None = None) -> SharedEvent:
        """Return a new event for two processes, or another process's. Raises StoreError."""
        ...
