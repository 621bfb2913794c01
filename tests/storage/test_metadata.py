"""The metadata environment: rows and namespaces come back as they were committed, or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.blocks import chain, identity_at
from tiercache.errors import StoreError, StoreFull
from tiercache.spec import Geometry, KVSpec, Namespace
from tiercache.storage.lmdb_env import Transaction
from tiercache.storage.metadata import Loaded, Metadata, Row
from tiercache.types import Identity

GEOMETRY = Geometry(layers=2, parts=2, unit_bytes=64, symbol_bytes=64)
SPEC = KVSpec(layers=2, kv_heads=2, head_dim=8, dtype="bfloat16", block_size=16)
CAPACITY = 1000


def rows_of(count: int, seed: int, first: int = 0) -> list[Row]:
    return [Row(first + place, block.identity, 3 + place % 2) for place, block in enumerate(chain(GEOMETRY, count, seed=seed))]


def listed(loaded: Loaded) -> list[Row]:
    return [Row(int(loaded.slots[place]), identity_at(loaded, place), int(loaded.charges[place])) for place in range(len(loaded))]


@pytest.fixture
def metadata(tmp_path: Path) -> Iterator[Metadata]:
    made = Metadata(tmp_path / "m")
    yield made
    made.close()


def load(path: Path, capacity: int = CAPACITY) -> list[Row]:
    metadata = Metadata(path)
    try:
        return listed(metadata.rows(GEOMETRY).load(capacity))
    finally:
        metadata.close()


def test_rows_come_back_oldest_first(metadata: Metadata, seed: int) -> None:
    """Every field survives a close, in the order of the puts, whatever the slots; a row written again is the newest."""
    rows = rows_of(50, seed)
    random.Random(seed).shuffle(rows)
    table = metadata.rows(GEOMETRY)

    table.commit(rows[:20])
    table.commit(rows[20:])
    table.commit(rows[:1])
    metadata.close()

    assert load(metadata.folder) == [*rows[1:], rows[0]]


def test_stamps_go_on_after_a_start(metadata: Metadata, seed: int) -> None:
    """What is put after a restart is newer than all from before it."""
    rows = rows_of(20, seed)
    metadata.rows(GEOMETRY).commit(rows[10:])
    metadata.close()
    again = Metadata(metadata.folder)
    table = again.rows(GEOMETRY)
    table.load(CAPACITY)

    table.commit(rows[:10])
    again.close()

    assert load(metadata.folder) == rows[10:] + rows[:10]


def test_forgotten_rows_stay_forgotten(metadata: Metadata, seed: int) -> None:
    """A forgotten slot has no row at the next start; forgetting what is not there is nothing."""
    rows = rows_of(10, seed)
    table = metadata.rows(GEOMETRY)
    table.commit(rows)

    table.commit((), [3, 4, 999])
    metadata.close()

    assert load(metadata.folder) == rows[:3] + rows[5:]


def test_the_order_of_use_serves_one_start(metadata: Metadata, seed: int) -> None:
    """The order that was left is followed once, with unknown slots last and strange ones passed over; then stamps count."""
    rows = rows_of(6, seed)
    table = metadata.rows(GEOMETRY)
    table.commit(rows)
    table.leave_order([4, 0, 5000, -1, 2, 3])
    metadata.close()

    assert [row.slot for row in load(metadata.folder)] == [4, 0, 2, 3, 1, 5]
    assert [row.slot for row in load(metadata.folder)] == [0, 1, 2, 3, 4, 5]


def test_symbols_keep_their_length(metadata: Metadata) -> None:
    """A symbol that is shorter than its room, or ends in zeros, comes back as it was."""
    symbols = [b"\x01\0\0\0", bytes(64), bytes(32), b"d" * 32]
    rows = [Row(slot, Identity(b"n" * 32, 0, 0, bytes(32), bytes(32), symbol, 2**64 - 1), 4) for slot, symbol in enumerate(symbols)]

    metadata.rows(GEOMETRY).commit(rows)
    metadata.close()

    assert load(metadata.folder) == rows


def test_a_smaller_tier_forgets_the_slots_beyond_it(metadata: Metadata, seed: int) -> None:
    """Rows of slots that no longer exist are not returned, then or after growing again."""
    rows = rows_of(10, seed)
    metadata.rows(GEOMETRY).commit(rows)
    metadata.close()

    assert load(metadata.folder, 4) == rows[:4]
    assert load(metadata.folder) == rows[:4]


def test_geometries_do_not_mix(metadata: Metadata, seed: int) -> None:
    """One slot number in two geometries is two rows."""
    other = GEOMETRY._replace(unit_bytes=128)
    rows = rows_of(1, seed)
    metadata.rows(GEOMETRY).commit(rows)

    assert len(metadata.rows(other).load(CAPACITY)) == 0

    metadata.rows(other).clear()
    assert listed(metadata.rows(GEOMETRY).load(CAPACITY)) == rows
    metadata.rows(GEOMETRY).clear()
    assert len(metadata.rows(GEOMETRY).load(CAPACITY)) == 0


@pytest.mark.parametrize(
    "space",
    [
        Namespace(model="m", weights="w"),
        Namespace(model="", weights="", adapter="", salt=""),
        Namespace(model="../../etc\0/🙂", weights="w\n", adapter="a", salt="tenant", world=8),
    ],
    ids=repr,
)
def test_namespaces_are_remembered(metadata: Metadata, space: Namespace) -> None:
    """A namespace and its spec come back equal under the digest, also when its blocks came first, and once."""
    digest = space.digest(SPEC)
    metadata.rows(GEOMETRY).commit([Row(0, Identity(digest, 0, 0, bytes(32), bytes(32), b"s" * 64, 1), 4)])

    assert metadata.remember(space, SPEC) == digest
    assert metadata.remember(space, SPEC) == digest
    metadata.close()
    again = Metadata(metadata.folder)

    assert again.namespaces() == {digest: (space, SPEC)}
    assert again.rows(GEOMETRY).load(CAPACITY).namespaces == [digest]
    again.close()


def test_blocks_of_a_namespace_share_its_digest(metadata: Metadata, seed: int) -> None:
    """Rows hold a number, and all blocks of a namespace get one object: a million digests would be 64 MB."""
    metadata.rows(GEOMETRY).commit(rows_of(100, seed))

    loaded = metadata.rows(GEOMETRY).load(CAPACITY)

    assert len({id(digest) for digest in loaded.namespaces}) == 1


def test_a_failed_commit_gives_no_number(metadata: Metadata) -> None:
    """A namespace first seen in a commit that failed is numbered anew, and known, in the one that succeeds."""

    def fail(transaction: Transaction) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    digests = [hashlib.sha256(bytes([number])).digest() for number in range(3)]
    with pytest.raises(StoreFull):
        metadata.commit(fail, digests=digests)
    rows = [Row(slot, Identity(digest, 0, 0, bytes(32), bytes(32), b"s", 1), 4) for slot, digest in enumerate(reversed(digests))]

    metadata.rows(GEOMETRY).commit(rows)
    metadata.close()

    assert load(metadata.folder) == rows


@pytest.mark.parametrize("content", [b"", b"\0" * 8192, b"garbage" * 5000], ids=["empty", "zeros", "garbage"])
def test_a_file_that_is_none_is_broken(tmp_path: Path, content: bytes) -> None:
    """What is no LMDB file is a StoreError that says so, before it is mapped."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "data.mdb").write_bytes(content)

    with pytest.raises(StoreError, match="no whole LMDB file") as caught:
        Metadata(tmp_path / "m")
    assert caught.value.fields["broken"]
