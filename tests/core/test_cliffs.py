"""Cliffs of performance that people met (kind 8), as counts of steps: the figures are the benchmarks' business."""

from __future__ import annotations

from collections.abc import Iterator
from typing import SupportsIndex

import pytest

from tests.core.house import HBM, House
from tiercache.policy import LRU
from tiercache.tree import Node


class Counting(LRU):
    """The LRU policy, counting the candidates it is asked for."""

    seen = 0

    def victims(self, position: int) -> Iterator[Node]:
        for node in super().victims(position):
            type(self).seen += 1
            yield node


def filled(leaves: int, *, below: int, spaces: int) -> House:
    """Return a house with `leaves` one-block prompts in HBM, which is full, and `below` slots in each tier below."""
    house = House(hbm=leaves, dram=below, ssd=below, policy=Counting)
    for token in range(leaves):
        house.put([token], f"space {token % spaces}", drop=False)
    return house


def steps(house: House, count: int = 50) -> float:
    """Return how many candidates one eviction and one put of one block look at, on average."""
    Counting.seen = 0
    for token in range(count):
        house.put([1_000_000 + token], "new", drop=True)
    return Counting.seen / count


@pytest.mark.parametrize(("below", "most"), [(100, 4), (4, 150)], ids=["room below", "all full"])
@pytest.mark.parametrize("trouble", ["none", "leased", "touched", "many namespaces"])
def test_p1_one_eviction_looks_at_a_few_candidates_however_many_leaves_there_are(trouble: str, below: int, most: int) -> None:
    """Also with a tenth of the leaves leased, a tenth used since they came, or a namespace for each few leaves."""
    costs = []
    for leaves in (300, 3_000):
        house = filled(leaves, below=below, spaces=leaves // 10 if trouble == "many namespaces" else 1)
        for token in range(leaves // 10):
            if trouble == "leased":
                house.cache.match(house.session, house.space("space 0"), house.key([token]), charged=False)
            if trouble == "touched":
                house.get([token], "space 0")
        costs.append(steps(house))

    small, large = costs
    assert large <= 1.2 * small
    assert large <= most


class Counted(bytes):
    """A key that counts the bytes that are taken out of it or compared with it."""

    touched = 0

    def __getitem__(self, index: SupportsIndex | slice) -> bytes:  # type: ignore[override]
        assert isinstance(index, slice)
        part = super().__getitem__(index)
        Counted.touched += len(part)
        return part

    def startswith(self, prefix: bytes, *place: int) -> bool:  # type: ignore[override]
        Counted.touched += len(prefix)
        return super().startswith(prefix, *place)


@pytest.mark.parametrize("shape", ["a node a page", "one node", "a split in every other page"])
def test_p2_a_walk_touches_each_byte_of_the_key_a_few_times(shape: str) -> None:
    """Twice as deep costs twice as much: nothing on the way copies the rest of the key."""
    touched = []
    for depth in (500, 1_000):
        house = House(hbm=2 * depth)
        if shape == "one node":
            house.put(range(depth))
        elif shape == "a node a page":
            for end in range(1, depth + 1):
                house.put(range(end))
        else:
            house.put(range(depth))
            for end in range(0, depth, 2):
                house.put([*range(end), 5_000])
        key = Counted(house.key(range(depth)))
        Counted.touched = 0
        assert house.space().tree.walk(key)[2] == depth
        assert house.space().tree.walk(Counted(key + b"more"))[2] == depth
        touched.append(Counted.touched)

    assert touched[1] <= 2.1 * touched[0]
    assert touched[0] <= 2 * 3 * 4 * 500


def test_p2_a_lease_walks_its_path_once() -> None:
    """Hold and release touch each node of the path, and nothing beside it."""
    house = House(hbm=1_000)
    for end in range(1, 101):
        house.put(range(end))
        house.put([*range(end), 7_000])
    before = {node: node.used for node in house.cache.residency.nodes if node is not None}
    with house.leased(range(100)) as lease:
        held = [node for node in before if node.holds]

    changed = [node for node in before if node.used != before[node]]
    assert lease.blocks == len(held) == len(changed) == 100
    assert house.pools[HBM].free == 800
