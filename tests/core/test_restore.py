"""How the tree comes back from what metadata names, whatever became of it."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.core.house import DRAM, HBM, SSD, TIERS, House, Record, checksum, columns, truth
from tiercache.audit import check
from tiercache.cache import Cache
from tiercache.changes import Change, Reason
from tiercache.keys import Digest, block_keys, sha256
from tiercache.restore import Stored, restore
from tiercache.storage.slots import SlotPool
from tiercache.types import Tier


def stored(house: House, prompts: Sequence[Sequence[int]]) -> dict[int, Record]:
    """Return records of `prompts`, as if all of them were durable; a shared prefix is one record."""
    space, stride = house.space(), 4 * house.page
    records: dict[int, Record] = {}
    for prompt in prompts:
        key = house.key(prompt)
        keys = block_keys(space.digest, bytes(32), key, stride, house.digest)
        for block, name in enumerate(keys):
            if all(record.key != name for record in records.values()):
                data = truth(space.digest, key[: (block + 1) * stride])
                parent = keys[block - 1] if block else bytes(32)
                slot = len(records)
                records[slot] = Record(space.digest, name, parent, key[block * stride : (block + 1) * stride], checksum(data))
                house.bytes[SSD][slot] = data
    return records


def come_back(house: House, records: dict[int, Record], order: Sequence[int] | None = None) -> list[int]:
    """Restore `records` into an empty house; return the slots to discard."""
    slots = list(records) if order is None else list(order)
    house.records = dict(records)
    strays = restore(house.cache, house.space().digest, 4 * house.page, columns(slots, records), SSD)
    for slot in strays:
        del house.records[slot], house.bytes[SSD][slot]
    return strays


def test_what_was_durable_is_found_again() -> None:
    """Through the whole house: write down, kill, come back; what was in memory alone is gone."""
    house = House()
    house.put([1, 2, 3, 4])
    house.put([1, 2, 5])
    house.put([8])
    house.persist([1, 2, 3])
    house.persist([1, 2, 5])
    again = house.restart()

    assert [again.get(tokens) for tokens in ([1, 2, 3, 4], [1, 2, 5], [8])] == [3, 3, 0]
    assert again.in_use() == [0, 0, 4]
    again.check()
    again.promote([1, 2, 5])
    assert again.get([1, 2, 5]) == 3


def test_runs_of_only_children_are_one_node() -> None:
    """However they were stored, block by block or at once."""
    house = House(ssd=32)
    records = stored(house, [[1, 2, 3, 4], [1, 2, 5, 6, 7]])

    assert come_back(house, records) == []
    assert len(house.node([1, 2]).blocks) == 2
    assert (len(house.node([1, 2, 3, 4]).blocks), len(house.node([1, 2, 5, 6, 7]).blocks)) == (2, 3)
    house.check()


def test_a_broken_chain_is_cut_at_the_hole() -> None:
    """What follows a missing block can't be reached: its records are to be discarded."""
    house = House()
    records = stored(house, [[1, 2, 3, 4, 5], [1, 7]])
    del records[2]
    strays = come_back(house, records)

    assert strays == [3, 4]
    assert (house.get([1, 2, 3, 4, 5]), house.get([1, 7])) == (2, 2)
    house.check()


def test_symbols_of_another_width_are_strays() -> None:
    """A record that was written with another block size is not this tree's."""
    house = House()
    records = stored(house, [[1, 2]])
    records[9] = records[1]._replace(key=b"k" * 32, symbol=b"long symbol")
    house.bytes[SSD][9] = b""

    assert come_back(house, records) == [9]
    assert house.get([1, 2]) == 2


def test_the_order_of_use_comes_back() -> None:
    """The least recently used leaf goes first, and an ancestor is as recent as its most recent descendant."""
    house = House()
    records = stored(house, [[1, 2], [3], [1, 4]])
    come_back(house, records, order=[1, 2, 0, 3])
    victims = list(house.space().policy.victims(SSD))

    assert victims == [house.node(tokens) for tokens in ([1, 2], [3], [1, 4], [1])]
    house.check()


def test_a_smaller_tier_keeps_what_has_a_slot() -> None:
    """Records in slots beyond the new capacity are cut off, with all that follows them."""
    house = House(ssd=4)
    records = stored(house, [[1, 2, 3, 4, 5, 6], [7]])
    strays = come_back(house, records)

    assert strays == [4, 5, 6]
    assert (house.get([1, 2, 3, 4, 5, 6]), house.get([7])) == (4, 0)
    house.check()


def test_a_smaller_budget_keeps_what_it_pays_for() -> None:
    """Slots may be enough and money short: the sum of the charges never exceeds the budget."""
    house = House()
    records = stored(house, [[1, 2, 3], [4, 5, 6]])
    pools = {tier: SlotPool(8) for tier in TIERS[:2]} | {Tier.SSD: SlotPool(8, budget=13)}
    cache = Cache(TIERS, pools, durable=[Tier.SSD])
    rows = columns(list(records), records)._replace(charges=[3] * 6)
    strays = restore(cache, house.space().digest, 4, rows, SSD)

    assert len(strays) == 2
    assert pools[Tier.SSD].used == 12
    check(cache)


def test_records_with_colliding_keys_end_no_house() -> None:
    """With a constant digest every key is the same: what follows such a key might be another block's, and is given up."""
    constant: Digest = lambda data: b"x" * 32  # noqa: E731 - a function of one use, and of one line
    house = House(digest=constant)
    space = house.space()
    rows = {
        slot: Record(space.digest, b"x" * 32, parent, bytes([token, 0, 0, 0]), 0)
        for slot, (parent, token) in enumerate([(bytes(32), 1), (b"x" * 32, 2), (b"x" * 32, 3), (b"x" * 32, 2)])
    }
    strays = restore(house.cache, space.digest, 4, columns(list(rows), rows), SSD)
    result = check(house.cache)

    assert result["blocks"] == 1
    assert sorted(strays) == [1, 2, 3]


def test_every_restored_node_is_told() -> None:
    """Listeners hear of what is there, once, and counters say so."""
    house = House()
    seen: list[Change] = []
    house.cache.residency.listeners.append(seen.append)
    come_back(house, stored(house, [[1, 2], [1, 3]]))

    assert {(change.before, change.after, change.reason) for change in seen} == {(None, Tier.SSD, Reason.RESTORE)}
    assert sum(len(change.blocks) for change in seen) == house.cache.stats.total(Reason.RESTORE) == 3


def test_nothing_stored_is_an_empty_tree() -> None:
    """A first start."""
    house = House()

    assert restore(house.cache, house.space().digest, 4, Stored([], [], [], [], [], []), SSD) == []
    assert house.check() == {"nodes": 0, "blocks": 0, "leases": 0}


@given(
    prompts=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=6), max_size=8),
    holes=st.sets(st.integers(0, 30)),
    data=st.data(),
)
def test_what_comes_back_is_every_chain_up_to_its_first_hole(
    prompts: list[list[int]], holes: set[int], data: st.DataObject
) -> None:
    """Of any set of records in any order: reachable ones are found, all others are to be discarded, the books are right."""
    house = House(ssd=64)
    records = {slot: record for slot, record in stored(house, prompts).items() if slot not in holes}
    present = {bytes(32)} | {record.key for record in records.values()}
    order = data.draw(st.permutations(sorted(records)))
    strays = come_back(house, records, order)

    house.check()
    for prompt in prompts:
        keys = block_keys(house.space().digest, bytes(32), house.key(prompt), 4, sha256)
        reachable = next((count for count, key in enumerate(keys) if key not in present), len(prompt))
        assert house.get(prompt) == reachable
    assert len(strays) + house.in_use()[SSD] == len(records)
    assert house.in_use()[HBM] == house.in_use()[DRAM] == 0
