"""The HBM tier on a device: slots in the device's memory, reached by copies on its streams."""

from __future__ import annotations

import threading

from tiercache.errors import TierTooSmall
from tiercache.kernels.device import Device, Pool
from tiercache.kernels.host import copy_block
from tiercache.sizes import format_size
from tiercache.spec import Geometry
from tiercache.storage.checksum import verify
from tiercache.storage.contract import Planes, Put
from tiercache.storage.volatile import VolatileStore
from tiercache.types import Identity, Tier


class DeviceArena(VolatileStore):
    """Slots of `length` bytes of a device's memory, layer-first. Transfers use `pool` by way of `DeviceCopier`.

    `fetch` and `put` are for single blocks: each copies over the bus and waits, in the calling thread. Raises TierTooSmall if
    `length` bytes hold no block, MemoryRefused if the device has no such room.
    """

    def __init__(self, device: Device, geometry: Geometry, *, length: int) -> None:
        slots = length // geometry.block_bytes
        if slots < 1:
            raise TierTooSmall(
                f"{Tier.HBM} has {format_size(length)} ({length} bytes) for blocks of {format_size(geometry.block_bytes)}",
                tier=Tier.HBM,
                length=length,
                need=geometry.block_bytes,
            )
        super().__init__(geometry, slots)
        self._pool: Pool | None = Pool(device.allocate(slots * geometry.block_bytes), geometry.planes, slots, geometry.unit_bytes)
        self._stream = device.stream()
        self._stage = device.allocate(geometry.block_bytes)
        self._host = device.pinned(geometry.planes, geometry.unit_bytes)
        self._turn = threading.Lock()

    @property
    def tier(self) -> Tier:
        """HBM."""
        return Tier.HBM

    @property
    def pool(self) -> Pool:
        """All slots. Raises Closed after `close`."""
        if self._pool is None:
            raise self._is_closed()
        return self._pool

    def view(self, slot: int) -> Planes | None:
        """Return None: the host can't address the device's memory."""
        self._require(slot)
        return None

    def views(self, first: int, count: int) -> None:
        """Return None, as `view` does."""
        self._require(first)
        self._require(first + count - 1)

    def fetch(self, slot: int, identity: Identity, into: Planes) -> None:
        """Copy the block in `slot` into `into`, `[planes, unit_bytes]`, and verify what was copied.

        Raises Untrusted, reason `checksum`, if it is not the block that `identity` names; `into` is then undefined.
        """
        self._require(slot)
        with self._turn:
            self._stream.gather(self.pool, [slot], self._stage)
            self._stream.read(self._stage, 0, self._host.reshape(-1))
            self._stream.record().wait()
            copy_block(self._host, into)
        verify(into, identity.checksum, f"copy of {self.tier} slot {slot}")

    def _take(self, item: Put) -> None:
        """Copy a block up; it is verified on its last place in host memory."""
        with self._turn:
            copy_block(item.source, self._host)
            verify(self._host, item.identity.checksum, f"source for {self.tier} slot {item.slot}")
            self._stream.write(self._host.reshape(-1), self._stage, 0)
            self._stream.scatter(self._stage, self.pool, [item.slot], first=0, planes=self._geometry.planes)
            self._stream.record().wait()

    def close(self) -> None:
        """Let go of the device's memory. May be called twice."""
        super().close()
        self._pool = None
