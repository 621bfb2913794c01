"""A CUDA device by way of CuPy: the one file that imports it.

Kernels are compiled when a device is opened; CuPy keeps what was compiled on disk. What the driver refuses
is translated: MemoryRefused where memory was asked for, StoreError for copies and kernels. CuPy clears the error that a failed
call leaves pending, so that the next call is not blamed for it.

Memory and events can be handed to another process, as 64 bytes each. Who opens a handle may outlive who gave it, or die before
him: the driver frees memory when its owner has freed it or ended, and nobody has it open any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np

from tiercache.errors import InvalidTensor, MemoryRefused, StoreError
from tiercache.kernels.device import LEAST_EXPORT, Event, Memory, Pool, require_fork, rows_of
from tiercache.kernels.host import Bytes
from tiercache.kernels.launch import NAMES, OPTIONS, SOURCE, plan
from tiercache.kernels.rotation import Loan, Rotation

_TO_HOST, _TO_DEVICE, _WITHIN = 2, 1, 3
_PORTABLE, _READ_ONLY = 1, 8
"""Of cudaHostRegister: pinned for every context, and memory that this process can't write."""


class CudaMemory:
    """Device memory of its own allocation, so that it can be exported to another process."""

    def __init__(self, size: int) -> None:
        self._memory = cupy.cuda.Memory(size)
        self.size = size

    @property
    def address(self) -> int:
        """The device's address."""
        return int(self._memory.ptr)


class BorrowedMemory:
    """Memory of the device that is somebody else's, whom this holds."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        self.address = address
        self.size = size
        self._owner = owner


class OpenedMemory:
    """Memory that another process exported, in place. Closed when nobody here holds it, an `array` on it included."""

    def __init__(self, device: CudaDevice, handle: bytes, size: int) -> None:
        self.address = int(cupy.cuda.runtime.ipcOpenMemHandle(handle))
        self.size = size
        self._closing = weakref.finalize(self, _close_opened, device, self.address)
        self._closing.atexit = False  # the driver does it, and may be gone by then

    def close(self) -> None:
        """Close it now: no array on it, and no copy under way, may be used any more. May be called twice."""
        with _memory("closing a handle"):
            self._closing()


def _close_opened(device: CudaDevice, address: int) -> None:
    with device.current():  # whoever held it last may be any thread
        cupy.cuda.runtime.ipcCloseMemHandle(address)


class CudaEvent:
    """A point in a stream of this process, by an event of its device's rotation, without timing."""

    def __init__(self, loan: Loan[Any], stream: Any) -> None:
        self._loan = loan
        loan.thing.record(stream)

    @property
    def event(self) -> Any:
        """CuPy's event."""
        return self._loan.thing

    @property
    def pointer(self) -> int:
        """The driver's event."""
        return int(self._loan.thing.ptr)

    def wait(self) -> None:
        """Wait in the calling thread; the interpreter goes on."""
        with _copies():
            self.event.synchronize()


class CudaSharedEvent:
    """An event for two processes."""

    def __init__(self, pointer: int, owner: Any) -> None:
        self.pointer = pointer
        self._owner = owner

    @classmethod
    def new(cls) -> CudaSharedEvent:
        """Return an event of this process, on the current device."""
        event = cupy.cuda.Event(block=True, disable_timing=True, interprocess=True)
        return cls(int(event.ptr), event)

    @classmethod
    def opened(cls, handle: bytes) -> CudaSharedEvent:
        """Return an event of another process, on the current device."""
        opened = cls(int(cupy.cuda.runtime.ipcOpenEventHandle(handle)), None)
        weakref.finalize(opened, cupy.cuda.runtime.eventDestroy, opened.pointer).atexit = False
        return opened

    def handle(self) -> bytes:
        """Return 64 bytes by which another process opens it."""
        with _copies():
            return bytes(cupy.cuda.runtime.ipcGetEventHandle(self.pointer))

    def record(self, stream: CudaStream) -> None:
        """Let it happen when all that is enqueued on `stream` now has happened."""
        with _copies(), stream.device.current():  # the default stream is that of the current device
            cupy.cuda.runtime.eventRecord(self.pointer, stream.pointer)

    def wait(self) -> None:
        """Wait in the calling thread; the interpreter goes on."""
        with _copies():
            cupy.cuda.runtime.eventSynchronize(self.pointer)


class CudaStream:
    """A stream that does not wait for the legacy default stream, or one that another library has made, by its pointer."""

    def __init__(self, device: CudaDevice, pointer: int | None = None) -> None:
        self.device = device
        with _memory("a stream"), device.current():
            if pointer is None:
                self._stream = cupy.cuda.Stream(non_blocking=True)
            else:
                self._stream = cupy.cuda.ExternalStream(pointer, device.number)

    @property
    def pointer(self) -> int:
        """The driver's stream."""
        return int(self._stream.ptr)

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
        """Launch the kernel that copies whole blocks within the pool."""
        require_fork(pool, origins, targets)
        address = _address(pool.memory)
        how = plan(unit_bytes=pool.unit_bytes, planes=pool.planes, pool_slots=pool.slots, slots=origins, addresses=[address])
        with _copies(), self.device.current(), self._stream:
            numbers = (np.uint32(how.rows), np.uint32(pool.planes), np.uint32(pool.slots), np.uint32(how.vectors))
            call = self.device.kernel(f"copy_{how.width}")
            call((how.grid,), how.block, (address, self._index(origins), self._index(targets), *numbers))

    def _launch(self, name: str, pool: Pool, slots: Sequence[int], source: int, target: int, *, first: int, planes: int) -> None:
        how = plan(unit_bytes=pool.unit_bytes, planes=planes, pool_slots=pool.slots, slots=slots, addresses=[source, target])
        with _copies(), self.device.current(), self._stream:
            numbers = (np.uint32(how.rows), np.uint32(planes), np.uint32(first), np.uint32(pool.slots), np.uint32(how.vectors))
            self.device.kernel(f"{name}_{how.width}")((how.grid,), how.block, (source, self._index(slots), target, *numbers))

    def launch(self, kernel: Any, grid: int, block: tuple[int, ...], *arguments: Any) -> None:
        """Launch a kernel that is not the product's (`CudaDevice.program`). Lists of slots go to the device first."""
        with _copies(), self.device.current(), self._stream:
            kernel((grid,), block, tuple(self._index(one) if isinstance(one, list) else one for one in arguments))

    @staticmethod
    def _index(slots: Sequence[int]) -> Any:
        """Return slots on the device.

        CuPy takes the list into pinned memory of its own before the call returns, and gives the device's memory back to this
        stream, which uses it again only after the kernel.
        """
        return cupy.asarray(np.asarray(slots, np.int32))

    def read(self, source: Memory, at: int, into: Bytes) -> None:
        """Copy device memory to host memory."""
        count, length, distance = rows_of(into)
        _require_room(source, at + count * length)
        self._cross(_host(into), distance, _address(source) + at, length, length, count, _TO_HOST)

    def write(self, source: Bytes, into: Memory, at: int) -> None:
        """Copy host memory to device memory."""
        count, length, distance = rows_of(source)
        _require_room(into, at + count * length)
        self._cross(_address(into) + at, length, _host(source), distance, length, count, _TO_DEVICE)

    def clone(self, source: Memory, into: Memory) -> None:
        """Copy device memory whole to other device memory, by the driver's own means."""
        _require_room(into, source.size)
        self._cross(_address(into), source.size, _address(source), source.size, source.size, 1, _WITHIN)

    def _cross(self, to: int, to_distance: int, source: int, distance: int, length: int, count: int, way: int) -> None:
        """Have the copy engine copy `count` rows of `length` bytes."""
        with _copies(), self.device.current():
            if count == 1:
                cupy.cuda.runtime.memcpyAsync(to, source, length, way, self.pointer)
            else:
                cupy.cuda.runtime.memcpy2DAsync(to, to_distance, source, distance, length, count, way, self.pointer)

    def record(self) -> CudaEvent:
        """Record an event."""
        with _copies(), self.device.current():
            return CudaEvent(self.device.events.lend(), self._stream)

    def mark(self) -> Any:
        """Record an event that knows the time (`CudaDevice.seconds`)."""
        with _copies(), self.device.current():
            event = cupy.cuda.Event(block=True)
            event.record(self._stream)
            return event

    def wait(self, event: Event) -> None:
        """Let the stream wait for an event of this device; the caller does not."""
        assert isinstance(event, CudaEvent | CudaSharedEvent)
        with _copies(), self.device.current():
            cupy.cuda.runtime.streamWaitEvent(self.pointer, event.pointer)


class CudaDevice:
    """One CUDA device by its number. Its kernels are compiled at once. Raises MemoryRefused where the driver refuses them."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.events: Rotation[Any] = Rotation(lambda: cupy.cuda.Event(block=True, disable_timing=True))
        with _kernels(), self.current():
            module = cupy.RawModule(code=SOURCE.read_text(encoding="utf-8"), options=OPTIONS)
            self._kernels = {name: module.get_function(name) for name in NAMES}

    @property
    def name(self) -> str:
        """`cuda:` and the number."""
        return f"cuda:{self.number}"

    @property
    def tensors(self) -> str:
        """As torch names it, too."""
        return self.name

    @property
    def uuid(self) -> bytes:
        """What the driver says. CuPy reads it as text, which ends at a byte of 0, or behind it: none of 16 bytes is."""
        return bytes(cupy.cuda.runtime.getDeviceProperties(self.number)["uuid"])[:16].ljust(16, b"\0")

    @contextmanager
    def current(self) -> Iterator[None]:
        """Let the calling thread's calls go to this device for the length of a block.

        (An object of `cupy.cuda.Device` keeps in one list which device each thread came from: it can't be shared by threads.)
        """
        before = cupy.cuda.runtime.getDevice()
        if before == self.number:
            yield
            return
        cupy.cuda.runtime.setDevice(self.number)
        try:
            yield
        finally:
            cupy.cuda.runtime.setDevice(before)

    def kernel(self, name: str) -> Any:
        """Return a kernel of `blocks.cu`."""
        return self._kernels[name]

    def allocate(self, size: int) -> CudaMemory:
        """Return device memory. Raises MemoryRefused."""
        with _memory(f"{size} bytes of device memory"), self.current():
            return CudaMemory(size)

    def pinned(self, *shape: int) -> Bytes:
        """Return pinned host memory. Raises MemoryRefused.

        Not of CuPy's pool, which makes powers of two of sizes, and gives nothing back.
        """
        size = int(np.prod(shape))
        with _memory(f"{size} bytes of pinned memory"), self.current():
            memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(size), 0)
        return np.frombuffer(memory, np.uint8, size).reshape(shape)

    def register(self, memory: Bytes, *, readonly: bool = False) -> None:
        """Pin host memory where it lies. Raises MemoryRefused, also where the card can't pin what this process may only read."""
        flags = _PORTABLE | (_READ_ONLY if readonly else 0)
        with _memory(f"pinning {memory.nbytes} bytes"), self.current():
            cupy.cuda.runtime.hostRegister(_host(memory), memory.nbytes, flags)

    def unregister(self, memory: Bytes) -> None:
        """Undo `register`."""
        with _memory("unpinning"), self.current():
            cupy.cuda.runtime.hostUnregister(_host(memory))

    def stream(self) -> CudaStream:
        """Return a new stream."""
        return CudaStream(self)

    def event(self, handle: bytes | None = None) -> CudaSharedEvent:
        """Return a new event that can be handed to another process, or the one that another handed over. Raises StoreError."""
        with _copies(), self.current():
            return CudaSharedEvent.new() if handle is None else CudaSharedEvent.opened(handle)

    def adopt(self, pointer: int) -> CudaStream:
        """Return another library's stream; 0 is the legacy default stream."""
        return CudaStream(self, pointer)

    def borrow(self, address: int, size: int, owner: object) -> BorrowedMemory:
        """Return another library's memory in place."""
        return BorrowedMemory(address, size, owner)

    def part(self, memory: Memory, at: int, size: int) -> BorrowedMemory:
        """Return a part of memory in place. Raises InvalidTensor."""
        if at < 0 or size < 0:
            raise InvalidTensor(f"{size} bytes from byte {at} on are no part of memory", value=at)
        _require_room(memory, at + size)
        return BorrowedMemory(_address(memory) + at, size, memory)

    def array(self, memory: Memory, *shape: int) -> Any:
        """Return memory in place as a CuPy array of bytes, which `torch.from_dlpack` takes without a copy. Raises InvalidTensor."""
        size = int(np.prod(shape))
        _require_room(memory, size)
        with self.current():
            owned = cupy.cuda.UnownedMemory(_address(memory), size, memory, self.number)
            return cupy.ndarray(shape, cupy.uint8, cupy.cuda.MemoryPointer(owned, 0))

    def export(self, memory: Memory) -> bytes:
        """Return the driver's handle of memory of its own allocation. Raises InvalidTensor for less than 2 MiB."""
        if memory.size < LEAST_EXPORT or not isinstance(memory, CudaMemory):
            raise InvalidTensor(f"{memory.size} bytes are no memory of their own: less than {LEAST_EXPORT} can't be exported")
        with _memory("a handle"), self.current():
            return bytes(cupy.cuda.runtime.ipcGetMemHandle(memory.address))

    def open(self, handle: bytes, size: int) -> OpenedMemory:
        """Return another process's memory. Raises MemoryRefused: its owner has freed it, or is this process."""
        with _memory("opening a handle"), self.current():
            return OpenedMemory(self, handle, size)

    # --- for who measures -------------------------------------------------------------------------------------------------

    def program(self, source: str, name: str) -> Any:
        """Return a kernel of another source, compiled."""
        with _copies(), self.current():
            return cupy.RawModule(code=source, options=OPTIONS).get_function(name)

    def seconds(self, start: Any, end: Any) -> float:
        """Wait for the second of two marks, and return the time between them."""
        with _copies():
            end.synchronize()
            return float(cupy.cuda.get_elapsed_time(start, end)) / 1e3

    def free(self) -> int:
        """Return how many bytes of the device's memory are free, what CuPy keeps for later given back."""
        with self.current():
            cupy.get_default_memory_pool().free_all_blocks()
            return int(cupy.cuda.runtime.memGetInfo()[0])

    def properties(self) -> dict[str, str | int | float]:
        """Return what the device is, and by which driver."""
        found = cupy.cuda.runtime.getDeviceProperties(self.number)
        return {
            "card": found["name"].decode(),
            "compute capability": f"{found['major']}.{found['minor']}",
            "card memory": int(found["totalGlobalMem"]),
            "cuda driver": int(cupy.cuda.runtime.driverGetVersion()),
            "cuda runtime": int(cupy.cuda.runtime.runtimeGetVersion()),
            "cupy": str(cupy.__version__),
        }


def count() -> int:
    """Return how many CUDA devices there are; 0 where there is no driver."""
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


def _address(memory: Memory) -> int:
    assert isinstance(memory, CudaMemory | OpenedMemory | BorrowedMemory)
    return memory.address


def _host(memory: Bytes) -> int:
    return int(memory.ctypes.data)


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
    except (cupy.cuda.runtime.CUDARuntimeError, cupy.cuda.driver.CUDADriverError, cupy.cuda.memory.OutOfMemoryError) as error:
        # The last: for the list of slots that a kernel is given.
        raise StoreError(f"the device failed: {error}", device=True) from error


@contextmanager
def _kernels() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, cupy.cuda.compiler.CompileException) as error:  # CUDA's errors, and a compiler that is not there
        raise MemoryRefused(f"kernels refused by the device: {error}") from error
