"""Records: a header that says whose block this is, and a payload. What the header says is compared, never believed.

A record is `header ‖ payload`, little-endian:

    offset  bytes  field
         0      8  magic `TCRECORD`
         8      2  format version
        10      1  codec (0 raw, 1 zstd over byte planes)
        11      1  bytes an item, the width of the byte planes
        12      2  group
        14      2  shard
        16      4  symbol bytes used
        20      4  zero
        24     32  namespace digest
        56     32  block key
        88     32  parent key
       120      8  payload bytes
       128      8  block bytes
       136      8  checksum of the uncompressed block, xxh3-64 in block-first order
       144     64  reserved, zero
       208      n  symbol, zero-padded to the geometry's symbol bytes, rounded up to 8
     208+n      8  checksum of the header before this field, xxh3-64
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

import xxhash

from tiercache.errors import Distrust, Untrusted
from tiercache.spec import DIGEST_BYTES, Geometry
from tiercache.types import Identity

MAGIC = b"TCRECORD"
VERSION = 1
_FIXED = struct.Struct("<8sHBBHHII32s32s32sQQQ64s")
_SEAL = struct.Struct("<Q")
_RESERVED = bytes(64)


class Encoding(enum.IntEnum):
    """How a payload lies in its record. The numbers are written to disk."""

    RAW = 0
    ZSTD = 1


class Payload(NamedTuple):
    """What a verified header says of the bytes after it."""

    encoding: Encoding
    item_bytes: int
    length: int


class RecordFormat:
    """Headers for blocks of one geometry; all are `header_bytes` long."""

    def __init__(self, geometry: Geometry) -> None:
        self._symbol_bytes = -(-geometry.symbol_bytes // 8) * 8
        self._symbol_limit = geometry.symbol_bytes
        self._block_bytes = geometry.block_bytes
        self.header_bytes = _FIXED.size + self._symbol_bytes + _SEAL.size

    def fits(self, identity: Identity) -> bool:
        """Return whether `identity` can be written: digests of 32 bytes, a symbol within the geometry's room."""
        digests = (identity.namespace, identity.key, identity.parent)
        return all(len(digest) == DIGEST_BYTES for digest in digests) and 0 < len(identity.symbol) <= self._symbol_limit

    def encode(self, identity: Identity, payload: Payload) -> bytes:
        """Return the header of a record that holds the block of `identity` as `payload`."""
        head = _FIXED.pack(
            MAGIC,
            VERSION,
            payload.encoding,
            payload.item_bytes,
            identity.group,
            identity.shard,
            len(identity.symbol),
            0,
            identity.namespace,
            identity.key,
            identity.parent,
            payload.length,
            self._block_bytes,
            identity.checksum,
            _RESERVED,
        ) + identity.symbol.ljust(self._symbol_bytes, b"\0")
        return head + _SEAL.pack(xxhash.xxh3_64_intdigest(head))

    def verify(self, header: bytes, identity: Identity, *, room: int) -> Payload:
        """Compare `header` with `identity` field by field and return what it says of its payload, of at most `room` bytes.

        Raises Untrusted with the first thing that is wrong as its reason: `length` (short), `magic`, `version`, `header` (its
        own checksum), `namespace`, `key`, `parent`, `symbol`, `length`, `checksum`, `codec`. The key is a digest, so the
        symbol is compared too: a collision is a miss.
        """
        if len(header) != self.header_bytes:
            raise _untrusted("length", found=len(header), expected=self.header_bytes)
        fields = _FIXED.unpack_from(header)
        magic, version, encoding, item, group, shard, used, _, namespace, key, parent, length, block, checksum, _ = fields
        if magic != MAGIC:
            raise _untrusted("magic", found=magic, expected=MAGIC)
        # Before the seal: another version may seal another way.
        if version != VERSION:
            raise _untrusted("version", found=version, expected=VERSION)
        if _SEAL.unpack_from(header, len(header) - _SEAL.size)[0] != xxhash.xxh3_64_intdigest(header[: -_SEAL.size]):
            raise _untrusted("header", found="another checksum", expected="its own")
        if namespace != identity.namespace or (group, shard) != (identity.group, identity.shard):
            expected = (identity.namespace.hex(), identity.group, identity.shard)
            raise _untrusted("namespace", found=(namespace.hex(), group, shard), expected=expected)
        if key != identity.key:
            raise _untrusted("key", found=key.hex(), expected=identity.key.hex())
        if parent != identity.parent:
            raise _untrusted("parent", found=parent.hex(), expected=identity.parent.hex())
        # Not shown: token ids stay out of messages and logs.
        if used > self._symbol_limit or header[_FIXED.size : _FIXED.size + used] != identity.symbol:
            raise _untrusted("symbol", found="another", expected="the block's")
        if block != self._block_bytes or not 0 < length <= room:
            raise _untrusted("length", found=(block, length), expected=(self._block_bytes, room))
        if checksum != identity.checksum:
            raise _untrusted("checksum", found=f"{checksum:016x}", expected=f"{identity.checksum:016x}")
        if encoding not in Encoding._value2member_map_ or item < 1 or block % item:
            raise _untrusted("codec", found=(encoding, item), expected="one of this version's")
        payload = Payload(Encoding(encoding), item, length)
        if payload.encoding is Encoding.RAW and length != block:
            raise _untrusted("length", found=length, expected=block)
        return payload


def _untrusted(reason: Distrust, *, found: object, expected: object) -> Untrusted:
    return Untrusted(reason, f"a record's {reason} is not what it must be: {found}, not {expected}", found=found, expected=expected)
