"""Requests come in, leases and reservations go out."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.core.house import DRAM, HBM, House
from tiercache.audit import check
from tiercache.cache import Cache
from tiercache.storage.slots import SlotPool
from tiercache.tree import path
from tiercache.types import Tier

# --- readers ------------------------------------------------------------------------------------------------------------


def test_a_match_leases_what_it_finds_in_one_step() -> None:
    """It ends inside an edge: the edge is split there, and only what matched is leased."""
    house = House()
    house.put([1, 2, 3, 4])
    with house.leased([1, 2, 9]) as lease:
        assert lease.blocks == 2
        assert [node.holds for node in path(house.node([1, 2, 3, 4]))] == [1, 0]
        assert house.cache.tiers_of(lease) == {HBM: 2}
        house.check()

    assert house.check()["leases"] == 0


def test_a_match_of_nothing_is_a_lease_all_the_same() -> None:
    """Zero blocks; the root is not leased."""
    house = House()
    with house.leased([1, 2]) as lease:
        assert (lease.blocks, lease.node) == (0, house.space().tree.root)
        assert house.space().tree.root.holds == 0
        house.check()


def test_a_match_without_a_reader_is_not_counted() -> None:
    """The house's own steps are no hits."""
    house = House()
    house.put([1, 2])
    lease = house.cache.match(house.session, house.space(), house.key([1, 2]), count=False, charged=False)
    house.cache.release(lease)

    assert house.cache.stats.matches == 0
    assert house.cache.covered(house.space(), house.key([1, 2, 3])) == 2
    assert house.cache.stats.matches == 0


def test_a_lease_ends_once() -> None:
    """Releasing again changes nothing: no count goes below zero, nobody else's lease ends."""
    house = House()
    house.put([1, 2])
    with house.leased([1, 2]) as other:
        lease = house.cache.match(house.session, house.space(), house.key([1, 2]))
        house.cache.release(lease)
        house.cache.release(lease)

        assert lease.ended() and not other.ended()
        assert house.node([1, 2]).holds == 1
        house.check()


@pytest.mark.parametrize("blocks", range(7))
def test_a_lease_can_be_shortened(blocks: int) -> None:
    """The first blocks stay leased, also where an edge must be cut; the rest may go."""
    house = House()
    house.put([1, 2])
    house.put([1, 2, 3, 4, 5])
    lease = house.cache.match(house.session, house.space(), house.key([1, 2, 3, 4, 5]))
    house.cache.shorten(lease, blocks)
    house.check()

    assert lease.blocks == min(blocks, 5)
    assert house.session.leased == [min(blocks, 5), 0, 0]
    house.compare(lease)
    house.demote(HBM, 8)
    assert house.tags([1, 2, 3, 4, 5]) == [HBM] * min(blocks, 5) + [DRAM] * (5 - min(blocks, 5))
    house.cache.release(lease)
    house.check()


def test_a_session_leases_no_more_than_its_share() -> None:
    """The rest is left unleased, and counted; another session has a share of its own."""
    house = House(hbm=10, dram=10, lease_share=0.5)
    house.put(list(range(1, 9)))
    house.put([20, 21])
    other = house.cache.begin_session()
    with house.leased(range(1, 9)) as lease, house.leased([20, 21]) as second, house.leased(range(1, 9), session=other) as third:
        assert (lease.blocks, second.blocks, third.blocks) == (5, 0, 5)
        assert house.cache.stats.clips == 3 + 2 + 3
        assert house.cache.allowance(house.session, HBM) == 0
        house.compare(lease)
        house.check()

    assert house.cache.allowance(house.session, HBM) == 5
    assert house.get([20, 21]) == 2


def test_many_leases_on_one_prefix_use_the_share_once() -> None:
    """Requests that share a system prompt are not kept from it: what counts is what is leased, not how often."""
    house = House(hbm=10, lease_share=0.5)
    house.put([1, 2, 3])
    leases = [house.cache.match(house.session, house.space(), house.key([1, 2, 3])) for _ in range(8)]

    assert [lease.blocks for lease in leases] == [3] * 8
    assert (house.session.leased[HBM], house.cache.residency.held[HBM], house.cache.allowance(house.session, HBM)) == (24, 3, 2)
    house.check()
    for lease in leases:
        house.cache.release(lease)
    assert house.cache.residency.held == [0, 0, 0]


def test_what_a_lone_session_holds_without_a_charge_counts_against_its_share() -> None:
    """While no other session leases from the tier, a block counts once, whoever of the session's own claims holds it."""
    house = House(hbm=10, lease_share=0.5)
    house.put([1, 2, 3, 4])
    house.put([5, 6, 7, 8])
    cache, space = house.cache, house.space()
    step = cache.match(house.session, space, house.key([1, 2, 3, 4]), charged=False)
    lease = cache.match(house.session, space, house.key([5, 6, 7, 8]))

    assert (step.blocks, lease.blocks) == (4, 1)
    cache.release(lease)
    cache.release(step)
    house.check()


def test_a_share_is_counted_tier_by_tier() -> None:
    """What lies in DRAM is not charged to HBM, and a promotion charges anew."""
    house = House(hbm=4, dram=10, lease_share=0.5)
    house.put([1])
    house.put([1, 2, 3, 4, 5], position=DRAM)
    with house.leased([1, 2, 3, 4, 5]) as lease:
        before = list(house.session.leased)
        house.lift(lease)
        after = list(house.session.leased)

        assert (lease.blocks, before, after) == (5, [1, 4, 0], [4, 1, 0])
        assert house.cache.allowance(house.session, HBM) == 0
        house.check()


def test_a_share_is_never_less_than_one_block() -> None:
    """A tiny tier can be leased at all."""
    house = House(hbm=2, lease_share=0.1)
    house.put([1, 2])

    assert house.get([1, 2]) == 1


# --- writers ------------------------------------------------------------------------------------------------------------


def test_a_reservation_follows_what_is_cached() -> None:
    """Its blocks are those after the cached prefix; committed ones are found at once, also one by one."""
    house = House()
    house.put([1, 2])
    key = house.key([1, 2, 3, 4, 5])
    room = house.cache.reserve(house.session, house.space(), key, after=None, position=HBM)
    found = []
    for upto in (1, 1, 3):
        house.fill(room, key, upto=upto)
        found.append(house.get([1, 2, 3, 4, 5]))
        house.check()
    house.cache.close(room)

    assert (room.present, len(room.blocks), room.pending) == (2, 3, 0)
    assert found == [3, 3, 5]
    assert house.check()["leases"] == 0


def test_a_reservation_after_a_lease_walks_only_the_rest() -> None:
    """The path of the lease is taken as it is, also when others have written after it meanwhile."""
    house = House()
    house.put([1, 2])
    with house.leased([1, 2, 3, 4]) as lease:
        house.put([1, 2, 3])
        room = house.cache.reserve(house.session, house.space(), house.key([1, 2, 3, 4]), after=lease, position=HBM)

        assert (room.present, len(room.blocks)) == (3, 1)
        house.cache.close(room)
    house.check()


def test_slots_come_from_the_tier_asked_for_and_then_from_below() -> None:
    """No faster than the block before, and never from a durable tier: who gets fewer is told so at once."""
    house = House(hbm=2, dram=3)
    house.put([1], position=DRAM)
    below = house.cache.reserve(house.session, house.space(), house.key([1, 2]), after=None, position=HBM)
    spread = house.cache.reserve(house.session, house.space(), house.key([5, 6, 7, 8, 9]), after=None, position=HBM)

    assert Counter(position for position, _ in below.places) == {DRAM: 1}
    assert [position for position, _ in spread.places] == [HBM, HBM, DRAM]
    house.fill(spread, house.key([5, 6, 7, 8, 9]))
    assert house.tags([5, 6, 7]) == [HBM, HBM, DRAM]
    house.check()
    for room in (below, spread):
        house.cache.close(room)
    assert house.in_use() == [2, 2, 0]


def test_a_policy_may_refuse_a_tier() -> None:
    """Blocks that are not worth a place go further down."""
    house = House()
    house.space().policy.admit = lambda position, blocks: position == DRAM  # type: ignore[method-assign]
    house.put([1, 2])

    assert house.tags([1, 2]) == [DRAM, DRAM]


def test_a_second_writer_of_the_same_blocks_is_told_that_they_are_pending() -> None:
    """It holds nothing, and is called when the first has ended; what that one left out is then its own."""
    house = House()
    other = house.cache.begin_session()
    key = house.key([1, 2, 3, 4])
    first = house.cache.reserve(house.session, house.space(), house.key([1, 2, 3]), after=None, position=HBM)
    second = house.cache.reserve(other, house.space(), key, after=None, position=HBM)
    ended: list[str] = []
    first.on_close.append(lambda: ended.append("first"))
    house.fill(first, key, upto=2)
    between = house.cache.reserve(other, house.space(), key, after=None, position=HBM)
    house.check()
    house.cache.close(first)
    after = house.cache.reserve(other, house.space(), key, after=None, position=HBM)

    assert (second.pending, len(second.blocks), second.other) == (3, 0, first)
    assert (between.present, between.pending, between.other) == (2, 1, first)
    assert (after.present, after.pending, len(after.blocks)) == (2, 0, 2)
    assert ended == ["first"]
    house.cache.end_session(other)
    house.check()
    assert house.in_use() == [2, 0, 0]


def test_two_writers_of_different_blocks_don_t_wait() -> None:
    """Only the same first block after the same prefix is the same work."""
    house = House()
    first = house.cache.reserve(house.session, house.space(), house.key([1, 2]), after=None, position=HBM)
    second = house.cache.reserve(house.session, house.space(), house.key([3, 2]), after=None, position=HBM)
    elsewhere = house.cache.reserve(house.session, house.space("b"), house.key([1, 2]), after=None, position=HBM)

    assert [len(room.blocks) for room in (first, second, elsewhere)] == [2, 2, 2]
    assert first.other is second.other is elsewhere.other is None


def test_closing_gives_back_what_was_not_committed() -> None:
    """Slots and ids; closing again does nothing."""
    house = House()
    key = house.key([1, 2, 3])
    room = house.cache.reserve(house.session, house.space(), key, after=None, position=HBM)
    house.fill(room, key, upto=1)
    house.cache.close(room)
    house.cache.close(room)

    assert house.in_use() == [1, 0, 0]
    assert house.cache.pending == {}
    assert house.get([1, 2, 3]) == 1
    house.check()


def test_a_commit_after_what_it_follows_was_deleted_commits_nothing() -> None:
    """A block without what comes before it is never attached."""
    house = House()
    house.put([1, 2])
    key = house.key([1, 2, 3])
    room = house.cache.reserve(house.session, house.space(), key, after=None, position=HBM)
    house.delete([1, 2])
    done = house.fill(room, key)
    house.cache.close(room)

    assert done == 0
    assert house.get([1, 2, 3]) == 0
    assert house.in_use() == [0, 0, 0]
    house.check()


def test_nothing_to_reserve_is_an_empty_reservation() -> None:
    """Everything is cached, or there is no whole block."""
    house = House(page=2)
    house.put([1, 2, 3, 4])
    rooms = [
        house.cache.reserve(house.session, house.space(), house.key(tokens), after=None, position=HBM)
        for tokens in ([1, 2, 3, 4], [1, 2, 3, 4, 5], [])
    ]

    assert [(room.present, len(room.blocks), room.pending) for room in rooms] == [(2, 0, 0), (2, 0, 0), (0, 0, 0)]


def test_a_session_takes_its_claims_with_it() -> None:
    """Leases and reservations end; what was committed stays."""
    house = House()
    house.put([1, 2])
    session = house.cache.begin_session()
    key = house.key([1, 2, 3, 4])
    lease = house.cache.match(session, house.space(), key)
    room = house.cache.reserve(session, house.space(), key, after=lease, position=HBM)
    house.fill(room, key, upto=1)
    house.cache.end_session(session)

    assert (lease.ended(), room.closed) == (True, True)
    assert session not in house.cache.sessions
    assert house.get([1, 2, 3, 4]) == 3
    assert house.check()["leases"] == 0


# --- taking away --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "removed", "left"),
    [
        ([1, 2, 3, 4], 2, {(1, 2, 5): 3, (1, 2, 3, 4): 2}),
        ([1, 2, 5], 1, {(1, 2, 5): 2, (1, 2, 3, 4): 4}),
        ([1, 2], 2, {(1, 2, 5): 0, (1, 2, 3, 4): 0}),
        ([1], 1, {(1, 2, 5): 0, (1, 2, 3, 4): 0}),
        ([1, 2, 3, 4, 9], 2, {(1, 2, 3, 4): 2, (1, 2, 5): 3}),
        ([1, 2, 9], 0, {(1, 2, 3, 4): 4, (1, 2, 5): 3}),
        ([1, 2, 3, 9], 0, {(1, 2, 3, 4): 4}),
        ([7], 0, {(1, 2, 3, 4): 4}),
        ([], 0, {(1, 2, 3, 4): 4}),
    ],
)
def test_a_deleted_prompt_leaves_what_others_share(prompt: list[int], removed: int, left: dict[tuple[int, ...], int]) -> None:
    """What continues it goes, too; what comes before it and belongs to nobody else does; a shared beginning stays."""
    house = House()
    house.put([1, 2, 3, 4])
    house.put([1, 2, 5])
    house.put([8])

    assert house.delete(prompt) == removed
    assert {tokens: house.get(tokens) for tokens in left} == left
    assert house.get([8]) == 1
    house.check()


def test_clearing_removes_one_namespace() -> None:
    """Others with the same tokens keep theirs."""
    house = House()
    for name in ("a", "b"):
        house.put([1, 2], name)
        house.put([1, 3], name)

    assert house.clear("a") == 3
    assert house.clear("a") == 0
    assert (house.get([1, 2], "a"), house.get([1, 2], "b")) == (0, 2)
    house.check()


@pytest.mark.parametrize("block", range(5))
def test_a_distrusted_block_goes_with_what_follows_it(block: int) -> None:
    """What comes before it stays; the reader's lease goes on until it ends."""
    house = House()
    house.put([1, 2])
    house.put([1, 2, 3, 4, 5])
    with house.leased([1, 2, 3, 4, 5]) as lease:
        house.cache.distrust(lease, block)
        found = house.cache.covered(house.space(), lease.key)
        house.cache.distrust(lease, block)
        house.check()

    assert found == block
    assert house.in_use() == [block, 0, 0]
    house.check()


def test_a_block_that_the_store_lacks_goes_with_what_follows_it() -> None:
    """Metadata named it, data had it not."""
    house = House()
    house.put([1, 2, 3])
    node = house.node([1, 2, 3])
    house.cache.lose_block(node, node.blocks[1])
    house.check()

    assert house.get([1, 2, 3]) == 1


@pytest.mark.parametrize(("tiers", "left"), [([Tier.DRAM, Tier.SSD], 2), ([Tier.DRAM], 1)], ids=["two", "one"])
def test_tiers_are_a_list(tiers: list[Tier], left: int) -> None:
    """No code names a neighbour: without HBM the first tier is DRAM, and the last one evicts."""
    cache = Cache(tiers, {tier: SlotPool(2) for tier in tiers}, durable=[Tier.SSD])
    session, space = cache.begin_session(), cache.residency.space(bytes(32), 4)
    room = cache.reserve(session, space, b"aaaabbbbcccc", after=None, position=0)
    cache.commit(room, 2, [1, 2])
    cache.close(room)
    work = cache.moves.make_room(0, 1)

    assert (len(room.blocks), len(work)) == (2, len(tiers) - 1)
    assert cache.covered(space, b"aaaabbbb") == left
    check(cache)
