"""The HBM tier on a device: slots in the device's memory, reached by copies on its streams."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from tiercache.errors import AuditFailed, Closed, InvalidTensor, TierTooSmall, Untrusted
from tiercache.kernels.device import Device, Pool
from tiercache.kernels.host import copy_block
from tiercache.sizes import format_size
from tiercache.spec import Geometry
from tiercache.storage.checksum import verify
from tiercache.storage.contract import FULL_CHARGE, Outcome, Planes, Put
from tiercache.types import Identity, Tier


class DeviceArena:
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
        self._geometry = geometry
        self._capacity = slots
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
    def geometry(self) -> Geometry:
        """The shape of the blocks that fit a slot."""
        return self._geometry

    @property
    def capacity(self) -> int:
        """How many slots there are; slots are numbered from 0."""
        return self._capacity

    @property
    def durable(self) -> bool:
        """False: what is stored ends with the process."""
        return False

    @property
    def pool(self) -> Pool:
        """All slots. Raises Closed after `close`."""
        if self._pool is None:
            raise Closed(f"the {self.tier} arena is closed")
        return self._pool

    def view(self, slot: int) -> Planes | None:
        """Return None: the host can't address the device's memory."""
        self._require(slot)
        return None

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

    def put(self, items: Sequence[Put]) -> list[Outcome]:
        """Copy `items` in, in order; each is verified on its last place in host memory, and the ones after a failure fail.

        Raises AuditFailed for a slot that does not exist and InvalidTensor for a source of another shape, before any copy.
        """
        shape = (self._geometry.planes, self._geometry.unit_bytes)
        for item in items:
            self._require(item.slot)
            if item.source.shape != shape or item.source.dtype != "uint8":
                what = f"{item.source.dtype} {item.source.shape}"
                raise InvalidTensor(f"the source for slot {item.slot} is {what}, not a block of bytes {shape}", slot=item.slot)
        outcomes: list[Outcome] = []
        for item in items:
            try:
                self._put(item)
            except Untrusted as error:
                outcomes.append(Outcome(0, error))
                break
            outcomes.append(Outcome(FULL_CHARGE))
        for item in items[len(outcomes) :]:
            what = f"{self.tier} slot {item.slot}: a block before it in the chain was not stored"
            outcomes.append(Outcome(0, Untrusted("order", what, slot=item.slot)))
        return outcomes

    def _put(self, item: Put) -> None:
        with self._turn:
            copy_block(item.source, self._host)
            verify(self._host, item.identity.checksum, f"source for {self.tier} slot {item.slot}")
            self._stream.write(self._host.reshape(-1), self._stage, 0)
            self._stream.scatter(self._stage, self.pool, [item.slot], first=0, planes=self._geometry.planes)
            self._stream.record().wait()

    def discard(self, slots: Sequence[int]) -> None:
        """Do nothing but see that `slots` exist (AuditFailed): the slot's next generation says that its block is gone."""
        for slot in slots:
            self._require(slot)

    def sync(self) -> None:
        """Do nothing: memory does not outlive a loss of power."""

    def close(self) -> None:
        """Let go of the device's memory. May be called twice."""
        self._pool = None

    def _require(self, slot: int) -> None:
        if self._pool is None:
            raise Closed(f"the {self.tier} arena is closed")
        if not 0 <= slot < self._capacity:
            raise AuditFailed(
                f"slot {slot} does not exist in {self.tier}; the slots are 0 to {self._capacity - 1}",
                slot=slot,
                capacity=self._capacity,
            )
