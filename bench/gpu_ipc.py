"""Part of `bench gpu`: device memory in two processes, by a handle of 64 bytes, without a copy; either of them killed."""

from __future__ import annotations

import gc
import hashlib
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

from tiercache.bench.gpu_bench import Bench
from tiercache.bench.gpu_rig import CudaRig, LazyRig, Rig, random_bytes

SLACK = 64 << 20
"""Bytes by which what is free may differ for reasons that are the driver's."""
PATIENCE = 20.0
WRITTEN = 0x5A
_SLOW = 0.1


def measure(bench: Bench) -> None:
    """Check. Sizes are those of the memory exported."""
    size = bench.pick(4 << 20, 256 << 20)
    _clients_die(bench, size)
    _owner_dies(bench, size)


def _clients_die(bench: Bench, size: int) -> None:
    """Two clients in turn: each waits for the owner's event, reads, writes in place, and is killed with all of it open."""
    rig = bench.rig
    before = rig.free()
    memory = rig.device.allocate(size)
    bench.check("memory that is taken is missing", rig.free() <= before - size + SLACK)
    handle = rig.device.export(memory)
    bench.check("a handle is 64 bytes at most", 0 < len(handle) <= 64, f"{len(handle)} bytes")
    stream, event, host = rig.device.stream(), rig.device.event(), rig.device.pinned(size)
    for turn in ("the first client", "the next client"):
        content = random_bytes(bench.draw, size)
        host[:] = content
        with _process(rig, "client", handle, size, event.handle()) as (told, said):
            bench.check(f"{turn} opens it without a copy", said.readline().strip() == "open")
            rig.busy(stream, _SLOW)
            stream.write(host, memory, 0)
            event.record(stream)
            told.write("read\n")
            told.flush()
            found = said.readline().strip()
            bench.check(f"{turn} reads it after the owner's event", found == hashlib.sha256(content.tobytes()).hexdigest())
            told.write("write\n")
            told.flush()
            written = said.readline().strip() == "written"
            there = rig.peek(memory)
            half = size // 2
            exact = bool((there[half:] == WRITTEN).all()) and np.array_equal(there[:half], content[:half])
            bench.check(f"the owner sees what {turn} wrote in place", written and exact)
    rig.poke(host, memory)
    bench.check("after two were killed, copies work", np.array_equal(rig.peek(memory), host))
    del memory
    bench.check("all of it is given back", *_comes_back(rig, before))


def _owner_dies(bench: Bench, size: int) -> None:
    """The owner is killed while its memory is open here: what is read is exact or refused, and all of it is given back."""
    rig = bench.rig
    before = rig.free()
    with _process(rig, "owner", b"", size, b"") as (_, said):
        handle, known = said.readline().split()
        opened = rig.open(bytes.fromhex(handle), size)
        bench.check("another process's memory is read in place", _digest(opened) == known)
    bench.check("killed, its memory is still whole here", _digest(opened) == known)
    del opened
    bench.check("and given back when closed", *_comes_back(rig, before))
    stream, memory, there = rig.device.stream(), rig.device.allocate(4096), random_bytes(bench.draw, 4096)
    stream.write(there, memory, 0)
    stream.record().wait()
    bench.check("copies work after it", np.array_equal(rig.peek(memory), there))


def _comes_back(rig: Rig, before: int) -> tuple[bool, str]:
    """Return whether as much is free as before; the driver takes a dead process's mappings away in its own time."""
    deadline = time.monotonic() + PATIENCE
    while rig.free() < before - SLACK and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.05)
    return rig.free() >= before - SLACK, f"{(before - rig.free()) / (1 << 20):.0f} MiB less than before"


@contextmanager
def _process(rig: Rig, role: str, handle: bytes, size: int, event: bytes) -> Iterator[tuple[IO[str], IO[str]]]:
    """Start the other process of this part, which is killed in the end."""
    arguments = ["lazy" if rig.dry else "card", role, handle.hex() or "-", str(size), event.hex() or "-"]
    with subprocess.Popen(
        [sys.executable, "-c", _START, *arguments, *sys.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process.stdin, process.stdout
        finally:
            process.kill()


# Not `-m`: a plain checkout is found by this process's path alone.
_START = "import sys; sys.path[:] = sys.argv[6:]; from tiercache.bench.gpu_ipc import other; other(*sys.argv[1:6])"


def other(kind: str, role: str, handle: str, length: str, event: str) -> None:
    """Be the other process: `client` or `owner`, until killed."""
    rig: Rig = LazyRig(1) if kind == "lazy" else CudaRig()
    size = int(length)
    if role == "owner":
        memory, content = rig.device.allocate(size), random_bytes(np.random.default_rng(), size)
        rig.poke(content, memory)
        print(rig.device.export(memory).hex(), hashlib.sha256(content.tobytes()).hexdigest(), flush=True)
        sys.stdin.read()
        return
    opened, ready = rig.open(bytes.fromhex(handle), size), rig.device.event(bytes.fromhex(event))
    print("open", flush=True)
    for line in sys.stdin:
        if line.strip() == "read":
            ready.wait()
            print(_digest(opened), flush=True)
        else:
            opened[size // 2 :] = WRITTEN
            _digest(opened)  # what was enqueued has happened when it has been copied back
            print("written", flush=True)


def _digest(memory: Any) -> str:
    """Return the SHA-256 of a tensor, a CuPy array or an array of the host."""
    found = memory.cpu().numpy() if hasattr(memory, "cpu") else memory.get() if hasattr(memory, "get") else memory
    return hashlib.sha256(np.ascontiguousarray(found).tobytes()).hexdigest()
