"""The SSD store beyond the contract: what a restart finds, what can't be trusted, what it costs."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.storage.blocks import Block, chain, contiguous, identity_at
from tests.storage.ssd_fixture import capacity_for
from tiercache.errors import AuditFailed, DirectoryLocked, InvalidConfig, TierTooSmall, Untrusted
from tiercache.spec import Geometry, KVSpec, Namespace
from tiercache.storage.checksum import checksum
from tiercache.storage.contract import Put
from tiercache.storage.ssd import SsdStore, SsdTier
from tiercache.storage.ssd_values import LmdbValues, Write

LARGE = Geometry(layers=4, parts=2, unit_bytes=4096, symbol_bytes=64)
SMALL = Geometry(layers=2, parts=2, unit_bytes=512, symbol_bytes=64)
SLOTS = 48


class Opened:
    """A tier with one store, to be opened again and again."""

    def __init__(self, path: Path, geometry: Geometry, codec: str = "raw", slots: int = SLOTS, *, sync: bool = True) -> None:
        self.tier = SsdTier(path, codec=codec, batch_bytes=1 << 20, sync=sync)
        try:
            self.store = self.tier.open(geometry, capacity_bytes=capacity_for(geometry, slots), item_bytes=2)
        except BaseException:
            self.tier.close()
            raise

    def __enter__(self) -> SsdStore:
        return self.store

    def __exit__(self, *_: object) -> None:
        self.tier.close()


def packable(geometry: Geometry, count: int, seed: int) -> list[Block]:
    """Blocks of bfloat16 values, which zstd packs."""
    made = []
    for place, block in enumerate(chain(geometry, count, seed=seed)):
        values = np.random.default_rng(seed + place).standard_normal(geometry.block_bytes // 2, dtype=np.float32)
        planes = (values.view("<u4") >> 16).astype("<u2").view(np.uint8).reshape(block.planes.shape)
        made.append(Block(block.identity._replace(checksum=checksum(planes)), planes))
    return made


def mixed(geometry: Geometry, count: int, seed: int) -> list[Block]:
    """A chain in which every other block can be packed."""
    return [
        pair[place % 2]
        for place, pair in enumerate(zip(chain(geometry, count, seed=seed), packable(geometry, count, seed), strict=True))
    ]


def put(store: SsdStore, blocks: list[Block], slots: list[int]) -> None:
    outcomes = store.put([block.at(slot) for block, slot in zip(blocks, slots, strict=True)])
    assert [outcome.error for outcome in outcomes] == [None] * len(blocks)


def read(store: SsdStore, slot: int, block: Block) -> bytes:
    into = contiguous(store.geometry)
    store.fetch(slot, block.identity, into)
    return into.tobytes()


def reconcile(store: SsdStore, step: int = 7) -> tuple[list[int], int]:
    """Reconcile to the end; return the absent slots and the number of records deleted."""
    absent: list[int] = []
    deleted = 0
    while True:
        found = store.reconcile(step)
        absent += found.absent
        deleted += found.deleted
        if found.done:
            return absent, deleted


def refusal(store: SsdStore, slot: int, block: Block) -> str:
    with pytest.raises(Untrusted) as caught:
        read(store, slot, block)
    return caught.value.reason


KINDS = [(LARGE, "raw"), (LARGE, "zstd"), (SMALL, "raw"), (SMALL, "zstd")]
each_kind = pytest.mark.parametrize(("geometry", "codec"), KINDS, ids=["raw", "zstd", "grouped", "grouped zstd"])


@each_kind
def test_a_restart_finds_what_was_stored(tmp_path: Path, geometry: Geometry, codec: str, seed: int) -> None:
    """Identity, charge and bytes of every block come back from metadata and disk; what was discarded stays away."""
    blocks = mixed(geometry, 40, seed)
    slots = random.Random(seed).sample(range(SLOTS), 40)
    with Opened(tmp_path, geometry, codec) as store:
        put(store, blocks, slots)
        gone = slots[10:20]
        store.discard(gone)
        before = store.stats()

    with Opened(tmp_path, geometry, codec) as store:
        loaded = store.load()
        after = store.stats()
        found = {int(slot): identity_at(loaded, place) for place, slot in enumerate(loaded.slots)}
        assert found == {slot: block.identity for slot, block in zip(slots, blocks, strict=True) if slot not in gone}
        assert list(found) == [slot for slot in slots if slot not in gone]
        for slot, block in zip(slots, blocks, strict=True):
            if slot in gone:
                assert refusal(store, slot, block) == "absent"
            else:
                assert read(store, slot, block) == block.planes.tobytes()
        assert reconcile(store) == ([], 0)
        assert (after.blocks, after.raw_records, after.packed_records) == (30, before.raw_records, before.packed_records)
        with pytest.raises(AuditFailed):
            store.load()


@each_kind
def test_the_charge_is_what_the_record_takes(tmp_path: Path, geometry: Geometry, codec: str, seed: int) -> None:
    """Only a block that fits three quarters costs 3; a record lies in one environment, also after its slot changed kind."""
    blocks = mixed(geometry, 4, seed)
    packs = codec == "zstd" and geometry is LARGE
    with Opened(tmp_path, geometry, codec) as store:
        outcomes = store.put([block.at(slot) for slot, block in enumerate(blocks)])
        assert [outcome.charge for outcome in outcomes] == ([4, 3, 4, 3] if packs else [4, 4, 4, 4])

        put(store, blocks[:2], [1, 0])

        stats = store.stats()
        assert stats.blocks == 4
        assert stats.packed_records == (2 if packs else 0)
        assert stats.raw_records == (2 if packs else 4 if geometry is LARGE else 1)
        assert [read(store, slot, blocks[place]) for slot, place in ((1, 0), (0, 1), (2, 2), (3, 3))] == [
            blocks[place].planes.tobytes() for place in range(4)
        ]


def test_another_codec_reads_what_the_first_wrote(tmp_path: Path, seed: int) -> None:
    """A store that was compressed and is raw now, or the other way round, serves the old records and writes the new kind."""
    blocks = packable(LARGE, 6, seed)
    with Opened(tmp_path, LARGE, "zstd") as store:
        put(store, blocks[:2], [0, 1])
    with Opened(tmp_path, LARGE, "raw") as store:
        assert store.put([blocks[2].at(2)])[0].charge == 4
        assert [read(store, slot, blocks[slot]) for slot in range(3)] == [block.planes.tobytes() for block in blocks[:3]]
    with Opened(tmp_path, LARGE, "zstd") as store:
        assert store.put([blocks[3].at(3)])[0].charge == 3
        assert [read(store, slot, blocks[slot]) for slot in range(4)] == [block.planes.tobytes() for block in blocks[:4]]
        assert reconcile(store) == ([], 0)


def test_blocks_of_a_group_keep_their_neighbours(tmp_path: Path, seed: int) -> None:
    """Small blocks share values: writing, overwriting and discarding one leaves the others exact, and an empty value goes."""
    blocks = chain(SMALL, SLOTS, seed=seed)
    choose = random.Random(seed)
    held: dict[int, Block] = {}
    with Opened(tmp_path, SMALL) as store:
        for _ in range(60):
            slot, block = choose.randrange(SLOTS), choose.choice(blocks)
            if slot in held and choose.random() < 0.4:
                store.discard([slot])
                del held[slot]
            else:
                put(store, [block], [slot])
                held[slot] = block
        assert {slot: read(store, slot, block) for slot, block in held.items()} == {
            slot: block.planes.tobytes() for slot, block in held.items()
        }
        assert reconcile(store) == ([], 0)

        store.discard(list(held))

        assert store.stats().raw_records == 0


def test_a_repeated_page_has_its_own_bytes_at_each_place(tmp_path: Path) -> None:
    """64 blocks of the same tokens, one after the other, are 64 records, each with the bytes of its place."""
    with Opened(tmp_path, LARGE, slots=64) as store:
        blocks = [Block(block.identity._replace(symbol=b"s" * 64), block.planes) for block in chain(LARGE, 64, seed=0)]
        put(store, blocks, list(range(64)))

        assert [read(store, place, blocks[place]) for place in range(64)] == [block.planes.tobytes() for block in blocks]
        assert refusal(store, 3, blocks[4]) == "key"


def tamper(path: Path, geometry: Geometry, environment: str, change: Callable[[LmdbValues, bytes], None]) -> None:
    """Let `change` write over the closed store's data environment; it gets the value of slot 1."""
    folder = next((path / "blocks").iterdir()) / environment
    values = LmdbValues(folder, value_bytes=1, map_bytes=1 << 24, sync=True)
    seen: list[bytes] = []
    assert values.read(1, lambda view: seen.append(bytes(view)))
    change(values, seen[0])
    values.close()


def overwrite(values: LmdbValues, key: int, value: bytes) -> None:
    values.value_bytes = len(value)
    values.commit([Write(key, 0, value)])


def remove(values: LmdbValues, value: bytes) -> None:
    values.commit((), [1])


def cut_by_one(values: LmdbValues, value: bytes) -> None:
    overwrite(values, 1, value[:-1])


def cut_by_half(values: LmdbValues, value: bytes) -> None:
    overwrite(values, 1, value[: len(value) // 2])


def cut_to_nothing(values: LmdbValues, value: bytes) -> None:
    overwrite(values, 1, b"")


def turn_a_bit(values: LmdbValues, value: bytes) -> None:
    overwrite(values, 1, value[:5000] + bytes([value[5000] ^ 1]) + value[5001:])


def older(values: LmdbValues, value: bytes) -> None:
    overwrite(values, 1, value[:8] + b"\x00\x00" + value[10:])


def newer(values: LmdbValues, value: bytes) -> None:
    overwrite(values, 1, value[:8] + b"\x02\x00" + value[10:])


def claim_a_terabyte(values: LmdbValues, value: bytes) -> None:
    overwrite(values, 1, value[:120] + (1 << 40).to_bytes(8, "little") + value[128:])


def swap(values: LmdbValues, value: bytes) -> None:
    other: list[bytes] = []
    values.read(2, lambda view: other.append(bytes(view)))
    overwrite(values, 2, value)
    overwrite(values, 1, other[0])


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (remove, "absent"),
        (cut_by_one, "length"),
        (cut_by_half, "length"),
        (cut_to_nothing, "length"),
        (turn_a_bit, "checksum"),
        (older, "version"),
        (newer, "version"),
        (claim_a_terabyte, "header"),
        (swap, "key"),
    ],
)
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_record_that_cannot_be_trusted_is_a_miss(
    tmp_path: Path, codec: str, change: Callable[[LmdbValues, bytes], None], word: str, seed: int
) -> None:
    """Whatever happened to a record, its fetch is Untrusted and counted, the others are exact, and the slot serves again."""
    blocks = packable(LARGE, 5, seed)
    with Opened(tmp_path, LARGE, codec) as store:
        put(store, blocks[:4], [0, 1, 2, 3])
    tamper(tmp_path, LARGE, "raw" if codec == "raw" else "packed", change)

    with Opened(tmp_path, LARGE, codec) as store:
        expected = {word, "codec"} if change is turn_a_bit else {word}
        assert refusal(store, 1, blocks[1]) in expected
        assert sum(store.stats().refused.values()) == 1
        assert read(store, 0, blocks[0]) == blocks[0].planes.tobytes()
        assert reconcile(store)[0] == ([1] if change is remove else [])
        store.discard([1])
        put(store, blocks[4:], [1])
        assert read(store, 1, blocks[4]) == blocks[4].planes.tobytes()


def test_a_second_tier_is_refused_and_a_first_one_unharmed(tmp_path: Path, seed: int) -> None:
    """Opening an owned directory through a link names the holder, in this process and in another; the owner sees nothing."""
    block = chain(LARGE, 1, seed=seed)[0]
    (tmp_path / "link").symlink_to(tmp_path / "d")
    script = "import sys; from pathlib import Path; from tiercache.storage.ssd import SsdTier; SsdTier(Path(sys.argv[1]))"
    with Opened(tmp_path / "d", LARGE) as store:
        put(store, [block], [0])

        with pytest.raises(DirectoryLocked):
            SsdTier(tmp_path / "link")
        second = subprocess.run([sys.executable, "-c", script, tmp_path / "link"], capture_output=True, text=True, check=False)

        assert second.returncode == 1 and "DirectoryLocked" in second.stderr
        assert read(store, 0, block) == block.planes.tobytes()


def test_small_and_unknown_requests_are_refused(tmp_path: Path) -> None:
    """A share that holds no block, an unknown codec and a second store of one geometry are clear errors."""
    with pytest.raises(InvalidConfig, match="lz4"):
        SsdTier(tmp_path, codec="lz4")
    tier = SsdTier(tmp_path)
    with pytest.raises(TierTooSmall, match="the least is 36864 bytes"):
        tier.open(LARGE, capacity_bytes=36863, item_bytes=2)
    assert tier.open(LARGE, capacity_bytes=36864, item_bytes=2).capacity == 1
    with pytest.raises(InvalidConfig, match="is open"):
        tier.open(LARGE, capacity_bytes=36864, item_bytes=2)
    tier.close()
    tier.close()


def test_one_call_names_a_slot_once(tmp_path: Path, seed: int) -> None:
    """A call with the same slot twice is refused before anything is stored."""
    blocks = chain(LARGE, 2, seed=seed)
    with Opened(tmp_path, LARGE) as store:
        with pytest.raises(AuditFailed, match="twice"):
            store.put([blocks[0].at(1), blocks[1].at(1)])
        assert store.stats().blocks == 0


def test_an_identity_without_room_fails_alone(tmp_path: Path, seed: int) -> None:
    """A symbol longer than the geometry's room is an outcome, and ends the chain there."""
    blocks = chain(LARGE, 3, seed=seed)
    long = blocks[1].identity._replace(symbol=b"s" * 65)
    with Opened(tmp_path, LARGE) as store:
        outcomes = store.put([blocks[0].at(0), Put(1, long, blocks[1].planes), blocks[2].at(2)])

        assert [getattr(outcome.error, "reason", None) for outcome in outcomes] == [None, "symbol", "order"]
        assert read(store, 0, blocks[0]) == blocks[0].planes.tobytes()


def test_geometries_share_a_directory(tmp_path: Path, seed: int) -> None:
    """Two block sizes have their own slots and files, and one list of namespaces."""
    spec = KVSpec(layers=4, kv_heads=2, head_dim=64, dtype="bfloat16")
    space = Namespace(model="m", weights="w")
    tier = SsdTier(tmp_path)
    stores = [tier.open(geometry, capacity_bytes=1 << 20, item_bytes=2) for geometry in (LARGE, SMALL)]
    blocks = [chain(geometry, 1, seed=seed, namespace=space.digest(spec))[0] for geometry in (LARGE, SMALL)]
    for store, block in zip(stores, blocks, strict=True):
        put(store, [block], [0])
    tier.remember(space, spec)
    tier.close()

    again = SsdTier(tmp_path)
    assert again.namespaces() == {space.digest(spec): (space, spec)}
    for geometry, block in zip((LARGE, SMALL), blocks, strict=True):
        assert read(again.open(geometry, capacity_bytes=1 << 20, item_bytes=2), 0, block) == block.planes.tobytes()
    again.close()


def test_files_of_another_layout_go_aside(tmp_path: Path, seed: int) -> None:
    """When values have another size than the metadata says, those files are kept elsewhere and the store starts empty."""
    block = chain(LARGE, 1, seed=seed)[0]
    opened = Opened(tmp_path, LARGE)
    put(opened.store, [block], [0])
    opened.tier._metadata.set_layout(LARGE, {"record": 1})
    opened.tier.close()

    opened = Opened(tmp_path, LARGE)
    with opened as store:
        assert opened.tier.aside == tmp_path / "set-aside-1"
        assert len(store.load()) == 0
        assert len(list((tmp_path / "set-aside-1").rglob("data.mdb"))) == 1
        put(store, [block], [0])
    with Opened(tmp_path, LARGE) as store:
        assert read(store, 0, block) == block.planes.tobytes()


def test_the_order_of_use_is_kept_over_a_clean_close(tmp_path: Path, seed: int) -> None:
    """Blocks come back in the order that was left, and by age at the start after that."""
    with Opened(tmp_path, LARGE) as store:
        put(store, chain(LARGE, 4, seed=seed), [0, 1, 2, 3])
        store.leave_order([2, 0, 3, 1])

    for expected in ([2, 0, 3, 1], [0, 1, 2, 3]):
        with Opened(tmp_path, LARGE) as store:
            assert store.load().slots.tolist() == expected


def test_stats_count_and_tell_the_time(tmp_path: Path, seed: int) -> None:
    """Files, records, refusals by reason and the time of the last sync are told."""
    blocks = chain(LARGE, 2, seed=seed)
    tier = SsdTier(tmp_path, clock=lambda: 17.0)
    store = tier.open(LARGE, capacity_bytes=1 << 20, item_bytes=2)
    assert store.stats().last_sync is None
    put(store, blocks[:1], [0])
    refusal(store, 0, blocks[1])
    refusal(store, 1, blocks[1])

    stats = store.stats()

    assert (stats.blocks, stats.raw_records, stats.unnamed_known, stats.last_sync) == (1, 1, 0, 17.0)
    assert stats.refused == {"key": 1, "absent": 1}
    assert LARGE.block_bytes < stats.raw_file_bytes <= stats.limit_bytes
    tier.close()
