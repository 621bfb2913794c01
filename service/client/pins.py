"""The daemon's memory, pinned for this client's device: once, however many namespaces lie in it, until the client's end."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence

from tiercache.kernels.device import Device
from tiercache.service.client.counts import Counts
from tiercache.service.client.mapping import Arena, Memory
from tiercache.storage.pinning import Pinning
from tiercache.storage.workers import Lane, Workers


class Pins:
    """What is pinned of each session's memory, and what a device refused to pin: both are counted.

    A session's memory is unpinned when nobody looks into it any more, or by `close`, when all copies are over.
    """

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._pinned: weakref.WeakKeyDictionary[Memory, dict[int, Pinning]] = weakref.WeakKeyDictionary()
        self._turn: asyncio.Lock | None = None

    async def pin(self, device: Device, arenas: Sequence[Arena], workers: Workers) -> int | None:
        """Have block-first arenas pinned, by a worker, if they are not yet; return how many slots of any lie in one pinned piece.

        None where nothing is pinned: copies from there take a detour, but are as right as any.
        """
        if self._turn is None:
            self._turn = asyncio.Lock()
        async with self._turn:
            found: list[Pinning] = []
            for arena in arenas:
                if arena.slot_bytes is not None:
                    known = self._known(arena)
                    found.append(await workers.run(Lane.COPY, self._pin, device, arena) if known is None else known)
        return min((pinning.together for pinning in found if pinning.refused is None), default=None)

    def close(self) -> None:
        """Unpin everything; no copy may be under way."""
        for pinned in list(self._pinned.values()):
            for pinning in pinned.values():
                pinning.close()
        self._pinned.clear()
        self._counts.pinned = 0

    def _known(self, arena: Arena) -> Pinning | None:
        return self._pinned.setdefault(arena.memory, {}).get(_begin(arena))

    def _pin(self, device: Device, arena: Arena) -> Pinning:
        slot = arena.slot_bytes
        assert slot is not None
        size = arena.capacity * slot
        pinning = Pinning(device, arena.readable[:size], slot_bytes=slot, readonly=True)
        self._pinned.setdefault(arena.memory, {})[_begin(arena)] = pinning
        if pinning.refused is None:
            self._counts.pinned += size
            weakref.finalize(arena.memory, self._gone, pinning, size).atexit = False
        else:
            self._counts.pageable += size
            self._counts.pageable_because = pinning.refused
        return pinning

    def _gone(self, pinning: Pinning, size: int) -> None:
        """Unpin memory of a session that is over."""
        pinning.close()
        self._counts.pinned = max(0, self._counts.pinned - size)


def _begin(arena: Arena) -> int:
    return int(arena.readable.__array_interface__["data"][0])
