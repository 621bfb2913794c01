"""M7, Q3 and Q4b on a CUDA device (`make test-gpu`). Their host forms: `test_3_movement_device`, `test_6_resources_*`."""

from __future__ import annotations

import gc
import hashlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.device_rig import is_exact, keys_of, pinned_house
from tiercache.kernels.device import Device, Memory, Pool
from tiercache.kernels.host import Bytes
from tiercache.storage.memory import HostMemory
from tiercache.storage.pinning import Pinning

if TYPE_CHECKING:
    from tiercache.kernels.cuda import CudaDevice

pytestmark = pytest.mark.gpu

DRAM = 1
CHUNK, CHUNKS = 1 << 20, 4
EXPORTED = 256 << 20
SLACK = 64 << 20
"""Bytes by which what is free on a device may differ for reasons that are the driver's."""
PATIENCE = 20.0
BUSY_NS = 100_000_000
BUSY = """
extern "C" __global__ void busy(unsigned long long length) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); while (now - start < length);
}
"""


@pytest.fixture(scope="module")
def cupy() -> Any:
    """CuPy, on a machine that has a device for it."""
    found = pytest.importorskip("cupy", reason="CuPy is not installed: these run on a CUDA device, with the `cuda` extra")
    if not found.cuda.is_available():
        pytest.skip("CuPy finds no CUDA device")
    return found


@pytest.fixture(scope="module")
def device(cupy: Any) -> CudaDevice:
    """The first device, its kernels compiled; the driver's own descriptors are open before a test begins."""
    from tiercache.kernels.cuda import CudaDevice

    device = CudaDevice(0)
    assert works(device)
    return device


def works(device: Device) -> bool:
    """Send bytes to the device, through both kernels and back, and return whether they came as they went."""
    size = 4096
    pool, stage, stream = Pool(device.allocate(4 * size), 1, 4, size), device.allocate(2 * size), device.stream()
    there, back = device.pinned(2 * size), device.pinned(2 * size)
    there[:] = np.arange(2 * size) % 251
    stream.write(there, stage, 0)
    stream.scatter(stage, pool, [3, 1], first=0, planes=1)
    stream.gather(pool, [3, 1], stage)
    stream.read(stage, 0, back)
    stream.record().wait()
    return bool((there == back).all())


def bytes_of(device: Device, memory: Memory) -> Bytes:
    """Return a copy of device memory."""
    into = device.pinned(memory.size)
    stream = device.stream()
    stream.read(memory, 0, into)
    stream.record().wait()
    return into


async def test_m7_demotions_behind_a_kernel_on_a_stream_of_their_own(
    tmp_path: Path, seed: int, cupy: Any, device: CudaDevice
) -> None:
    """Begun while their streams, none of them the default one, are busy: 64 demotions through two stages are exact, and come up
    exact."""
    from tiercache.kernels.cuda import CudaDevice, CudaStream

    class Watched(CudaDevice):
        """Keeps its streams, so that they can be made busy."""

        def stream(self) -> CudaStream:
            streams.append(super().stream())
            return streams[-1]

    streams: list[CudaStream] = []
    keys = keys_of(seed, 64, 1)
    watched = Watched(0)
    assert works(watched)
    busy = cupy.RawKernel(BUSY, "busy")
    busy((1,), (1,), (np.uint64(0),))
    streams.clear()

    def pool_of(pool: Pool) -> Bytes:
        return bytes_of(watched, pool.memory).reshape(pool.planes, pool.slots, pool.unit_bytes)

    async with pinned_house(watched, tmp_path, hbm=64, dram=64, pool_of=pool_of) as house:
        for key in keys:
            house.insert(key)
        assert len(streams) >= 2 and all(stream._stream.ptr for stream in streams)
        for stream in streams:
            with watched.current(), stream._stream:
                busy((1,), (1,), (np.uint64(BUSY_NS),))
        ends = [stream.record() for stream in streams]
        house.demote(64)
        gc.collect(0)
        begun_in_time = not any(end.event.done for end in ends)
        await house.stack.traffic.settle()

        assert begun_in_time, "the streams were free before the demotions had begun: this proves nothing"
        for key in keys:
            found = house.found(key)
            assert [tier for tier, _ in found] == [DRAM] and is_exact(found, key)
        leases = [house.lease(key) for key in keys]
        for lease in leases:
            await house.promote(lease)
        await house.stack.traffic.settle()
        for key, lease in zip(keys, leases, strict=True):
            found = house.found(key)
            assert [tier for tier, _ in found] == [0] and is_exact(found, key)
            house.cache.release(lease)
        house.stack.check()


@pytest.mark.parametrize("at", [0, CHUNKS // 2], ids=["0 %", "50 %"])
def test_q3_pinning_that_the_driver_refuses(device: CudaDevice, at: int) -> None:
    """What is pinned already is refused: the chunks before it are given back, it is said, and the next operation works."""
    with closing(HostMemory(CHUNK * CHUNKS)) as memory:
        parts = [memory.array[place : place + CHUNK] for place in range(0, CHUNK * CHUNKS, CHUNK)]
        device.register(parts[at])
        try:
            pinning = Pinning(device, memory.array, slot_bytes=4096, chunk=CHUNK)

            assert pinning.refused is not None and str(CHUNK) in pinning.refused
            assert works(device)
            pinning.close()
        finally:
            device.unregister(parts[at])
        for part in parts:  # twice is refused: none of them was left pinned
            device.register(part)
            device.unregister(part)
        pinning = Pinning(device, memory.array, slot_bytes=4096, chunk=CHUNK)
        assert pinning.refused is None
        pinning.close()
        assert works(device)


CLIENT = """
import hashlib, sys
import cupy, numpy
cupy.cuda.Device(0).use()
cupy.zeros(1)
if len(sys.argv) > 1:
    address = cupy.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(sys.argv[1]))
    found = bytearray(int(sys.argv[2]))
    cupy.cuda.runtime.memcpy(numpy.frombuffer(found, "u1").ctypes.data, address, len(found), cupy.cuda.runtime.memcpyDeviceToHost)
    print(hashlib.sha256(found).hexdigest(), flush=True)
else:
    print("here", flush=True)
sys.stdin.read()
"""


@contextmanager
def client(*arguments: str) -> Iterator[str]:
    """A process with a context on the device, which says one line and is killed in the end."""
    process = subprocess.Popen([sys.executable, "-c", CLIENT, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def test_q4b_a_client_of_the_devices_memory_is_killed(cupy: Any, device: CudaDevice, seed: int) -> None:
    """Killed with the memory mapped, and before it maps any: the next client maps it and reads it exactly; given back, all is free.

    No daemon exports a device's memory yet. What it would export is allocated as here, and must be as good after a client's death.
    """

    def free() -> int:
        gc.collect()
        with device.current():
            return int(cupy.cuda.runtime.memGetInfo()[0])

    pattern = device.pinned(1 << 20)
    pattern[:] = np.random.default_rng(seed).integers(0, 256, len(pattern), np.uint8)
    base = free()
    memory = device.allocate(EXPORTED)
    assert free() <= base - EXPORTED + SLACK
    stream = device.stream()
    stream.write(pattern, memory, 0)
    stream.record().wait()
    handle = device.export(memory).hex()
    exact = hashlib.sha256(pattern.tobytes()).hexdigest()

    with client() as said:
        assert said == "here"
    for _ in range(2):
        with client(handle, str(len(pattern))) as said:
            assert said == exact
    assert works(device)
    del memory

    deadline = time.monotonic() + PATIENCE
    while free() < base - SLACK and time.monotonic() < deadline:
        time.sleep(0.05)  # the driver takes a dead process's mappings away in its own time
    assert free() >= base - SLACK
