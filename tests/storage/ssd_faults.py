"""An SSD tier whose operations on the disk can be made to fail or hang, and what its store is asked."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import lmdb

from tests.storage.blocks import Block, contiguous
from tests.storage.ssd_fixture import capacity_for
from tests.storage.test_ssd_store import LARGE
from tiercache.errors import Untrusted
from tiercache.spec import Geometry
from tiercache.storage.lmdb_env import Transaction
from tiercache.storage.metadata import Metadata
from tiercache.storage.ssd import SsdStore, SsdTier
from tiercache.storage.ssd_values import LmdbValues, Write

FULL_DISK = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
BROKEN_DISK = OSError(errno.EIO, os.strerror(errno.EIO))
FULL_MAP = lmdb.MapFullError("mdb_put: MDB_MAP_FULL")


class Faults:
    """What is to go wrong: errors to raise, in the order of the calls, None for a call that works; and what to do before."""

    def __init__(self) -> None:
        self.commits: list[Exception | None] = []
        self.syncs: list[Exception | None] = []
        self.rows: list[Exception | None] = []
        self.log: list[str] = []
        self.in_copy: Callable[[], object] = lambda: None
        self.in_commit: Callable[[], object] = lambda: None

    def next(self, errors: list[Exception | None], entry: str) -> None:
        self.log.append(entry)
        error = errors.pop(0) if errors else None
        if error is not None:
            raise error


def faulty(faults: Faults) -> tuple[type[LmdbValues], type[Metadata]]:
    class FaultyValues(LmdbValues):
        def read(self, key: int, copy: Callable[[memoryview], None]) -> bool:
            def held(view: memoryview) -> None:
                faults.in_copy()
                copy(view)

            return super().read(key, held)

        def commit(self, writes: Sequence[Write] = (), deletes: Sequence[int] = ()) -> None:
            faults.in_commit()
            faults.next(faults.commits, "write" if writes else "delete")
            super().commit(writes, deletes)

        def sync(self) -> None:
            faults.next(faults.syncs, "sync")
            super().sync()

    class FaultyMetadata(Metadata):
        def commit(self, change: Callable[[Transaction], object], *, digests: Sequence[bytes] = (), need: int = 0) -> None:
            def failing(transaction: Transaction) -> None:
                change(transaction)
                faults.next(faults.rows, "rows")

            super().commit(failing, digests=digests, need=need)

    return FaultyValues, FaultyMetadata


class Rig:
    """A tier with faults, and a store of it; `batch` blocks go into one transaction."""

    def __init__(self, path: Path, geometry: Geometry = LARGE, *, codec: str = "raw", slots: int = 64, batch: int = 4) -> None:
        self.faults = Faults()
        values, metadata = faulty(self.faults)
        self.tier = SsdTier(path, codec=codec, batch_bytes=batch * 36864, values=values, metadata=metadata)
        self.store = self.tier.open(geometry, capacity_bytes=capacity_for(geometry, slots), item_bytes=2)
        self.faults.log.clear()

    def __enter__(self) -> tuple[SsdStore, Faults]:
        return self.store, self.faults

    def __exit__(self, *_: object) -> None:
        self.tier.close()


def reasons(store: SsdStore, blocks: list[Block], first: int = 0) -> list[str | None]:
    """Put `blocks` from slot `first` on; return None for each that was stored and the word for each that was not."""
    outcomes = store.put([block.at(first + place) for place, block in enumerate(blocks)])
    assert all((outcome.charge > 0) is (outcome.error is None) for outcome in outcomes)
    return [
        outcome.error.reason if isinstance(outcome.error, Untrusted) else type(outcome.error).__name__ if outcome.error else None
        for outcome in outcomes
    ]


def holds(store: SsdStore, blocks: list[Block], first: int = 0) -> list[bool]:
    """Whether each block is in its slot; what is not must be absent."""
    held = []
    for place, block in enumerate(blocks):
        into = contiguous(store.geometry)
        try:
            store.fetch(first + place, block.identity, into)
        except Untrusted as error:
            held.append(False)
            reason = error.reason
        else:
            held.append(True)
            reason = "absent"
            assert into.tobytes() == block.planes.tobytes()
        assert reason == "absent"
    return held
