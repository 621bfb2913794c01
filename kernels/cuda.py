"""A CUDA device by way of CuPy: the one file that imports it.

Kernels are compiled when the first one is launched, once a device; CuPy keeps what was compiled on disk. What the driver refuses
is translated: MemoryRefused where memory was asked for, StoreError for copies and kernels. CuPy clears the error that a failed
call leaves pending, so that the next call is not blamed for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np

from tiercache.errors import InvalidTensor, MemoryRefused, StoreError
from tiercache.kernels.device import Event, Memory, Pool
from tiercache.kernels.host import Bytes
from tiercache.kernels.launch import OPTIONS, SOURCE, plan

_TO_HOST, _TO_DEVICE = 2, 1
_PORTABLE = 1
"""Of cudaHostRegister: pinned for every context."""


class CudaMemory:
    """Device memory of its own allocation, so that it can be exported to another process."""

    def __init__(self, size: int) -> None:
        self._memory = cupy.cuda.Memory(size)
        self.size = size

    @property
    def address(self) -> int:
        """The device's address."""
        return int(self._memory.ptr)


class CudaEvent:
    """A CUDA event, without timing."""

    def __init__(self, stream: Any) -> None:
        self.event = cupy.cuda.Event(block=True, disable_timing=True)
        self.event.record(stream)

    def wait(self) -> None:
        """Wait in the calling thread; the interpreter goes on."""
        with _copies():
            self.event.synchronize()


class CudaStream:
    """A stream that does not wait for the legacy default stream."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        with device.current():
            self._stream = cupy.cuda.Stream(non_blocking=True)

    def gather(self, pool: Pool, slots: Sequence[int], into: Memory) -> None:
        """Launch the kernel that copies the blocks in `slots` into block-first memory."""
        _require_room(into, len(slots) * pool.planes * pool.unit_bytes)
        self._launch("gather", pool, slots, _address(pool.memory), _address(into), first=0, planes=pool.planes)

    def scatter(self, source: Memory, pool: Pool, slots: Sequence[int], *, first: int, planes: int) -> None:
        """Launch the kernel that copies block-first memory into planes of the blocks in `slots`."""
        if first < 0 or planes < 1 or first + planes > pool.planes:
            raise InvalidTensor(f"planes {first} to {first + planes} of {pool.planes} do not exist", first=first, planes=planes)
        _require_room(source, len(slots) * planes * pool.unit_bytes)
        self._launch("scatter", pool, slots, _address(source), _address(pool.memory), first=first, planes=planes)

    def copy(self, pool: Pool, origins: Sequence[int], targets: Sequence[int]) -> None:
        """Launch the kernel that copies whole blocks within the pool: a fork. No slot may be in both lists."""
        if len(origins) != len(targets) or set(origins) & set(targets) or len(set(targets)) != len(targets):
            raise InvalidTensor(f"{len(origins)} slots can't be copied to {len(targets)}: each target once, none an origin")
        address = _address(pool.memory)
        plan(unit_bytes=pool.unit_bytes, planes=pool.planes, pool_slots=pool.slots, slots=targets, addresses=[address])
        how = plan(unit_bytes=pool.unit_bytes, planes=pool.planes, pool_slots=pool.slots, slots=origins, addresses=[address])
        with self._device.current(), self._stream, _copies():
            numbers = (np.uint32(how.rows), np.uint32(pool.planes), np.uint32(pool.slots), np.uint32(how.vectors))
            call = self._device.kernel(f"copy_{how.width}")
            call((how.grid,), how.block, (address, self._index(origins), self._index(targets), *numbers))

    def _launch(self, name: str, pool: Pool, slots: Sequence[int], source: int, target: int, *, first: int, planes: int) -> None:
        how = plan(unit_bytes=pool.unit_bytes, planes=planes, pool_slots=pool.slots, slots=slots, addresses=[source, target])
        with self._device.current(), self._stream, _copies():
            numbers = (np.uint32(how.rows), np.uint32(planes), np.uint32(first), np.uint32(pool.slots), np.uint32(how.vectors))
            self._device.kernel(f"{name}_{how.width}")((how.grid,), how.block, (source, self._index(slots), target, *numbers))

    @staticmethod
    def _index(slots: Sequence[int]) -> Any:
        """Return slots on the device.

        The copy there has left this list before the call returns, since it comes from pageable memory. CuPy gives the memory
        back to this stream, which uses it again only after the kernel.
        """
        return cupy.asarray(np.asarray(slots, np.int32))

    def read(self, source: Memory, at: int, into: Bytes) -> None:
        """Copy device memory to host memory."""
        _require_room(source, at + into.nbytes)
        with self._device.current(), _copies():
            cupy.cuda.runtime.memcpyAsync(_host(into), _address(source) + at, into.nbytes, _TO_HOST, self._stream.ptr)

    def write(self, source: Bytes, into: Memory, at: int) -> None:
        """Copy host memory to device memory."""
        _require_room(into, at + source.nbytes)
        with self._device.current(), _copies():
            cupy.cuda.runtime.memcpyAsync(_address(into) + at, _host(source), source.nbytes, _TO_DEVICE, self._stream.ptr)

    def record(self) -> CudaEvent:
        """Record an event."""
        with self._device.current(), _copies():
            return CudaEvent(self._stream)

    def wait(self, event: Event) -> None:
        """Let the stream wait for an event of this device; the caller does not."""
        assert isinstance(event, CudaEvent)
        with self._device.current(), _copies():
            self._stream.wait_event(event.event)


class CudaDevice:
    """One CUDA device by its number."""

    def __init__(self, number: int = 0) -> None:
        self._device = cupy.cuda.Device(number)
        self._module = cupy.RawModule(code=SOURCE.read_text(encoding="utf-8"), options=OPTIONS)
        self._kernels: dict[str, Any] = {}

    def current(self) -> Any:
        """Return the context in which calls go to this device."""
        return self._device

    def kernel(self, name: str) -> Any:
        """Return a kernel of `blocks.cu`; all are compiled when the first is asked for."""
        found = self._kernels.get(name)
        if found is None:
            found = self._kernels[name] = self._module.get_function(name)
        return found

    def allocate(self, size: int) -> CudaMemory:
        """Return device memory. Raises MemoryRefused."""
        with self.current(), _memory(f"{size} bytes of device memory"):
            return CudaMemory(size)

    def pinned(self, *shape: int) -> Bytes:
        """Return pinned host memory. Raises MemoryRefused."""
        size = int(np.prod(shape))
        with self.current(), _memory(f"{size} bytes of pinned memory"):
            memory = cupy.cuda.alloc_pinned_memory(size)
        return np.frombuffer(memory, np.uint8, size).reshape(shape)

    def register(self, memory: Bytes) -> None:
        """Pin host memory where it lies. Raises MemoryRefused."""
        with self.current(), _memory(f"pinning {memory.nbytes} bytes"):
            cupy.cuda.runtime.hostRegister(_host(memory), memory.nbytes, _PORTABLE)

    def unregister(self, memory: Bytes) -> None:
        """Undo `register`."""
        with self.current(), _memory("unpinning"):
            cupy.cuda.runtime.hostUnregister(_host(memory))

    def stream(self) -> CudaStream:
        """Return a new stream."""
        return CudaStream(self)


def _address(memory: Memory) -> int:
    assert isinstance(memory, CudaMemory)
    return memory.address


def _host(array: Bytes) -> int:
    if not array.flags.c_contiguous:
        raise InvalidTensor(f"host memory of shape {array.shape} and strides {array.strides} is not contiguous")
    return int(array.ctypes.data)


def _require_room(memory: Memory, size: int) -> None:
    if size > memory.size:
        raise InvalidTensor(f"{size} bytes do not fit device memory of {memory.size}", value=size, limit=memory.size)


@contextmanager
def _memory(what: str) -> Iterator[None]:
    try:
        yield
    except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.memory.OutOfMemoryError) as error:
        raise MemoryRefused(f"{what} refused by the device: {error}") from error


@contextmanager
def _copies() -> Iterator[None]:
    try:
        yield
    except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError) as error:
        raise StoreError(f"the device failed: {error}") from error
