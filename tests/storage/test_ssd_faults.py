"""The SSD store under failure: each of its operations on the disk can fail, and the books stay right."""

from __future__ import annotations

from pathlib import Path

import lmdb
import pytest

from tests.storage.blocks import Block, chain
from tests.storage.ssd_faults import BROKEN_DISK, FULL_DISK, FULL_MAP, Rig, holds, reasons
from tests.storage.test_ssd_store import LARGE, mixed, reconcile, refusal
from tiercache.errors import StoreFull
from tiercache.storage.contract import FULL_CHARGE


def test_a_put_is_data_then_sync_then_rows(tmp_path: Path, seed: int) -> None:
    """The parts of a long call are committed one by one, and synced and named once at its end."""
    with Rig(tmp_path) as (store, faults):
        assert reasons(store, chain(LARGE, 10, seed=seed)) == [None] * 10

        assert faults.log == ["write", "write", "write", "sync", "rows"]


def test_a_discard_is_rows_then_data(tmp_path: Path, seed: int) -> None:
    """Metadata never names what is gone; and an overwrite is a discard, then a put."""
    blocks = chain(LARGE, 2, seed=seed)
    with Rig(tmp_path) as (store, faults):
        reasons(store, blocks)
        faults.log.clear()

        store.discard([0])
        reasons(store, blocks[:1], 1)

        assert faults.log == ["rows", "delete", "rows", "delete", "write", "sync", "rows"]


@pytest.mark.parametrize(
    ("error", "word"),
    [(FULL_DISK, "StoreFull"), (BROKEN_DISK, "StoreError"), (lmdb.DiskError("full"), "StoreFull"), (lmdb.Error("?"), "StoreError")],
    ids=["ENOSPC", "EIO", "lmdb disk", "lmdb other"],
)
@pytest.mark.parametrize("batch", [0, 1, 2])
def test_a_failed_commit_stores_exactly_what_came_before(
    tmp_path: Path, batch: int, error: Exception, word: str, seed: int
) -> None:
    """The batches before the failed one are stored, it and the later ones are not, and the same put works afterwards."""
    blocks = chain(LARGE, 12, seed=seed)
    with Rig(tmp_path) as (store, faults):
        faults.commits = [None] * batch + [error]

        words = reasons(store, blocks)

        assert words == [None] * (4 * batch) + [word] + ["order"] * (11 - 4 * batch)
        assert holds(store, blocks) == [True] * (4 * batch) + [False] * (12 - 4 * batch)
        counted = "disk full" if word == "StoreFull" else "failed"
        assert store.stats().refused == {counted: 1, "order": 11 - 4 * batch, "absent": 12 - 4 * batch}
        assert reasons(store, blocks) == [None] * 12
        assert holds(store, blocks) == [True] * 12
    with Rig(tmp_path) as (store, _):
        assert holds(store, blocks) == [True] * 12
        assert reconcile(store) == ([], 0)


@pytest.mark.parametrize("operation", ["syncs", "rows"])
def test_what_could_not_be_named_is_not_stored(tmp_path: Path, operation: str, seed: int) -> None:
    """If the sync or the metadata fails, all of the call fails, its bytes are deleted later, and a restart sees none of it."""
    blocks = chain(LARGE, 10, seed=seed)
    with Rig(tmp_path) as (store, faults):
        setattr(faults, operation, [BROKEN_DISK])

        assert reasons(store, blocks) == ["StoreError"] + ["order"] * 9
        assert holds(store, blocks) == [False] * 10
        assert (store.stats().unnamed_known, store.stats().raw_records) == (10, 10)
        assert reasons(store, blocks[:1], 20) == [None]
        assert (store.stats().unnamed_known, store.stats().raw_records) == (0, 1)
    with Rig(tmp_path) as (store, _):
        assert store.load().slots.tolist() == [20]


def test_a_discard_that_cannot_be_written_changes_nothing(tmp_path: Path, seed: int) -> None:
    """When the metadata refuses, the caller is told and the block is still there, now and after a restart."""
    blocks = chain(LARGE, 3, seed=seed)
    with Rig(tmp_path) as (store, faults):
        reasons(store, blocks)
        faults.rows = [FULL_DISK]

        with pytest.raises(StoreFull):
            store.discard([0, 1])

        assert holds(store, blocks) == [True] * 3
    with Rig(tmp_path) as (store, _):
        assert holds(store, blocks) == [True] * 3


def test_a_failed_delete_is_done_later(tmp_path: Path, seed: int) -> None:
    """A discard whose data can't be deleted holds all the same; the record goes with the next write, or after a restart."""
    blocks = chain(LARGE, 4, seed=seed)
    with Rig(tmp_path) as (store, faults):
        reasons(store, blocks)
        faults.commits = [FULL_DISK]
        store.discard([0])
        assert (store.stats().blocks, store.stats().raw_records, refusal(store, 0, blocks[0])) == (3, 4, "absent")
        reasons(store, blocks[:1], 10)
        assert store.stats().raw_records == 4

        faults.commits = [FULL_DISK]
        store.discard([1])
    with Rig(tmp_path) as (store, _):
        assert holds(store, blocks) == [False, False, True, True]
        assert reconcile(store) == ([], 1)
        assert store.stats().raw_records == 3


def test_a_full_map_is_retried_once(tmp_path: Path, seed: int) -> None:
    """The first refusal makes room and tries again; a second one is the outcome, counted, and the store lives on."""
    blocks = chain(LARGE, 3, seed=seed)
    with Rig(tmp_path) as (store, faults):
        faults.commits = [FULL_MAP]
        assert reasons(store, blocks[:1]) == [None]
        assert faults.log == ["write", "write", "sync", "rows"]

        faults.commits = [FULL_MAP, FULL_MAP]
        assert reasons(store, blocks[1:], 1) == ["StoreFull", "order"]

        assert store.stats().refused["map full"] == 1
        assert reasons(store, blocks[1:], 1) == [None, None]
        assert holds(store, blocks) == [True] * 3


def test_unnamed_records_make_room(tmp_path: Path, seed: int) -> None:
    """When the map is full, records that nothing names are deleted in a transaction of their own before the retry."""
    blocks = chain(LARGE, 3, seed=seed)
    with Rig(tmp_path) as (store, faults):
        reasons(store, blocks[:2])
        faults.commits = [FULL_DISK, FULL_DISK]  # the discard's delete, and the one before the next put
        store.discard([0])
        faults.commits.append(FULL_MAP)
        faults.log.clear()

        assert reasons(store, blocks[2:], 5) == [None]

        assert faults.log == ["delete", "write", "delete", "write", "sync", "rows"]
        assert store.stats().raw_records == 2


def test_one_environment_fails_and_the_other_does_not(tmp_path: Path, seed: int) -> None:
    """When packed records fail, the blocks before the first of them stand, and raw ones after it are not left behind."""
    blocks = mixed(LARGE, 4, seed)
    with Rig(tmp_path, codec="zstd") as (store, faults):
        faults.commits = [BROKEN_DISK]

        assert reasons(store, blocks) == [None, "StoreError", "order", "order"]

        assert holds(store, blocks) == [True, False, False, False]
        assert store.stats().unnamed_known == 1
        reconcile(store)
        assert (store.stats().raw_records, store.stats().packed_records) == (1, 0)


@pytest.mark.parametrize("both", [False, True], ids=["packed", "both"])
def test_a_full_packed_environment_leaves_its_blocks_to_the_raw_one(tmp_path: Path, both: bool, seed: int) -> None:
    """What can't be stored packed for want of room is stored raw, at full charge; only when that is full too it is refused."""
    blocks = mixed(LARGE, 4, seed)
    with Rig(tmp_path, codec="zstd") as (store, faults):
        faults.commits = [FULL_DISK, FULL_DISK if both else None]

        outcomes = store.put([block.at(slot) for slot, block in enumerate(blocks)])

        assert [outcome.charge for outcome in outcomes] == ([0] * 4 if both else [FULL_CHARGE] * 4)
        assert isinstance(outcomes[0].error, StoreFull) is both
        assert holds(store, blocks) == [not both] * 4
        assert reconcile(store) == ([], 0)
        assert (store.stats().raw_records, store.stats().packed_records) == (0 if both else 4, 0)


def test_a_record_that_could_not_be_deleted_does_not_take_its_successor_along(tmp_path: Path, seed: int) -> None:
    """Making room for the raw part of a put spares its packed part, committed but not named yet."""
    blocks = mixed(LARGE, 4, seed)
    with Rig(tmp_path, codec="zstd") as (store, faults):
        assert reasons(store, blocks) == [None] * 4
        store.discard([0, 2])
        faults.commits = [BROKEN_DISK]
        store.discard([1, 3])
        assert store.stats().unnamed_known == 2
        faults.commits = [BROKEN_DISK, None, FULL_DISK]
        faults.log.clear()

        assert reasons(store, blocks) == [None] * 4

        assert faults.log[:3] == ["delete", "write", "write"] and faults.log.count("write") == 3
        assert holds(store, blocks) == [True] * 4


def test_a_rotten_source_ends_the_chain(tmp_path: Path, seed: int) -> None:
    """A source that no longer has its checksum is refused on the way in; across batches everything before it stands."""
    blocks = chain(LARGE, 10, seed=seed)
    rotten = Block(blocks[6].identity, blocks[5].planes)
    with Rig(tmp_path) as (store, _):
        assert reasons(store, [*blocks[:6], rotten, *blocks[7:]]) == [None] * 6 + ["checksum"] + ["order"] * 3

        assert holds(store, blocks) == [True] * 6 + [False] * 4
