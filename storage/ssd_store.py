"""The SSD store: the contract of every tier over two data environments and the rows of the metadata."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import Final, NamedTuple

import numpy as np

from tiercache.errors import AuditFailed, Closed, InvalidTensor, StoreError, StoreFull, Untrusted
from tiercache.spec import Geometry
from tiercache.storage.contract import FULL_CHARGE, Outcome, Planes, Put
from tiercache.storage.lmdb_env import translated
from tiercache.storage.metadata import Loaded, Rows
from tiercache.storage.ssd_layout import SsdLayout
from tiercache.storage.ssd_parts import parts
from tiercache.storage.ssd_records import Records
from tiercache.storage.ssd_values import LmdbValues
from tiercache.storage.ssd_writer import Call, Reconciled, SsdWriter
from tiercache.types import Identity, Tier

CLOSE_SECONDS: Final = 10.0
"""How long closing waits for a write or a read that hangs; after that the environments stay open until the process ends."""


class SsdStats(NamedTuple):
    """What an operator asks of one geometry's files. `last_sync` is the clock's, None if never.

    `refused` counts failed fetches and puts since the opening, by the reason of Untrusted; `disk full`, `map full` and
    `failed` are the others.
    """

    blocks: int
    raw_records: int
    packed_records: int
    unnamed_known: int
    raw_file_bytes: int
    packed_file_bytes: int
    limit_bytes: int
    refused: dict[str, int]
    last_sync: float | None


class SsdStore:
    """Blocks of one geometry on SSD (the Protocol `tiercache.storage.contract.Store`); made by `SsdTier.open`.

    A fetch is a short read transaction in the caller's thread. Puts and discards from several threads are done one after the
    other, in the order of their arrival, and small ones together (`tiercache.storage.ssd_writer`). A slot beyond `capacity`
    raises AuditFailed in every call; after `close` each raises Closed.
    """

    def __init__(
        self,
        geometry: Geometry,
        layout: SsdLayout,
        records: Records,
        rows: Rows,
        values: dict[int, LmdbValues],
        writer: SsdWriter,
        loaded: Loaded,
    ) -> None:
        self._geometry = geometry
        self._layout = layout
        self._records = records
        self._rows = rows
        self._values = values
        self._writer = writer
        self._loaded: Loaded | None = loaded
        self._refused: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._closed = False

    @property
    def tier(self) -> Tier:
        """SSD."""
        return Tier.SSD

    @property
    def geometry(self) -> Geometry:
        """The shape of the blocks that fit a slot."""
        return self._geometry

    @property
    def capacity(self) -> int:
        """How many slots there are; slots are numbered from 0. More than the budget pays for at full charge with zstd."""
        return self._layout.capacity

    @property
    def budget_units(self) -> int:
        """Units that the slots in use may cost together: 4 a raw record, 3 a compressed one."""
        return self._layout.budget_units

    @property
    def limit_bytes(self) -> int:
        """What the data files may occupy together: the capacity and its slack. Metadata comes on top, about 200 bytes a block."""
        return self._layout.limit

    @property
    def durable(self) -> bool:
        """True."""
        return True

    def load(self) -> Loaded:
        """Return what metadata named when the store was opened, without reading a block; once.

        Raises AuditFailed the second time: the columns are the caller's, and stale as soon as something is put.
        """
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            raise AuditFailed("the SSD store was loaded before")
        return loaded

    def reconcile(self, step: int = 4096) -> Reconciled:
        """Compare the next `step` stored values with metadata; call again until the result says done.

        Records that nothing names are deleted. Slots that metadata names but that hold nothing are returned: the caller drops
        their blocks with all that hang from them, and discards them. Puts and discards may go on meanwhile. Raises StoreError.
        """
        return self._writer.reconcile(step)

    def view(self, slot: int) -> None:
        """Return None: a disk's bytes are not addressable."""
        self._check(slot)

    def views(self, first: int, count: int) -> None:
        """Return None, as `view` does."""
        self._check(first)
        self._check(first + count - 1)

    def fetch(self, slot: int, identity: Identity, into: Planes) -> None:
        """Copy the block in `slot` into `into`, `[planes, unit_bytes]`, and verify it against `identity`.

        Raises Untrusted, reason absent, magic, version, header, namespace, key, parent, symbol, length, checksum or codec, and
        StoreError if the disk can't be read; `into` is then undefined.
        """
        self._check(slot)
        self._check_shape(into, slot)
        try:
            values = self._values.get(self._writer.charge(slot))
            if values is None:
                raise Untrusted("absent", f"SSD slot {slot} holds no block", slot=slot)
            with translated(values.folder):
                self._records.fetch(values, slot, identity, into)
        except StoreError as error:
            self._count(error)
            raise

    def put(self, items: Sequence[Put]) -> list[Outcome]:
        """Store `items`, in order, and return one outcome for each.

        An item is stored when its bytes and its row are both committed: safe from kill -9, and from a loss of power unless the
        tier was opened with `sync=False`. A slot that holds a block loses it first. Outcomes carry Untrusted (`checksum`,
        `symbol`, `order`), StoreFull (the disk or the map) or StoreError (the disk failed); the store lives on.
        """
        for item in items:
            self._check(item.slot)
            self._check_shape(item.source, item.slot)
        if len({item.slot for item in items}) != len(items):
            raise AuditFailed("one call names a slot twice", slots=[item.slot for item in items])
        call = Call()
        try:
            self._put(call, items)
        except BaseException:
            self._writer.abandon(call)
            raise
        for outcome in call.outcomes:
            if outcome.error is not None:
                self._count(outcome.error)
        return call.outcomes

    def discard(self, slots: Sequence[int]) -> None:
        """Forget what `slots` hold, for good when the call returns; slots that hold nothing are passed over.

        Raises StoreError if the metadata can't be written: then nothing is forgotten.
        """
        for slot in slots:
            self._check(slot)
        self._writer.forget(slots)

    def sync(self) -> None:
        """Make everything that was put so far safe from power loss. Raises StoreError.

        With `sync=False` it holds until the next put: what is then written without order puts all of the directory at risk.
        """
        self._writer.sync()

    def leave_order(self, slots: Sequence[int]) -> None:
        """Write down the order of use, least recently used first, for the next start; to be called before `close`."""
        self._require_open()
        self._rows.leave_order(slots)

    def stats(self) -> SsdStats:
        """Return counts for operators. Raises Closed."""
        self._require_open()
        raw, packed = self._values[FULL_CHARGE], next((v for charge, v in self._values.items() if charge != FULL_CHARGE), None)
        with self._counting:
            refused = dict(self._refused)
        return SsdStats(
            blocks=self._writer.named,
            raw_records=raw.count(),
            packed_records=packed.count() if packed else 0,
            unnamed_known=self._writer.strays,
            raw_file_bytes=raw.file_bytes,
            packed_file_bytes=packed.file_bytes if packed else 0,
            limit_bytes=self._layout.limit,
            refused=refused,
            last_sync=self._writer.last_sync,
        )

    def close(self) -> None:
        """Give the store's files back. May be called twice. Waits for what runs, but never longer than `CLOSE_SECONDS`."""
        self.finish(CLOSE_SECONDS)

    def finish(self, seconds: float) -> bool:
        """Close, and return whether everything is closed; False if a call still hung in the disk after `seconds`."""
        self._closed = True
        return self._writer.close(seconds)

    def _put(self, call: Call, items: Sequence[Put]) -> None:
        most = max(1, self._layout.batch // self._records.stage_bytes)
        left = len(items)
        with closing(parts(self._records, items, most)) as ready:
            for staged, rotten in ready:
                left -= len(staged)
                self._writer.put(call, staged, last=rotten is not None or left == 0)
                if rotten is not None and not call.failed:
                    call.fail(1, rotten)
                if call.failed:
                    call.fail(len(items) - len(call.outcomes), Untrusted("order", "a block before it in the chain was not stored"))
                    return

    def _check(self, slot: int) -> None:
        self._require_open()
        if not 0 <= slot < self._layout.capacity:
            raise AuditFailed(f"there is no slot {slot} in SSD; the slots are 0 to {self._layout.capacity - 1}", slot=slot)

    def _check_shape(self, planes: Planes, slot: int) -> None:
        shape = (self._geometry.planes, self._geometry.unit_bytes)
        if planes.shape != shape or planes.dtype != np.uint8:
            raise InvalidTensor(f"{planes.dtype} {planes.shape} is no block of bytes {shape}", slot=slot)

    def _count(self, error: StoreError) -> None:
        with self._counting:
            self._refused[_word(error)] += 1

    def _require_open(self) -> None:
        if self._closed:
            raise Closed("the SSD store is closed")


def _word(error: StoreError) -> str:
    if isinstance(error, Untrusted):
        return error.reason
    return f"{error.fields.get('kind', 'store')} full" if isinstance(error, StoreFull) else "failed"
