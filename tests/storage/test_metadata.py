"""The metadata environment: rows and namespaces come back as they were committed, or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
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
    metadata.rows(SPEC.geometry).commit([Row(0, Identity(digest, 0, 0, bytes(32), bytes(32), b"s" * 64, 1), 4)])

    assert metadata.remember(space, SPEC) == digest
    assert metadata.remember(space, SPEC) == digest
    metadata.close()
    again = Metadata(metadata.folder)

    assert again.namespaces() == {digest: (space, SPEC)}
    assert again.rows(SPEC.geometry).load(CAPACITY).namespaces == [digest]
    assert again.namespaces() == {digest: (space, SPEC)}
    again.close()


def row_of(digest: bytes, slot: int) -> Row:
    return Row(slot, Identity(digest, 0, 0, bytes(32), bytes(32), b"s" * 64, 1), 4)


@pytest.mark.parametrize("loads", [True, False], ids=["its rows are loaded", "its rows are not"])
def test_namespaces_of_which_nothing_is_stored_are_forgotten(tmp_path: Path, loads: bool) -> None:
    """At a start: those without a row, also when a row was there once; one that is new in the run stays, and numbers stay true."""
    spaces = [Namespace(model="m", weights="w", salt=str(number)) for number in range(4)]
    metadata = Metadata(tmp_path / "m")
    digests = [metadata.remember(space, SPEC) for space in spaces]
    rows = metadata.rows(SPEC.geometry)
    rows.commit([row_of(digest, slot) for slot, digest in enumerate(digests[:3])])
    rows.commit((), [0, 1, 2] if not loads else [0])
    metadata.close()

    metadata = Metadata(tmp_path / "m")
    fresh = Namespace(model="m", weights="w", salt="fresh")
    new = metadata.remember(fresh, SPEC)
    kept = {digest: (space, SPEC) for digest, space in zip(digests[1:3], spaces[1:3], strict=True)} if loads else {}
    rows = metadata.rows(SPEC.geometry)
    if loads:
        assert rows.load(CAPACITY).namespaces == digests[1:3]

    assert metadata.namespaces() == {**kept, new: (fresh, SPEC)}

    rows.commit([row_of(new, 7), row_of(digests[0], 8)])
    metadata.close()
    metadata = Metadata(tmp_path / "m")
    assert metadata.rows(SPEC.geometry).load(CAPACITY).namespaces == [*(digests[1:3] if loads else []), new, digests[0]]
    metadata.close()


def test_rows_that_could_not_be_forgotten_keep_their_namespace(tmp_path: Path) -> None:
    """On a disk so full that a smaller tier can't delete the rows beyond it, the next start can still tell whose they are."""

    class Full(Metadata):
        def commit(self, change: Callable[[Transaction], object], *, digests: Sequence[bytes] = (), need: int = 0) -> None:
            raise StoreFull("full")

    metadata = Metadata(tmp_path / "m")
    digest = metadata.remember(Namespace(model="m", weights="w"), SPEC)
    metadata.rows(SPEC.geometry).commit([row_of(digest, 9)])
    metadata.close()
    full = Full(tmp_path / "m")
    assert len(full.rows(SPEC.geometry).load(5)) == 0
    full.close()

    metadata = Metadata(tmp_path / "m")

    assert metadata.rows(SPEC.geometry).load(CAPACITY).namespaces == [digest]
    metadata.close()


@pytest.mark.parametrize("value", [b"short", bytes(168), b"\xff" * 168], ids=["short", "zeros", "ones"])
def test_a_row_that_can_not_be_is_broken(metadata: Metadata, seed: int, value: bytes) -> None:
    """A row of another size, and one that is not under its own slot, are told before anything is made of them."""
    table = metadata.rows(GEOMETRY)
    table.commit(rows_of(10, seed))
    assert table._type.itemsize == 168

    metadata.commit(lambda transaction: transaction.put((5).to_bytes(8, "big"), value, db=table._database))

    with pytest.raises(StoreError) as caught:
        metadata.rows(GEOMETRY).load(CAPACITY)
    assert caught.value.fields["broken"]


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
