"""Room, promotions, copies to the durable tier, and what a finished move changes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.core.house import DRAM, HBM, SSD, House
from tiercache.changes import Reason
from tiercache.transfer import Discard, Transfer, Work


def transfers(house: House) -> list[Transfer]:
    return [work for work in house.held if isinstance(work, Transfer)]


def test_spare_copies_go_first() -> None:
    """What a faster tier also holds costs nothing to drop; no victim is asked for."""
    house = House(dram=4)
    house.put([1, 2], position=DRAM)
    house.put([3, 4], position=DRAM)
    house.promote([1, 2])
    freed = house.demote(DRAM, 2)

    assert (freed, house.written) == (2, 0)
    assert house.tags([1, 2]) == [HBM, HBM]
    assert house.tags([3, 4]) == [DRAM, DRAM]
    house.check()


def test_a_victim_with_a_copy_below_only_loses_the_upper_one() -> None:
    """A clean copy makes a demotion free: no bytes move."""
    house = House()
    house.put([1, 2], position=DRAM)
    house.promote([1, 2])
    house.holding = True
    work = house.cache.moves.make_room(HBM, 8)

    assert work == []
    assert house.pools[HBM].free == 8
    assert house.tags([1, 2]) == [DRAM, DRAM]


def test_a_victim_goes_from_its_tail_and_no_further_than_asked() -> None:
    """Two slots are asked for: two blocks go, and the node is split there."""
    house = House()
    house.put(list(range(1, 9)))
    freed = house.demote(HBM, 2)

    assert freed == 2
    assert house.tags(list(range(1, 9))) == [HBM] * 6 + [DRAM] * 2
    house.check()


def test_room_that_is_on_its_way_is_not_asked_for_again() -> None:
    """A second caller of the same room sees what the first one's moves will free."""
    house = House()
    house.put([1, 2])
    house.put([3, 4])
    house.holding = True
    first = house.cache.moves.make_room(HBM, 6)
    again = house.cache.moves.make_room(HBM, 6)
    more = house.cache.moves.make_room(HBM, 7)
    house.start([*first, *more])

    assert (len(first), again, len(more)) == (1, [], 1)
    assert house.cache.inflight.leaving[HBM] == 3
    house.settle()
    assert house.cache.inflight.leaving == [0, 0, 0]
    assert house.pools[HBM].free == 7
    house.check()


def test_a_chain_of_nodes_goes_down_in_one_call() -> None:
    """Evicting reaches the parents: what was stored block by block leaves in one move, from its end."""
    house = House(hbm=6)
    for end in (1, 2, 3):
        house.put(list(range(1, end + 1)))
    house.put([7, 8, 9])
    house.holding = True
    house.start(house.cache.moves.make_room(HBM, 2))

    [transfer] = transfers(house)
    assert transfer.blocks.tolist() == [*house.node([1, 2]).blocks, *house.node([1, 2, 3]).blocks]
    house.settle()
    assert house.tags([1, 2, 3]) == [HBM, DRAM, DRAM]
    assert house.tags([7, 8, 9]) == [HBM] * 3
    house.check()


def test_what_was_used_later_does_not_go_before_a_parent_whose_child_is_still_leaving() -> None:
    """The parent becomes a leaf when the child's copy has ended; that is worth waiting for, it never waits for a disk."""
    house = House(hbm=4)
    house.put([1])
    house.put([1, 2])
    house.get([1])  # used later than its child: another place in the order
    house.put([3, 4])
    house.holding = True
    house.start(house.cache.moves.make_room(HBM, 2))
    [transfer] = transfers(house)
    waited = house.cache.moves.make_room(HBM, 2)
    house.finish(transfer)
    house.start(house.cache.moves.make_room(HBM, 2))

    assert (transfer.count, waited) == (1, [])
    house.settle()
    assert house.tags([1, 2]) == [DRAM, DRAM]
    assert house.tags([3, 4]) == [HBM, HBM]


def test_a_writer_that_may_drop_does_not_wait_for_a_child() -> None:
    """When the time is up, something goes, whatever is still on its way."""
    house = House(hbm=4, dram=1)
    house.put([1])
    house.put([1, 2])
    house.get([1])
    house.put([3, 4])
    house.holding = True
    house.start(house.cache.moves.make_room(HBM, 1))
    house.cache.moves.refusing.add(SSD)
    house.start(house.cache.moves.make_room(HBM, 2, drop=True))

    assert house.tags([3, 4]) == [HBM]
    assert house.cache.stats.total(Reason.DROP) == 1
    house.settle()
    house.check()


def test_the_victims_of_one_call_are_the_oldest_of_all_namespaces() -> None:
    """Moves in flight don't make their namespace pay again."""
    house = House(hbm=6)
    for token in (1, 2, 3):
        for name in ("a", "b"):
            house.put([token], name)
    house.holding = True
    house.start(house.cache.moves.make_room(HBM, 4))
    house.settle()

    assert [house.tags([token], name) for token in (1, 2, 3) for name in ("a", "b")] == [[DRAM]] * 4 + [[HBM]] * 2


def test_the_durable_tier_is_closed_towards_the_root() -> None:
    """A leaf that goes to disk first brings its ancestors there, root first, as clean copies; their upper copies stay."""
    house = House(dram=4)
    house.put([1, 2])
    house.put([1, 2, 3], position=DRAM)
    house.put([1, 2, 3, 4], position=DRAM)
    house.holding = True
    house.start(house.cache.moves.make_room(DRAM, 3))
    [transfer] = transfers(house)
    blocks = [block for tokens in ([1, 2], [1, 2, 3], [1, 2, 3, 4]) for block in house.node(tokens).blocks]

    assert transfer.blocks.tolist() == blocks
    assert transfer.sources == [HBM, HBM, DRAM, DRAM]
    assert (transfer.drop_from, transfer.drop_count) == (DRAM, 1)
    house.settle()
    assert house.tags([1, 2, 3, 4]) == [HBM, HBM, DRAM, SSD]
    assert len(house.records) == 4
    house.check()
    assert house.restart().get([1, 2, 3, 4]) == 4


def test_a_hot_prefix_is_written_once() -> None:
    """The second leaf below it finds its ancestors durable."""
    house = House(dram=4)
    house.put([1, 2])
    house.put([1, 2, 3], position=DRAM)
    house.put([1, 2, 4], position=DRAM)
    house.room(DRAM, 4, drop=False)

    assert house.written == 4
    assert house.tags([1, 2, 3]) == [HBM, HBM, SSD]
    house.check()


def test_a_long_path_is_written_in_batches() -> None:
    """What does not fit one transaction goes ahead as clean copies; the victim follows in the last one."""
    house = House(hbm=8, dram=2, ssd=32, batch_blocks=3)
    house.put(list(range(1, 9)))
    house.put([*range(1, 9), 10], position=DRAM)
    house.holding = True
    steps = []
    while house.pools[DRAM].free < 2:
        house.start(house.cache.moves.make_room(DRAM, 2))
        [transfer] = transfers(house)
        steps.append((transfer.count, transfer.reason, transfer.drop_count))
        house.finish(transfer)

    assert steps == [(3, Reason.COPY, 0), (3, Reason.COPY, 0), (3, Reason.DEMOTE, 1)]
    assert house.tags([*range(1, 9), 10]) == [HBM] * 8 + [SSD]
    house.check()


def test_a_tier_that_refuses_is_not_written() -> None:
    """With its disk failing, DRAM keeps what it has, and says how little room there is."""
    house = House(hbm=2, dram=2)
    house.put([1, 2], position=DRAM)
    house.cache.moves.refusing.add(SSD)
    freed = house.demote(DRAM, 1)
    kept = house.tags([1, 2])
    house.room(DRAM, 1, drop=True)

    assert (freed, kept) == (0, [DRAM, DRAM])
    assert house.tags([1, 2]) == [DRAM]
    assert house.cache.stats.total(Reason.DROP) == 1


def test_who_may_drop_waits_for_no_disk() -> None:
    """Neither are blocks written for it, nor does what is being written count as room: the least valuable that can go goes."""
    house = House(dram=4)
    for token in (1, 2, 3, 4):
        house.put([token], position=DRAM)
    house.holding = True
    house.start(house.cache.moves.make_room(DRAM, 1))
    writing = list(house.held)
    house.start(house.cache.moves.make_room(DRAM, 1, drop=True))

    assert house.held == writing
    assert house.pools[DRAM].free == house.cache.stats.total(Reason.DROP) == 1
    assert [house.tags([token]) for token in (1, 2, 3, 4)] == [[DRAM], [], [DRAM], [DRAM]], "the oldest is being written"
    house.settle()
    house.check()
    assert house.cache.inflight.leaving_to_disk == [0, 0, 0]


def test_a_dry_tier_below_is_asked_once() -> None:
    """While its records are being discarded the last tier has nothing to give: not asked again for each of many victims."""
    house = House(hbm=40, dram=2, ssd=2)
    for token in range(44):
        house.put([token])
    house.holding = True
    asked: list[int] = []
    free = house.cache.moves._free

    def counting(position: int, want: int, work: list[Work], **how: Any) -> None:
        asked.append(position)
        free(position, want, work, **how)

    house.cache.moves._free = counting  # type: ignore[method-assign]
    house.start(house.cache.moves.make_room(HBM, 1))

    assert asked == [HBM, DRAM, SSD]
    house.settle()
    house.check()


@pytest.mark.parametrize("arrived", range(6))
def test_a_failure_commits_exactly_the_blocks_before_it(arrived: int) -> None:
    """Of a demotion of three nodes: the nodes, and the part of a node, that arrived; the upper copies of all others stay."""
    house = House()
    for end in (2, 4, 6):
        house.put(list(range(1, end + 1)))
    house.holding = True
    house.start(house.cache.moves.make_room(HBM, 8))
    [transfer] = transfers(house)
    house.finish(transfer, arrived=arrived)

    assert transfer.count == 6
    assert house.pools[DRAM].capacity - house.pools[DRAM].free == arrived
    assert house.pools[HBM].free == 2, "what lies above a block that stayed stays, too"
    assert house.get(list(range(1, 7))) == 6
    house.check()
    house.settle()
    house.evict_all()
    assert house.in_use() == [0, 0, 0]


@pytest.mark.parametrize("arrived", [0, 2, 5, 7])
def test_a_failed_write_to_disk_leaves_no_record_without_a_block(arrived: int) -> None:
    """The part that arrived is durable; the rest is where it was, and the slots are free again."""
    house = House()
    house.put(list(range(1, 9)))
    house.holding = True
    house.persist(list(range(1, 9)))
    [transfer] = transfers(house)
    house.finish(transfer, arrived=arrived)

    assert len(house.records) == house.in_use()[SSD] == arrived
    assert house.tags(list(range(1, 9))) == [HBM] * 8
    assert house.restart().get(list(range(1, 9))) == arrived
    house.check()


def test_bytes_that_are_rotten_at_their_source_are_a_miss_from_then_on() -> None:
    """The block that failed its check leaves the tree with what follows it; what came before arrived."""
    house = House()
    house.put(list(range(1, 7)), position=DRAM)
    house.put([1, 2, 3, 4, 5, 6, 7], position=DRAM)
    house.holding = True
    [transfer] = house.promote(list(range(1, 7)))
    house.finish(transfer, arrived=2, rotten=True)

    assert house.get(list(range(1, 8))) == 2
    assert house.cache.stats.total(Reason.UNTRUSTED) == 5
    assert house.in_use() == [2, 2, 0]
    house.check()


def test_a_record_that_arrived_late_is_discarded() -> None:
    """A write that ends after its prompt was deleted leaves a record that nobody names: its slot waits for the discard."""
    house = House()
    house.put([1, 2])
    house.holding = True
    house.persist([1, 2])
    [transfer] = transfers(house)
    house.delete([1, 2])
    house.finish(transfer)
    [discard] = house.held
    records = len(house.records)
    house.settle()

    assert isinstance(discard, Discard) and records == 2
    assert house.records == {}
    assert house.in_use() == [0, 0, 0]
    house.check()


def test_a_lease_taken_while_a_demotion_runs_keeps_the_upper_copy() -> None:
    """The bytes below are not lost: the next demotion is free."""
    house = House()
    house.put([1, 2])
    house.holding = True
    house.start(house.cache.moves.make_room(HBM, 8))
    [transfer] = transfers(house)
    with house.leased([1, 2]) as lease:
        house.finish(transfer)
        house.compare(lease)
        leased = house.tags([1, 2])
    later = house.cache.moves.make_room(HBM, 8)

    assert leased == [HBM, HBM]
    assert later == []
    assert house.tags([1, 2]) == [DRAM, DRAM]
    house.check()


def test_a_promotion_takes_one_source_and_what_fits() -> None:
    """Blocks of one transfer come from one tier, in chain order; the rest follows when those are there."""
    house = House(hbm=3)
    house.put([1, 2], position=DRAM)
    house.put([1, 2, 3, 4], position=DRAM)
    house.persist([1, 2, 3, 4])
    house.demote(DRAM, 2)
    house.holding = True
    with house.leased([1, 2, 3, 4]) as lease:
        moves = house.cache.moves
        first = moves.plan_promote(lease.node, HBM, most=8)
        second = moves.plan_promote(lease.node, HBM, most=8)
        assert first is not None
        house.start([first])
        house.finish(first)
        third = moves.plan_promote(lease.node, HBM, most=8)
        assert third is not None
        house.start([third])
        house.finish(third)
        fourth = moves.plan_promote(lease.node, HBM, most=8)

    assert (first.sources, second, third.sources, fourth) == ([DRAM] * 2, None, [SSD], None)
    assert house.tags([1, 2, 3, 4]) == [HBM] * 3 + [SSD]
    house.check()


def test_a_promotion_of_nothing_is_none() -> None:
    """Everything is there, everything is on its way, or the tier refuses."""
    house = House()
    house.put([1])
    house.put([2], position=DRAM)
    moves = house.cache.moves
    there = moves.plan_promote(house.node([1]), HBM, most=8)
    moves.refusing.add(HBM)
    refused = moves.plan_promote(house.node([2]), HBM, most=8)
    moves.refusing.clear()
    most = moves.plan_promote(house.node([2]), HBM, most=0)
    house.holding = True
    house.promote([2])
    under_way = moves.plan_promote(house.node([2]), HBM, most=8)

    assert there is refused is most is under_way is None
    assert moves.slower(house.node([2]), HBM) == []


def test_what_has_just_been_promoted_is_not_the_next_victim() -> None:
    """Also when its reader has left before it arrived, and others were read meanwhile."""
    house = House(hbm=2)
    house.put([1], "a", position=DRAM)
    house.put([2], "b")
    house.holding = True
    [transfer] = house.promote([1], "a")
    house.get([2], "b")
    house.finish(transfer)

    assert [node.space for node in house.cache.residency.payers.victims(HBM)] == [house.space("b"), house.space("a")]
