"""Faults of tier movement that people met (kind 3), and the prompt that lies in three tiers (W4)."""

from __future__ import annotations

import random

import pytest

from tests.core.house import DRAM, HBM, SSD, House
from tiercache.changes import Change, Reason
from tiercache.transfer import Transfer
from tiercache.types import Tier

N, M = [1, 2, 3, 4], [5, 6, 7, 8]


# --- M1: a slot that is still read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", [HBM, DRAM], ids=["HBM to DRAM", "DRAM to SSD"])
@pytest.mark.parametrize("drop", [False, True])
def test_m1_a_slot_is_not_reused_while_a_demotion_reads_it(position: int, drop: bool) -> None:
    """With the copy of N held before it reads, M finds no slot; afterwards both are exact."""
    house = House(hbm=4 if position == HBM else 1, dram=4, ssd=8)
    house.put(N, position=position)
    house.holding = True
    house.start(house.cache.moves.make_room(position, 4))
    [transfer] = house.held
    house.start(house.cache.moves.make_room(position, 4, drop=drop))
    stored = house.put(M, position=position, drop=drop)
    slots = house.in_use()[position]
    house.check()
    house.finish(transfer)
    house.settle()

    assert (stored, slots) == (0, 4)
    assert house.put(M, position=position) == 4
    assert (house.get(N), house.get(M)) == (4, 4)
    house.check()


def test_m1_a_slot_is_not_reused_while_its_deleted_block_is_read() -> None:
    """The block has left the tree; its slot is the transfer's until the copy reports."""
    house = House(hbm=4, dram=4)
    house.put(N)
    house.holding = True
    house.start(house.cache.moves.make_room(HBM, 4))
    [transfer] = house.held
    house.delete(N)
    stored = house.put(M, drop=False)
    house.finish(transfer)  # fails on wrong bytes at the source, were the slots M's now
    house.holding = False

    assert stored == 0
    assert house.put(M) == 4
    assert house.get(N) == 0
    house.check()


# --- M2: a promotion's own source -----------------------------------------------------------------------------------------

X, Y, Z = [1, 2, 3, 4], list(range(11, 19)), [21, 22, 23, 24]


def crowded() -> House:
    """Return HBM full of Y, DRAM full of X (the oldest) and Z."""
    house = House(hbm=8, dram=8, ssd=32)
    house.put(X, position=DRAM)
    house.put(Z, position=DRAM)
    house.put(Y)
    assert house.in_use() == [8, 8, 0]
    return house


def test_m2_a_promotion_does_not_evict_its_own_source() -> None:
    """Room for X pushes Y to DRAM, and that pushes Z to disk; X, though the oldest there, stays until it has arrived."""
    house = crowded()
    with house.leased(X) as lease:
        house.lift(lease)
        house.compare(lease)

    assert house.tags(X) == [HBM] * 4
    assert house.tags(Y) == [HBM] * 4 + [DRAM] * 4
    assert house.tags(Z) == [SSD] * 4
    assert [house.get(tokens) for tokens in (X, Y, Z)] == [4, 8, 4]
    house.check()


def test_m2_two_promotions_at_once_get_a_shorter_way_up() -> None:
    """With X and Z both leased nothing in DRAM can make room: both stay where they are, readable, and nothing spins."""
    house = crowded()
    with house.leased(X) as first, house.leased(Z) as second:
        moved = house.lift(first), house.lift(second)
        house.compare(first)
        house.compare(second)
        house.check()

    assert moved == ([], [])
    assert [house.get(tokens) for tokens in (X, Y, Z)] == [4, 8, 4]


def test_m2_promotions_in_parallel_with_held_copies(seed: int) -> None:
    """Whatever order the copies end in, well or not: X, Y and Z are exact or gone, and X is never its own victim."""
    random_ = random.Random(seed)
    for _ in range(50):
        house = crowded()
        house.holding = True
        with house.leased(X) as first, house.leased(Z[: random_.randint(0, 4)]) as second:
            for _ in range(12):
                for lease in (first, second):
                    house.lift(lease)
                if house.held:
                    work = random_.choice(house.held)
                    if isinstance(work, Transfer) and random_.random() < 0.3:
                        house.finish(work, arrived=random_.randrange(work.count))
                    else:
                        house.finish(work)
                house.check()
                house.compare(first)
                house.compare(second)
        house.settle()
        assert (house.get(X), house.get(Z) >= second.blocks) == (4, True)
        house.check()


# --- M4: a demotion that could not be done --------------------------------------------------------------------------------


def test_m4_a_demotion_that_could_not_be_done_is_not_done() -> None:
    """All of DRAM is leased: HBM keeps its blocks, and nothing was freed. With leave to drop, they go and are counted."""
    house = House(hbm=4, dram=4, ssd=8)
    house.put(X, position=DRAM)
    house.put(Z)
    with house.leased(X):
        work = house.cache.moves.make_room(HBM, 2)
        kept = house.tags(Z)
        house.room(HBM, 2, drop=True)
        house.check()

    assert (work, kept) == ([], [HBM] * 4)
    assert house.tags(Z) == [HBM] * 2, "never tagged DRAM without bytes there"
    assert house.cache.stats.between(Tier.HBM, None) == house.cache.stats.total(Reason.DROP) == 2
    assert house.pools[HBM].free == 2


def test_m4_a_failed_write_leaves_the_node_where_it_was() -> None:
    """An error between DRAM and disk: the node stays in DRAM, readable, and the call freed nothing."""
    house = House(dram=4)
    house.put(X, position=DRAM)
    house.holding = True
    house.start(house.cache.moves.make_room(DRAM, 4))
    house.finish(house.held[0], arrived=0)

    assert house.pools[DRAM].free == 0
    assert house.get(X) == 4
    assert (house.tags(X), house.in_use()[SSD], house.held) == ([DRAM] * 4, 0, [])
    assert house.cache.inflight.leaving == [0, 0, 0]
    house.check()


# --- M6: a hole at the head -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hole", [0, 60, 127])
def test_m6_the_stored_chain_ends_before_a_hole(hole: int) -> None:
    """Page `hole` of 128 can't be written: after a restart all before it is found; put again, all is there, and once."""
    house = House(hbm=128, dram=128, ssd=256, batch_blocks=16)
    tokens = list(range(1, 129))
    house.put(tokens)
    house.holding = True
    done = 0
    while done <= hole:
        house.persist(tokens)
        [transfer] = house.held
        assert isinstance(transfer, Transfer)
        house.finish(transfer, arrived=min(transfer.count, hole - done))
        done += transfer.count
        house.check()
    again = house.restart()

    assert again.get(tokens) == hole == len(again.records)
    assert again.put(tokens) == 128 - hole
    again.persist(tokens)
    assert again.get(tokens) == 128
    assert len(again.records) == len({record.key for record in again.records.values()}) == 128
    assert again.restart().get(tokens) == 128
    again.check()


# --- M8: thrash -----------------------------------------------------------------------------------------------------------


def test_m8_a_cycle_larger_than_hbm_moves_no_more_than_itself() -> None:
    """12 nodes round and round through 10 slots: at most 12 up and 12 down a round, and nothing is demoted by its own promotion."""
    house = House(hbm=10, dram=100)
    for token in range(12):
        house.put([token])
    ups, downs = [], []
    seen: list[Change] = []
    house.cache.residency.listeners.append(seen.append)
    for _ in range(20):
        seen.clear()
        for token in range(12):
            house.promote([token])
            assert house.tags([token]) == [HBM]
        ups.append(sum(change.reason is Reason.PROMOTE for change in seen))
        downs.append(sum((change.before, change.after) == (Tier.HBM, Tier.DRAM) for change in seen))

    assert max(ups) <= 12
    assert max(downs) <= 12
    assert house.cache.stats.copied[Tier.HBM, Tier.DRAM] <= 12, "copies below are kept: each node goes down once by copying"
    house.check()


def test_m8_an_unchanged_record_is_not_written_again() -> None:
    """Down to disk, up again, down again: the second way down writes nothing."""
    house = House(dram=4)
    house.put(X, position=DRAM)
    house.demote(DRAM, 4)
    first = house.written
    house.promote(X, to=DRAM)
    house.demote(DRAM, 4)

    assert (first, house.written) == (4, 4)
    assert house.tags(X) == [SSD] * 4
    assert house.get(X) == 4


def test_m8_one_shot_prompts_write_only_what_is_demoted() -> None:
    """A thousand prompts that never come back: no block is written to disk that did not have to leave DRAM."""
    house = House(hbm=8, dram=16, ssd=64)
    for number in range(1_000):
        house.put([4 * number, 4 * number + 1])

    assert house.written == house.cache.stats.copied[Tier.DRAM, Tier.SSD] == house.cache.stats.between(Tier.DRAM, Tier.SSD)
    assert house.written == 2_000 - 8 - 16
    house.check()


# --- M9: clear, delete, replace -------------------------------------------------------------------------------------------


def test_m9_a_delete_reaches_a_copy_in_flight() -> None:
    """Copies in DRAM and on disk and a demotion held open: found no more at once, after its end, and after a restart."""
    house = House()
    house.put(X)
    house.persist(X)
    house.put([*X, 5])
    house.promote([*X, 5])
    house.holding = True
    house.start(house.cache.moves.make_room(HBM, 8))
    [transfer] = [work for work in house.held if isinstance(work, Transfer)]
    house.delete(X)
    at_once = house.cache.covered(house.space(), house.key([*X, 5]))
    house.finish(transfer)
    after = house.cache.covered(house.space(), house.key([*X, 5]))
    house.settle()

    assert (at_once, after) == (0, 0)
    assert house.in_use() == [0, 0, 0]
    assert house.restart().get([*X, 5]) == 0
    house.check()


@pytest.mark.parametrize("position", [HBM, DRAM])
def test_m9_new_bytes_for_the_same_tokens_are_the_only_ones(position: int) -> None:
    """Deleted while a copy of the old bytes runs, and put again: whatever ends when, only the new bytes are found."""
    house = House(hbm=8, dram=8)
    house.put(X, position=position)
    house.holding = True
    house.start(house.cache.moves.make_room(position, 8))
    [transfer] = house.held
    house.delete(X)
    stored = house.put(X, position=position, edition=1)
    house.check()
    house.finish(transfer)
    house.check()
    house.settle()

    assert stored == 4
    assert house.get(X) == 4
    house.persist(X)
    assert house.restart().get(X) == 4
    house.check()


def test_m9_a_clear_leaves_leased_bytes_exact_until_their_release() -> None:
    """Not found any more; read to the end; then every tier is empty."""
    house = House()
    house.put(X)
    house.put([*X, 5], position=DRAM)
    house.put(M, position=DRAM)
    house.persist(M)
    with house.leased([*X, 5]) as lease:
        cleared = house.clear()
        house.put(M, edition=1)
        house.compare(lease)
        found = house.cache.covered(house.space(), lease.key)
        house.check()

    assert (cleared, found) == (9, 0)
    house.clear()
    assert house.in_use() == [0, 0, 0]
    assert house.records == {}
    house.check()


# --- W4: one prompt in three tiers ----------------------------------------------------------------------------------------


def spread() -> House:
    """Return a prompt of ten pages: 0-3 in HBM, 4-6 in DRAM, 7-9 on disk."""
    house = House(hbm=16, dram=16, ssd=32)
    for end in (4, 7, 10):
        house.put(list(range(end)), position=DRAM)
    house.persist(list(range(10)))
    house.demote(DRAM, 3)
    house.promote(list(range(4)))
    assert house.tags(list(range(10))) == [HBM] * 4 + [DRAM] * 3 + [SSD] * 3
    return house


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("to", [HBM, DRAM])
def test_w4_a_prompt_in_three_tiers_is_put_together_in_order(split: bool, to: int) -> None:
    """Each page comes back as itself, also when another prompt has cut the part in HBM."""
    house = spread()
    if split:
        house.put([0, 1, 99])
    with house.leased(list(range(10))) as lease:
        transfers = house.lift(lease, to)
        house.compare(lease)

    assert [transfer.count for transfer in transfers] == ([3, 3] if to == HBM else [3])
    assert house.tags(list(range(10))) == [HBM] * (10 if to == HBM else 4) + [DRAM] * (0 if to == HBM else 6)
    assert house.get(list(range(10))) == 10
    house.check()


def test_w4_a_page_that_can_t_be_read_ends_the_prompt() -> None:
    """Page 7 fails its check on disk: seven pages are valid, then and later."""
    house = spread()
    house.holding = True
    with house.leased(list(range(10))) as lease:
        while planned := house.lift(lease):
            [transfer] = planned
            house.finish(transfer, arrived=0 if transfer.sources[0] == SSD else None, rotten=transfer.sources[0] == SSD)

    assert house.get(list(range(10))) == 7
    assert house.cache.stats.total(Reason.UNTRUSTED) == 3
    house.settle()
    assert house.restart().get(list(range(10))) == 7
    house.check()
