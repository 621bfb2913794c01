"""The parts of a put: what is ready stays as it is while it is written, and nothing is read or left running after the end."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.storage.blocks import Block, chain
from tests.storage.ssd_fixture import capacity_for
from tests.storage.test_ssd_store import LARGE
from tiercache.errors import Untrusted
from tiercache.storage.contract import Put
from tiercache.storage.ssd_layout import SsdLayout
from tiercache.storage.ssd_parts import parts
from tiercache.storage.ssd_records import Records, Staged

LAYOUT = SsdLayout.of(LARGE, capacity_bytes=capacity_for(LARGE, 64), batch_bytes=1 << 20, packed=False)


@pytest.fixture
def records() -> Records:
    return Records(LARGE, LAYOUT, 2)


def puts(blocks: list[Block]) -> list[Put]:
    return [block.at(slot) for slot, block in enumerate(blocks)]


def payload(one: Staged) -> bytes:
    return bytes(one.write.data)


def stagers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tiercache-stage"]


def alone(records: Records, put: Put) -> bytes:
    return payload(records.stage(put, np.empty(records.stage_bytes, np.uint8)))


@pytest.mark.parametrize("count", [0, 1, 3, 4, 10])
def test_parts_are_the_items_in_order(records: Records, count: int, seed: int) -> None:
    """Every block is in one part, no part is longer than asked, and each record is what it is when staged alone."""
    items = puts(chain(LARGE, count, seed=seed))

    found = [[payload(one) for one in part.staged] for part in parts(records, items, 3)]

    assert [len(part) for part in found] == [min(3, count - first) for first in range(0, count, 3)]
    assert [data for part in found for data in part] == [alone(records, put) for put in items]
    assert not stagers()


def test_a_part_stays_as_it_is_until_the_next_is_asked_for(seed: int) -> None:
    """However far the staging thread is ahead, it fills no buffer that is being written."""
    ahead = threading.Semaphore(0)

    class Telling(Records):
        def stage(self, put: Put, buffer: NDArray[np.uint8]) -> Staged:
            try:
                return super().stage(put, buffer)
            finally:
                ahead.release()

    records = Telling(LARGE, LAYOUT, 2)
    items = puts(chain(LARGE, 6, seed=seed))
    ready = parts(records, items, 2)

    for number, part in enumerate(ready):
        for _ in range(4 if number == 0 else 2 if number == 1 else 0):
            assert ahead.acquire(timeout=10)
        assert not ahead.acquire(timeout=0.05), "a third part is staged, and there are two buffers"
        now = [payload(one) for one in part.staged]
        assert now == [alone(Records(LARGE, LAYOUT, 2), put) for put in items[2 * number : 2 * number + 2]]


def test_a_rotten_source_ends_the_parts(records: Records, seed: int) -> None:
    """What comes before it is ready, it is named, and nothing after it is staged."""
    items = puts(chain(LARGE, 10, seed=seed))
    items[4].source[0, 0] ^= 1

    found = list(parts(records, items, 3))

    assert [len(part.staged) for part in found] == [3, 1]
    assert found[0].rotten is None
    assert isinstance(found[1].rotten, Untrusted)
    assert found[1].rotten.reason == "checksum"
    assert not stagers()


def test_an_iterator_that_is_closed_reads_no_source_any_more(records: Records, seed: int) -> None:
    """Who stops early frees the sources: by then the thread has ended."""
    ready = parts(records, puts(chain(LARGE, 12, seed=seed)), 3)
    next(ready)

    ready.close()

    assert not stagers()


def test_what_breaks_in_the_thread_is_raised_to_who_waits(seed: int) -> None:
    """Nobody waits for ever for a part that can't come."""

    class Broken(Records):
        def stage(self, put: Put, buffer: NDArray[np.uint8]) -> Staged:
            if put.slot == 4:
                raise MemoryError
            return super().stage(put, buffer)

    ready = parts(Broken(LARGE, LAYOUT, 2), puts(chain(LARGE, 10, seed=seed)), 3)
    assert len(next(ready).staged) == 3

    with pytest.raises(MemoryError):
        next(ready)

    assert not stagers()


def test_without_a_thread_parts_are_staged_where_they_are_asked_for(
    records: Records, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system that has no more threads still writes."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    items = puts(chain(LARGE, 7, seed=seed))

    found = [payload(one) for part in parts(records, items, 3) for one in part.staged]

    assert found == [alone(records, put) for put in items]
