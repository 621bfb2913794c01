"""The metadata environment: whose block is in which slot, and the namespaces they belong to.

Databases: `spaces` (number, 4 bytes → digest ‖ JSON of namespace and spec, or the digest alone), `layouts` (geometry → JSON of
what its files measure), `order` (geometry → slots, least recently used first, from a clean close), and one for each geometry
(slot, 8 bytes big-endian → row). Rows have one size for each geometry, so that all of them are read as one array.

A namespace of which nothing is stored is forgotten at a start, so that `spaces` does not grow with every tenant there ever was.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import lmdb
import msgspec
import numpy as np
from numpy.typing import NDArray

from tiercache.errors import StoreError, StoreFull
from tiercache.spec import DIGEST_BYTES, Geometry, KVSpec, Namespace
from tiercache.storage.contract import FULL_CHARGE
from tiercache.storage.lmdb_env import Environment, Headroom, Transaction, open_environment, translated
from tiercache.storage.spaces import Spaces, encode, read_json
from tiercache.types import Identity

_MAP_BYTES: Final = 1 << 34
"""Address space, not disk: 16 million rows of blocks of 64 tokens fit."""
_HEADROOM_PAGES: Final = 256
_GEOMETRIES: Final = 256
"""Geometries that one directory can hold."""


class Row(NamedTuple):
    """One stored block: its slot, whose it is, and the units that it costs."""

    slot: int
    identity: Identity
    charge: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """Every stored block, one a place, in columns; the least recently used first if that is known, else the oldest first.

    `namespaces[i]` is the digest, one object for all blocks of a namespace.
    """

    slots: NDArray[np.int64]
    charges: NDArray[np.uint8]
    namespaces: list[bytes]
    groups: NDArray[np.uint16]
    shards: NDArray[np.uint16]
    keys: list[bytes]
    parents: list[bytes]
    symbols: list[bytes]
    checksums: list[int]

    def __len__(self) -> int:
        return len(self.slots)


class Metadata:
    """The environment in `folder`. A commit is safe from kill -9 when it returns, and from a loss of power with `sync=True`.

    Thread-safe. Opening raises StoreError for files that are no whole environment or hold what can't be read.
    """

    def __init__(self, folder: Path, *, sync: bool = True) -> None:
        self.folder = folder
        # LMDB has one writer anyway; the lock keeps the numbers of new namespaces in step with what is committed.
        self._writing = threading.Lock()
        self._new: dict[bytes, int] = {}
        self._environment: Environment = open_environment(
            folder, map_bytes=_MAP_BYTES, sync=sync, metasync=True, databases=_GEOMETRIES + 3
        )
        self._headroom = Headroom(self._environment, folder, _HEADROOM_PAGES)
        try:
            with translated(folder):
                self._spaces = self._environment.open_db(b"spaces")
                self._layouts = self._environment.open_db(b"layouts")
                self._order = self._environment.open_db(b"order")
                with self._environment.begin(db=self._spaces) as transaction:
                    entries = [(int.from_bytes(key, "big"), value) for key, value in transaction.cursor()]
            self._book = Spaces(entries)
            for geometry in self._book.geometries():
                if not self._entries(geometry):
                    self.forget_spaces(geometry, ())
        except BaseException:
            self.close()
            raise

    def remember(self, namespace: Namespace, spec: KVSpec) -> bytes:
        """Write down what the namespace's digest stands for, once, and return the digest."""
        digest = namespace.digest(spec)
        with self._writing:
            if digest not in self._book.known:
                value = encode(digest, namespace, spec)
                number = self._book.number(digest) if digest in self._book else self._book.allot([digest])[digest]
                with translated(self.folder, need=len(value)), self._environment.begin(write=True) as transaction:
                    transaction.put(_number(number), value, db=self._spaces)
                self._book.add(number, value)
        return digest

    def namespaces(self) -> dict[bytes, tuple[Namespace, KVSpec]]:
        """Return what was remembered, by digest: the namespaces of which something is stored, and those new in this run."""
        with self._writing:
            return dict(self._book.known)

    def forget_spaces(self, geometry: Geometry, used: Collection[int]) -> None:
        """Forget the namespaces of `geometry` from before this run whose numbers are not among `used`, those of its rows.

        A full disk is no reason not to start: they are forgotten the next time.
        """
        with self._writing:
            numbers = self._book.unused(geometry, used)
            with suppress(StoreError):
                if numbers:
                    with translated(self.folder), self._environment.begin(write=True) as transaction:
                        for number in numbers:
                            transaction.delete(_number(number), db=self._spaces)
                    self._book.drop(numbers)

    def rows(self, geometry: Geometry) -> Rows:
        """Return the rows of `geometry`."""
        with self._writing, translated(self.folder):
            return Rows(self, geometry, self._environment.open_db(name(geometry).encode()))

    def layout(self, geometry: Geometry) -> dict[str, int] | None:
        """Return what was set as the layout of `geometry`'s files, or None."""
        with translated(self.folder), self._environment.begin(db=self._layouts) as transaction:
            value = transaction.get(name(geometry).encode())
        return None if value is None else read_json(value, dict[str, int])

    def set_layout(self, geometry: Geometry, layout: dict[str, int]) -> None:
        """Write down the layout of `geometry`'s files."""
        self.commit(lambda transaction: transaction.put(name(geometry).encode(), msgspec.json.encode(layout), db=self._layouts))

    def census(self, geometry: Geometry) -> dict[bytes, int]:
        """Return how many rows of `geometry` each namespace has, by digest. Raises StoreError."""
        rows = self._whole_rows(geometry)
        numbers, counts = np.unique(rows["namespace"], return_counts=True) if rows is not None else ((), ())
        return {self.digest(int(number)): int(count) for number, count in zip(numbers, counts, strict=True)}

    def forget(self, geometry: Geometry, digests: Collection[bytes]) -> int:
        """Delete the rows of the namespaces `digests`, and return how many there were. No store of `geometry` may be open.

        Nothing names what lies in the data files then: it goes when they are next opened. Raises StoreError; nothing changed then.
        """
        rows = self._whole_rows(geometry)
        with self._writing:
            numbers = [self._book.number(digest) for digest in digests if digest in self._book]
        if rows is None or not numbers:
            return 0
        slots: list[int] = rows["slot"][np.isin(rows["namespace"], numbers)].tolist()
        if slots:
            self.rows(geometry).commit((), slots)
        return len(slots)

    def _whole_rows(self, geometry: Geometry) -> NDArray[np.void] | None:
        """Return all rows of `geometry`; None when nothing of it was ever stored."""
        return None if self.layout(geometry) is None else self.rows(geometry).table()

    def commit(self, change: Callable[[Transaction], object], *, digests: Sequence[bytes] = (), need: int = 0) -> None:
        """Run `change` in one write transaction, in which each of `digests` has a number.

        `need` is what `change` adds, in bytes; 0 for a deletion, which may use the last room of a full disk. Raises StoreFull
        or StoreError; nothing changed then. All writing of rows goes through here: a test replaces it to let
        it fail.
        """
        with self._writing:
            if not self._headroom.keep(_MAP_BYTES) and need:
                raise StoreFull(f"{self.folder}: the disk is full", path=str(self.folder), kind="disk")
            self._new = self._book.allot(digests)
            try:
                with translated(self.folder, need=need), self._environment.begin(write=True) as transaction:
                    for digest, number in self._new.items():
                        transaction.put(_number(number), digest, db=self._spaces)
                    change(transaction)
                # A number is one only when it is on disk: a later row would name a namespace that no restart knows.
                for digest, number in self._new.items():
                    self._book.add(number, digest)
            finally:
                self._new = {}

    def sync(self) -> None:
        """Make what was committed safe from a loss of power."""
        with translated(self.folder):
            self._environment.sync(True)

    def close(self) -> None:
        """Close the environment. May be called twice; nothing else may be called after it."""
        with self._writing:
            self._headroom.close()
            self._environment.close()

    def number(self, digest: bytes) -> int:
        """Return the number of a namespace, inside the commit that was given its digest."""
        found = self._new.get(digest)
        return self._book.number(digest) if found is None else found

    def digest(self, number: int) -> bytes:
        """Return the digest of a namespace. Raises StoreError for a number that stands for none."""
        digest = self._book.digest(number)
        if digest is None:
            raise StoreError(f"{self.folder}: no namespace has the number {number}", path=str(self.folder), broken=True)
        return digest

    def scan(self, database: Any) -> bytes:
        """Return all values of `database` one after the other, in the order of their keys."""
        with translated(self.folder), self._environment.begin(db=database) as transaction:
            values: list[bytes] = list(transaction.cursor().iternext(keys=False))
        return b"".join(values)

    def take_order(self, geometry: Geometry) -> bytes | None:
        """Return the order that was written at the last clean close, and delete it: it is stale from now on."""
        key = name(geometry).encode()
        with translated(self.folder), self._environment.begin(db=self._order) as transaction:
            order: bytes | None = transaction.get(key)
        if order is not None:
            with suppress(StoreError):  # a start must not fail on a full disk; a stale order is only a worse one
                self.commit(lambda transaction: transaction.delete(key, db=self._order))
        return order

    def leave_order(self, geometry: Geometry, order: bytes) -> None:
        """Write down the order of use for the next start."""
        self.commit(lambda transaction: transaction.put(name(geometry).encode(), order, db=self._order), need=len(order))

    def _entries(self, geometry: Geometry) -> int:
        """Return how many rows `geometry` has."""
        with translated(self.folder):
            try:
                database = self._environment.open_db(name(geometry).encode(), create=False)
            except lmdb.NotFoundError:
                return 0
            with self._environment.begin(db=database) as transaction:
                return int(transaction.stat(database)["entries"])


class Rows:
    """The rows of one geometry."""

    def __init__(self, metadata: Metadata, geometry: Geometry, database: Any) -> None:
        self._metadata = metadata
        self._geometry = geometry
        self._database = database
        self._symbol_bytes = geometry.symbol_bytes
        self._type = np.dtype(
            [
                ("slot", "<i8"),
                ("stamp", "<u8"),
                ("checksum", "<u8"),
                ("namespace", "<u4"),
                ("used", "<u4"),
                ("group", "<u2"),
                ("shard", "<u2"),
                ("charge", "u1"),
                ("zero", "V3"),
                ("key", f"V{DIGEST_BYTES}"),
                ("parent", f"V{DIGEST_BYTES}"),
                ("symbol", f"V{geometry.symbol_bytes}"),
            ]
        )
        self._row = struct.Struct(f"<qQQIIHHB3x{DIGEST_BYTES}s{DIGEST_BYTES}s{geometry.symbol_bytes}s")
        self._stamp = 0

    def load(self, capacity: int) -> Loaded:
        """Return every row, without reading a block, and forget those of slots beyond `capacity`: the tier is smaller now.

        Stamps go on from the highest found. Raises StoreError for rows that can't be.
        """
        table = self.table()
        self._stamp = int(table["stamp"].max()) + 1 if len(table) else 0
        order = self._metadata.take_order(self._geometry)
        # Keys are in order and each is its row's slot: what is out of order was never written like that.
        slots, charges = table["slot"], table["charge"]
        if len(table) and (
            slots.min() < 0
            or (np.diff(slots) < 1).any()
            or table["used"].max() > self._symbol_bytes
            or charges.min() < 1
            or charges.max() > FULL_CHARGE
        ):
            raise StoreError(f"{self._metadata.folder}: a row that can't be", broken=True)
        used = frozenset(np.unique(table["namespace"]).tolist())
        beyond = slots >= capacity
        if beyond.any():
            with suppress(StoreError):  # on a full disk the next start tries again
                self.commit((), slots[beyond].tolist())
            table = table[~beyond]
        loaded = self._columns(table[_by_use(table, order, capacity)])
        # Not before all is read, and with the rows beyond: they may still be there.
        self._metadata.forget_spaces(self._geometry, used)
        return loaded

    def table(self) -> NDArray[np.void]:
        """Return every row as it lies there. Raises StoreError for rows that can't be."""
        raw = self._metadata.scan(self._database)
        if len(raw) % self._type.itemsize:
            raise StoreError(f"{self._metadata.folder}: {len(raw)} bytes are no rows of {self._type.itemsize}", broken=True)
        return np.frombuffer(raw, self._type)

    def commit(self, rows: Sequence[Row], forget: Sequence[int] = ()) -> None:
        """Write `rows` and delete those of the slots `forget`, in one transaction. Raises StoreFull or StoreError."""
        stamps = range(self._stamp, self._stamp + len(rows))

        def change(transaction: Transaction) -> None:
            for slot in forget:
                transaction.delete(_slot(slot), db=self._database)
            for row, stamp in zip(rows, stamps, strict=True):
                transaction.put(_slot(row.slot), self._encode(row, stamp), db=self._database)

        self._metadata.commit(change, digests=[row.identity.namespace for row in rows], need=len(rows) * self._type.itemsize)
        self._stamp = stamps.stop

    def clear(self) -> None:
        """Forget every row."""

        def change(transaction: Transaction) -> None:
            transaction.drop(self._database, delete=False)

        self._metadata.commit(change)

    def leave_order(self, slots: Sequence[int]) -> None:
        """Write down the order of use, least recently used first, for the next `load`."""
        self._metadata.leave_order(self._geometry, np.asarray(slots, "<i8").tobytes())

    def sync(self) -> None:
        """Make what was committed safe from a loss of power."""
        self._metadata.sync()

    def _encode(self, row: Row, stamp: int) -> bytes:
        one = row.identity
        number = self._metadata.number(one.namespace)
        digests = (one.key, one.parent, one.symbol)
        return self._row.pack(row.slot, stamp, one.checksum, number, len(one.symbol), one.group, one.shard, row.charge, *digests)

    def _columns(self, table: NDArray[np.void]) -> Loaded:
        numbers = table["namespace"].tolist()
        digests = {number: self._metadata.digest(number) for number in set(numbers)}
        return Loaded(
            slots=table["slot"].astype(np.int64),
            charges=table["charge"].copy(),
            namespaces=[digests[number] for number in numbers],
            groups=table["group"].astype(np.uint16),
            shards=table["shard"].astype(np.uint16),
            keys=table["key"].tolist(),
            parents=table["parent"].tolist(),
            symbols=_cut(table["symbol"].tolist(), table["used"]),
            checksums=table["checksum"].tolist(),
        )


def name(geometry: Geometry) -> str:
    """Return the name of `geometry` in the metadata and in the data directory."""
    return f"{geometry.layers}x{geometry.parts}x{geometry.unit_bytes}-{geometry.symbol_bytes}"


def _by_use(table: NDArray[np.void], order: bytes | None, capacity: int) -> NDArray[np.intp]:
    """Return the places of `table`'s rows in their order of use; rows that `order` does not know are the latest."""
    if order is None:
        return np.argsort(table["stamp"], kind="stable")
    slots = np.frombuffer(order, "<i8")
    slots = slots[(slots >= 0) & (slots < capacity)]
    rank = np.full(capacity, len(slots), np.int64)
    rank[slots] = np.arange(len(slots))
    return np.lexsort((table["stamp"], rank[table["slot"]]))


def _cut(symbols: list[bytes], used: NDArray[np.uint32]) -> list[bytes]:
    return [symbol[:length] for symbol, length in zip(symbols, used.tolist(), strict=True)]


def _slot(slot: int) -> bytes:
    return slot.to_bytes(8, "big")


def _number(number: int) -> bytes:
    return number.to_bytes(4, "big")
