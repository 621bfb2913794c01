"""The disk beside LMCache's: stored until it is there, synced and unsynced, and retrieved from there, cold and warm.

LMCache's server writes a file a chunk and syncs nothing. It is compared with our daemon made not to sync, which loses what was
stored with the machine's power, as LMCache does. Cold: the pages of all files are dropped, for which our daemon is stopped, since
nothing is dropped under an open map. Warm: the memory tier is too small, or emptied, and the files are in the page cache.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack
from itertools import count
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiercache.bench.calibrate import disk_rates
from tiercache.bench.figures import Goal, Reference, Spread
from tiercache.bench.peer_daemon import EXACT, daemon
from tiercache.bench.peer_figures import add_rates, add_ratio
from tiercache.bench.peer_link import CHUNKS, Peer, served
from tiercache.bench.peer_sides import Ours, Prompt, Side, Theirs, same
from tiercache.bench.run import Run
from tiercache.bench.timing import quiet
from tiercache.config import Config
from tiercache.service.client.remote_kv import RemoteKV
from tiercache.types import Tier

SYNCED, UNSYNCED, PEER = "tiercache, synced", "tiercache, unsynced", "LMCache, unsynced"
_MEMORY = 2
"""Prompts that fit our memory tier, so that the third one that is read comes from disk."""
_RESIDENT = 0.01
"""How much of a file may be in the page cache for it to be cold."""
_BYTES = ctypes.POINTER(ctypes.c_ubyte)


async def disk(run: Run, prompt: Prompt, python: Path | None) -> None:
    """Measure the disk with prompts of one size."""
    folder = run.folder / f"disk-{prompt.bytes}"
    folder.mkdir()
    try:
        await _measure(run, prompt, python, folder)
    finally:
        shutil.rmtree(folder)


async def _measure(run: Run, prompt: Prompt, python: Path | None, folder: Path) -> None:
    rounds = run.pick(2, 6)
    numbers = count(1)
    with ExitStack() as stack:
        theirs = folder / "theirs"
        peer = (
            stack.enter_context(served(python, prompt.spec, folder, memory=(_MEMORY + 2) * prompt.bytes, disk=theirs))
            if python is not None
            else None
        )
        before = disk_rates(folder, prompt.bytes, prompt.bytes // CHUNKS)
        stored = await _store(prompt, peer, folder, numbers, rounds)
        warm, cold = await _retrieve(run, prompt, peer, folder, numbers, rounds)
        after = disk_rates(folder, prompt.bytes, prompt.bytes // CHUNKS)
    raw = "O_DIRECT, best of 1, 4, 8"
    writes = None if before is None or after is None else Reference(raw, Spread.of([before.write, after.write]))
    reads = None if before is None or after is None else Reference(raw, Spread.of([before.read, after.read]))
    if before is None:
        run.note("the folder's file system has no O_DIRECT: the disk has no reference")
    goal = Goal(key="peer-disk", at_least=1.2)
    add_rates(run, "store on disk", prompt, stored, writes)
    add_ratio(run, "store on disk beside LMCache", prompt, stored, (UNSYNCED, PEER), goal)
    for name, samples, limit in (("warm", warm, None), ("cold", cold, reads)):
        add_rates(run, f"retrieve from disk, {name}", prompt, samples, limit)
        add_ratio(run, f"retrieve from disk, {name}, beside LMCache", prompt, samples, (SYNCED, PEER), goal)


async def _store(prompt: Prompt, peer: Peer | None, folder: Path, numbers: Iterator[int], rounds: int) -> dict[str, list[float]]:
    async with AsyncExitStack() as stack:
        sides: dict[str, Side] = {}
        for name in (SYNCED, UNSYNCED):
            kv = await stack.enter_async_context(_daemon(prompt, folder / name[-8:], rounds + 4, sync=name == SYNCED))
            sides[name] = Ours(kv, prompt, flushed=True)
        if peer is not None:
            sides[PEER] = Theirs(peer, "slots")
        await same(sides.values(), prompt, numbers)
        times: dict[str, list[float]] = {name: [] for name in sides}
        with quiet():
            for warm in range(rounds + 1):
                for name, side in sides.items():
                    if name == PEER:
                        await side.clear()
                    took = await side.store(next(numbers))
                    times[name] += [took] if warm else []
    return times


async def _retrieve(
    run: Run, prompt: Prompt, peer: Peer | None, folder: Path, numbers: Iterator[int], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    names = [SYNCED, *([PEER] if peer is not None else [])]
    warm: dict[str, list[float]] = {name: [] for name in names}
    cold: dict[str, list[float]] = {name: [] for name in names}
    place, capacity = folder / "ours", _MEMORY + 2
    mine = [next(numbers) for _ in range(_MEMORY + 1)]
    other = next(numbers)
    async with _daemon(prompt, place, capacity) as kv:
        side = Ours(kv, prompt, flushed=True)
        for number in mine:
            await side.store(number)
    if peer is not None:
        await Theirs(peer, "slots").store(other)
    async with _daemon(prompt, place, capacity) as kv:
        side = Ours(kv, prompt, found_in={Tier.SSD})
        assert await side.digest(mine[0]) == prompt.digest
        for turn in range(rounds + _MEMORY):
            took = await side.retrieve(mine[(turn + 1) % len(mine)])
            warm[SYNCED] += [took] if turn >= _MEMORY else []
            if peer is not None:
                took = await _theirs(peer, prompt, other, digest=not turn)
                warm[PEER] += [took] if turn >= _MEMORY else []
    for _ in range(rounds):
        shares = [_drop(place)]
        async with _daemon(prompt, place, capacity) as kv:
            cold[SYNCED].append(await Ours(kv, prompt, found_in={Tier.SSD}).retrieve(mine[0]))
        if peer is not None:
            peer.call("clear")
            shares.append(_drop(folder / "theirs"))
            cold[PEER].append(peer.call("retrieve", other))
        if max(shares) > _RESIDENT:
            run.note(f"after their pages were dropped, {max(shares):.0%} of the files was still in the page cache: not cold")
    return warm, cold


async def _theirs(peer: Peer, prompt: Prompt, number: int, *, digest: bool) -> float:
    peer.call("clear")
    if digest:
        assert peer.call("digest", number) == prompt.digest, "LMCache gave other bytes back from disk than were stored"
        peer.call("clear")
    return float(peer.call("retrieve", number))


def _daemon(prompt: Prompt, place: Path, capacity: int, *, sync: bool = True) -> AbstractAsyncContextManager[RemoteKV]:
    """Return our daemon with disk for `capacity` prompts at `place`, and little memory."""
    ssd = capacity * prompt.bytes + (64 << 20)
    config = Config.of(dram=_MEMORY * prompt.bytes, ssd=ssd, directory=str(place), drain_seconds=0.0, **EXACT)
    return daemon(config, prompt.spec, sync=sync)


def _drop(folder: Path) -> float:
    """Write the files in `folder` and drop their pages from memory; return the share that is still there."""
    found, pages = 0, 0
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size:
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                resident = _resident(file.fileno())
            found, pages = found + int(resident.sum()), pages + len(resident)
    return found / max(pages, 1)


def _resident(file: int) -> NDArray[np.uint8]:
    """Return for each page of a file whether it is in memory. (A read that must not wait would tell, too, but reads ahead.)"""
    with mmap.mmap(file, 0, prot=mmap.PROT_READ) as region:
        whole = np.frombuffer(region, np.uint8)
        states = np.zeros(-(-len(whole) // mmap.PAGESIZE), np.uint8)
        failed = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(whole.ctypes.data), ctypes.c_size_t(len(whole)), states.ctypes.data_as(_BYTES)
        )
        del whole  # a map that is looked into can't be closed
    assert not failed, "mincore refused"
    return np.bitwise_and(states, 1, dtype=np.uint8)
