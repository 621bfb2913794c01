"""Pinning a host arena for a device: in chunks, all of it or nothing, and never silently nothing."""

from __future__ import annotations

import math
import mmap
from contextlib import ExitStack

from tiercache.errors import MemoryRefused
from tiercache.kernels.device import Device
from tiercache.kernels.host import Bytes

CHUNK = 1 << 30
"""Bytes that one call of the driver pins. It holds locks meanwhile, and has limits on one call that it does not have on many."""


class Pinning:
    """Slots of host memory, registered with a device as long as this lives; `memory` begins with the first of them.

    A driver refuses a copy that goes over the end of what one call pinned. So a chunk is a whole number of slots, `together` of
    them, and who copies neighbouring slots at once stays within multiples of that.

    A device that refuses a chunk gets back those before it: half an arena pinned would make some blocks fast and others not, and
    keep from others what they could pin whole. Then the memory stays pageable, copies take a detour, and `refused` says why.

    A chunk is also a whole number of pages, where one of that size can be: what a driver pins is pages, and it may refuse one that
    it has pinned already.

    `readonly` is for memory that this process has mapped so; not every card pins that.
    """

    def __init__(self, device: Device, memory: Bytes, *, slot_bytes: int, chunk: int = CHUNK, readonly: bool = False) -> None:
        self.together = max(1, chunk // slot_bytes)
        """How many slots one call pins."""
        step = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, slot_bytes)
        if self.together > step:
            self.together -= self.together % step
        chunk = self.together * slot_bytes
        self.refused: str | None = None
        """Why the memory is pageable; None when it is pinned."""
        self._given = ExitStack()
        with ExitStack() as taken:
            try:
                for start in range(0, memory.nbytes, chunk):
                    part = memory[start : start + chunk]
                    device.register(part, readonly=readonly)
                    taken.callback(device.unregister, part)
            except MemoryRefused as error:
                self.refused = str(error)
            else:
                self._given = taken.pop_all()

    def close(self) -> None:
        """Unpin. May be called twice."""
        self._given.close()
