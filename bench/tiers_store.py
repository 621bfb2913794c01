"""The SSD store alone: what syncing costs it, and what compression costs and saves."""

from __future__ import annotations

import shutil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiercache.bench.cold import chill
from tiercache.bench.rawdisk import RawDisk
from tiercache.bench.run import Run
from tiercache.bench.timing import quiet, seconds
from tiercache.keys import ROOT_KEY, block_keys
from tiercache.spec import Geometry, KVSpec
from tiercache.storage.checksum import checksum
from tiercache.storage.codec import Codec
from tiercache.storage.contract import Put
from tiercache.storage.ssd import SsdTier
from tiercache.types import Identity

_SPEC = KVSpec(layers=32, kv_heads=8, head_dim=64, dtype="bfloat16")
_SPACE = b"bench".ljust(32, b"\0")


class _Mode(NamedTuple):
    """One way to open the store, as it is shown."""

    store: str
    codec: str
    sync: bool


_MODES = (_Mode("raw, synced", "raw", True), _Mode("raw, unsynced", "raw", False), _Mode("zstd, synced", "zstd", True))


def measure_store(run: Run) -> None:
    """Measure one put and cold fetches of a chain of blocks of 1 MiB in each mode, in turns with the disk itself."""
    geometry = _SPEC.geometry
    count = run.pick(8, 192)
    puts = _chain(geometry, count)
    total = count * geometry.block_bytes
    written: dict[_Mode, list[float]] = {mode: [] for mode in _MODES}
    fetched: dict[_Mode, list[float]] = {mode: [] for mode in _MODES}
    writes: list[float] = []
    reads: list[float] = []
    with RawDisk.of(run.folder, total=total, piece=geometry.block_bytes) as raw:
        for turn in range(run.pick(2, 6)):
            if raw is not None and turn:
                writes.append(total / raw.best_growth())
                reads.append(total / raw.best_read())
            for mode in _MODES:
                down, up = _turn(run, geometry, mode, puts)
                if turn:  # the first one compares bytes and warms up
                    written[mode].append(total / down)
                    fetched[mode].append(total / up)
    for mode in _MODES:
        at: dict[str, str | int | float] = {"store": mode.store, "block bytes": geometry.block_bytes}
        run.add("store put", written[mode], "B/s", at=at, reference=run.reference("O_DIRECT", writes) if writes else None)
        run.add("store fetch, cold", fetched[mode], "B/s", at=at, reference=run.reference("O_DIRECT", reads) if reads else None)
    codec = Codec(geometry.block_bytes)
    sizes = [len(codec.compress(put.source.reshape(-1), 2)) / geometry.block_bytes for put in puts[: run.pick(4, 64)]]
    run.add("compressed size", sizes, "1", at={"store": "zstd", "values": "normal, bfloat16"})


def _turn(run: Run, geometry: Geometry, mode: _Mode, puts: list[Put]) -> tuple[float, float]:
    """Return the seconds of one put of all blocks, and of fetching them cold one after the other."""
    folder = run.folder / "store"
    into = np.ones((geometry.planes, geometry.unit_bytes), np.uint8)
    room = 4 * len(puts) * geometry.block_bytes
    tier = SsdTier(folder, codec=mode.codec, sync=mode.sync)
    store = tier.open(geometry, capacity_bytes=room, item_bytes=2)
    with quiet():
        down = seconds(lambda: store.put(puts))
    assert store.stats().blocks == len(puts), "not everything was stored"
    if not mode.sync:
        store.sync()  # not timed: or what is not synced is dropped before it is read
    tier.close()
    chill(folder)
    tier = SsdTier(folder, codec=mode.codec, sync=mode.sync)
    store = tier.open(geometry, capacity_bytes=room, item_bytes=2)
    up = 0.0
    with quiet():
        for put in puts:
            up += seconds(lambda one=put: store.fetch(one.slot, one.identity, into))  # type: ignore[misc]
            assert np.array_equal(into, put.source), "wrong bytes"
    tier.close()
    shutil.rmtree(folder)
    return down, up


def _chain(geometry: Geometry, count: int) -> list[Put]:
    """Return a chain of blocks of normally distributed bfloat16, of a scale that differs from head to head."""
    random = np.random.default_rng(0)
    symbols = np.arange(count * geometry.symbol_bytes // 4, dtype="<i4").tobytes()
    keys = block_keys(_SPACE, ROOT_KEY, symbols, geometry.symbol_bytes)
    puts: list[Put] = []
    for slot, (key, parent) in enumerate(zip(keys, [ROOT_KEY, *keys], strict=False)):
        block = _normal(random, geometry)
        symbol = symbols[slot * geometry.symbol_bytes : (slot + 1) * geometry.symbol_bytes]
        puts.append(Put(slot, Identity(_SPACE, 0, 0, key, parent, symbol, checksum(block)), block))
    return puts


def _normal(random: np.random.Generator, geometry: Geometry) -> NDArray[np.uint8]:
    values = random.standard_normal((geometry.planes, geometry.unit_bytes // 2), np.float32)
    values *= random.uniform(0.1, 3.0, (geometry.planes, 1)).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
