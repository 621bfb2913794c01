"""What every store promises: one suite, which each implementation passes."""

from __future__ import annotations

import importlib
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.storage.blocks import POISON, Block, chain, contiguous, strided
from tiercache.errors import TierCacheError, Untrusted
from tiercache.kernels.lazy import LazyDevice
from tiercache.spec import Geometry
from tiercache.storage.arenas import DramArena, HostHbmArena
from tiercache.storage.contract import FULL_CHARGE, Put, Store
from tiercache.storage.device_arena import DeviceArena
from tiercache.storage.layouts import block_first_slot_bytes
from tiercache.storage.memory import HostMemory
from tiercache.types import Tier

GEOMETRY = Geometry(layers=3, parts=2, unit_bytes=3200, symbol_bytes=64)
"""A block of more than 16 KiB, whose planes are no multiple of 64 bytes and which fills no whole page."""
SLOTS = 8

OpenStore = Callable[[Geometry, int], Store]
Room = Callable[[Geometry], NDArray[np.uint8]]


def dram(path: Path, geometry: Geometry, slots: int) -> Store:
    memory = HostMemory(block_first_slot_bytes(geometry) * slots)
    store = DramArena(memory, geometry)
    memory.close()  # the arena's views keep the mapping
    return store


def hbm(path: Path, geometry: Geometry, slots: int) -> Store:
    memory = HostMemory(geometry.block_bytes * slots)
    store = HostHbmArena(memory, geometry)
    memory.close()
    return store


def ssd(path: Path, geometry: Geometry, slots: int) -> Store:
    fixture = importlib.import_module("tests.storage.ssd_fixture")
    store: Store = fixture.make_ssd(path, geometry, slots)
    return store


def device(path: Path, geometry: Geometry, slots: int) -> Store:
    device = LazyDevice(1)
    return DeviceArena(device, geometry, device.allocate(geometry.block_bytes * slots))


MAKERS = {"DRAM": (Tier.DRAM, dram), "HBM": (Tier.HBM, hbm), "device": (Tier.HBM, device), "SSD": (Tier.SSD, ssd)}
addressable = pytest.mark.parametrize("kind", ["DRAM", "HBM"], indirect=True)


@pytest.fixture(params=MAKERS)
def kind(request: pytest.FixtureRequest) -> str:
    made: str = request.param
    return made


@pytest.fixture
def store(kind: str, tmp_path: Path) -> Iterator[Store]:
    made = MAKERS[kind][1](tmp_path, GEOMETRY, SLOTS)
    yield made
    made.close()


@pytest.fixture(params=[contiguous, strided])
def room(request: pytest.FixtureRequest) -> Room:
    made: Room = request.param
    return made


def fetched(store: Store, slot: int, block: Block) -> bytes:
    into = contiguous(store.geometry)
    store.fetch(slot, block.identity, into)
    return into.tobytes()


def stored(store: Store, *puts: Put) -> None:
    for outcome in store.put(puts):
        assert outcome.error is None
        assert 1 <= outcome.charge <= FULL_CHARGE


def rotten(block: Block) -> Block:
    """The block with one bit of its bytes turned over: its identity tells another checksum."""
    planes = block.planes.copy()
    planes[-1, -1] ^= 1
    return Block(block.identity, planes)


def test_a_store_says_what_it_is(store: Store, kind: str) -> None:
    """Tier, geometry and capacity are those it was made with; SSD alone is durable; it and a device have no view."""
    assert (store.tier, store.geometry, store.capacity) == (MAKERS[kind][0], GEOMETRY, SLOTS)
    assert store.durable == (kind == "SSD")
    assert (store.view(0) is None) == (store.views(0, 2) is None) == (kind in ("SSD", "device"))


def test_what_was_put_is_fetched_byte_for_byte(store: Store, room: Room, seed: int) -> None:
    """A chain comes back exact into either layout, and the neighbours of a layer-first target keep their poison."""
    blocks = chain(GEOMETRY, SLOTS, seed=seed)

    stored(store, *(block.at(slot) for slot, block in enumerate(blocks)))

    for slot, block in enumerate(blocks):
        into = room(GEOMETRY)
        store.fetch(slot, block.identity, into)
        assert into.tobytes() == block.planes.tobytes()
        if into.base is not None and into.base.ndim == 3:
            assert (into.base[:, ::2] == POISON).all()


def test_a_source_may_be_layer_first(store: Store, seed: int) -> None:
    """A source whose planes lie apart is stored like one whose planes follow one another."""
    block = chain(GEOMETRY, 1, seed=seed)[0]
    source = strided(GEOMETRY)
    source[:] = block.planes

    stored(store, Put(2, block.identity, source))

    assert fetched(store, 2, block) == block.planes.tobytes()


def test_a_source_is_the_callers_again_after_put(store: Store, seed: int) -> None:
    """What happens to the source after the call does not reach the store."""
    block = chain(GEOMETRY, 1, seed=seed)[0]
    source = block.planes.copy()

    stored(store, Put(0, block.identity, source))
    source[:] = POISON

    assert fetched(store, 0, block) == block.planes.tobytes()


def test_a_put_of_nothing_is_nothing(store: Store) -> None:
    """No items, no outcomes."""
    assert store.put([]) == []


def test_slots_may_come_in_any_order(store: Store, seed: int) -> None:
    """The chain's order is the items', not the slots'."""
    blocks = chain(GEOMETRY, SLOTS, seed=seed)
    slots = random.Random(seed).sample(range(SLOTS), SLOTS)

    stored(store, *(block.at(slot) for slot, block in zip(slots, blocks, strict=True)))

    assert [fetched(store, slot, block) for slot, block in zip(slots, blocks, strict=True)] == [
        block.planes.tobytes() for block in blocks
    ]


def test_a_slot_is_never_taken_for_another_block(store: Store, seed: int) -> None:
    """A fetch under the identity of a neighbour, or of the same tokens with other bytes, is Untrusted."""
    first, second = chain(GEOMETRY, 2, seed=seed)
    stored(store, first.at(0), second.at(1))
    other = first.identity._replace(checksum=first.identity.checksum ^ 1)

    for slot, identity in ((0, second.identity), (1, first.identity), (0, other)):
        with pytest.raises(Untrusted) as caught:
            store.fetch(slot, identity, contiguous(GEOMETRY))
        assert caught.value.reason.isidentifier()


def test_a_slot_that_was_never_written_is_untrusted(store: Store, seed: int) -> None:
    """An empty slot is a miss, not zeros."""
    block = chain(GEOMETRY, 1, seed=seed)[0]

    with pytest.raises(Untrusted):
        store.fetch(3, block.identity, contiguous(GEOMETRY))


def test_a_rotten_source_is_refused_with_all_that_follows_it(store: Store, seed: int) -> None:
    """Exactly the blocks before the bad one are stored; the ones after it leave their slots as they were."""
    before = chain(GEOMETRY, SLOTS, seed=seed + 1)
    stored(store, *(block.at(slot) for slot, block in enumerate(before)))
    blocks = chain(GEOMETRY, 5, seed=seed)
    bad = [*blocks[:2], rotten(blocks[2]), *blocks[3:]]

    outcomes = store.put([block.at(slot) for slot, block in enumerate(bad)])

    reasons = [outcome.error.reason if isinstance(outcome.error, Untrusted) else outcome.error for outcome in outcomes]
    assert reasons == [None, None, "checksum", "order", "order"]
    assert [fetched(store, slot, blocks[slot]) for slot in (0, 1)] == [block.planes.tobytes() for block in blocks[:2]]
    assert [fetched(store, slot, before[slot]) for slot in range(3, SLOTS)] == [block.planes.tobytes() for block in before[3:]]
    with pytest.raises(Untrusted):
        fetched(store, 2, blocks[2])


def test_a_slot_can_be_used_again(store: Store, seed: int) -> None:
    """After a discard and another put the slot holds the new block alone, and its neighbours are untouched."""
    old, new = chain(GEOMETRY, 3, seed=seed), chain(GEOMETRY, 1, seed=seed + 1)[0]
    stored(store, *(block.at(slot) for slot, block in enumerate(old)))

    store.discard([2])
    stored(store, new.at(2))

    assert fetched(store, 2, new) == new.planes.tobytes()
    assert [fetched(store, slot, old[slot]) for slot in (0, 1)] == [block.planes.tobytes() for block in old[:2]]
    with pytest.raises(Untrusted):
        fetched(store, 2, old[2])


def test_a_durable_store_forgets_what_is_discarded(store: Store, seed: int) -> None:
    """Discarded from a durable store is gone at once; memory may keep the bytes, whose generation ends elsewhere."""
    blocks = chain(GEOMETRY, 3, seed=seed)
    stored(store, *(block.at(slot) for slot, block in enumerate(blocks)))

    store.discard([1, 2])
    store.discard([])

    assert fetched(store, 0, blocks[0]) == blocks[0].planes.tobytes()
    if store.durable:
        for slot in (1, 2):
            with pytest.raises(Untrusted):
                fetched(store, slot, blocks[slot])


@pytest.mark.parametrize("slot", [-1, SLOTS, 2**33])
def test_a_slot_that_does_not_exist_is_refused(store: Store, slot: int, seed: int) -> None:
    """Every call names the slot that is not there; a negative one never means the last, and nothing else changes."""
    blocks = chain(GEOMETRY, 2, seed=seed)
    stored(store, blocks[0].at(SLOTS - 1))
    into = contiguous(GEOMETRY)

    with pytest.raises(TierCacheError, match=f"slot {slot}"):
        store.fetch(slot, blocks[0].identity, into)
    with pytest.raises(TierCacheError, match=f"slot {slot}"):
        store.put([blocks[0].at(0), blocks[1].at(slot)])
    with pytest.raises(TierCacheError, match=f"slot {slot}"):
        store.discard([slot])

    assert (into == POISON).all()
    assert fetched(store, SLOTS - 1, blocks[0]) == blocks[0].planes.tobytes()
    with pytest.raises(Untrusted):
        fetched(store, 0, blocks[0])


@pytest.mark.parametrize("shape", [(1, 3200), (6, 1), (6, 3199), (7, 3200), (19200,)], ids=str)
def test_bytes_of_another_shape_are_refused(store: Store, shape: tuple[int, ...], seed: int) -> None:
    """No source is stretched or cut to fit, and no target is."""
    block = chain(GEOMETRY, 1, seed=seed)[0]
    stored(store, block.at(0))
    wrong = np.full(shape, POISON, np.uint8)

    with pytest.raises(TierCacheError):
        store.fetch(0, block.identity, wrong)
    with pytest.raises(TierCacheError):
        store.put([Put(1, block.identity, wrong)])

    assert (wrong == POISON).all()
    assert fetched(store, 0, block) == block.planes.tobytes()


@addressable
def test_a_view_is_the_slot_itself(store: Store, seed: int) -> None:
    """A view reads what was put, and what is written in place is what is fetched."""
    first, second = chain(GEOMETRY, 2, seed=seed)
    stored(store, first.at(4))
    view = store.view(4)
    assert view is not None
    before = view.tobytes()

    view[:] = second.planes

    assert view.shape == (GEOMETRY.planes, GEOMETRY.unit_bytes)
    assert before == first.planes.tobytes()
    assert fetched(store, 4, second) == second.planes.tobytes()


@addressable
def test_neighbouring_slots_are_seen_in_one(store: Store, seed: int) -> None:
    """Views of several slots are the slots' own bytes, and what is written there is what is fetched; one slot beyond is refused."""
    blocks = chain(GEOMETRY, 3, seed=seed)
    stored(store, blocks[0].at(2), blocks[1].at(3))
    views = store.views(2, 3)
    assert views is not None

    views[2] = blocks[2].planes

    assert views.shape == (3, GEOMETRY.planes, GEOMETRY.unit_bytes)
    assert [view.tobytes() for view in views] == [block.planes.tobytes() for block in blocks]
    assert fetched(store, 4, blocks[2]) == blocks[2].planes.tobytes()
    with pytest.raises(TierCacheError, match=f"slot {SLOTS}"):
        store.views(SLOTS - 2, 3)


@addressable
def test_what_was_written_in_place_can_be_put_where_it_lies(store: Store, seed: int) -> None:
    """A slot's own view as the source is verified like any other: good bytes are stored, rotten ones refused."""
    block = chain(GEOMETRY, 1, seed=seed)[0]
    view = store.view(5)
    assert view is not None
    view[:] = block.planes
    stored(store, Put(5, block.identity, view))

    view[0, 0] ^= 1
    outcome = store.put([Put(5, block.identity, view)])[0]

    assert isinstance(outcome.error, Untrusted)


@addressable
@pytest.mark.parametrize("byte", [0, 3199, 3200, 9600, 19199])
def test_one_turned_bit_in_a_slot_is_seen(store: Store, byte: int, seed: int) -> None:
    """Whichever byte of an addressable slot changes, the fetch is Untrusted with reason `checksum`."""
    block = chain(GEOMETRY, 1, seed=seed)[0]
    stored(store, block.at(6))
    view = store.view(6)
    assert view is not None

    view[divmod(byte, GEOMETRY.unit_bytes)] ^= 0x10

    with pytest.raises(Untrusted) as caught:
        fetched(store, 6, block)
    assert caught.value.reason == "checksum"


def test_different_slots_work_at_once(store: Store, seed: int) -> None:
    """Four threads that put and fetch different slots see nothing but their own blocks."""
    wrong: list[str] = []

    def work(first: int) -> None:
        for turn in range(3):
            blocks = chain(GEOMETRY, 2, seed=seed + 10 * first + turn)
            stored(store, blocks[0].at(first), blocks[1].at(first + 4))
            for slot, block in zip((first, first + 4), blocks, strict=True):
                if fetched(store, slot, block) != block.planes.tobytes():
                    wrong.append(f"slot {slot}, turn {turn}")
        done.append(first)

    done: list[int] = []
    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert sorted(done) == [0, 1, 2, 3]


def test_a_long_walk_agrees_with_a_dictionary(store: Store, seed: int) -> None:
    """Random puts, discards and fetches over all slots: what the dictionary holds is exact, what it does not is Untrusted."""
    choose = random.Random(seed)
    known = chain(GEOMETRY, 6, seed=seed)
    model: dict[int, Block] = {}
    undefined: set[int] = set()
    """Slots of memory after a put that failed: they may still hold what they held."""
    for _ in range(80):
        slot, block = choose.randrange(SLOTS), choose.choice(known)
        step = choose.choice(["put", "put rotten", "discard", "fetch", "fetch", "fetch another"])
        if step == "put":
            stored(store, block.at(slot))
            model[slot] = block
            undefined.discard(slot)
        elif step == "put rotten":
            store.discard([slot])
            assert store.put([rotten(block).at(slot)])[0].error is not None
            model.pop(slot, None)
            if not store.durable:
                undefined.add(slot)
        elif step == "discard" and store.durable:
            store.discard([slot])
            model.pop(slot, None)
        elif slot in model and step == "fetch":
            assert fetched(store, slot, model[slot]) == model[slot].planes.tobytes()
        elif model.get(slot) is not block and slot not in undefined:
            with pytest.raises(Untrusted):
                fetched(store, slot, block)

    for slot, block in model.items():
        assert fetched(store, slot, block) == block.planes.tobytes()


def test_sync_changes_nothing_that_is_read(store: Store, seed: int) -> None:
    """After a sync everything is there as before, and it may be called with nothing to do."""
    block = chain(GEOMETRY, 1, seed=seed)[0]

    store.sync()
    stored(store, block.at(0))
    store.sync()

    assert fetched(store, 0, block) == block.planes.tobytes()


def test_a_closed_store_refuses_and_closes_again(store: Store, seed: int) -> None:
    """After closing, nothing is fetched or stored, and closing once more is no fault."""
    block = chain(GEOMETRY, 1, seed=seed)[0]
    stored(store, block.at(0))

    store.close()
    store.close()

    with pytest.raises(TierCacheError):
        fetched(store, 0, block)
    with pytest.raises(TierCacheError):
        store.put([block.at(1)])
