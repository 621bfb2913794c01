"""Kind 2, index and tree: T1 to T5, on the core with slots of real bytes; at the face in `test_2_index_face`."""

from __future__ import annotations

import gc
import random

import pytest

from tests.core.house import DRAM, HBM, SSD, House, Record, checksum, columns
from tiercache.audit import check
from tiercache.changes import Reason
from tiercache.errors import AuditFailed
from tiercache.keys import block_keys
from tiercache.restore import restore
from tiercache.tree import subtree

DEPTH = 20_000
STEPS = 5_000


def family() -> House:
    """Return A(2) → B(2) → C(2), and D(2) beside C."""
    house = House(hbm=20, dram=8, ssd=8)
    for tokens in ([1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 7, 8]):
        house.put(tokens)
    return house


def test_t1_a_lease_protects_the_node_and_all_its_ancestors() -> None:
    """Evict everything under a lease on C: only D goes. After its release: C, B, A in this order."""
    house = family()
    with house.leased([1, 2, 3, 4, 5, 6]) as lease:
        house.evict_all()
        house.check()
        house.compare(lease)

        assert house.in_use() == [6, 0, 4], "on disk clean copies of A and B, which came before D"
        assert house.cache.covered(house.space(), house.key([1, 2, 3, 4, 7])) == 4

    order = [node.key[0] for node in house.space().policy.victims(HBM)]
    gone = []
    for _ in range(3):
        before = house.tags([1, 2, 3, 4, 5, 6])
        assert house.demote(HBM, 2) == 2
        gone.append(
            [block for block, (old, new) in enumerate(zip(before, house.tags([1, 2, 3, 4, 5, 6]), strict=True)) if old != new]
        )
    assert order == [5, 3, 1]
    assert gone == [[4, 5], [2, 3], [0, 1]], "C, B, A"
    house.evict_all()
    assert house.in_use() == [0, 0, 0]
    house.check()


def test_t1_leases_count_and_never_below_zero() -> None:
    """Leased twice and released once it is held; released once too often, nothing happens (at the face it is LeaseReleased)."""
    house = family()
    first, second = (house.cache.match(house.session, house.space(), house.key([1, 2, 3, 4, 5, 6])) for _ in range(2))
    house.cache.release(first)
    house.cache.release(first)
    house.check()
    house.evict_all()
    held = house.in_use()
    house.cache.release(second)
    house.check()

    assert held == [6, 0, 4]
    assert all(node.holds == 0 for node in subtree(house.space().tree.root))


@pytest.mark.parametrize(("count", "kept"), [(0, 0), (1, 0), (15, 0), (16, 16), (17, 16), (31, 16), (33, 32)])
def test_t2_only_whole_pages_are_stored(count: int, kept: int) -> None:
    """Empty, shorter than a page, not a multiple of it: no node of length zero, no lease on the root, every slot accounted for."""
    house = House(page=16)
    tokens = list(range(1, count + 1))
    stored = house.put(tokens)
    again = house.put(tokens)
    found = house.get(tokens)

    assert (stored * 16, again, found * 16) == (kept, 0, kept)
    assert house.in_use() == [kept // 16, 0, 0]
    assert house.pools[HBM].free == 8 - kept // 16
    assert all(len(node.blocks) for node in subtree(house.space().tree.root) if node.parent is not None)
    assert house.space().tree.root.holds == 0
    house.check()
    house.delete(tokens)
    assert house.in_use() == [0, 0, 0]


@pytest.mark.parametrize("cut", [0, 1, 15, 16, 17, 24, 31, 32, 47, 48])
def test_t2_a_tail_that_goes_in_two_ranges_goes_once(cut: int) -> None:
    """A reservation is committed up to the middle of a page and given back, and what was committed is deleted: the two ranges meet
    inside a page, and each slot is free once."""
    house = House(page=16)
    key = house.key(range(48))
    room = house.cache.reserve(house.session, house.space(), key, after=None, position=HBM)
    house.fill(room, key, upto=cut // 16)
    house.cache.close(room)
    house.cache.close(room)
    assert house.in_use() == [cut // 16, 0, 0]
    house.delete(range(cut))
    house.delete(range(48))
    pool = house.pools[HBM]
    taken = pool.take(8)

    assert sorted(taken) == list(range(8)), "the free list has each slot once"
    with pytest.raises(AuditFailed, match="twice"):
        pool.give([taken[0], taken[0]])
    pool.give(taken)
    with pytest.raises(AuditFailed):
        pool.give(taken[:1])
    house.check()


def deep(house: House, depth: int) -> bytes:
    """Store one prompt page by page, a node each, and return its key.

    Each put continues the last one's lease: by itself each would walk and lease all before it, which is quadratic as it is asked.
    """
    key = b"".join(number.to_bytes(4, "little") for number in range(1, depth + 1))
    room = house.cache.reserve(house.session, house.space(), key, after=None, position=HBM)
    for block, (position, slot) in enumerate(room.places, start=1):
        house.bytes[position][slot] = b"x"
        house.cache.commit(room, block, [checksum(b"x")])
    house.cache.close(room)
    return key


def test_t3_a_chain_of_twenty_thousand_nodes() -> None:
    """Lookup, split in the middle, lease, shorten, audit, every move, eviction and the end of the tree: no recursion."""
    house = House(hbm=2 * DEPTH, dram=2 * DEPTH, ssd=DEPTH, batch_blocks=DEPTH)
    key = deep(house, DEPTH)
    half = key[: 2 * DEPTH]
    lease = house.cache.match(house.session, house.space(), key)
    part = house.cache.match(house.session, house.space(), half + b"else")
    nodes = check(house.cache)["nodes"]
    house.cache.shorten(lease, DEPTH // 4)
    house.cache.release(part)
    house.cache.release(lease)

    assert (nodes, lease.blocks, part.blocks) == (DEPTH, DEPTH // 4, DEPTH // 2)
    house.demote(HBM, 2 * DEPTH)
    assert house.in_use() == [0, DEPTH, 0]
    house.demote(DRAM, 2 * DEPTH)
    assert house.in_use() == [0, 0, DEPTH]
    lease = house.cache.match(house.session, house.space(), key)
    assert len(house.lift(lease, DRAM)) == 1
    house.cache.release(lease)
    check(house.cache)
    house.evict_all()
    assert house.in_use() == [0, 0, 0]
    check(house.cache)


def test_t3_a_deep_tree_is_split_deleted_and_dropped() -> None:
    """One long edge is cut in its middle; a deep chain goes with one call, and another with its last reference."""
    house = House(hbm=3 * DEPTH)
    house.put(range(100_001, 100_001 + DEPTH // 10))
    house.get(range(100_001, 100_001 + DEPTH // 20))
    key = deep(house, DEPTH)
    check(house.cache)
    removed = house.cache.delete(house.space(), key)
    deep(house, DEPTH)
    check(house.cache)
    del house
    gc.collect()

    assert removed == DEPTH


def test_t3_a_deep_tree_comes_back_from_its_records() -> None:
    """A branch at every level keeps every level a node of its own."""
    house = House(hbm=1, dram=1, ssd=2 * DEPTH)
    space = house.space()
    key = b"".join(number.to_bytes(4, "little") for number in range(1, DEPTH + 1))
    keys = block_keys(space.digest, bytes(32), key, 4)
    records: dict[int, Record] = {}
    for level, name in enumerate(keys):
        parent = keys[level - 1] if level else bytes(32)
        records[2 * level] = Record(space.digest, name, parent, key[4 * level : 4 * level + 4], 0)
        records[2 * level + 1] = Record(space.digest, bytes(28) + name[:4], parent, b"side", 0)
    strays = restore(house.cache, space.digest, 4, columns(list(records), records), SSD)

    assert strays == []
    assert check(house.cache)["nodes"] >= 2 * DEPTH - 1
    assert space.tree.walk(key)[2] == DEPTH


def test_t4_splits_keep_the_books(seed: int) -> None:
    """5,000 random steps on pages of four tokens out of three: many splits, and every rule checked after each."""
    random_ = random.Random(seed)
    house = House(hbm=12, dram=12, ssd=24, page=4)
    for step in range(STEPS):
        tokens = [random_.randint(1, 3) for _ in range(random_.randint(0, 24))]
        match random_.randrange(6):
            case 0 | 1:
                house.put(tokens, drop=random_.random() < 0.5)
            case 2:
                house.get(tokens)
            case 3:
                house.promote(tokens, to=random_.choice([HBM, DRAM]))
            case 4:
                house.demote(random_.choice([HBM, DRAM, SSD]), random_.randint(1, 4))
            case _:
                house.delete(tokens) if random_.random() < 0.2 else house.persist(tokens)
        check(house.cache) if step % 25 else house.check()

    assert house.cache.stats.total(Reason.EVICT) > 0


def test_t4_a_partial_match_refreshes_what_it_matched_alone() -> None:
    """X (8 pages) at t1, Y (4) at t2, the first 4 of X at t3: the tail of X goes first, not Y, not the head of X."""
    house = House(hbm=12, page=4)
    x, y = list(range(1, 33)), list(range(101, 117))
    house.put(x)
    house.put(y)
    house.get(x[:16])
    house.demote(HBM, 4)

    assert house.tags(x) == [HBM] * 4 + [DRAM] * 4
    assert house.tags(y) == [HBM] * 4
    house.demote(HBM, 4)
    assert house.tags(x)[:4] == [HBM] * 4
    assert house.tags(y) == [DRAM] * 4


def late() -> House:
    """Return P (pages 0-3) in DRAM and pages 4-7 below it on their way from SSD, held, with nobody waiting for them."""
    house = House(hbm=4, dram=8, ssd=16)
    house.put([1, 2, 3, 4], position=DRAM)
    house.put([1, 2, 3, 4, 5, 6, 7, 8], position=DRAM)
    house.persist([1, 2, 3, 4, 5, 6, 7, 8])
    house.demote(DRAM, 8)
    house.promote([1, 2, 3, 4], to=DRAM)
    house.holding = True
    house.promote([1, 2, 3, 4, 5, 6, 7, 8], to=DRAM)
    assert len(house.held) == 1
    return house


@pytest.mark.parametrize("change", ["room", "delete", "again", "split", "split below"])
@pytest.mark.parametrize("arrived", [4, 2])
def test_t5_a_late_arrival_is_attached_right_or_dropped(change: str, arrived: int) -> None:
    """Whatever became of P meanwhile: its pages are never found without it, every slot comes back, everything can go."""
    house = late()
    [transfer] = house.held
    match change:
        case "room":
            house.start(house.cache.moves.make_room(DRAM, 8))
            assert house.tags([1, 2, 3, 4]) == [DRAM] * 4, "a parent whose child is on its way is no leaf"
        case "delete":
            house.delete([1, 2, 3, 4])
        case "again":
            house.delete([1, 2, 3, 4])
            house.put([1, 2, 3, 4], edition=1)
        case "split":
            assert house.get([1, 2]) == 2
        case _:
            assert house.get([1, 2, 3, 4, 5]) == 5
    house.check()
    house.finish(transfer, arrived=arrived)
    house.check()
    house.settle()
    found = house.get([1, 2, 3, 4, 5, 6, 7, 8])
    tags = house.tags([1, 2, 3, 4, 5, 6, 7, 8])

    assert found == {"delete": 0, "again": 4}.get(change, 8)
    assert tags == sorted(tags)
    assert house.restart().get([1, 2, 3, 4, 5, 6, 7, 8]) in {0, 4, 8}
    house.check()
    house.evict_all()
    assert house.in_use() == [0, 0, 0]


def test_t5_a_parent_whose_child_has_a_copy_in_the_tier_stays_there() -> None:
    """Also where that child is in a faster tier as well: 'leaf of the tier' is a property of all its copies."""
    house = House(hbm=4, dram=4)
    house.put([1], position=DRAM)
    house.put([1, 2], position=DRAM)
    house.persist([1])
    house.promote([1, 2])
    parent, child = house.node([1]), house.node([1, 2])
    house.holding = True
    house.persist([1, 2])  # keeps the child's copies in place
    house.start(house.cache.moves.make_room(DRAM, 4))
    during = [parent.copies >> DRAM & 1, child.copies >> DRAM & 1]
    house.settle()
    house.demote(DRAM, 4)

    assert during == [1, 1]
    assert [parent.copies >> DRAM & 1, child.copies >> DRAM & 1] == [0, 0]
    house.check()
