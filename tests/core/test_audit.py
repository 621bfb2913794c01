"""The audit finds what is wrong: each of these was right, and is bent once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.core.house import DRAM, HBM, SSD, House
from tiercache.audit import check
from tiercache.errors import AuditFailed
from tiercache.leases import Quarantine


def full() -> House:
    """Return a house with copies in every tier, a lease, a reservation, a move and a discard under way."""
    house = House(hbm=6, dram=6, ssd=16)
    house.put([1, 2], position=DRAM)
    house.put([1, 2, 3], position=DRAM)
    house.persist([1, 2, 3])
    house.promote([1, 2, 3])
    house.put([5, 6], position=DRAM)
    house.put([7], position=DRAM)
    house.persist([7])
    house.holding = True
    house.delete([7])
    house.cache.match(house.session, house.space(), house.key([1, 2]))
    house.cache.reserve(house.session, house.space(), house.key([8]), after=None, position=HBM)
    house.lift(house.cache.match(house.session, house.space(), house.key([5])))
    assert len(house.held) == 2
    return house


def bend_hold(house: House) -> None:
    house.node([1, 2]).holds += 1


def bend_held(house: House) -> None:
    house.cache.residency.held[HBM] += 1


def bend_move(house: House) -> None:
    house.node([1, 2, 3]).moves = 1


def bend_kids(house: House) -> None:
    house.node([1, 2]).kids += 1


def bend_copies(house: House) -> None:
    house.node([1, 2]).copies &= ~(1 << DRAM)


def bend_tier(house: House) -> None:
    node = house.node([1, 2])
    node.copies &= ~(1 << HBM)


def bend_durable(house: House) -> None:
    house.node([1, 2]).copies &= ~(1 << SSD)


def bend_key(house: House) -> None:
    house.node([1, 2, 3]).key += b"...."


def bend_child(house: House) -> None:
    children = house.space().tree.root.children
    assert children is not None
    children[b"...."] = children.pop(house.key([1]))


def bend_owner(house: House) -> None:
    house.cache.residency.table.owner[house.node([1, 2]).blocks[0]] = 99


def bend_slot(house: House) -> None:
    house.cache.residency.table.slot[HBM, house.node([1, 2]).blocks[0]] = -1


def bend_twice(house: House) -> None:
    table = house.cache.residency.table
    first, second = house.node([1, 2]).blocks
    table.slot[DRAM, second] = table.slot[DRAM, first]


def bend_pool(house: House) -> None:
    house.pools[HBM].take(1)


def bend_free(house: House) -> None:
    pool = house.pools[DRAM]
    [slot] = house.cache.residency.table.slots(house.node([1, 2, 3]).blocks, DRAM)
    pool.hold([slot])
    pool.give([slot])


def bend_charge(house: House) -> None:
    house.session.leased[HBM] -= 3


def bend_order(house: House) -> None:
    node = house.node([1, 2, 3])
    node.space.policy.withheld(node, HBM)


def bend_spare(house: House) -> None:
    house.cache.residency.spare[DRAM].clear()


def bend_buried(house: House) -> None:
    house.cache.residency.buried_held += 1


def bend_waste(house: House) -> None:
    house.cache.residency.waste[SSD].append(15)


def bend_ids(house: House) -> None:
    house.cache.residency.table.allocate(1)


def bend_lease(house: House) -> None:
    house.session.leases.clear()


def bend_quarantine(house: House) -> None:
    house.cache.quarantines.add(Quarantine(((HBM, 5),)))


def bend_arriving(house: House) -> None:
    house.node([1, 2]).arriving |= 1 << HBM


def bend_budget(house: House) -> None:
    house.pools[HBM]._budget = 0


BENDS = {name.removeprefix("bend_"): call for name, call in globals().copy().items() if name.startswith("bend_")}


def test_a_house_in_the_middle_of_everything_is_in_order() -> None:
    """Leases, reservations, moves and discards are all part of the books."""
    result = check(full().cache)

    assert result == {"nodes": 4, "blocks": 5, "leases": 3}


@pytest.mark.parametrize("bend", BENDS.values(), ids=BENDS.keys())
def test_a_fault_in_the_books_is_found(bend: Callable[[House], None]) -> None:
    """It is named, and all faults that were found are listed."""
    house = full()
    bend(house)

    with pytest.raises(AuditFailed) as caught:
        check(house.cache)

    assert caught.value.fields["faults"]
    assert str(len(caught.value.fields["faults"])) in str(caught.value)


@pytest.mark.parametrize(
    ("bend", "text"),
    [
        (bend_quarantine, "1 slots are in quarantine, the pool says 0"),
        (bend_arriving, "also on its way"),
        (bend_budget, "units are used of 0"),
    ],
)
def test_a_fault_that_breaks_one_rule_is_named_by_it(bend: Callable[[House], None], text: str) -> None:
    """What is in quarantine, on its way twice, or above the budget shows nowhere else."""
    house = full()
    bend(house)

    with pytest.raises(AuditFailed, match=text):
        check(house.cache)
