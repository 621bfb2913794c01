"""The page on the format is the format: a reader written by its text alone reads what the product wrote, and golden bytes hold."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np
import pytest
import xxhash
import zstandard

from tests.project.tree import ROOT
from tests.storage.blocks import Block, chain
from tests.storage.test_ssd_store import packable
from tiercache.errors import DISTRUST
from tiercache.keys import ROOT_KEY, block_keys, pack_tokens
from tiercache.spec import Geometry, KVSpec, Namespace
from tiercache.storage.checksum import checksum
from tiercache.storage.codec import Codec
from tiercache.storage.directory import FORMAT
from tiercache.storage.lmdb_env import PAGE as LMDB_PAGE
from tiercache.storage.metadata import Metadata
from tiercache.storage.records import VERSION, Encoding, Payload, RecordFormat
from tiercache.storage.ssd import SsdTier
from tiercache.storage.ssd_layout import SsdLayout
from tiercache.types import Identity

PAGE = (ROOT / "docs/reference/on-disk-format.md").read_text()
SPEC = KVSpec(layers=1, kv_heads=1, head_dim=4, dtype="float16", block_size=2)
SPACE = Namespace(model="m", weights="sha256:1", salt="s")
TOKENS = pack_tokens([7, 8, 9, 10], limit=10)
BLOCK = np.arange(32, dtype=np.uint8).reshape(2, 16)

# The second block of TOKENS, raw, as version 1 of records is for ever.
DIGEST = "65329b200d71d240f515917687930d479deb8ea71d03fa81600b89045b4e6dbb"
PARENT = "db3809df26f2582c602315acea79d8249b46f88e4755291fd7d09f0f3228763c"
KEY = "fb1cea881add2633705e5984b381c37deec8a07b71a71e43964b3e822c56c3bd"
GOLDEN = (
    "54435245434f5244"  # magic
    "0100" + "00" + "01" + "0000" + "0000" + "08000000" + "00000000"
    f"{DIGEST}{KEY}{PARENT}"
    "2000000000000000" + "2000000000000000" + "054c6ee91f582335"  # payload, block, checksum
    f"{'00' * 64}"
    f"090000000a000000{'00' * 24}"  # symbol
    "e755d6f43b2dea6b"  # seal
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
)
FRAME = "28b52ffd202080000000020406080a0c0e10121416181a1c1e80000001030507090b0d0f11131517191b1d1f010000"
"""The same block as a payload of codec 1: planes of two bytes."""


class Field(NamedTuple):
    """A line of a table: where a field begins, and how long it is."""

    offset: int
    bytes: int


def table(heading: str, room: int) -> dict[str, Field]:
    """Return the fields of the first table below a heading of the page; `room` is what it calls n or m."""
    _, _, below = PAGE.partition(f"\n## {heading}\n")
    rows = re.findall(r"^\| ([\d nm+]+) \| ([\dnm]+) \| (\w+) \|", below.partition("\n## ")[0], flags=re.MULTILINE)
    assert rows, heading

    def number(text: str) -> int:
        return sum(room if part.strip() in "nm" else int(part) for part in text.split("+"))

    return {name: Field(number(offset), number(size)) for offset, size, name in rows}


def cut(fields: dict[str, Field], raw: bytes) -> dict[str, bytes]:
    """Return the bytes of each field."""
    return {name: raw[field.offset : field.offset + field.bytes] for name, field in fields.items()}


def whole(value: bytes) -> int:
    return int.from_bytes(value, "little")


def hashed(*parts: bytes) -> bytes:
    return hashlib.sha256(b"".join(parts)).digest()


def namespace_digest(space: Namespace, spec: KVSpec) -> bytes:
    """The page's section on digests."""
    listed = [b"tiercache-namespace-1"]
    for owner, names in ((space, "model weights adapter salt world"), (spec, "layers kv_heads head_dim dtype block_size latent")):
        for name in names.split():
            value = getattr(owner, name)
            listed += [name.encode(), b"\0" if value is None else type(value).__name__.encode() + b"\1" + str(value).encode()]
    return hashed(*(len(part).to_bytes(8, "little") + part for part in listed))


def block_key(digest: bytes, parent: bytes, symbol: bytes) -> bytes:
    return hashed(b"tiercache-block-1", digest, parent, len(symbol).to_bytes(8, "little"), symbol)


def decoded(record: bytes, fields: dict[str, Field], block_bytes: int) -> tuple[dict[str, bytes], bytes]:
    """Return the header's fields and the block of a record, by the page."""
    head = cut(fields, record)
    start = fields["seal"].offset + fields["seal"].bytes
    payload = record[start : start + whole(head["length"])]
    assert whole(head["seal"]) == xxhash.xxh3_64_intdigest(record[: fields["seal"].offset])
    if whole(head["codec"]) == 1:
        planes = zstandard.ZstdDecompressor().decompress(payload, max_output_size=block_bytes)
        item = whole(head["item"])
        payload = np.frombuffer(planes, np.uint8).reshape(item, -1).T.tobytes()
    assert whole(head["checksum"]) == xxhash.xxh3_64_intdigest(payload)
    return head, payload


# --- golden bytes ---------------------------------------------------------------------------------------------------------


def identity() -> Identity:
    digest = SPACE.digest(SPEC)
    first, second = block_keys(digest, ROOT_KEY, TOKENS, 8)
    return Identity(digest, 0, 0, second, first, TOKENS[8:], checksum(BLOCK))


def test_the_golden_record_is_what_is_written() -> None:
    """The bytes of one record, digests included, are those of version 1; a change of them is a change of the format."""
    form = RecordFormat(SPEC.geometry)

    record = form.encode(identity(), Payload(Encoding.RAW, 1, BLOCK.nbytes)) + BLOCK.tobytes()

    assert record.hex() == GOLDEN


def test_the_golden_record_is_read() -> None:
    """A record of version 1 is read by the product, and by the page's own table, to the last field."""
    record = bytes.fromhex(GOLDEN)
    fields = table("Records", 32)
    payload = RecordFormat(SPEC.geometry).verify(record[: -BLOCK.nbytes], identity(), room=BLOCK.nbytes)

    head, block = decoded(record, fields, BLOCK.nbytes)

    assert payload == Payload(Encoding.RAW, 1, BLOCK.nbytes) and block == BLOCK.tobytes()
    first = block_key(namespace_digest(SPACE, SPEC), ROOT_KEY, TOKENS[:8])
    second = block_key(namespace_digest(SPACE, SPEC), first, TOKENS[8:])
    assert (head["namespace"].hex(), head["key"].hex(), head["parent"].hex()) == (DIGEST, KEY, PARENT)
    assert (head["namespace"], head["key"], head["parent"]) == (namespace_digest(SPACE, SPEC), second, first)
    assert head["magic"] == b"TCRECORD" and whole(head["version"]) == VERSION == 1
    assert head["symbol"][: whole(head["used"])] == TOKENS[8:] and not any(head["zero"] + head["reserved"])


def test_the_golden_frame_is_read() -> None:
    """A payload of codec 1 is read by the product and by the page's words on byte planes."""
    into = np.empty_like(BLOCK)

    Codec(BLOCK.nbytes).decompress(bytes.fromhex(FRAME), 2, into)

    assert into.tobytes() == BLOCK.tobytes()
    planes = zstandard.ZstdDecompressor().decompress(bytes.fromhex(FRAME))
    assert np.frombuffer(planes, np.uint8).reshape(2, -1).T.tobytes() == BLOCK.tobytes()


# --- the tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heading", "names"), [("Records", 17), ("Metadata", 12)])
def test_the_tables_leave_no_gap(heading: str, names: int) -> None:
    """Each field begins where the one before it ends."""
    fields = table(heading, 64)

    assert len(fields) == names
    end = 0
    for name, field in fields.items():
        assert field.offset == end, name
        end += field.bytes


@pytest.mark.parametrize("symbol", [32, 36, 64])
def test_the_table_of_records_is_the_code_s(symbol: int) -> None:
    """A header that differs in one field alone differs in that field's bytes of the table, and in the seal."""
    geometry = Geometry(2, 2, 64, symbol)
    form, fields = RecordFormat(geometry), table("Records", -(-symbol // 8) * 8)
    one = Identity(b"n" * 32, 1, 2, b"k" * 32, b"p" * 32, b"s" * symbol, 3)
    plain = form.encode(one, Payload(Encoding.RAW, 1, 256))
    changes: dict[str, bytes] = {
        "namespace": form.encode(one._replace(namespace=b"N" * 32), Payload(Encoding.RAW, 1, 256)),
        "group": form.encode(one._replace(group=0x0909), Payload(Encoding.RAW, 1, 256)),
        "shard": form.encode(one._replace(shard=0x0909), Payload(Encoding.RAW, 1, 256)),
        "key": form.encode(one._replace(key=b"K" * 32), Payload(Encoding.RAW, 1, 256)),
        "parent": form.encode(one._replace(parent=b"P" * 32), Payload(Encoding.RAW, 1, 256)),
        "symbol": form.encode(one._replace(symbol=b"S" * symbol), Payload(Encoding.RAW, 1, 256)),
        "checksum": form.encode(one._replace(checksum=0xFEDCBA9876543210), Payload(Encoding.RAW, 1, 256)),
        "codec": form.encode(one, Payload(Encoding.ZSTD, 1, 256)),
        "item": form.encode(one, Payload(Encoding.RAW, 4, 256)),
        "length": form.encode(one, Payload(Encoding.RAW, 1, 0x0102030405060708)),
    }

    for name, changed in changes.items():
        before, after = cut(fields, plain), cut(fields, changed)
        assert {other for other in fields if before[other] != after[other]} == {name, "seal"}, name
    assert len(plain) == form.header_bytes == fields["seal"].offset + fields["seal"].bytes
    assert whole(cut(fields, plain)["block"]) == geometry.block_bytes


def test_the_page_names_every_reason_in_the_order_of_the_checks() -> None:
    """The reasons of the page's table are those of the product, less the two that no record has."""
    _, _, below = PAGE.partition("### Reading a record")
    listed = re.findall(r"^\| (\d+) \|.*\| `(\w+)` \|$", below.partition("\n## ")[0], flags=re.MULTILINE)

    assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
    assert {reason for _, reason in listed} == DISTRUST - {"order", "archive"}
    assert re.search(r"Format (\d+), records of version (\d+)", PAGE).groups() == (str(FORMAT), str(VERSION))  # type: ignore[union-attr]


# --- a second implementation ----------------------------------------------------------------------------------------------


class SecondReader:
    """Reads a directory by the page: nothing of the product is used."""

    def __init__(self, directory: Path, geometry: Geometry) -> None:
        assert json.loads((directory / "format.json").read_text())["format"] == 1
        self._name = f"{geometry.layers}x{geometry.parts}x{geometry.unit_bytes}-{geometry.symbol_bytes}"
        self._geometry = geometry
        self._directory = directory
        with self._metadata() as environment:
            spaces = environment.open_db(b"spaces", create=False)
            rows = environment.open_db(self._name.encode(), create=False)
            with environment.begin() as transaction:
                digests = {int.from_bytes(key, "big"): value[:32] for key, value in transaction.cursor(db=spaces)}
                layouts = environment.open_db(b"layouts", txn=transaction, create=False)
                self._layout = json.loads(transaction.get(self._name.encode(), db=layouts))
                fields = table("Metadata", geometry.symbol_bytes)
                self._rows: dict[tuple[bytes, bytes], dict[str, Any]] = {}
                for key, value in transaction.cursor(db=rows):
                    row = cut(fields, value)
                    assert int.from_bytes(key, "big") == whole(row["slot"]) and len(value) == 104 + geometry.symbol_bytes
                    self._rows[digests[whole(row["namespace"])], row["key"]] = row

    def _metadata(self) -> Any:
        return lmdb.open(str(self._directory / "metadata"), readonly=True, lock=False, max_dbs=300)

    def read(self, namespace: bytes, symbols: list[bytes]) -> bytes | None:
        """Return the block at the end of a chain of symbols."""
        parent = key = bytes(32)
        for symbol in symbols:
            parent, key = key, block_key(namespace, key, symbol)
        row = self._rows.get((namespace, key))
        if row is None:
            return None
        slot, packed = whole(row["slot"]), whole(row["charge"]) == 3
        geometry, layout = self._geometry, self._layout
        folder = self._directory / "blocks" / self._name / ("packed" if packed else "raw")
        with lmdb.open(str(folder), readonly=True, lock=False) as environment, environment.begin() as transaction:
            value = transaction.get((slot // layout["group"]).to_bytes(8, "big"))
        assert value is not None and len(value) == layout["packed_value" if packed else "raw_value"]
        record = value[slot % layout["group"] * layout["record"] :]
        head, block = decoded(record, table("Records", -(-geometry.symbol_bytes // 8) * 8), geometry.block_bytes)
        assert (head["namespace"], head["key"], head["parent"]) == (namespace, key, parent)
        assert head["symbol"][: whole(head["used"])] == symbols[-1] and head["checksum"] == row["checksum"]
        assert whole(head["codec"]) == packed
        return block


LARGE = Geometry(4, 2, 4096, 64)
SMALL = Geometry(2, 2, 512, 36)


@pytest.mark.parametrize(("geometry", "codec"), [(LARGE, "raw"), (LARGE, "zstd"), (SMALL, "raw")], ids=["raw", "zstd", "grouped"])
def test_a_reader_by_the_page_reads_what_was_written(tmp_path: Path, geometry: Geometry, codec: str, seed: int) -> None:
    """Raw, compressed and grouped records of a chain are found over their digests, and hold the same bytes."""
    blocks: list[Block] = packable(geometry, 6, seed) if codec == "zstd" else chain(geometry, 6, seed=seed)
    tier = SsdTier(tmp_path, codec=codec)
    store = tier.open(geometry, capacity_bytes=1 << 22, item_bytes=2)
    outcomes = store.put([block.at(2 * slot + 1) for slot, block in enumerate(blocks)])
    assert [outcome.charge for outcome in outcomes] == [3 if codec == "zstd" else 4] * 6
    tier.close()

    reader = SecondReader(tmp_path, geometry)

    symbols = [block.identity.symbol for block in blocks]
    for count, block in enumerate(blocks, 1):
        assert reader.read(block.identity.namespace, symbols[:count]) == block.planes.tobytes()
    assert reader.read(b"m" * 32, symbols) is None


@pytest.mark.parametrize("block_bytes", [32, 8192, 16383, 16384, 65536, 737280])
def test_the_sizes_are_the_page_s(block_bytes: int) -> None:
    """Records, values and groups have the sizes that the page's sentences give."""
    geometry = Geometry(1, 1, block_bytes, 64)

    layout = SsdLayout.of(geometry, capacity_bytes=1 << 30, batch_bytes=1 << 20, packed=True)

    record = 216 + 64 + block_bytes
    assert layout.record == record and layout.shape["page"] == LMDB_PAGE
    if block_bytes < 16 * 1024:
        group = max(1, 32768 // record)
        assert (layout.group, layout.packs) == (group, group == 1) and (group == 1 or layout.raw_value == group * record)
    else:
        pages = -(-(record + 16) // LMDB_PAGE)
        assert (layout.group, layout.raw_value, layout.packed_value) == (1, pages * LMDB_PAGE - 16, pages * 3 // 4 * LMDB_PAGE - 16)


def test_the_table_of_rows_is_the_code_s(tmp_path: Path) -> None:
    """Offsets and widths of a row's fields are those of the type that the product reads rows as."""
    metadata = Metadata(tmp_path / "m")
    kind = metadata.rows(SMALL)._type
    metadata.close()

    assert kind.fields is not None
    assert {name: Field(kind.fields[name][1], kind.fields[name][0].itemsize) for name in kind.names or ()} == table("Metadata", 36)
