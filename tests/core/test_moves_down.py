"""What goes down when a tier below is full, leased, or too small: nothing in vain, nothing past its child."""

from __future__ import annotations

import pytest

from tests.core.house import DRAM, HBM, SSD, House
from tiercache.transfer import Discard, Transfer


def transfers(house: House) -> list[Transfer]:
    return [work for work in house.held if isinstance(work, Transfer)]


@pytest.mark.parametrize("others", [0, 6], ids=["empty", "full of others"])
def test_what_a_durable_tier_can_t_hold_whole_is_not_begun(others: int) -> None:
    """A path of eight blocks, six slots on disk: nothing is written ahead of what can't follow, and nobody else's record goes."""
    house = House(dram=8, ssd=6)
    for token in range(100, 100 + others):
        house.put([token], position=DRAM)
    house.demote(DRAM, others)
    house.put(list(range(1, 9)), position=DRAM)
    before = house.written
    for _ in range(10):
        house.start(house.cache.moves.make_room(DRAM, 2))

    assert (house.written - before, house.pools[DRAM].free) == (0, 0)
    assert [house.tags([token]) for token in range(100, 100 + others)] == [[SSD]] * others
    house.room(DRAM, 2, drop=True)
    assert house.tags(list(range(1, 9))) == [DRAM] * 6
    house.check()


def test_room_for_the_end_of_a_path_is_not_made_from_its_beginning() -> None:
    """The disk is full of the path's first four records and of two that are leased: none of the four goes for the path's end.

    When the two have gone it follows, and each block of the path has been written once.
    """
    house = House(hbm=4, dram=4, ssd=6)
    house.put([1, 2, 3, 4])
    house.persist([1, 2, 3, 4])
    house.put([7, 8], position=DRAM)
    house.persist([7, 8])
    house.put([1, 2, 3, 4, 5, 6], position=DRAM)
    with house.leased([7, 8]):
        for _ in range(20):
            house.start(house.cache.moves.make_room(DRAM, 2))
        stayed = house.written, house.in_use()[SSD], house.tags([1, 2, 3, 4, 5, 6])
    house.delete([7, 8])
    for _ in range(20):
        house.start(house.cache.moves.make_room(DRAM, 4))

    assert stayed == (6, 6, [HBM] * 4 + [DRAM] * 2)
    assert (house.written, house.tags([1, 2, 3, 4, 5, 6])) == (8, [HBM] * 4 + [SSD] * 2)
    house.check()


def test_a_path_is_not_begun_for_which_leases_leave_no_place() -> None:
    """It would fit an empty disk, but not beside what is leased there: no part of it is written ahead, over and over."""
    house = House(hbm=4, dram=4, ssd=6)
    house.put([7, 8], position=DRAM)
    house.persist([7, 8])
    house.put([1, 2, 3, 4])
    house.put([1, 2, 3, 4, 5, 6], position=DRAM)
    with house.leased([7, 8]):
        for _ in range(20):
            house.start(house.cache.moves.make_room(DRAM, 2))
        written = house.written

    assert (written, house.tags([1, 2, 3, 4, 5, 6])) == (2, [HBM] * 4 + [DRAM] * 2)
    house.check()


def test_the_records_of_many_victims_are_discarded_together() -> None:
    """Ten nodes leave the disk in one call: one discard, and so one transaction, not ten."""
    house = House(dram=4, ssd=16)
    for token in range(16):
        house.put([token], position=DRAM)
        house.demote(DRAM, 4)
    house.holding = True
    work = house.cache.moves.make_room(SSD, 10)
    again = house.cache.moves.make_room(SSD, 10)
    house.start(work)

    [discard] = work
    assert isinstance(discard, Discard) and len(discard.slots) == 10
    assert again == [] and house.cache.inflight.leaving[SSD] == 10
    house.settle()
    assert house.pools[SSD].free == 10
    house.check()


def test_what_a_leased_tier_can_t_take_goes_past_it() -> None:
    """DRAM is leased: for who makes room ahead HBM's leaf goes to disk with all that comes before it, and comes back whole."""
    house = House(hbm=4, dram=2, ssd=8)
    house.put([7, 8], position=DRAM)
    house.put([1, 2, 3, 4])
    with house.leased([7, 8]):
        not_ahead = house.cache.moves.make_room(HBM, 2)
        house.start(house.cache.moves.make_room(HBM, 2, past=True))

    assert not_ahead == [] and house.tags([1, 2, 3, 4]) == [HBM, HBM, SSD, SSD]
    assert (house.written, house.pools[HBM].free, house.tags([7, 8])) == (4, 2, [DRAM] * 2)
    assert house.restart().get([1, 2, 3, 4]) == 4
    house.check()


def test_what_a_busy_tier_can_take_soon_is_waited_for() -> None:
    """DRAM is full, but a record of it is being written: HBM's leaf waits for that slot, and goes to no disk."""
    house = House(hbm=2, dram=2, ssd=8)
    house.put([7, 8], position=DRAM)
    house.put([1, 2])
    house.holding = True
    house.start(house.cache.moves.make_room(HBM, 2, past=True))
    [first] = transfers(house)
    again = house.cache.moves.make_room(HBM, 2, past=True)
    house.settle()

    assert (first.to, again) == (SSD, [])
    assert house.tags([1, 2]) == [HBM, HBM], "nobody has asked again"
    house.demote(HBM, 2)
    assert (house.tags([1, 2]), house.written) == ([DRAM, DRAM], 2)
    house.check()


def test_a_parent_does_not_go_past_its_child() -> None:
    """The path with the child is too long for the disk, so the child stays in DRAM; the parent, which would fit, stays above it."""
    house = House(hbm=2, dram=1, ssd=2)
    house.put([1, 2])
    house.put([1, 2, 3], position=DRAM)
    work = house.cache.moves.make_room(HBM, 1, past=True)

    assert (work, house.tags([1, 2, 3])) == ([], [HBM, HBM, DRAM])
    house.check()


def test_a_child_that_comes_to_a_tier_in_between_keeps_its_parent_above() -> None:
    """It came while its parent was written past that tier: the record is a clean copy, and the parent's upper copy stays."""
    house = House(hbm=2, dram=1, ssd=8)
    house.put([7], position=DRAM)
    house.put([1, 2])
    house.holding = True
    with house.leased([7]):
        house.start(house.cache.moves.make_room(HBM, 2, past=True))
    [transfer] = transfers(house)
    house.delete([7])
    house.put([1, 2, 3], position=DRAM)
    house.finish(transfer)

    assert (transfer.to, house.tags([1, 2, 3])) == (SSD, [HBM, HBM, DRAM])
    assert len(house.records) == 2
    house.settle()
    house.check()


def test_a_parent_whose_child_goes_to_a_disk_is_not_waited_for() -> None:
    """Past a leased tier, too: what was used later goes before the parent, as a disk is waited for by nobody in this way."""
    house = House(hbm=4, dram=1, ssd=8)
    house.put([7], position=DRAM)
    house.put([1])
    house.put([1, 2])
    house.get([1])
    house.put([3, 4])
    house.holding = True
    with house.leased([7]):
        house.start(house.cache.moves.make_room(HBM, 1, past=True))
        house.start(house.cache.moves.make_room(HBM, 2, past=True))

    assert [(transfer.to, transfer.drop_count) for transfer in transfers(house)] == [(SSD, 1), (SSD, 1)]
    house.settle()
    assert (house.tags([1, 2]), house.tags([3, 4])) == ([HBM, SSD], [HBM, SSD])
    house.check()
