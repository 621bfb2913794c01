"""The HBM tier on a device: slots in the device's memory, reached by copies on its streams."""

from __future__ import annotations

import threading

from tiercache.errors import TierTooSmall
from tiercache.kernels.device import Device, Memory, Pool
from tiercache.kernels.host import copy_block
from tiercache.sizes import format_size
from tiercache.spec import Geometry
from tiercache.storage.checksum import verify
from tiercache.storage.contract import Planes, Put
from tiercache.storage.staging import Stage
from tiercache.storage.volatile import VolatileStore
from tiercache.types import Identity, Tier


class DeviceArena(VolatileStore):
    """Slots in memory of a device, layer-first. Transfers use `pool` by way of `DeviceCopier`.

    They are as many as fit the first `length` bytes (None: all), and `most` at most. `fetch` and `put` are for single blocks: each
    copies over the bus and waits, in the calling thread. Raises TierTooSmall if there is no room for a block, MemoryRefused if the
    device has none for a stage of one.
    """

    def __init__(
        self, device: Device, geometry: Geometry, memory: Memory, *, length: int | None = None, most: int | None = None
    ) -> None:
        length = memory.size if length is None else min(length, memory.size)
        slots = length // geometry.block_bytes
        if most is not None:
            slots = min(slots, most)
        if slots < 1:
            raise TierTooSmall(
                f"{Tier.HBM} has {format_size(length)} ({length} bytes) for blocks of {format_size(geometry.block_bytes)}",
                tier=Tier.HBM,
                length=length,
                need=geometry.block_bytes,
            )
        super().__init__(geometry, slots)
        self._pool: Pool | None = Pool(memory, geometry.planes, slots, geometry.unit_bytes)
        self._stream = device.stream()
        self._stage: Stage | None = Stage(
            device.allocate(geometry.block_bytes), device.pinned(1, geometry.planes, geometry.unit_bytes)
        )
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
        stage = self._required_stage()
        with self._turn:
            self._stream.gather(self.pool, [slot], stage.memory)
            self._stream.read(stage.memory, 0, stage.host.reshape(-1))
            self._stream.record().wait()
            copy_block(stage.host[0], into)
        verify(into, identity.checksum, f"copy of {self.tier} slot {slot}")

    def _take(self, item: Put) -> None:
        """Copy a block up; it is verified on its last place in host memory."""
        stage = self._required_stage()
        with self._turn:
            copy_block(item.source, stage.host[0])
            verify(stage.host[0], item.identity.checksum, f"source for {self.tier} slot {item.slot}")
            self._stream.write(stage.host.reshape(-1), stage.memory, 0)
            self._stream.scatter(stage.memory, self.pool, [item.slot], first=0, planes=self._geometry.planes)
            self._stream.record().wait()

    def close(self) -> None:
        """Let go of the device's memory. May be called twice."""
        super().close()
        self._pool = self._stage = None

    def _required_stage(self) -> Stage:
        if self._stage is None:
            raise self._is_closed()
        return self._stage
