"""What a reader copies out of slots is the blocks that were asked for, wherever they lie, or it says where that ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import NamedTuple

import numpy as np
import pytest

from tests.storage.blocks import POISON, Block, chain
from tiercache.errors import WorkerDied
from tiercache.kernels.host import Bytes, copy_run
from tiercache.spec import Geometry
from tiercache.storage import layouts, reader
from tiercache.storage.arenas import DramArena, HostHbmArena
from tiercache.storage.memory import HostMemory
from tiercache.storage.reader import Place, Reader
from tiercache.storage.workers import Lane, ThreadWorkers

GEOMETRY = Geometry(layers=3, parts=2, unit_bytes=96, symbol_bytes=64)
SLOTS = 24
BLOCK_SIZE = 16
PATIENCE = 20.0


class House(NamedTuple):
    """Two tiers, the reader of both, and the blocks of one chain."""

    hbm: HostHbmArena
    dram: DramArena
    reader: Reader
    blocks: list[Block]

    def place(self, number: int, position: int, slot: int) -> Place:
        """Put a block into a slot; return where it lies."""
        block = self.blocks[number]
        [outcome] = (self.hbm, self.dram)[position].put([block.at(slot)])
        assert outcome.error is None
        return Place(position, slot, block.identity.checksum)

    def places(self, slots: list[tuple[int, int]]) -> list[Place]:
        """Put the chain's blocks into slots of tiers."""
        return [self.place(number, position, slot) for number, (position, slot) in enumerate(slots)]


@pytest.fixture
async def house(seed: int) -> AsyncIterator[House]:
    dram, hbm = HostMemory(SLOTS * 4096), HostMemory(SLOTS * GEOMETRY.block_bytes)
    stores = HostHbmArena(hbm, GEOMETRY), DramArena(dram, GEOMETRY)
    workers = ThreadWorkers({Lane.COPY: 2})
    yield House(*stores, Reader(stores, workers, block_size=BLOCK_SIZE, threads=2), chain(GEOMETRY, SLOTS, seed=seed))
    workers.close()
    for store in stores:
        store.close()
    dram.close()
    hbm.close()


def target(count: int) -> tuple[Bytes, Bytes]:
    """Return room for blocks, `[planes, count * unit_bytes]`, and the memory around it."""
    around = np.full((GEOMETRY.planes, (count + 2) * GEOMETRY.unit_bytes), POISON, np.uint8)
    return around[:, GEOMETRY.unit_bytes : -GEOMETRY.unit_bytes], around


def expected(blocks: list[Block]) -> Bytes:
    return np.concatenate([block.planes for block in blocks], axis=1)


PATTERNS = {
    "neighbours": [(1, slot) for slot in range(8)],
    "neighbours in HBM": [(0, slot) for slot in range(8)],
    "backwards": [(1, slot) for slot in reversed(range(8))],
    "scattered": [(1, slot) for slot in (5, 6, 20, 0, 1, 2, 9, 23)],
    "over two tiers": [(0, 3), (0, 4), (0, 5), (1, 6), (1, 7), (0, 8), (1, 8), (1, 9)],
}


@pytest.mark.parametrize("run", [1, 2 * GEOMETRY.block_bytes, 1 << 20], ids=["a block", "two blocks", "all"])
@pytest.mark.parametrize("share", [1, 1 << 20], ids=["in parts", "whole"])
@pytest.mark.parametrize("pattern", PATTERNS)
async def test_gathered_blocks_are_exact_wherever_they_lie(
    house: House, pattern: str, share: int, run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and layer by layer, whatever is copied by one call or in one thread; nothing beside the target is written."""
    monkeypatch.setattr(reader, "SHARE", share)
    monkeypatch.setattr(layouts, "RUN_BYTES", run)
    places = house.places(PATTERNS[pattern])
    wanted = expected(house.blocks[: len(places)])
    into, around = target(len(places))

    good = await house.reader.gather(places, into)

    assert good == len(places) and np.array_equal(into, wanted)
    for layer in range(GEOMETRY.layers):
        into[:] = POISON
        await house.reader.layer(places, layer, into[: GEOMETRY.parts])
        assert np.array_equal(into[: GEOMETRY.parts], wanted[layer * GEOMETRY.parts : (layer + 1) * GEOMETRY.parts])
    assert (around[:, : GEOMETRY.unit_bytes] == POISON).all() and (around[:, -GEOMETRY.unit_bytes :] == POISON).all()


@pytest.mark.parametrize("share", [1, 1 << 20], ids=["in parts", "whole"])
@pytest.mark.parametrize("bad", range(8))
async def test_a_rotten_block_ends_what_is_good(house: House, bad: int, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a run of neighbours holds it, and whichever thread finds it."""
    monkeypatch.setattr(reader, "SHARE", share)
    places = house.places(PATTERNS["neighbours"])
    house.dram.view(bad)[-1, -1] ^= 1
    into, _ = target(len(places))

    good = await house.reader.gather(places, into)

    assert good == bad
    assert np.array_equal(into[:, : bad * GEOMETRY.unit_bytes], expected(house.blocks[:bad]) if bad else into[:, :0])


@pytest.mark.parametrize("late", [False, True], ids=["before the second half", "after the copy"])
async def test_a_block_that_changes_under_its_copy_is_not_good(house: House, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of one block and half of another would be copied, or the check would see another block than the copy: neither passes."""

    def torn(blocks: Bytes, into: Bytes) -> None:
        half = len(into) // 2
        copy_run(blocks[:, :half], into[:half])
        if not late:
            house.dram.view(3)[:] = house.blocks[20].planes
        copy_run(blocks[:, half:], into[half:])
        if late:
            house.dram.view(3)[:] = house.blocks[20].planes

    monkeypatch.setattr(reader, "copy_run", torn)
    places = house.places(PATTERNS["neighbours"])
    into, _ = target(len(places))

    assert await house.reader.gather(places, into) == 3
    assert np.array_equal(into[:, : 3 * GEOMETRY.unit_bytes], expected(house.blocks[:3]))


async def test_no_blocks_are_gathered_in_no_parts(house: House) -> None:
    """A hit of nothing may be read."""
    assert await house.reader.gather([], np.empty((GEOMETRY.planes, 0), np.uint8)) == 0


async def test_a_gather_ends_when_all_of_its_threads_have(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """One dies while another still writes: the caller hears of it only when that one has ended, too."""
    monkeypatch.setattr(reader, "SHARE", 1)
    dead, go = threading.Event(), threading.Event()
    first = threading.Lock()

    def dying(blocks: Bytes, into: Bytes) -> None:
        if first.acquire(blocking=False):
            dead.set()
            raise SystemExit("killed by the test")
        assert go.wait(PATIENCE)
        copy_run(blocks, into)

    monkeypatch.setattr(reader, "copy_run", dying)
    places = house.places(PATTERNS["neighbours"])
    into, _ = target(len(places))

    gathering = asyncio.ensure_future(house.reader.gather(places, into))
    while not dead.is_set():  # noqa: ASYNC110 - it is set in a thread
        await asyncio.sleep(0.001)
    done, _ = await asyncio.wait([gathering], timeout=0.05)
    assert not done, "a thread still writes"
    go.set()
    with pytest.raises(WorkerDied):
        await gathering
