"""Which node goes first when a tier needs room.

A policy sees nodes come, be used, move and go, and answers with candidates, lazily. It does not know leases or transfers: a
node that can't go now is *withheld* from it and later *offered* again. There is one policy object a namespace; which namespace
pays is `Payers`' choice.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from tiercache.tree import Node


class Policy(Protocol):
    """The eviction order of one namespace, one order a tier. A node is only in the order of its fastest tier."""

    def admit(self, position: int, blocks: int) -> bool:
        """Return whether `blocks` new blocks are worth a place in the tier."""
        ...

    def offered(self, node: Node, position: int) -> None:
        """The node is a candidate of the tier from now on, and was used just now."""
        ...

    def withheld(self, node: Node, position: int) -> None:
        """The node is no candidate for now: it is in use, moves, or is gone."""
        ...

    def moved(self, node: Node, position: int, to: int) -> None:
        """A candidate's fastest tier changed from `position` to `to`."""
        ...

    def split(self, head: Node, tail: Node, position: int) -> None:
        """A candidate was cut; both halves keep its recency, the head after its tail."""
        ...

    def victims(self, position: int) -> Iterator[Node]:
        """Yield candidates, the least valuable first. The caller may withhold or move what it was given while it iterates."""
        ...

    def oldest(self, position: int) -> int | None:
        """Return when the first victim was used last, as a stamp that grows with use; None when there is no candidate."""
        ...


PolicyFactory = Callable[[int], Policy]
"""Makes the policy of one namespace, given the number of tiers."""


class LRU:
    """Least recently used first, with links in the nodes: every operation costs the same however many nodes there are.

    All candidates of a tier are in its order, inner nodes too. Callers offer a path from its end towards the root, so an
    ancestor always stands after its descendants and the first candidate is a leaf of the tier: no search for leaves. A node
    that comes down into a tier has no ancestor in that tier's order, because tiers are closed towards the root: an ancestor's
    fastest tier is at least the one that the node just left.
    """

    def __init__(self, tiers: int) -> None:
        self._ends: Sequence[_Ring] = [_Ring() for _ in range(tiers)]

    def admit(self, position: int, blocks: int) -> bool:
        """Admit everything."""
        return True

    def offered(self, node: Node, position: int) -> None:
        """Put the node at the recent end."""
        # Written out, as `withheld` is: each lease comes by here once a node, and a call costs more than the links.
        assert node.newer is None
        end = self._ends[position].end
        older = end.older
        assert older is not None
        node.older, node.newer = older, end
        older.newer = end.older = node

    def withheld(self, node: Node, position: int) -> None:
        """Take the node out."""
        older, newer = node.older, node.newer
        assert older is not None and newer is not None
        older.newer, newer.older = newer, older
        node.older = node.newer = None

    def moved(self, node: Node, position: int, to: int) -> None:
        """Take the node over to the recent end of the other order."""
        self._ends[position].remove(node)
        self._ends[to].insert(node, after=None)

    def split(self, head: Node, tail: Node, position: int) -> None:
        """Put the head right after its tail."""
        self._ends[position].insert(head, after=tail)

    def victims(self, position: int) -> Iterator[Node]:
        """Yield from the old end. What the caller left in place is passed over once."""
        ring = self._ends[position]
        passed: Node | None = None
        while True:
            node = passed.newer if passed is not None and _is_in(passed, position) else ring.oldest
            if node is None or node is ring.end:
                return
            yield node
            if _is_in(node, position):  # the caller left it
                passed = node

    def oldest(self, position: int) -> int | None:
        """Return the stamp of the node at the old end."""
        node = self._ends[position].oldest
        return node.used if node is not None else None


def _is_in(node: Node, position: int) -> bool:
    return node.newer is not None and node.tag == position


class _Ring:
    """A doubly linked list through `older` and `newer`, closed by a sentinel."""

    __slots__ = ("end",)

    def __init__(self) -> None:
        # The sentinel is a node only for its links.
        self.end: Node = Node.__new__(Node)
        self.end.older = self.end.newer = self.end

    @property
    def oldest(self) -> Node | None:
        node = self.end.newer
        return node if node is not self.end else None

    def insert(self, node: Node, *, after: Node | None) -> None:
        assert node.newer is None
        older = after if after is not None else self.end.older
        assert older is not None and older.newer is not None
        node.older, node.newer = older, older.newer
        older.newer.older = node
        older.newer = node

    def remove(self, node: Node) -> None:
        older, newer = node.older, node.newer
        assert older is not None and newer is not None
        older.newer, newer.older = newer, older
        node.older = node.newer = None


class Payers:
    """Chooses the namespace that gives up a node next: the one whose first victim was used longest ago.

    A heap of (stamp, number, policy) a tier, corrected lazily: use makes stamps grow, so an entry that is out of date is mostly
    too small, comes up early, and is put back with its present stamp. (A node that came down from above keeps its old stamp:
    then the entry is too large, and its namespace pays a little late.)
    """

    def __init__(self, tiers: int) -> None:
        self._heaps: list[list[tuple[int, int, Policy]]] = [[] for _ in range(tiers)]
        self._listed: list[set[int]] = [set() for _ in range(tiers)]

    def announce(self, number: int, policy: Policy, position: int) -> None:
        """Make the namespace `number` known as one that may have candidates in the tier."""
        if number not in self._listed[position]:
            self._listed[position].add(number)
            heapq.heappush(self._heaps[position], (policy.oldest(position) or 0, number, policy))

    def victims(self, position: int) -> Iterator[Node]:
        """Yield candidates over all namespaces, the least recently used first.

        Each namespace's next candidate is asked for when the one before has been dealt with, and stands in line by its own
        stamp: what a caller leaves in place (it moves, and goes when it has moved) doesn't make its namespace pay twice.
        """
        heap, listed = self._heaps[position], self._listed[position]
        begun: list[tuple[int, int, Policy]] = []
        line: list[tuple[int, int, Node, Iterator[Node]]] = []
        try:
            while heap or line:
                if heap and (not line or heap[0][0] <= line[0][0]):
                    stamp, number, policy = heap[0]
                    now = policy.oldest(position)
                    if now is None:
                        heapq.heappop(heap)
                        listed.discard(number)
                    elif now != stamp:
                        heapq.heapreplace(heap, (now, number, policy))
                    else:
                        begun.append(heapq.heappop(heap))
                        _queue(line, number, policy.victims(position))
                else:
                    _, number, node, candidates = heapq.heappop(line)
                    if node.alive and node.tag == position and not node.holds:  # it waited in line meanwhile
                        yield node
                    _queue(line, number, candidates)
        finally:
            for entry in begun:
                heapq.heappush(heap, entry)


def _queue(line: list[tuple[int, int, Node, Iterator[Node]]], number: int, candidates: Iterator[Node]) -> None:
    node = next(candidates, None)
    if node is not None:
        heapq.heappush(line, (node.used, number, node, candidates))
