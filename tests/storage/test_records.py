"""Headers of records: everything in them is compared, nothing is believed."""

from __future__ import annotations

import struct

import pytest
import xxhash

from tests.storage.blocks import chain
from tiercache.errors import Untrusted
from tiercache.keys import ROOT_KEY
from tiercache.spec import Geometry
from tiercache.storage.records import Encoding, Payload, RecordFormat
from tiercache.types import Identity

GEOMETRY = Geometry(layers=2, parts=2, unit_bytes=4096, symbol_bytes=64)
FORMAT = RecordFormat(GEOMETRY)
RAW = Payload(Encoding.RAW, 1, GEOMETRY.block_bytes)
IDENTITY = Identity(b"n" * 32, 1, 2, b"k" * 32, b"p" * 32, bytes(range(64)), 0x1122334455667788)


def resealed(header: bytes, offset: int, value: bytes) -> bytes:
    """The header with `value` at `offset`, and a seal that fits it."""
    head = header[:offset] + value + header[offset + len(value) : -8]
    return head + xxhash.xxh3_64_intdigest(head).to_bytes(8, "little")


def reason(header: bytes, identity: Identity = IDENTITY) -> str:
    with pytest.raises(Untrusted) as caught:
        FORMAT.verify(header, identity, room=GEOMETRY.block_bytes)
    return caught.value.reason


@pytest.mark.parametrize("payload", [RAW, Payload(Encoding.ZSTD, 2, 1000)], ids=str)
def test_a_header_gives_back_its_payload(payload: Payload) -> None:
    """What was encoded for an identity is verified against the same one."""
    header = FORMAT.encode(IDENTITY, payload)

    assert len(header) == FORMAT.header_bytes
    assert FORMAT.verify(header, IDENTITY, room=GEOMETRY.block_bytes) == payload


def test_the_format_is_the_documented_one() -> None:
    """The bytes of one header are those of the table, so that an accidental change of format is seen."""
    header = FORMAT.encode(IDENTITY, RAW)

    expected = (
        b"TCRECORD"
        + struct.pack("<HBBHHII", 1, 0, 1, 1, 2, 64, 0)
        + b"n" * 32
        + b"k" * 32
        + b"p" * 32
        + struct.pack("<QQQ", 16384, 16384, 0x1122334455667788)
        + bytes(64)
        + bytes(range(64))
    )
    assert header[:-8] == expected
    assert header[-8:] == xxhash.xxh3_64_intdigest(expected).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("namespace", b"m" * 32, "namespace"),
        ("group", 0, "namespace"),
        ("shard", 0, "namespace"),
        ("key", b"q" * 32, "key"),
        ("parent", ROOT_KEY, "parent"),
        ("symbol", bytes(64), "symbol"),
        ("symbol", bytes(range(63)), "symbol"),
        ("checksum", 1, "checksum"),
    ],
)
def test_each_part_of_the_identity_is_compared(field: str, value: object, word: str) -> None:
    """A header that differs from the identity in one field alone is refused for that field."""
    header = FORMAT.encode(IDENTITY, RAW)

    assert reason(header, IDENTITY._replace(**{field: value})) == word  # type: ignore[arg-type]


def test_a_colliding_digest_is_a_miss(seed: int) -> None:
    """Two blocks whose namespace, key, parent and checksum are equal are told apart by their tokens."""
    first, second = chain(GEOMETRY, 2, seed=seed)
    header = FORMAT.encode(first.identity, RAW)

    assert reason(header, first.identity._replace(symbol=second.identity.symbol)) == "symbol"


@pytest.mark.parametrize(
    ("offset", "value", "word"),
    [
        (0, b"TCRECORE", "magic"),
        (8, struct.pack("<H", 0), "version"),
        (8, struct.pack("<H", 2), "version"),
        (10, b"\x02", "codec"),
        (11, b"\x00", "codec"),
        (11, b"\x03", "codec"),
        (16, struct.pack("<I", 63), "symbol"),
        (16, struct.pack("<I", 1 << 31), "symbol"),
        (120, struct.pack("<Q", 1 << 40), "length"),
        (120, struct.pack("<Q", 0), "length"),
        (120, struct.pack("<Q", 16383), "length"),
        (128, struct.pack("<Q", 1 << 40), "length"),
    ],
)
def test_a_sealed_lie_is_refused(offset: int, value: bytes, word: str) -> None:
    """A field that can't be is refused by name, although the header's own checksum fits."""
    assert reason(resealed(FORMAT.encode(IDENTITY, RAW), offset, value)) == word


def test_every_turned_bit_is_seen() -> None:
    """Whichever byte of a header changes, it is refused."""
    header = FORMAT.encode(IDENTITY, RAW)

    for place in range(len(header)):
        turned = header[:place] + bytes([header[place] ^ 0x20]) + header[place + 1 :]
        assert reason(turned) in {"magic", "version", "header"}, place


@pytest.mark.parametrize("length", [0, 1, 8, 207, FORMAT.header_bytes - 1, FORMAT.header_bytes + 1])
def test_a_header_of_another_length_is_refused(length: int) -> None:
    """A cut header is refused before any field is read."""
    assert reason(FORMAT.encode(IDENTITY, RAW).ljust(length, b"\0")[:length]) == "length"


def test_zeros_are_no_record() -> None:
    """A place in a value that was never written is refused."""
    assert reason(bytes(FORMAT.header_bytes)) == "magic"


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"symbol": b"d" * 32}, True),
        ({"symbol": b"d" * 65}, False),
        ({"symbol": b""}, False),
        ({"key": b"k" * 31}, False),
    ],
    ids=str,
)
def test_an_identity_must_fit(change: dict[str, bytes], fits: bool) -> None:
    """Symbols up to the geometry's room fit, digests must have 32 bytes."""
    assert FORMAT.fits(IDENTITY._replace(**change)) is fits  # type: ignore[arg-type]
