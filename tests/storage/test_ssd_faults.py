"""The SSD store under failure: each of its operations on the disk can fail or hang, and the books stay right."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import lmdb
import pytest

from tests.storage.blocks import Block, chain, contiguous
from tests.storage.ssd_fixture import capacity_for
from tests.storage.test_ssd_store import LARGE, SMALL, mixed, read, reconcile, refusal
from tiercache.errors import Closed, StoreError, StoreFull, Untrusted
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
        faults.commits = [None, BROKEN_DISK]

        assert reasons(store, blocks) == [None, "StoreError", "order", "order"]

        assert holds(store, blocks) == [True, False, False, False]
        assert store.stats().unnamed_known == 1
        reconcile(store)
        assert (store.stats().raw_records, store.stats().packed_records) == (1, 0)


def test_a_rotten_source_ends_the_chain(tmp_path: Path, seed: int) -> None:
    """A source that no longer has its checksum is refused on the way in; across batches everything before it stands."""
    blocks = chain(LARGE, 10, seed=seed)
    rotten = Block(blocks[6].identity, blocks[5].planes)
    with Rig(tmp_path) as (store, _):
        assert reasons(store, [*blocks[:6], rotten, *blocks[7:]]) == [None] * 6 + ["checksum"] + ["order"] * 3

        assert holds(store, blocks) == [True] * 6 + [False] * 4


def test_a_read_keeps_its_bytes_while_others_write(tmp_path: Path, seed: int) -> None:
    """Held between finding and copying, while the slot is discarded and 20 others are written over: the bytes are the old ones."""
    blocks = chain(LARGE, 24, seed=seed)
    found, resume = threading.Event(), threading.Event()
    results: list[bytes] = []
    with Rig(tmp_path) as (store, faults):
        reasons(store, blocks[:4])

        def hold() -> None:
            found.set()
            resume.wait()

        faults.in_copy = hold
        reader = threading.Thread(target=lambda: results.append(read(store, 1, blocks[1])))
        reader.start()
        found.wait()
        faults.in_copy = lambda: None
        store.discard([0, 1, 2])
        for place, block in enumerate(blocks[4:]):
            assert reasons(store, [block], 1 + place) == [None]
            store.discard([1 + place])
        resume.set()
        reader.join()

        assert results == [blocks[1].planes.tobytes()]


def test_a_view_cannot_outlive_its_transaction(tmp_path: Path, seed: int) -> None:
    """Whoever keeps the view that a read was given gets an error, not another record's bytes."""
    kept: list[memoryview] = []
    block = chain(LARGE, 1, seed=seed)[0]
    with Rig(tmp_path) as (store, _):
        reasons(store, [block])
        values = next(iter(store._values.values()))

        assert values.read(0, kept.append)

        with pytest.raises(ValueError, match="released"):
            kept[0][0]


def test_many_callers_share_transactions(tmp_path: Path, seed: int) -> None:
    """Puts that wait behind a slow one are done together, in fewer transactions than calls, and one that fails fails alone."""
    blocks = chain(LARGE, 9, seed=seed)
    bad = blocks[4].identity._replace(symbol=b"s" * 65)
    entered, resume = threading.Event(), threading.Event()
    arrivals = threading.Semaphore(0)
    words: dict[int, list[str | None]] = {}
    with Rig(tmp_path, batch=16, slots=512) as (store, faults):

        def hold() -> None:
            entered.set()
            resume.wait()

        def work(place: int) -> None:
            block = Block(bad, blocks[4].planes) if place == 4 else blocks[place]
            words[place] = reasons(store, [block], place)

        class Queue(deque[object]):
            def append(self, job: object) -> None:
                super().append(job)
                arrivals.release()

        store._writer._queue = Queue()  # type: ignore[assignment]
        faults.in_commit = hold
        threads = [threading.Thread(target=work, args=(0,))]
        threads[0].start()
        entered.wait()
        arrivals.acquire()
        faults.in_commit = lambda: None
        faults.log.clear()
        threads += [threading.Thread(target=work, args=(place,)) for place in range(1, 9)]
        for thread in threads[1:]:
            thread.start()
        for _ in range(8):
            arrivals.acquire()
        faults.commits = [None, FULL_DISK, None]  # the held one; the joint one; then each alone
        resume.set()
        for thread in threads:
            thread.join()

        assert words == {place: ["symbol"] if place == 4 else [None] for place in range(9)}
        assert faults.log.count("rows") == 2
        assert holds(store, blocks) == [place != 4 for place in range(9)]


def test_threads_put_read_and_discard_at_once(tmp_path: Path, seed: int) -> None:
    """Six threads on their own slots, small blocks that share values, with reconciling between: every read is exact."""
    wrong: list[object] = []
    with Rig(tmp_path, SMALL, slots=64) as (store, _):

        def work(first: int) -> None:
            choose = random.Random(seed + first)
            held: dict[int, Block] = {}
            try:
                for turn in range(12):
                    slot = first + 6 * choose.randrange(10)
                    if slot in held and choose.random() < 0.5:
                        store.discard([slot])
                        del held[slot]
                    else:
                        held[slot] = chain(SMALL, 1, seed=seed + 100 * first + turn)[0]
                        assert reasons(store, [held[slot]], slot) == [None]
                    assert store.reconcile(3).absent == []
                    assert all(read(store, slot, block) == block.planes.tobytes() for slot, block in held.items())
            except (AssertionError, StoreError) as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(first,)) for first in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert wrong == []


def test_a_close_under_a_read_waits_for_it(tmp_path: Path, seed: int) -> None:
    """While a read is inside, the environment is not taken from under it; the read is exact, and then the close succeeds."""
    block = chain(LARGE, 1, seed=seed)[0]
    found, resume = threading.Event(), threading.Event()
    results: list[bytes] = []

    def hold() -> None:
        found.set()
        resume.wait()

    rig = Rig(tmp_path)
    reasons(rig.store, [block])
    rig.faults.in_copy = hold
    reader = threading.Thread(target=lambda: results.append(read(rig.store, 0, block)))
    reader.start()
    found.wait()

    assert rig.store.finish(0.01) is False
    resume.set()
    reader.join()

    assert results == [block.planes.tobytes()]
    assert rig.store.finish(0.01) is True
    rig.tier.close()


def test_a_close_under_a_write_that_hangs_gives_up(tmp_path: Path, seed: int) -> None:
    """The close says that it could not, calls are refused from then on, and the write is done if it ever ends."""
    block = chain(LARGE, 1, seed=seed)[0]
    entered, resume = threading.Event(), threading.Event()
    results: list[object] = []

    def hold() -> None:
        entered.set()
        resume.wait()

    def put() -> None:
        try:
            results.append(reasons(rig.store, [block], 3))
        except Closed as error:
            results.append(error)

    rig = Rig(tmp_path)
    rig.faults.in_commit = hold
    writer = threading.Thread(target=put)
    writer.start()
    entered.wait()

    assert rig.store.finish(0.01) is False
    with pytest.raises(Closed):
        rig.store.fetch(0, block.identity, contiguous(LARGE))
    resume.set()
    writer.join()

    assert results == [[None]]
    rig.tier.close()
    with Rig(tmp_path) as (store, _):
        assert holds(store, [block], 3) == [True]


TINY_DISK = """
import sys
from pathlib import Path
from tests.storage.blocks import chain
from tests.storage.test_ssd_store import LARGE, read, reconcile
from tiercache.storage.ssd import SsdTier

tier = SsdTier(Path(sys.argv[1]), batch_bytes=1 << 20)
store = tier.open(LARGE, capacity_bytes=64 << 20, item_bytes=2)
blocks = chain(LARGE, 200, seed=7)
stored = []
for slot, block in enumerate(blocks):
    outcome = store.put([block.at(slot)])[0]
    if outcome.error is not None:
        break
    stored.append(slot)
print("full after", len(stored), type(outcome.error).__name__, outcome.error.fields.get("kind"))
assert 40 < len(stored) < 150
for slot in stored:
    assert read(store, slot, blocks[slot]) == blocks[slot].planes.tobytes()
store.discard(stored[:20])
again = [store.put([blocks[slot].at(slot)])[0].error for slot in range(10)]
print("again", again)
assert again == [None] * 10
for slot in [*range(10), *stored[20:]]:
    assert read(store, slot, blocks[slot]) == blocks[slot].planes.tobytes()
reconcile(store)
tier.close()
tier = SsdTier(Path(sys.argv[1]), batch_bytes=1 << 20)
store = tier.open(LARGE, capacity_bytes=64 << 20, item_bytes=2)
for slot in [*range(10), *stored[20:]]:
    assert read(store, slot, blocks[slot]) == blocks[slot].planes.tobytes()
tier.close()
print("fine")
"""


def test_a_full_disk_is_an_answer(tmp_path: Path) -> None:
    """On a file system of 4 MiB puts end with a full disk, all that was stored is exact, and deleting makes room again."""
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("unshare is not installed")
    command = [unshare, "-rm", "sh", "-c"]
    if subprocess.run([*command, f"mount -t tmpfs tmpfs '{tmp_path}'"], capture_output=True, check=False).returncode:
        pytest.skip("this system lets no user mount a file system of its own")
    script = f"mount -t tmpfs -o size=4m tmpfs '{tmp_path}' && exec '{sys.executable}' - '{tmp_path}'"

    ran = subprocess.run([*command, script], input=TINY_DISK, capture_output=True, text=True, check=False)

    print(ran.stdout, ran.stderr)
    assert ran.returncode == 0
    assert "StoreFull disk" in ran.stdout and "fine" in ran.stdout
