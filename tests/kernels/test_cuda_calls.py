"""The CUDA device's calls of CuPy where there is CuPy and no card: the driver's answers are given here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tiercache.errors import MemoryRefused, StoreError

if TYPE_CHECKING:
    from tiercache.kernels.cuda import CudaDevice

cupy: Any = pytest.importorskip("cupy", reason="CuPy is not installed")


class Driver:
    """A driver's current device by thread, in the place of the runtime's two calls."""

    def __init__(self) -> None:
        self._here = threading.local()
        self.error: Exception | None = None

    def get(self) -> int:
        """Return the calling thread's current device; 0 at first."""
        return getattr(self._here, "number", 0)

    def set(self, number: int) -> None:
        """Make a device the calling thread's current one."""
        if self.error is not None:
            raise self.error
        self._here.number = number


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Two devices, 0 current in each thread, and kernels that compile."""
    made = Driver()
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", made.get)
    monkeypatch.setattr(cupy.cuda.runtime, "setDevice", made.set)

    class Module:
        def __init__(self, **given: object) -> None:
            pass

        def get_function(self, name: str) -> Callable[..., None]:
            return lambda *args: None

    monkeypatch.setattr(cupy, "RawModule", Module)
    return made


def opened(number: int) -> CudaDevice:
    """Return a device."""
    from tiercache.kernels.cuda import CudaDevice

    return CudaDevice(number)


def test_each_thread_comes_back_to_the_device_that_it_came_from(driver: Driver) -> None:
    """Two threads are on a device at once, and leave it in the order in which they came."""
    device = opened(1)
    inside, leave = threading.Event(), threading.Event()
    found: list[int] = []

    def other() -> None:
        driver.set(2)
        with device.current():
            inside.set()
            assert leave.wait(20)
            found.append(driver.get())
        found.append(driver.get())

    thread = threading.Thread(target=other)
    with device.current():
        thread.start()
        assert inside.wait(20)
    assert driver.get() == 0
    leave.set()
    thread.join()
    assert found == [1, 2]


@pytest.mark.parametrize("told", [b"abc", b"", b"sixteen bytes ex", b"sixteen bytes exand what lies behind"])
def test_a_uuid_has_sixteen_bytes(driver: Driver, monkeypatch: pytest.MonkeyPatch, told: bytes) -> None:
    """Also one in which a byte is 0, where CuPy ends it."""
    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceProperties", lambda number: {"uuid": told})
    assert opened(0).uuid == told[:16].ljust(16, b"\0")


def test_what_the_driver_refuses_at_the_start_is_said(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A context that can't be had, and a compiler that is not there."""
    driver.error = RuntimeError("no room for a context")
    with pytest.raises(MemoryRefused, match="no room for a context"):
        opened(1)
    driver.error = None

    def missing(**given: object) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cupy, "RawModule", missing)
    with pytest.raises(MemoryRefused, match="no compiler"):
        opened(0)


def test_no_room_for_a_list_of_slots_is_a_failed_copy() -> None:
    """A kernel's list lies in the card's memory, which a runner may have taken whole."""
    from tiercache.kernels import cuda

    with pytest.raises(StoreError), cuda._copies():
        raise cupy.cuda.memory.OutOfMemoryError(1, 2)


def test_the_calls_are_those_that_cupy_has() -> None:
    """Names and order of what they take."""
    runtime = cupy.cuda.runtime
    told = {
        runtime.memcpyAsync: "dst, size_t size, int kind, intptr_t stream",
        runtime.memcpy2DAsync: "dst, size_t dpitch, intptr_t src, size_t spitch, size_t width, size_t height, MemoryKind kind",
        runtime.hostRegister: "ptr, size_t size, unsigned int flags",
        runtime.ipcOpenMemHandle: "bytes handle",
        runtime.streamWaitEvent: "stream, intptr_t event",
        runtime.eventRecord: "event, intptr_t stream",
    }
    for call, arguments in told.items():
        assert arguments.replace("dst, size_t size", "dst, intptr_t src, size_t size") in (call.__doc__ or ""), call
