"""Who goes first: one order a namespace and tier, and which namespace pays."""

from __future__ import annotations

from array import array
from itertools import islice

from tests.core.house import DRAM, HBM, House
from tiercache.policy import LRU, Payers
from tiercache.residency import Space
from tiercache.tree import BLOCK_IDS, Node


def nodes(policy: LRU, count: int, *, number: int = 0) -> list[Node]:
    """Return nodes of one block in one tier that no order holds yet, used at stamps 1, 2, …"""
    space = Space(number, bytes([number]), 4, policy)
    made = [Node(space, space.tree.root, bytes(4), array(BLOCK_IDS, [place])) for place in range(count)]
    for stamp, node in enumerate(made, start=1):
        node.copies, node.used = 1, stamp
    return made


def offered(policy: LRU, *made: Node) -> None:
    for node in made:
        policy.offered(node, 0)


def test_victims_come_in_the_order_in_which_they_were_offered() -> None:
    """The least recently used is first."""
    policy = LRU(1)
    first, second, third = nodes(policy, 3)
    offered(policy, first, second, third)
    policy.withheld(first, 0)
    offered(policy, first)

    assert list(policy.victims(0)) == [second, third, first]
    assert policy.oldest(0) == second.used


def test_what_the_caller_leaves_in_place_is_passed_over_once() -> None:
    """A victim that can't go now doesn't stop the search, and is first again in the next one."""
    policy = LRU(1)
    made = nodes(policy, 4)
    offered(policy, *made)

    seen = []
    for node in policy.victims(0):
        seen.append(node)
        if node is not made[0]:
            policy.withheld(node, 0)

    assert seen == made
    assert list(policy.victims(0)) == made[:1]


def test_a_victim_may_move_to_another_tier_while_victims_are_asked_for() -> None:
    """A node that moves goes to the recent end of the other order, and the search goes on where it was."""
    policy = LRU(2)
    made = nodes(policy, 3)
    offered(policy, *made)

    for node in islice(policy.victims(0), 2):
        node.copies = 2
        policy.moved(node, 0, 1)

    assert list(policy.victims(0)) == made[2:]
    assert list(policy.victims(1)) == made[:2]


def test_both_halves_of_a_split_keep_the_recency() -> None:
    """The head stands right after its tail: not at the recent end, and not before what hangs below it."""
    policy = LRU(1)
    tail, other, head = nodes(policy, 3)
    offered(policy, tail, other)
    policy.split(head, tail, 0)

    assert list(policy.victims(0)) == [tail, head, other]


def test_an_empty_order_has_no_oldest() -> None:
    """There is no stamp where there is no candidate."""
    assert LRU(1).oldest(0) is None
    assert list(LRU(1).victims(0)) == []
    assert LRU(1).admit(0, 5)


def test_the_namespace_with_the_oldest_victim_pays() -> None:
    """Over namespaces, too, the least recently used goes first, whether victims leave or stay where they are."""
    policies = [LRU(1), LRU(1)]
    payers = Payers(1)
    made = [nodes(policy, 4, number=number) for number, policy in enumerate(policies)]
    order: list[Node] = []
    for place in range(4):
        for number in (1, 0):
            node = made[number][place]
            node.used = len(order) + 1
            offered(policies[number], node)
            payers.announce(number, policies[number], 0)
            order.append(node)

    stayed = list(payers.victims(0))
    went = []
    for node in payers.victims(0):
        node.space.policy.withheld(node, 0)
        went.append(node)

    assert stayed == order
    assert went == order


def test_a_namespace_that_was_used_since_it_was_listed_is_put_back() -> None:
    """A stamp in the heap may be out of date; it is then corrected before anybody pays."""
    policies = [LRU(1), LRU(1)]
    payers = Payers(1)
    [[early], [late]] = [nodes(policy, 1, number=number) for number, policy in enumerate(policies)]
    early.used, late.used = 1, 2
    for number, node in enumerate((early, late)):
        offered(policies[number], node)
        payers.announce(number, policies[number], 0)
    policies[0].withheld(early, 0)
    early.used = 3
    offered(policies[0], early)

    assert list(payers.victims(0)) == [late, early]


def test_a_namespace_without_candidates_is_forgotten_until_it_has_some() -> None:
    """Thousands of idle namespaces cost an eviction nothing."""
    policy, payers = LRU(1), Payers(1)
    [node] = nodes(policy, 1)
    offered(policy, node)
    payers.announce(0, policy, 0)
    policy.withheld(node, 0)

    assert list(payers.victims(0)) == []
    assert payers._listed == [set()]
    offered(policy, node)
    payers.announce(0, policy, 0)
    assert list(payers.victims(0)) == [node]


def test_a_search_that_is_given_up_changes_nothing() -> None:
    """Whoever has enough room stops asking; the next one starts from the oldest again."""
    policies = [LRU(1), LRU(1)]
    payers = Payers(1)
    made = [nodes(policy, 2, number=number) for number, policy in enumerate(policies)]
    for number, (policy, own) in enumerate(zip(policies, made, strict=True)):
        offered(policy, *own)
        payers.announce(number, policy, 0)

    first = [list(islice(payers.victims(0), 3)) for _ in range(3)]

    assert first[0] == first[1] == first[2]


def test_namespaces_share_a_tier_and_each_has_its_own_order() -> None:
    """Same tokens, two namespaces: two nodes; who pays is chosen by the age of both."""
    house = House(hbm=4)
    house.put([1, 2], "a")
    house.put([1, 2], "b")
    house.get([1, 2], "a")
    house.put([4, 5, 6], "c", drop=False)

    assert house.tags([1, 2], "a") == [HBM, DRAM]
    assert house.tags([1, 2], "b") == [DRAM, DRAM]
    house.check()
