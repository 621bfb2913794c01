"""The kernels of `blocks.cu` as functions of the host, compiled once a run with the machine's C++ compiler."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tiercache.kernels.host import Bytes
from tiercache.kernels.launch import SOURCE, Launch, plan


class _How(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint) for name in ("grid", "width", "height", "seed")]


@cache
def compiler() -> str | None:
    """Return the C++ compiler, if there is one."""
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def compiled(folder: Path, source: Path = SOURCE) -> ctypes.CDLL:
    """Compile the kernels of a source into `folder` and load them."""
    library = folder / f"{source.stem}.so"
    flags = ["-x", "c++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{SOURCE.parent}"]
    found = compiler()
    assert found is not None
    subprocess.run([found, *flags, "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library))


class HostKernels:
    """The launchers on the host: the arguments of those on a device, and a seed for the order of threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.host_moved.restype = ctypes.c_uint64

    def gather(self, pool: Bytes, slots: Sequence[int], into: Bytes, *, first: int, planes: int, seed: int) -> Launch:
        """`into` `[blocks, planes, unit]` from `pool` `[planes, slots, unit]`."""
        return self._run("gather", pool, slots, pool, into, first, planes, seed)

    def scatter(self, source: Bytes, pool: Bytes, slots: Sequence[int], *, first: int, planes: int, seed: int) -> Launch:
        """The inverse."""
        return self._run("scatter", pool, slots, source, pool, first, planes, seed)

    def copy(self, pool: Bytes, origins: Sequence[int], targets: Sequence[int], *, seed: int) -> Launch:
        """Blocks within the pool."""
        planes, pool_slots, unit = pool.shape
        how = plan(unit_bytes=unit, planes=planes, pool_slots=pool_slots, slots=origins, addresses=[pool.ctypes.data])
        call = self._library[f"host_copy_{how.width}"]
        call(
            _how(how, seed),
            _at(pool),
            _index(origins),
            _index(targets),
            *map(ctypes.c_uint, (how.rows, planes, pool_slots, how.vectors)),
        )
        self._require_each_once(how)
        return how

    def _require_each_once(self, how: Launch) -> None:
        """Every vector is moved by one thread, not by several that would all write the same."""
        assert self._library.host_moved() == how.rows * how.vectors

    def _run(
        self, name: str, pool: Bytes, slots: Sequence[int], source: Bytes, target: Bytes, first: int, planes: int, seed: int
    ) -> Launch:
        _, pool_slots, unit = pool.shape
        addresses = [source.ctypes.data, target.ctypes.data]
        how = plan(unit_bytes=unit, planes=planes, pool_slots=pool_slots, slots=slots, addresses=addresses)
        numbers = map(ctypes.c_uint, (how.rows, planes, first, pool_slots, how.vectors))
        self._library[f"host_{name}_{how.width}"](_how(how, seed), _at(source), _index(slots), _at(target), *numbers)
        self._require_each_once(how)
        return how


def host_mapped(library: ctypes.CDLL, planes: int, slots: int, unit: int, chosen: Sequence[int], *, seed: int) -> None:
    """Run both kernels of `bench/mapped.cu` between a pool and twice as many padded slots, and compare every byte."""
    draw = np.random.default_rng(seed)
    pool = draw.integers(0, 256, (planes, slots, unit), np.uint8)
    stride = -(-planes * unit // 4096) * 4096
    memory = draw.integers(0, 256, (2 * slots, stride), np.uint8)
    numbers = [int(number) for number in draw.permutation(2 * slots)[: len(chosen)]]
    how = plan(unit_bytes=unit, planes=planes, pool_slots=slots, slots=chosen, addresses=[0])
    assert how.width == 16
    sizes = tuple(map(ctypes.c_uint, (how.rows, planes, 0, slots, how.vectors, stride // 16)))
    for way in ("down", "up"):
        expected = (pool.copy(), memory.copy())
        for slot, number in zip(chosen, numbers, strict=True):
            block = expected[1][number, : planes * unit].reshape(planes, unit)
            if way == "down":
                block[...] = expected[0][:, slot]
            else:
                expected[0][:, slot] = block
        library[f"host_mapped_{way}"](_how(how, seed), _at(pool), _index(chosen), _at(memory), _index(numbers), *sizes)
        assert np.array_equal(pool, expected[0]) and np.array_equal(memory, expected[1])
        memory[:] = draw.integers(0, 256, memory.shape, np.uint8)


def _how(how: Launch, seed: int) -> _How:
    return _How(how.grid, *how.block, seed)


def _at(array: Bytes) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _index(slots: Sequence[int]) -> Any:
    return np.asarray(slots, np.int32).ctypes.data_as(ctypes.c_void_p)
