"""The SSD store with many callers, calls that hang, and a disk that is full."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

import pytest

from tests.storage.blocks import Block, chain, contiguous
from tests.storage.ssd_faults import FULL_DISK, Rig, holds, reasons
from tests.storage.test_ssd_store import LARGE, SMALL, read
from tiercache.errors import Closed, StoreError


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
