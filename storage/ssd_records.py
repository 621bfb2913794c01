"""Between blocks and values: a block becomes a record ready to be written, a value read becomes a verified block."""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from tiercache.errors import Untrusted
from tiercache.spec import Geometry
from tiercache.storage.checksum import verify
from tiercache.storage.codec import Codec
from tiercache.storage.contract import FULL_CHARGE, Planes, Put
from tiercache.storage.records import Encoding, Payload, RecordFormat
from tiercache.storage.ssd_layout import PACKED_CHARGE, SsdLayout
from tiercache.storage.ssd_values import LmdbValues, Write
from tiercache.types import Identity


class Staged(NamedTuple):
    """A block whose record is ready to be written: where to, at what charge. `raw` is the record that needs no packing."""

    slot: int
    identity: Identity
    charge: int
    write: Write
    raw: Write

    def unpacked(self) -> Self:
        """Return the same block as a raw record, which it may be already."""
        return self._replace(charge=FULL_CHARGE, write=self.raw)


class Records:
    """Records of one geometry. Thread-safe; `item_bytes` is the width of the byte planes of blocks that are compressed."""

    def __init__(self, geometry: Geometry, layout: SsdLayout, item_bytes: int) -> None:
        self._shape = (geometry.planes, geometry.unit_bytes)
        self._block_bytes = geometry.block_bytes
        self._format = RecordFormat(geometry)
        self._layout = layout
        self._item_bytes = item_bytes if geometry.block_bytes % item_bytes == 0 else 1
        self._codec = Codec(geometry.block_bytes)

    @property
    def stage_bytes(self) -> int:
        """Bytes of buffer that one `stage` needs."""
        return self._layout.raw_value if self._layout.group == 1 else self._layout.record

    def stage(self, put: Put, buffer: NDArray[np.uint8]) -> Staged:
        """Bring the block together in `buffer`, `stage_bytes` long, verify it there and return its record.

        The copy is what is verified and what is written, so a source that changes meanwhile can't slip through. The result is
        valid until `buffer` is used again. Raises Untrusted: `checksum` if the source was rotten, `symbol` for an identity that
        no record has room for.
        """
        identity = put.identity
        if not self._format.fits(identity):
            raise Untrusted("symbol", f"slot {put.slot}: no record has room for an identity of this size")
        start = self._format.header_bytes
        block = buffer[start : start + self._block_bytes]
        np.copyto(block.reshape(self._shape), put.source)
        verify(block.reshape(self._shape), identity.checksum, f"source of SSD slot {put.slot}")
        header = self._format.encode(identity, Payload(Encoding.RAW, 1, self._block_bytes))
        buffer[:start] = np.frombuffer(header, np.uint8)
        buffer[start + self._block_bytes :] = 0
        key, member = divmod(put.slot, self._layout.group)
        raw = Write(key, member * self._layout.record, buffer.data)
        packed = self._pack(identity, block) if self._layout.packs else None
        if packed is None:
            return Staged(put.slot, identity, FULL_CHARGE, raw, raw)
        # The raw record lies in the buffer anyway: to keep it costs a header.
        return Staged(put.slot, identity, PACKED_CHARGE, Write(key, 0, packed), raw)

    def fetch(self, values: LmdbValues, slot: int, identity: Identity, into: Planes) -> None:
        """Copy the block in `slot` of `values` into `into`, `[planes, unit_bytes]`, and verify it.

        Raises Untrusted with its reason; `into` is then undefined. Sizes are those of the layout: a value of another size is
        a miss before anything of it is read, and what its header claims is only compared.
        """
        key, member = divmod(slot, self._layout.group)
        packed = values.value_bytes == self._layout.packed_value
        first = member * self._layout.record
        start = first + self._format.header_bytes
        kept: list[bytes] = []

        # Nothing but copying under the transaction: it pins pages, and the view must not outlive it.
        def copy(value: memoryview) -> None:
            if len(value) != values.value_bytes:
                return
            kept.append(bytes(value[first:start]))
            if packed:
                kept.append(bytes(value[start:]))
            else:
                np.copyto(into, np.frombuffer(value[start : start + self._block_bytes], np.uint8).reshape(self._shape))

        if not values.read(key, copy):
            raise Untrusted("absent", f"SSD slot {slot} holds no record", slot=slot)
        if not kept:
            raise Untrusted("length", f"the value of SSD slot {slot} is not of {values.value_bytes} bytes", slot=slot)
        room = len(kept[1]) if packed else self._block_bytes
        payload = self._format.verify(kept[0], identity, room=room)
        if (payload.encoding is Encoding.ZSTD) is not packed:
            raise Untrusted("codec", f"SSD slot {slot} holds a record of the other environment", slot=slot)
        if packed:
            self._codec.decompress(kept[1][: payload.length], payload.item_bytes, into)
        verify(into, identity.checksum, f"SSD slot {slot}")

    def _pack(self, identity: Identity, block: NDArray[np.uint8]) -> bytes | None:
        """Return the record as a whole value of the packed environment, or None if it does not fit one."""
        frame = self._codec.compress(block, self._item_bytes)
        room = self._layout.packed_value - self._format.header_bytes
        if len(frame) > room:
            return None
        header = self._format.encode(identity, Payload(Encoding.ZSTD, self._item_bytes, len(frame)))
        return b"".join((header, frame, bytes(room - len(frame))))
