"""What the stores of one geometry have of a device: its slots, the stages of the way there, host memory pinned for it."""

from __future__ import annotations

import logging

from tiercache.errors import MemoryRefused
from tiercache.kernels.device import Device, Memory
from tiercache.kernels.host import Bytes
from tiercache.spec import Geometry
from tiercache.storage.device_arena import DeviceArena
from tiercache.storage.pinning import Pinning
from tiercache.storage.staging import Ring

log = logging.getLogger(__name__)

STAGES = 4
"""So many copies are under way at once. Two keep the bus busy one way; there are two ways, and readers beside the transfers."""
STAGE_BYTES = 32 << 20
"""Bytes of a stage at most: a millisecond of the bus, beside which what a copy costs before it begins is little."""

BESIDE = 2
"""Runners' streams that have a stage of their own within the device; more of them share these."""
BESIDE_BYTES = 16 << 20
"""Bytes of such a stage at most: the device moves that much in the time of some launches."""


_KEPT: list[Bus] = []
"""Whose device may still copy: all that they have stays where it is until the process ends."""


class Bus:
    """A device's arena in `memory`, a ring of stages for it, and the host memory `below` pinned, whose slots are `slot_bytes` long.

    Raises TierTooSmall if `length` bytes hold no block, and MemoryRefused if the device or the host has no room for the stages.
    Memory that can't be pinned is no error: `pageable` says why. Blocks the calling thread, for as long as pinning takes.
    """

    def __init__(
        self, device: Device, geometry: Geometry, memory: Memory, *, length: int, most: int, below: Bytes | None, slot_bytes: int
    ) -> None:
        self.device = device
        self.slot_bytes = memory.size
        """Bytes of the device's memory that the slots lie in, what is left over included."""
        self._left = False
        self._handle: bytes | None = None
        self.arena = DeviceArena(device, geometry, memory, length=length, most=most)
        blocks = max(1, min(self.arena.capacity, STAGE_BYTES // geometry.block_bytes))
        self.ring = Ring(device, geometry, stages=STAGES, blocks=blocks)
        size = max(geometry.block_bytes, min(blocks * geometry.block_bytes, BESIDE_BYTES))
        self.beside = [device.allocate(size) for _ in range(BESIDE)]
        """Stages of runners' own streams (`Passage`)."""
        self._below = below
        self._pinning = None if below is None else Pinning(device, below, slot_bytes=slot_bytes)
        if self.pageable is not None:
            log.warning("DRAM for blocks of %d bytes stays pageable: %s", geometry.block_bytes, self.pageable)

    @property
    def stage_bytes(self) -> int:
        """Bytes of the device that stages take: of the ring, of runners' streams, and the arena's own for single blocks."""
        return self.ring.size + sum(stage.size for stage in self.beside) + self.arena.geometry.block_bytes

    @property
    def stage_host_bytes(self) -> int:
        """Bytes of pinned host memory that stages take."""
        return self.ring.size + self.arena.geometry.block_bytes

    @property
    def together(self) -> int | None:
        """How many slots of the host memory one copy may cross: no copy goes over a multiple of it."""
        return None if self._pinning is None else self._pinning.together

    @property
    def pageable(self) -> str | None:
        """Why the host memory is not pinned; None when it is, or when there is none."""
        return None if self._pinning is None else self._pinning.refused

    @property
    def below_bytes(self) -> int:
        """Bytes of host memory that are pinned, or would be."""
        return 0 if self._below is None else self._below.nbytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory below that are pinned."""
        return 0 if self.pageable is not None else self.below_bytes

    def handle(self) -> bytes:
        """Return what another process opens the slots' memory by. Raises MemoryRefused where the driver refuses that, Closed."""
        if self._handle is None:
            self._handle = self.device.export(self.arena.pool.memory)
        return self._handle

    def abandon(self) -> None:
        """Keep all of it as it is, whoever closes it or forgets it: the device may still copy, and nobody knows for how long.

        Nothing is left to keep where it was closed before.
        """
        if self._left:
            return
        self._left = True
        _KEPT.append(self)
        log.error("what %s has begun may not have ended; its memory is kept until the process ends", self.device.name)

    def close(self) -> None:
        """Unpin, and let go of slots and stages. Nothing is being copied any more. May be called twice.

        A device that refuses to unpin is one that nothing is known of: all is kept as it is then.
        """
        if self._left:
            return
        if self._pinning is not None:
            try:
                self._pinning.close()
            except MemoryRefused as error:
                log.error("DRAM for %s can't be unpinned: %s", self.device.name, str(error))
                self.abandon()
                return
        self._left = True
        self.ring.close()
        self.beside.clear()
        self.arena.close()
        self._below = None
