"""Arenas: tiers whose slots lie in host memory, block-first for DRAM, layer-first for HBM where there is no device."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
from numpy.typing import NDArray

from tiercache.errors import AuditFailed, TierTooSmall
from tiercache.kernels.host import copy_block
from tiercache.sizes import format_size
from tiercache.spec import Geometry
from tiercache.storage.checksum import verify
from tiercache.storage.contract import Blocks, Planes, Put
from tiercache.storage.layouts import (
    SLOT_ALIGNMENT,
    SlotPlanes,
    block_first,
    block_first_slot_bytes,
    layer_first,
)
from tiercache.storage.memory import HostMemory
from tiercache.storage.volatile import VolatileStore
from tiercache.types import Identity, Tier


class HostArena(VolatileStore):
    """What both arenas share: all slots are `[slots, planes, unit_bytes]` bytes in place, of a stride that is the layout's.

    Everything is verified where it arrives, not where it came from: a source that changes under the copy, or a copy that went
    wrong, then can't be mistaken for a good block. An arena keeps no identities; the block table and the generations say
    whose a slot is, and the checksum is the guard.

    The region has `length` bytes, or as many as `most` slots take if these are fewer. Raises TierTooSmall if it holds no block,
    AuditFailed if it does not lie in `memory` on a page boundary.
    """

    def __init__(
        self, memory: HostMemory, geometry: Geometry, *, offset: int = 0, length: int | None = None, most: int | None = None
    ) -> None:
        length = memory.size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > memory.size or offset % SLOT_ALIGNMENT:
            raise AuditFailed(
                f"{length} bytes at {offset} are no region of {memory.size} bytes on a boundary of {SLOT_ALIGNMENT}",
                offset=offset,
                length=length,
            )
        need = self._slot_bytes(geometry)
        if most is not None:
            length = min(length, most * need)
        self._offset = offset
        self._length = length
        if length < need:
            raise TierTooSmall(
                f"{self.tier} has {format_size(length)} ({length} bytes) for blocks of {format_size(geometry.block_bytes)}; "
                f"one needs {need} bytes",
                tier=self.tier,
                length=length,
                need=need,
            )
        region = memory.array[offset : offset + length]
        slots = self._lay_out(region, geometry)
        super().__init__(geometry, len(slots))
        self._slots: SlotPlanes | None = slots

    @property
    @abstractmethod
    def layout(self) -> str:
        """`block-first` or `layer-first` (`tiercache.storage.layouts`)."""

    @staticmethod
    @abstractmethod
    def _slot_bytes(geometry: Geometry) -> int:
        """Return what one slot takes of the region."""

    @staticmethod
    @abstractmethod
    def _lay_out(region: NDArray[np.uint8], geometry: Geometry) -> SlotPlanes:
        """Return all slots that fit the region, in place."""

    @property
    def offset(self) -> int:
        """Where the arena begins in its memory, in bytes; with `length` and the geometry all that a client needs to map it."""
        return self._offset

    @property
    def length(self) -> int:
        """Bytes of the memory that are the arena's."""
        return self._length

    def view(self, slot: int) -> Planes:
        """Return the slot's bytes in place, `[planes, unit_bytes]`.

        The view is valid for as long as the caller owns the slot or holds a lease on its block. Raises AuditFailed if there is
        no such slot, Closed after `close`.
        """
        self._require(slot)
        slots = self._slots
        if slots is None:
            raise self._is_closed()
        planes: Planes = slots[slot]
        return planes

    def views(self, first: int, count: int) -> Blocks:
        """Return neighbouring slots in place, `[count, planes, unit_bytes]`. Valid, and raises, as `view`."""
        self._require(first)
        self._require(first + count - 1)
        slots = self._slots
        if slots is None:
            raise self._is_closed()
        return slots[first : first + count]

    def fetch(self, slot: int, identity: Identity, into: Planes) -> None:
        """Copy the block in `slot` into `into`, `[planes, unit_bytes]`, and verify the copy against `identity`.

        Raises Untrusted, reason `checksum`, if the copy is not the block that `identity` names; `into` is then undefined.
        """
        copy_block(self.view(slot), into)
        verify(into, identity.checksum, f"copy of {self.tier} slot {slot}")

    def verify(self, slot: int, identity: Identity) -> None:
        """Verify the bytes in `slot` where they lie. Raises Untrusted, reason `checksum`, if they are not what `identity` names."""
        verify(self.view(slot), identity.checksum, f"{self.tier} slot {slot}")

    def _take(self, item: Put) -> None:
        """Copy a block in and verify it where it arrived. A source may be the slot's own view, which a client wrote in place."""
        target = self.view(item.slot)
        copy_block(item.source, target)
        verify(target, item.identity.checksum, f"copy into {self.tier} slot {item.slot}")

    def close(self) -> None:
        """Let go of the memory. Views that were handed out stay valid as long as they live. May be called twice."""
        super().close()
        self._slots = None


class DramArena(HostArena):
    """Slots in host memory, block-first `[slots, layers, parts, unit_bytes]`, each padded to 4 KiB.

    A block is one contiguous run, which is what a disk and a DMA want; the padding lets a writer map its slots and no others.
    """

    @property
    def tier(self) -> Tier:
        """DRAM."""
        return Tier.DRAM

    @property
    def layout(self) -> str:
        """`block-first`."""
        return "block-first"

    @property
    def slot_bytes(self) -> int:
        """The distance between two slots in bytes; slot `s` begins at `offset + s * slot_bytes` of the memory."""
        return block_first_slot_bytes(self._geometry)

    @staticmethod
    def _slot_bytes(geometry: Geometry) -> int:
        return block_first_slot_bytes(geometry)

    @staticmethod
    def _lay_out(region: NDArray[np.uint8], geometry: Geometry) -> SlotPlanes:
        return block_first(region, geometry)


class HostHbmArena(HostArena):
    """Slots in host memory in the HBM tier's place, layer-first `[layers, parts, slots, unit_bytes]`, without padding."""

    @property
    def tier(self) -> Tier:
        """HBM."""
        return Tier.HBM

    @property
    def layout(self) -> str:
        """`layer-first`."""
        return "layer-first"

    def layers_array(self) -> NDArray[np.uint8]:
        """Return all slots in place as `[layers, parts, slots, unit_bytes]`, as attention kernels want them; contiguous.

        Raises Closed after `close`.
        """
        slots = self._slots
        if slots is None:
            raise self._is_closed()
        geometry = self._geometry
        planes: NDArray[np.uint8] = slots.transpose(1, 0, 2)
        return planes.reshape(geometry.layers, geometry.parts, self._capacity, geometry.unit_bytes)

    @staticmethod
    def _slot_bytes(geometry: Geometry) -> int:
        return geometry.block_bytes

    @staticmethod
    def _lay_out(region: NDArray[np.uint8], geometry: Geometry) -> SlotPlanes:
        return layer_first(region, geometry)
