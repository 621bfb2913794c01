"""Kind 7, accounting, in the books of the core: budgets, hit rates, counters of moves; the product in `test_7_accounting`."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.core.house import DRAM, HBM, SSD, House
from tiercache.audit import check
from tiercache.changes import Reason
from tiercache.stats import Stats
from tiercache.transfer import Report, Transfer
from tiercache.types import Tier


def usage(house: House) -> list[int]:
    """Return the blocks in use by tier, after comparing the pools with the nodes and with what lies there."""
    house.check()
    pools = house.in_use()
    assert len(house.records) == pools[SSD]
    return pools


def once(house: House) -> None:
    house.put([1])


def delete(house: House) -> None:
    house.delete([1])


def clear(house: House) -> None:
    house.clear()


def failed_put(house: House) -> None:
    room = house.cache.reserve(house.session, house.space(), house.key([1, 2, 3]), after=None, position=DRAM)
    house.cache.close(room)


def ended_session(house: House) -> None:
    session = house.cache.begin_session()
    house.cache.match(session, house.space(), house.key([1]))
    room = house.cache.reserve(session, house.space(), house.key([1, 2, 3]), after=None, position=DRAM)
    house.fill(room, house.key([1, 2, 3]), upto=0)
    house.cache.end_session(session)


def evicted_under_lease(house: House) -> None:
    with house.leased([1]):
        house.evict_all()
        house.delete([1])
        check(house.cache)


def failed_copy(house: House) -> None:
    house.holding = True
    house.persist([1])
    for work in list(house.held):
        house.finish(work, arrived=0)
    house.settle()


@pytest.mark.parametrize(
    "way", [once, delete, clear, failed_put, ended_session, evicted_under_lease, failed_copy], ids=lambda way: way.__name__
)
def test_a1_what_is_charged_is_given_back(way: Callable[[House], None]) -> None:
    """The same put five times is charged once; whatever takes it away gives it back, once; then ten fit again."""
    house = House(hbm=10, dram=10, ssd=10)
    for _ in range(5):
        house.put([1])
        assert usage(house) == [1, 0, 0]
    way(house)
    left = usage(house)
    house.clear()

    assert sum(left) == house.check()["blocks"] or left == [1, 0, 0]
    assert usage(house) == [0, 0, 0]
    for token in range(10):
        house.put([token], drop=False)
    assert usage(house) == [10, 0, 0]


def test_a1_asking_for_more_than_there_is_evicts_nothing() -> None:
    """A reservation takes free slots; it makes no room by itself, and says how much it got."""
    house = House(hbm=10, dram=1, ssd=1)
    for token in range(8):
        house.put([token])
    room = house.cache.reserve(house.session, house.space(), house.key(list(range(100, 115))), after=None, position=HBM)

    assert len(room.blocks) == 3
    assert all(house.get([token]) == 1 for token in range(8))
    house.cache.close(room)
    assert usage(house) == [8, 0, 0]


def test_a1_usage_never_exceeds_the_budget(seed: int) -> None:
    """Puts, evictions and records that turn out smaller than they were charged: the sum stays within the cap at every step."""
    random_ = random.Random(seed)
    house = House(hbm=4, dram=4, ssd=8)
    house.holding = True
    charged = 0
    for _ in range(400):
        house.put([random_.randint(1, 4) for _ in range(random_.randint(1, 5))])
        house.start(house.cache.moves.make_room(random_.choice([HBM, DRAM]), 2))
        for work in list(house.held):
            if isinstance(work, Transfer) and work.to == SSD:
                arrived = random_.randint(0, work.count)
                house.held.remove(work)
                keys = house._copy(work, arrived)
                charges = [random_.choice([3, 4]) for _ in keys]
                charged += sum(charges)
                house.start(house.cache.inflight.complete(work, Report(arrived=arrived, keys=keys, charges=charges)))
            elif work in house.held:
                house.finish(work)
        house.check()
        assert all(0 <= pool.used <= pool.budget for pool in house.pools)

    assert charged > 0
    house.settle()
    house.clear()
    assert [pool.used for pool in house.pools] == [0, 0, 0]


def hundred() -> tuple[House, list[int]]:
    """Return a prompt of 100 pages: 30 in HBM, 20 in DRAM, 10 on disk, 40 nowhere."""
    house = House(hbm=100, dram=100, ssd=100)
    prompt = list(range(100))
    house.put(prompt[:30], position=DRAM)
    house.put(prompt[:50], position=DRAM)
    house.put(prompt[:60], position=DRAM)
    house.persist(prompt)
    house.demote(DRAM, 10)
    house.promote(prompt[:30])
    house.cache.stats.matches = house.cache.stats.asked = house.cache.stats.missed = 0
    house.cache.stats.queries, house.cache.stats.hits = [0, 0, 0], [0, 0, 0]
    return house, prompt


def test_a2_a_tier_is_asked_for_what_no_faster_one_had() -> None:
    """100 pages, 30 + 20 + 10 found: queries and hits by tier are 100/30, 70/20, 50/10, and 40 missed."""
    house, prompt = hundred()
    for _ in range(5):  # what the house asks for itself, and what is refused, is no request
        house.cache.release(house.cache.match(house.session, house.space(), house.key(prompt), count=False))
        house.cache.covered(house.space(), house.key(prompt))
    found = house.get(prompt)
    stats = house.cache.stats

    assert found == 60
    assert (stats.queries, stats.hits, stats.missed) == ([100, 70, 50], [30, 20, 10], 40)
    assert (stats.matches, stats.asked) == (1, 100)


def test_a2_counters_only_grow() -> None:
    """A later lookup with more hits is no negative step."""
    house, prompt = hundred()
    steps = []
    for _ in range(3):
        house.get(prompt)
        stats = house.cache.stats
        steps.append((*stats.queries, *stats.hits, stats.missed, stats.matches))
        house.promote(prompt)

    for first, second in pairwise(steps):
        assert all(before <= after for before, after in zip(first, second, strict=True))
    assert house.cache.stats.hits[HBM] > 3 * 30


def test_a2_each_way_counts_exactly_what_moved() -> None:
    """HBM to DRAM, DRAM to disk, disk to DRAM, DRAM to HBM: each by the blocks that moved, none stays at zero."""
    house = House(hbm=8, dram=8, ssd=8)
    house.put([1, 2, 3])
    house.demote(HBM, 3 + 5)
    house.demote(DRAM, 8)
    house.promote([1, 2, 3], to=DRAM)
    house.promote([1, 2])
    stats = house.cache.stats

    assert stats.copied == {
        (Tier.HBM, Tier.DRAM): 3,
        (Tier.DRAM, Tier.SSD): 3,
        (Tier.SSD, Tier.DRAM): 3,
        (Tier.DRAM, Tier.HBM): 2,
    }
    assert [stats.between(*way) for way in stats.copied] == [3, 3, 3, 2]
    assert stats.total(Reason.INSERT) == 3
    assert stats.total(Reason.PROMOTE) == 5
    assert stats.total(Reason.EVICT) == 0


def test_a2_failures_and_clips_are_counted_by_reason() -> None:
    """Names are few and known: they become labels."""
    stats = Stats((Tier.HBM, Tier.SSD))
    stats.failed("checksum")
    stats.failed("checksum", 2)
    stats.clipped(4)

    assert stats.failures == {"checksum": 3}
    assert stats.clips == 4
    assert stats.between(None, Tier.HBM) == 0
