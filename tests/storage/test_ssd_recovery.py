"""The SSD store after a hard end: what was acknowledged is there, what was not is absent or exact, nothing is stranded."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.storage.blocks import chain, identity_at
from tests.storage.test_ssd_store import LARGE, SLOTS, SMALL, Opened, each_kind, mixed, put, read, reconcile
from tiercache.spec import Geometry
from tiercache.storage.ssd_records import Staged
from tiercache.storage.ssd_store import SsdStore
from tiercache.storage.ssd_values import LmdbValues, Write
from tiercache.storage.ssd_writer import Call

WRITER = """
import random, sys
from pathlib import Path
from tests.storage.test_ssd_store import LARGE, SMALL, SLOTS, Opened, mixed

path, kind, codec, seed = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
geometry = {"LARGE": LARGE, "SMALL": SMALL}[kind]
store = Opened(path, geometry, codec).store
blocks = mixed(geometry, 16, 5)
choose = random.Random(seed)
print("ready", flush=True)
while True:
    slots = choose.sample(range(SLOTS), choose.randrange(1, 9))
    if choose.random() < 0.3:
        print("drop", *slots, flush=True)
        store.discard(slots)
        print("dropped", *slots, flush=True)
    else:
        pairs = [(slot, choose.randrange(16)) for slot in slots]
        print("put", *(f"{slot}:{place}" for slot, place in pairs), flush=True)
        outcomes = store.put([blocks[place].at(slot) for slot, place in pairs])
        assert all(outcome.error is None for outcome in outcomes), outcomes
        print("stored", *(f"{slot}:{place}" for slot, place in pairs), flush=True)
"""


def killed(path: Path, kind: str, codec: str, seed: int, lines: int) -> list[list[str]]:
    """Run the writer, kill it some time after its `lines`th line, and return what it said."""
    command = [sys.executable, "-c", WRITER, str(path), kind, codec, str(seed)]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONHASHSEED": str(seed % 1000)})
    assert writer.stdout is not None
    said = [writer.stdout.readline().split() for _ in range(lines)]
    writer.send_signal(signal.SIGKILL)
    said += [line.split() for line in writer.stdout if line.endswith("\n")]
    writer.communicate()
    return said


@pytest.mark.parametrize(
    ("kind", "codec", "rounds"),
    [("LARGE", "raw", 2), ("LARGE", "zstd", 2), ("SMALL", "raw", 1)]
    + [pytest.param(kind, codec, 20, marks=pytest.mark.slow) for kind, codec in (("LARGE", "zstd"), ("SMALL", "raw"))],
)
def test_a_kill_loses_nothing_that_was_acknowledged(tmp_path: Path, kind: str, codec: str, rounds: int, seed: int) -> None:
    """A writer is killed at a random moment, again and again: each slot holds what was last acknowledged, or what was under way."""
    geometry = {"LARGE": LARGE, "SMALL": SMALL}[kind]
    blocks = mixed(geometry, 16, 5)
    choose = random.Random(seed)
    possible: dict[int, set[int | None]] = {slot: {None} for slot in range(SLOTS)}
    for number in range(rounds):
        for word, *pairs in killed(tmp_path, kind, codec, seed + number, choose.randrange(2, 40)):
            for pair in pairs:
                slot = int(pair.partition(":")[0])
                place = int(pair.partition(":")[2]) if ":" in pair else None
                if word in ("put", "drop"):
                    # An overwrite under way has lost the old block, or not yet; or it is done.
                    possible[slot] |= {place, None}
                else:
                    possible[slot] = {place}
        with Opened(tmp_path, geometry, codec) as store:
            loaded = store.load()
            found = {int(slot): identity_at(loaded, place) for place, slot in enumerate(loaded.slots)}
            keys = {block.identity.key: place for place, block in enumerate(blocks)}
            for slot in range(SLOTS):
                held = keys[found[slot].key] if slot in found else None
                assert held in possible[slot], (slot, possible[slot])
                possible[slot] = {held}
                if held is not None:
                    assert read(store, slot, blocks[held]) == blocks[held].planes.tobytes()
            assert reconcile(store)[0] == []
            stats = store.stats()
            assert stats.blocks == len(found)
            if geometry is LARGE:
                assert stats.raw_records + stats.packed_records == len(found)
            else:
                assert stats.raw_records <= len(found)


def environment(store: SsdStore, charge: int = 4) -> LmdbValues:
    return store._values[charge]


@each_kind
def test_unnamed_records_are_deleted_and_absent_ones_told(tmp_path: Path, geometry: Geometry, codec: str, seed: int) -> None:
    """Records that nothing names go, in steps, also beyond the last slot; named slots that hold nothing are returned."""
    blocks = chain(geometry, SLOTS, seed=seed)
    with Opened(tmp_path, geometry, codec) as store:
        put(store, blocks[:20], list(range(20)))
        values = environment(store)
        group = 1 if geometry is LARGE else store.capacity // store._layout.keys
        values.grow(store.limit_bytes)
        stray = [key for key in (*range(store._layout.keys), 10**6, 2**40) if key * group >= 20]
        values.commit([Write(key, 0, b"x" * values.value_bytes) for key in stray], [0])

        absent, deleted = reconcile(store)

        assert absent == list(range(group))
        assert deleted == len(stray)
        assert reconcile_again(store) == ([], 0)
        store.discard(absent)
        assert store.stats().blocks == 20 - group


def reconcile_again(store: SsdStore) -> tuple[list[int], int]:
    """Reconciling is once a start; a further step finds nothing."""
    found = store.reconcile(5)
    assert found.done
    return found.absent, found.deleted


def test_a_record_in_both_environments_is_in_one(tmp_path: Path, seed: int) -> None:
    """What a kill left of the other kind under a slot's key is deleted, and the named record stays."""
    blocks = mixed(LARGE, 2, seed)
    with Opened(tmp_path, LARGE, "zstd") as store:
        put(store, blocks, [0, 1])
        for charge, slot in ((3, 0), (4, 1)):
            values = environment(store, charge)
            values.commit([Write(slot, 0, b"x" * values.value_bytes)])

        assert reconcile(store) == ([], 2)

        assert [read(store, slot, blocks[slot]) for slot in (0, 1)] == [block.planes.tobytes() for block in blocks]


def test_reconciling_spares_what_is_being_put(tmp_path: Path, seed: int) -> None:
    """Between the parts of a call its first bytes are stored but not named: reconciling leaves them, and they get their names."""
    blocks = chain(LARGE, 2, seed=seed)
    with Opened(tmp_path, LARGE) as store:
        call = Call()
        staged: list[Staged] = []
        for slot, block in enumerate(blocks):
            staged.append(store._records.stage(block.at(slot), np.empty(store._records.stage_bytes, np.uint8)))
        store._writer.put(call, staged[:1], last=False)

        assert reconcile(store) == ([], 0)

        store._writer.put(call, staged[1:], last=True)
        assert [outcome.error for outcome in call.outcomes] == [None, None]
        assert [read(store, slot, blocks[slot]) for slot in (0, 1)] == [block.planes.tobytes() for block in blocks]


def test_an_interrupted_call_leaves_nothing(tmp_path: Path, seed: int) -> None:
    """A call that gets no last part is never named, and its bytes are deleted."""
    block = chain(LARGE, 1, seed=seed)[0]
    with Opened(tmp_path, LARGE) as store:
        call = Call()
        staged = store._records.stage(block.at(0), np.empty(store._records.stage_bytes, np.uint8))
        store._writer.put(call, [staged], last=False)

        store._writer.abandon(call)

        assert (store.stats().blocks, store.stats().unnamed_known) == (0, 1)
        put(store, [block], [1])
        assert store.stats().raw_records == 1
