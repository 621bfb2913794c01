"""What the SSD store occupies: every slot of the budget can be used, again and again, and the files stay within their limit."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.storage.blocks import Block, chain
from tests.storage.test_ssd_store import LARGE, SMALL, Opened, packable, put, read
from tiercache.errors import StoreFull, TierTooSmall
from tiercache.spec import Geometry
from tiercache.storage.contract import FULL_CHARGE
from tiercache.storage.lmdb_env import PAGE
from tiercache.storage.ssd_layout import GROUP_BYTES, PACKED_CHARGE, SMALL_BLOCK, SsdLayout
from tiercache.storage.ssd_store import SsdStore

MIB = 1 << 20


def occupied(store: SsdStore) -> int:
    stats = store.stats()
    return stats.raw_file_bytes + stats.packed_file_bytes


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("unit", [64, 512, 4064, 4096, 6144, 65536])
def test_the_layout_keeps_its_rules(unit: int, packed: bool) -> None:
    """Values are at most whole pages less 16 bytes, the budget's worth of values fits the capacity, a batch is 1/16 of the map."""
    geometry = Geometry(2, 2, unit, 64)
    for capacity in (MIB, 10 * MIB + 12345, 3 << 30):
        layout = SsdLayout.of(geometry, capacity_bytes=capacity, batch_bytes=32 * MIB, packed=packed)

        assert layout.record * layout.group <= layout.raw_value <= layout.raw_pages * PAGE - 16
        assert (layout.group > 1) == (geometry.block_bytes < SMALL_BLOCK and 2 * layout.record <= GROUP_BYTES)
        per_value = layout.group * FULL_CHARGE
        assert (
            layout.budget_units // per_value * layout.raw_pages * PAGE
            <= capacity
            < (layout.budget_units // per_value + 1) * layout.raw_pages * PAGE
        )
        assert layout.packed_pages * FULL_CHARGE <= layout.raw_pages * PACKED_CHARGE
        assert layout.capacity == (layout.budget_units // PACKED_CHARGE if layout.packs else layout.budget_units // FULL_CHARGE)
        assert capacity * 1.15 - 1 <= layout.limit
        assert layout.batch <= max(layout.limit // 16, layout.raw_pages * PAGE)
        assert layout.packs is (packed and layout.group == 1)


def test_a_share_below_one_value_is_refused() -> None:
    """A tier that can't hold one block says what it needs."""
    with pytest.raises(TierTooSmall) as caught:
        SsdLayout.of(LARGE, capacity_bytes=9 * PAGE - 1, batch_bytes=MIB, packed=True)
    assert caught.value.fields["need"] == 9 * PAGE


@pytest.mark.parametrize(("geometry", "slots", "turns"), [(LARGE, 64, 150), (SMALL, 128, 120)], ids=["raw", "grouped"])
def test_a_full_store_turns_over_for_ever(tmp_path: Path, geometry: Geometry, slots: int, turns: int, seed: int) -> None:
    """With every slot in use, discarding a few and putting as many never fails and never makes the file larger than its limit."""
    choose = random.Random(seed)
    blocks = chain(geometry, 16, seed=seed)
    with Opened(tmp_path, geometry, slots=slots, sync=False) as store:
        held = {slot: choose.choice(blocks) for slot in range(store.capacity)}
        put(store, list(held.values()), list(held))
        for _ in range(turns):
            some = choose.sample(range(store.capacity), choose.randrange(1, 9))
            store.discard(some)
            fresh = [choose.choice(blocks) for _ in some]
            put(store, fresh, some)
            held.update(zip(some, fresh, strict=True))
            assert occupied(store) <= store.limit_bytes

        assert store.stats().blocks == store.capacity
        assert all(read(store, slot, block) == block.planes.tobytes() for slot, block in held.items())


def test_a_discarded_store_is_empty_and_holds_as_much_again(tmp_path: Path, seed: int) -> None:
    """The same put five times counts once; after discarding all there is no record, and everything fits again."""
    blocks = chain(LARGE, 16, seed=seed)
    with Opened(tmp_path, LARGE, slots=16) as store:
        for _ in range(5):
            put(store, blocks, list(range(16)))
            assert (store.stats().blocks, store.stats().raw_records) == (16, 16)

        for _ in range(5):
            store.discard(list(range(16)))
            assert (store.stats().blocks, store.stats().raw_records) == (0, 0)
            put(store, blocks, list(range(16)))

        assert occupied(store) <= store.limit_bytes


def test_two_kinds_share_one_limit(tmp_path: Path, seed: int) -> None:
    """While the part of packable blocks swings, the files together stay within the limit, and a refusal is StoreFull."""
    choose = random.Random(seed)
    raw, packed = chain(LARGE, 8, seed=seed), packable(LARGE, 8, seed)
    with Opened(tmp_path, LARGE, "zstd", slots=64, sync=False) as store:
        held: dict[int, tuple[int, Block]] = {}
        free = list(range(store.capacity))
        used = refused = 0
        for turn in range(500):
            part = 0.9 if turn % 200 < 100 else 0.3
            while used + FULL_CHARGE > store.budget_units:
                slot = choose.choice(list(held))
                used -= held.pop(slot)[0]
                free.append(slot)
                store.discard([slot])
            block = choose.choice(packed if choose.random() < part else raw)
            slot = free.pop()
            (outcome,) = store.put([block.at(slot)])
            if outcome.error is None:
                held[slot] = (outcome.charge, block)
                used += outcome.charge
            else:
                assert isinstance(outcome.error, StoreFull)
                free.append(slot)
                refused += 1
            assert occupied(store) <= store.limit_bytes
        stats = store.stats()
        print(f"refused {refused} of 500")
        assert stats.blocks == stats.raw_records + stats.packed_records == len(held)
        assert refused < 250
        for slot, (_, block) in held.items():
            assert read(store, slot, block) == block.planes.tobytes()


def test_a_smaller_share_forgets_what_lies_beyond(tmp_path: Path, seed: int) -> None:
    """After a start with fewer slots the rest is gone from metadata and, after reconciling, from the disk."""
    blocks = chain(LARGE, 16, seed=seed)
    with Opened(tmp_path, LARGE, slots=16) as store:
        put(store, blocks, list(range(16)))

    with Opened(tmp_path, LARGE, slots=6) as store:
        assert store.load().slots.tolist() == list(range(6))
        while not store.reconcile(4).done:
            pass
        assert store.stats().raw_records == 6
        assert read(store, 5, blocks[5]) == blocks[5].planes.tobytes()


@pytest.mark.parametrize("before", ["zstd", "raw"])
@pytest.mark.parametrize("slots", [64, 32], ids=["the same share", "half of it"])
def test_what_finds_no_room_packed_is_stored_raw(tmp_path: Path, before: str, slots: int, seed: int) -> None:
    """Raw records that once took the map, also under another codec or share, keep no packable block out of the budget, for ever.

    A block stored so costs full charge, and its bytes come back, also after a restart.
    """
    raw, packed = chain(LARGE, 8, seed=seed), packable(LARGE, 8, seed)
    choose = random.Random(seed)
    with Opened(tmp_path, LARGE, before, slots=64, sync=False) as store:
        for turn in range(12):  # the raw file takes all it can
            put(store, [raw[slot % 8] for slot in range(64)], list(range(64)))
            if turn % 2:
                store.discard(list(range(8, 64)))
    with Opened(tmp_path, LARGE, "zstd", slots=slots, sync=False) as store:
        store.discard(list(range(1, store.capacity)))
        held = {0: (FULL_CHARGE, raw[0])}
        for turn in range(400):
            if turn == 200:
                assert FULL_CHARGE in {charge for charge, _ in list(held.values())[1:]}
            while sum(charge for charge, _ in held.values()) + FULL_CHARGE > store.budget_units:
                slot = choose.choice(list(held))
                del held[slot]
                store.discard([slot])
            slot = next(slot for slot in range(store.capacity) if slot not in held)
            block = choose.choice(packed)
            (outcome,) = store.put([block.at(slot)])
            assert outcome.error is None
            held[slot] = (outcome.charge, block)
        stats = store.stats()
        assert (stats.unnamed_known, stats.refused) == (0, {})
        assert stats.blocks == stats.raw_records + stats.packed_records == len(held)
        assert stats.raw_records == sum(charge == FULL_CHARGE for charge, _ in held.values())
    with Opened(tmp_path, LARGE, "zstd", slots=slots, sync=False) as store:
        assert all(read(store, slot, block) == block.planes.tobytes() for slot, (_, block) in held.items())
