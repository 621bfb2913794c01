"""Copies, holds and slots: each step, and what it must keep true."""

from __future__ import annotations

from tests.core.house import DRAM, HBM, SSD, House
from tiercache.changes import Change, Reason
from tiercache.slots import SlotState
from tiercache.tree import Node
from tiercache.types import Tier


def candidates(house: House, position: int, name: str = "a") -> list[Node]:
    return list(house.space(name).policy.victims(position))


def test_a_leased_path_is_no_candidate_and_comes_back_from_its_end() -> None:
    """A lease withholds every node of its path; the release offers them again, descendants before ancestors."""
    house = House()
    house.put([1])
    house.put([1, 2])
    house.put([1, 2, 3])
    house.put([9])
    with house.leased([1, 2]) as lease:
        leased = candidates(house, HBM)
        holds = [house.node(tokens).holds for tokens in ([1], [1, 2], [1, 2, 3], [9])]

    assert leased == [house.node([1, 2, 3]), house.node([9])]
    assert holds == [1, 1, 0, 0]
    assert candidates(house, HBM) == [house.node(tokens) for tokens in ([1, 2, 3], [9], [1, 2], [1])]
    assert lease.node is house.node([1, 2])
    assert house.space().tree.root.holds == 0, "the root is never leased"


def test_a_release_stops_where_another_lease_goes_on() -> None:
    """What lies above that node is held by it, and was counted once."""
    house = House()
    house.put([1, 2])
    house.put([1, 2, 3, 4])
    residency = house.cache.residency
    top, end = house.node([1, 2]), house.node([1, 2, 3, 4])
    residency.hold(end)
    residency.hold(top)
    both = end.holds, top.holds
    residency.release(end)

    assert both == (1, 2), "a lease that ends here, and a child that is held"
    assert (end.holds, top.holds) == (0, 1)
    assert candidates(house, HBM) == [end]
    residency.release(top)
    house.check()


def test_children_are_counted_by_tier_from_the_moment_they_are_on_their_way() -> None:
    """A parent is no leaf of a tier while a child is in it or arriving: it would be a hole above the child."""
    house = House()
    house.put([1])
    house.put([1, 2], position=DRAM)
    parent, child = house.node([1]), house.node([1, 2])
    residency = house.cache.residency
    before = [residency.kids(parent, position) for position in (HBM, DRAM, SSD)]
    house.holding = True
    [transfer] = house.promote([1, 2])
    during = [residency.kids(parent, position) for position in (HBM, DRAM, SSD)]
    free = residency.is_free_to_lose(parent, HBM)
    house.finish(transfer, arrived=0)

    assert (before, during, free) == ([0, 1, 0], [1, 1, 0], False)
    assert [residency.kids(parent, position) for position in (HBM, DRAM, SSD)] == [0, 1, 0]
    assert residency.is_free_to_lose(parent, HBM)
    assert child.arriving == child.moves == 0


def test_a_spare_copy_is_a_leaf_s_lower_copy_that_nobody_reads() -> None:
    """It is listed when it becomes one, and not while a lease or a child in that tier stands against it."""
    house = House()
    house.put([1], position=DRAM)
    house.put([1, 2], position=DRAM)
    house.promote([1, 2])
    parent, child = house.node([1]), house.node([1, 2])
    spare = house.cache.residency.spare
    both = set(spare[DRAM])
    with house.leased([1, 2]):
        leased = set(spare[DRAM])
    house.cache.residency.lose(child, DRAM, Reason.DEMOTE)

    assert (both, leased) == ({child}, set())
    assert set(spare[DRAM]) == {parent}
    assert spare[HBM] == spare[SSD] == {}
    house.check()


def test_what_leaves_the_tree_under_a_lease_keeps_its_slots_until_the_release() -> None:
    """It can't be found any more, its bytes stay exact, and its durable record goes at once."""
    house = House()
    house.put([1, 2])
    house.persist([1, 2])
    with house.leased([1, 2]) as lease:
        house.delete([1, 2])
        house.compare(lease)
        during = house.in_use()
        found = house.get([1, 2])
        buried = house.cache.residency.buried_held
        house.check()

    assert (found, during, buried) == (0, [2, 0, 0], 1)
    assert house.in_use() == [0, 0, 0]
    assert house.cache.residency.buried_held == 0
    house.check()


def test_what_leaves_the_tree_under_a_transfer_keeps_its_slots_until_the_report() -> None:
    """Cancelling is not an end of a copy: source and destination are freed when it has reported."""
    house = House()
    house.put([1, 2])
    house.holding = True
    house.room(HBM, house.pools[HBM].capacity, drop=False)
    [transfer] = house.held
    house.delete([1, 2])
    during = house.in_use()
    house.check()
    house.finish(transfer)

    assert during == [2, 2, 0]
    assert house.in_use() == [0, 0, 0]
    house.check()


def test_a_durable_slot_is_not_free_before_its_record_is_gone() -> None:
    """Another block's record in that slot would be found under the first one's name after a crash."""
    house = House()
    house.put([1, 2])
    house.persist([1, 2])
    house.holding = True
    house.delete([1, 2])
    [discard] = house.held
    states = [house.pools[SSD].state(slot) for slot in house.records]
    house.finish(discard)

    assert states == [SlotState.HELD] * 2
    assert house.records == {}
    assert house.in_use() == [0, 0, 0]


def test_a_slot_s_generation_grows_when_its_block_goes() -> None:
    """A copying reader sees by it that the slot was given to somebody else."""
    house = House(hbm=2)
    house.put([1, 2])
    before = house.pools[HBM].generations.tolist()
    house.delete([1, 2])
    house.put([3, 4])

    assert before == [0, 0]
    assert house.pools[HBM].generations.tolist() == [1, 1]


def test_every_committed_change_is_told_once() -> None:
    """Insert, copy, demote, promote, trim and delete, with the fastest tier before and after."""
    house = House()
    seen: list[Change] = []
    house.cache.residency.listeners.append(seen.append)
    house.put([1, 2])
    house.persist([1, 2])
    house.demote(HBM, 8)
    house.promote([1, 2], to=DRAM)
    house.promote([1, 2])
    house.demote(DRAM, 8)
    house.delete([1, 2])

    assert [(change.before, change.after, change.reason) for change in seen] == [
        (None, Tier.HBM, Reason.INSERT),
        (Tier.HBM, Tier.HBM, Reason.COPY),
        (Tier.HBM, Tier.SSD, Reason.DEMOTE),
        (Tier.SSD, Tier.DRAM, Reason.PROMOTE),
        (Tier.DRAM, Tier.HBM, Reason.PROMOTE),
        (Tier.HBM, Tier.HBM, Reason.TRIM),
        (Tier.HBM, None, Reason.DELETE),
    ]
    assert [change.seq for change in seen] == sorted({change.seq for change in seen})
    assert {(change.namespace, len(change.blocks)) for change in seen} == {(house.space().digest, 2)}


def test_touching_makes_a_path_the_most_recent_one() -> None:
    """A promotion touches what it brought, so that the next demotion does not undo it."""
    house = House()
    for token in (1, 2, 3):
        house.put([token])
    house.cache.residency.touch(house.node([1]))

    assert candidates(house, HBM) == [house.node([token]) for token in (2, 3, 1)]


def test_owners_are_found_after_splits() -> None:
    """A transfer names blocks; whose they are is looked up when it ends."""
    house = House()
    house.put([1, 2, 3, 4])
    blocks = house.node([1, 2, 3, 4]).blocks[:]
    house.get([1])
    house.get([1, 2, 3])

    assert house.cache.residency.owners(blocks) == [house.node(tokens) for tokens in ([1], [1, 2, 3], [1, 2, 3, 4])]
    assert house.cache.residency.owners(blocks[1:2]) == [house.node([1, 2, 3])]


def test_a_place_below_is_one_that_no_child_is_above() -> None:
    """A copy on SSD does not let a node go from HBM while a child sits in DRAM."""
    house = House()
    house.put([1])
    house.put([1, 2], position=DRAM)
    house.persist([1])
    parent, residency = house.node([1]), house.cache.residency
    with_child = residency.has_place_below(parent, HBM)
    house.delete([1, 2])
    house.put([1])
    house.persist([1])

    assert not with_child
    assert residency.has_place_below(house.node([1]), HBM)
