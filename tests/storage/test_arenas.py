"""Where the arenas put each byte, and what they refuse. Their promises as stores are in the contract suite."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.storage.blocks import POISON, chain, contiguous
from tiercache.errors import AuditFailed, Closed, InvalidTensor, TierTooSmall, Untrusted
from tiercache.spec import Geometry
from tiercache.storage import arenas
from tiercache.storage.arenas import DramArena, HostHbmArena
from tiercache.storage.contract import Planes, Put
from tiercache.storage.layouts import (
    SLOT_ALIGNMENT,
    block_first,
    block_first_slot_bytes,
    layer_first,
)
from tiercache.storage.memory import HostMemory

GEOMETRY = Geometry(layers=3, parts=2, unit_bytes=1000, symbol_bytes=64)
geometries = st.builds(
    Geometry, layers=st.integers(1, 4), parts=st.integers(1, 2), unit_bytes=st.integers(1, 3000), symbol_bytes=st.just(64)
)
Arena = type[DramArena] | type[HostHbmArena]


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    made = HostMemory(256 * 1024)
    made.array[:] = POISON
    yield made
    made.close()


def slot_bytes(arena: Arena, geometry: Geometry) -> int:
    return block_first_slot_bytes(geometry) if arena is DramArena else geometry.block_bytes


@given(geometry=geometries, pages=st.integers(1, 12), data=st.data())
def test_a_dram_block_is_one_run_that_starts_on_a_page(geometry: Geometry, pages: int, data: st.DataObject) -> None:
    """Slot s begins at offset + s * slot_bytes; a block written there touches neither padding nor anything outside."""
    length = block_first_slot_bytes(geometry) * 2 + pages * 100
    offset = SLOT_ALIGNMENT * data.draw(st.integers(0, 2))
    memory = HostMemory(offset + length + 777)
    memory.array[:] = POISON
    arena = DramArena(memory, geometry, offset=offset, length=length)
    slot = data.draw(st.integers(0, arena.capacity - 1))
    block = chain(geometry, 1)[0]
    wanted = bytearray(memory.array.tobytes())
    start = offset + slot * arena.slot_bytes
    wanted[start : start + geometry.block_bytes] = block.planes.tobytes()

    arena.put([block.at(slot)])

    assert start % SLOT_ALIGNMENT == 0
    assert arena.view(slot).flags.c_contiguous
    assert memory.array.tobytes() == wanted
    memory.close()


@given(geometry=geometries, slots=st.integers(1, 5), data=st.data())
def test_an_hbm_block_lies_plane_by_plane_in_the_planes_own_arrays(geometry: Geometry, slots: int, data: st.DataObject) -> None:
    """Plane p of slot s begins at offset + (p * capacity + s) * unit_bytes, and nothing else is touched."""
    spare = data.draw(st.integers(0, geometry.block_bytes - 1))
    offset = SLOT_ALIGNMENT * data.draw(st.integers(0, 2))
    memory = HostMemory(offset + geometry.block_bytes * slots + spare)
    memory.array[:] = POISON
    arena = HostHbmArena(memory, geometry, offset=offset)
    slot = data.draw(st.integers(0, slots - 1))
    block = chain(geometry, 1)[0]
    wanted = bytearray(memory.array.tobytes())
    for plane in range(geometry.planes):
        start = offset + (plane * slots + slot) * geometry.unit_bytes
        wanted[start : start + geometry.unit_bytes] = block.planes[plane].tobytes()

    arena.put([block.at(slot)])

    assert arena.capacity == slots
    assert memory.array.tobytes() == wanted
    memory.close()


@given(geometry=geometries, length=st.integers(0, 60_000))
def test_layouts_use_all_room_but_less_than_a_slot(geometry: Geometry, length: int) -> None:
    """As many slots are laid out, in place, as the region has room for."""
    region = np.zeros(length, np.uint8)

    blocks, layers = block_first(region, geometry), layer_first(region, geometry)

    assert 0 <= length - len(blocks) * block_first_slot_bytes(geometry) < block_first_slot_bytes(geometry)
    assert 0 <= length - len(layers) * geometry.block_bytes < geometry.block_bytes
    assert np.shares_memory(blocks, region) == (len(blocks) > 0)


def test_attention_kernels_see_the_arena_a_layer_at_a_time(memory: HostMemory) -> None:
    """`layers_array` is the arena itself, contiguous, [layers, parts, slots, unit_bytes]."""
    arena = HostHbmArena(memory, GEOMETRY)
    block = chain(GEOMETRY, 1)[0]
    arena.put([block.at(3)])

    layers = arena.layers_array()

    assert layers.shape == (3, 2, arena.capacity, 1000)
    assert layers.flags.c_contiguous
    assert layers[:, :, 3].tobytes() == block.planes.tobytes()
    layers[2, 1, 3, 999] ^= 1
    assert arena.view(3)[5, 999] == block.planes[5, 999] ^ 1


def test_arenas_of_one_memory_do_not_touch_one_another(memory: HostMemory) -> None:
    """Full arenas side by side leave each other's bytes, and those between them, alone."""
    half = 128 * 1024
    first = DramArena(memory, GEOMETRY, length=half - 4096)
    second = HostHbmArena(memory, GEOMETRY, offset=half)
    ones, twos = chain(GEOMETRY, first.capacity, seed=1), chain(GEOMETRY, second.capacity, seed=2)

    first.put([block.at(slot) for slot, block in enumerate(ones)])
    second.put([block.at(slot) for slot, block in enumerate(twos)])

    assert [first.view(slot).tobytes() for slot in range(first.capacity)] == [block.planes.tobytes() for block in ones]
    assert [second.view(slot).tobytes() for slot in range(second.capacity)] == [block.planes.tobytes() for block in twos]
    assert (memory.array[half - 4096 : half] == POISON).all()
    assert (first.offset, first.length, second.offset, second.length) == (0, half - 4096, half, half)


@pytest.mark.parametrize("arena", [DramArena, HostHbmArena])
def test_a_region_of_exactly_one_block_holds_one(memory: HostMemory, arena: Arena) -> None:
    """The smallest arena has one slot."""
    assert arena(memory, GEOMETRY, length=slot_bytes(arena, GEOMETRY)).capacity == 1


@pytest.mark.parametrize("arena", [DramArena, HostHbmArena])
def test_a_region_that_holds_no_block_is_refused_with_sizes(memory: HostMemory, arena: Arena) -> None:
    """One byte less than a slot is TierTooSmall, which names tier, room and need."""
    need = slot_bytes(arena, GEOMETRY)

    with pytest.raises(TierTooSmall, match=f"({need - 1} bytes).*needs {need} bytes") as caught:
        arena(memory, GEOMETRY, length=need - 1)

    assert caught.value.fields["length"] == need - 1
    assert caught.value.fields["need"] == need
    assert str(caught.value.fields["tier"]) in str(caught.value)


@pytest.mark.parametrize(("offset", "length"), [(-4096, 8192), (4096, 256 * 1024), (0, -1), (100, 8192), (512 * 1024, None)])
@pytest.mark.parametrize("arena", [DramArena, HostHbmArena])
def test_a_region_outside_of_the_memory_is_refused(memory: HostMemory, arena: Arena, offset: int, length: int | None) -> None:
    """A region lies within its memory and begins on a page."""
    with pytest.raises(AuditFailed, match=f"at {offset}"):
        arena(memory, GEOMETRY, offset=offset, length=length)


@pytest.mark.parametrize("arena", [DramArena, HostHbmArena])
def test_verify_sees_one_turned_bit_where_it_lies(memory: HostMemory, arena: Arena, seed: int) -> None:
    """Verifying in place passes a good block and refuses one with any single bit turned, naming tier and slot."""
    block = chain(GEOMETRY, 1, seed=seed)[0]
    made = arena(memory, GEOMETRY)
    made.put([block.at(2)])
    made.verify(2, block.identity)
    view = made.view(2)
    place = np.unravel_index(seed % view.size, view.shape)

    view[place] ^= 1 << (seed % 8)

    with pytest.raises(Untrusted, match=f"{made.tier} slot 2") as caught:
        made.verify(2, block.identity)
    assert caught.value.reason == "checksum"


@pytest.mark.parametrize("arena", [DramArena, HostHbmArena])
def test_a_copy_that_goes_wrong_is_seen_where_it_arrives(memory: HostMemory, arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is verified, not its source: a byte that changes on the way in or out is Untrusted, though the source is good."""
    first, second = chain(GEOMETRY, 2)
    made = arena(memory, GEOMETRY)
    made.put([first.at(0)])

    def tear(source: Planes, into: Planes) -> None:
        into[:] = source
        into[2, 500] ^= 4

    monkeypatch.setattr(arenas, "copy_block", tear)
    with pytest.raises(Untrusted, match="checksum"):
        made.fetch(0, first.identity, contiguous(GEOMETRY))
    outcomes = made.put([first.at(1), second.at(2)])

    assert [outcome.error.reason for outcome in outcomes if isinstance(outcome.error, Untrusted)] == ["checksum", "order"]


@pytest.mark.parametrize("arena", [DramArena, HostHbmArena])
def test_a_bad_item_is_refused_before_any_copy(memory: HostMemory, arena: Arena) -> None:
    """A source of another shape refuses the whole call: not even the good block before it is written."""
    first, second = chain(GEOMETRY, 2)
    made = arena(memory, GEOMETRY)

    with pytest.raises(InvalidTensor, match="slot 1"):
        made.put([first.at(0), Put(1, second.identity, second.planes[:1])])

    assert (memory.array == POISON).all()


@pytest.mark.parametrize("arena", [DramArena, HostHbmArena])
def test_views_outlive_the_arena(memory: HostMemory, arena: Arena) -> None:
    """A view that was handed out stays readable after arena and memory are closed; a new one is refused."""
    block = chain(GEOMETRY, 1)[0]
    made = arena(memory, GEOMETRY)
    made.put([block.at(0)])
    view = made.view(0)

    made.close()
    memory.close()

    assert view.tobytes() == block.planes.tobytes()
    with pytest.raises(Closed, match=str(made.tier)):
        made.view(0)
    if isinstance(made, HostHbmArena):
        with pytest.raises(Closed):
            made.layers_array()
