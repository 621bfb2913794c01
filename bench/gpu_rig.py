"""What `bench gpu` runs on: a card, or the lazy device in a dry run, where the same programs run and nothing is measured."""

from __future__ import annotations

import importlib
import importlib.util
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tiercache.errors import MemoryRefused
from tiercache.kernels.device import Device, Event, Memory, Pool, Stream
from tiercache.kernels.host import Bytes, empty_bytes
from tiercache.kernels.launch import plan
from tiercache.kernels.lazy import LazyDevice, LazyEvent, LazyMemory, LazyStream, pool_array

MAPPED = Path(__file__).with_name("mapped.cu")
BUSY = """
extern "C" __global__ void busy(unsigned long long length) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < length);
}
"""
"""Every thread of it spins for so many nanoseconds."""


class Slots(NamedTuple):
    """Block-first slots in pinned host memory: `[slots, planes, unit_bytes]`, whose blocks lie one behind the other."""

    blocks: Bytes
    numbers: list[int]
    """Which of them take part, in order."""


class Rig(ABC):
    """One device and what the checks ask of it beside its Protocol."""

    device: Device
    dry: bool

    @abstractmethod
    def properties(self) -> dict[str, str | int | float]:
        """Return what the device is."""

    @abstractmethod
    def free(self) -> int:
        """Return how many bytes of its memory are free."""

    @abstractmethod
    def streams(self) -> list[Stream]:
        """Return all streams that were made so far."""

    @abstractmethod
    def busy(self, stream: Stream, seconds: float, *, wide: bool = False) -> None:
        """Keep a stream busy for a time; `wide`, on all of the device's processors."""

    @abstractmethod
    def is_done(self, event: Event) -> bool:
        """Return whether an event has happened, without waiting."""

    @abstractmethod
    def seconds(self, stream: Stream, enqueue: Callable[[], None]) -> float:
        """Return how long the device takes for what `enqueue` enqueues, which waits for nothing of the host meanwhile."""

    @abstractmethod
    def clone(self, stream: Stream, source: Memory, into: Memory) -> None:
        """Copy device memory whole by the driver's own means."""

    @abstractmethod
    def mapped(self, stream: Stream, pool: Pool, slots: Sequence[int], host: Slots, *, up: bool) -> None:
        """Copy blocks between the pool and host memory by a kernel that crosses the bus itself."""

    def open(self, handle: bytes, size: int) -> Any:
        """Open another process's memory and return it in place, as an array or tensor of bytes; gone with it, it is closed."""
        found = self.device.array(self.device.open(handle, size), size)
        if self.dry or importlib.util.find_spec("torch") is None:
            return found
        tensor = importlib.import_module("torch").from_dlpack(found)
        assert tensor.data_ptr() == found.data.ptr, "the tensor is a copy"
        return tensor

    def wall(self, stream: Stream, enqueue: Callable[[], None]) -> float:
        """Return how long it takes from the first call to the end of the last copy, on the host's clock."""
        stream.record().wait()
        began = time.perf_counter()
        enqueue()
        stream.record().wait()
        return time.perf_counter() - began

    def peek(self, memory: Memory) -> Bytes:
        """Return a copy of device memory."""
        into = self.device.pinned(memory.size)
        stream = self.device.stream()
        stream.read(memory, 0, into)
        stream.record().wait()
        return into

    def poke(self, source: Bytes, memory: Memory) -> None:
        """Fill device memory with host memory of its size."""
        stream = self.device.stream()
        stream.write(source.reshape(-1), memory, 0)
        stream.record().wait()


class CudaRig(Rig):
    """A card. Raises MemoryRefused where there is none."""

    dry = False

    def __init__(self) -> None:
        # By name: the module needs CuPy, and only this class does.
        self._cuda: Any = importlib.import_module("tiercache.kernels.cuda")
        made: list[Stream] = []

        class Watched(self._cuda.CudaDevice):  # type: ignore[misc, name-defined]
            """Keeps its streams, so that they can be made busy."""

            def stream(self) -> Any:
                made.append(super().stream())
                return made[-1]

        if not self._cuda.count():
            raise MemoryRefused("there is no CUDA device")
        self._made = made
        self.device = self._card = Watched(0)
        self._busy = self._card.program(BUSY, "busy")
        source = MAPPED.read_text(encoding="utf-8")
        self._kernels = {up: self._card.program(source, "mapped_up" if up else "mapped_down") for up in (False, True)}

    def properties(self) -> dict[str, str | int | float]:
        """Return card, driver and versions."""
        found: dict[str, str | int | float] = self._card.properties()
        return found

    def free(self) -> int:
        """Return what the driver says."""
        return int(self._card.free())

    def streams(self) -> list[Stream]:
        """Return all streams that were made so far."""
        return list(self._made)

    def busy(self, stream: Stream, seconds: float, *, wide: bool = False) -> None:
        """Launch a kernel that spins."""
        threads = 256 if wide else 1
        stream.launch(self._busy, 264 if wide else 1, (threads,), np.uint64(seconds * 1e9))  # type: ignore[attr-defined]

    def is_done(self, event: Event) -> bool:
        """Ask the driver."""
        return bool(event.event.done)  # type: ignore[attr-defined]

    def seconds(self, stream: Stream, enqueue: Callable[[], None]) -> float:
        """Put a spinning kernel in front, so that all is enqueued when the first copy begins."""
        self.busy(stream, 5e-3)
        start = stream.mark()  # type: ignore[attr-defined]
        enqueue()
        return float(self._card.seconds(start, stream.mark()))  # type: ignore[attr-defined]

    def clone(self, stream: Stream, source: Memory, into: Memory) -> None:
        """Have the driver copy."""
        stream.clone(source, into)  # type: ignore[attr-defined]

    def mapped(self, stream: Stream, pool: Pool, slots: Sequence[int], host: Slots, *, up: bool) -> None:
        """Launch the kernel of `mapped.cu`."""
        at = int(host.blocks.ctypes.data)
        how = plan(unit_bytes=pool.unit_bytes, planes=pool.planes, pool_slots=pool.slots, slots=slots, addresses=[at])
        assert how.width == 16, "rows of the bench are whole vectors of 16 bytes"
        numbers = (how.rows, pool.planes, 0, pool.slots, how.vectors, host.blocks.strides[0] // 16)
        address = pool.memory.address  # type: ignore[attr-defined]
        arguments = (address, list(slots), at, host.numbers, *map(np.uint32, numbers))
        stream.launch(self._kernels[up], how.grid, how.block, *arguments)  # type: ignore[attr-defined]


class LazyRig(Rig):
    """The lazy device: orders and bytes are as they would be, times are not."""

    dry = True

    def __init__(self, seed: int) -> None:
        self.device = self._lazy = LazyDevice(seed)

    def properties(self) -> dict[str, str | int | float]:
        """Return that there is none."""
        return {"card": "none: the lazy device"}

    def free(self) -> int:
        """Return a number that grows and shrinks as memory goes and comes."""
        return (1 << 40) - self._lazy.allocated

    def streams(self) -> list[Stream]:
        """Return all streams that were made so far."""
        return list(self._lazy.streams)

    def busy(self, stream: Stream, seconds: float, *, wide: bool = False) -> None:
        """Enqueue nothing that takes a place in the stream: everything is late here."""
        _lazy(stream).call(lambda: None)

    def is_done(self, event: Event) -> bool:
        """Return whether the device has come to it."""
        assert isinstance(event, LazyEvent)
        return event.happened

    def seconds(self, stream: Stream, enqueue: Callable[[], None]) -> float:
        """Return some time: it means nothing."""
        return self.wall(stream, enqueue)

    def clone(self, stream: Stream, source: Memory, into: Memory) -> None:
        """Enqueue a copy."""
        assert isinstance(source, LazyMemory) and isinstance(into, LazyMemory)
        here, there = source.bytes, into.bytes
        _lazy(stream).call(lambda: np.copyto(there[: len(here)], here))

    def mapped(self, stream: Stream, pool: Pool, slots: Sequence[int], host: Slots, *, up: bool) -> None:
        """Enqueue what the kernel of `mapped.cu` does; the kernel itself is proven on the host beside the others."""

        def copy() -> None:
            blocks = pool_array(pool)
            for slot, number in zip(slots, host.numbers, strict=True):
                if up:
                    blocks[:, slot] = host.blocks[number]
                else:
                    host.blocks[number] = blocks[:, slot]

        _lazy(stream).call(copy)


def _lazy(stream: Stream) -> LazyStream:
    assert isinstance(stream, LazyStream)
    return stream


def random_bytes(draw: np.random.Generator, *shape: int) -> Bytes:
    """Return random bytes on a page boundary."""
    memory = empty_bytes(*shape)
    flat = memory.reshape(-1)
    piece = 64 << 20
    for start in range(0, len(flat), piece):
        part = flat[start : start + piece]
        part[:] = np.frombuffer(draw.bytes(len(part)), np.uint8)
    return memory
