"""How the tree comes back from what a durable tier's metadata names."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tiercache.cache import Cache
from tiercache.changes import Reason
from tiercache.keys import ROOT_KEY
from tiercache.table import rows
from tiercache.tree import Node


class Stored(NamedTuple):
    """One block that metadata names, as columns of one namespace, the least recently used first."""

    slots: Sequence[int]
    keys: Sequence[bytes]
    parents: Sequence[bytes]
    symbols: Sequence[bytes]
    checksums: Sequence[int]
    charges: Sequence[int]

    def at(self, places: Sequence[int]) -> Stored:
        """Return the rows at `places`."""
        return Stored(
            slots=[self.slots[place] for place in places],
            keys=[self.keys[place] for place in places],
            parents=[self.parents[place] for place in places],
            symbols=[self.symbols[place] for place in places],
            checksums=[self.checksums[place] for place in places],
            charges=[self.charges[place] for place in places],
        )


def restore(cache: Cache, namespace: bytes, stride: int, stored: Stored, position: int) -> list[int]:
    """Build the tree of a namespace from what the durable tier at `position` holds, and return the slots to discard.

    To discard are blocks whose chain is broken, blocks of another symbol width, those that follow a key which two blocks have (a
    collision of digests), and what a tier that has become smaller can't hold. Costs one pass; depth does not matter. Runs of only
    children become one node. The order of the columns becomes the order of recency, with every ancestor as recent as its most
    recent descendant.
    """
    pool = cache.residency.slots[position]
    runs = _chains(stored, stride, capacity=pool.capacity, budget=pool.budget - pool.used)
    reached = [row for run in runs for row in run.rows]
    slots = [stored.slots[row] for row in reached]
    pool.claim(slots, [stored.charges[row] for row in reached])
    pool.hold(slots)
    space = cache.residency.space(namespace, stride)
    nodes: list[Node] = []
    for run in runs:
        parent = space.tree.root if run.parent is None else nodes[run.parent]
        nodes.append(_plant(cache, parent, run.rows, stored, position))
    _order(cache, nodes, runs)
    kept = set(reached)
    return [slot for row, slot in enumerate(stored.slots) if row not in kept]


class _Run(NamedTuple):
    """Rows that become one node, and the run they follow."""

    parent: int | None
    rows: list[int]


def _chains(stored: Stored, stride: int, *, capacity: int, budget: int) -> list[_Run]:
    """Return the runs that can be reached from the root, each after the one it follows."""
    _, keys, parents, symbols, _, charges = stored
    # A block has one follower or none, but at a branch: a number for each, and a list where there are several.
    following: dict[bytes, int] = {}
    branches: dict[bytes, list[int]] = {}
    for row, (parent, symbol, slot) in enumerate(zip(parents, symbols, stored.slots, strict=True)):
        if len(symbol) == stride and slot < capacity:
            first = following.setdefault(parent, row)
            if first != row:
                branches.setdefault(parent, [first]).append(row)
    for key in _shared(stored):
        following.pop(key, None)
        branches.pop(key, None)

    def after(key: bytes) -> list[int]:
        row = following.get(key)
        return [] if row is None else branches.get(key) or [row]

    # Also with the same key twice in other ways no row is to be reached twice, and no chain to lead back into itself.
    reached = bytearray(len(keys))
    runs: list[_Run] = []
    stack: list[tuple[int | None, int]] = [(None, row) for row in after(ROOT_KEY)]
    while stack:
        before, row = stack.pop()
        if reached[row] or charges[row] > budget:
            continue
        run: list[int] = []
        next_row: int | None = row
        while next_row is not None and not reached[next_row] and charges[next_row] <= budget:
            row = next_row
            reached[row] = 1
            budget -= charges[row]
            run.append(row)
            key = keys[row]
            next_row = following.get(key) if key not in branches else None
        seen: set[bytes] = set()
        for row in after(key):
            if not reached[row] and symbols[row] not in seen:
                seen.add(symbols[row])
                stack.append((len(runs), row))
        runs.append(_Run(before, run))
    return runs


def _shared(stored: Stored) -> set[bytes]:
    """Return the keys that two different blocks have: which of them a block follows that names such a parent, nobody can tell."""
    if len(set(stored.keys)) == len(stored.keys):
        return set()
    meant: dict[bytes, tuple[bytes, bytes]] = {}
    shared: set[bytes] = set()
    for key, parent, symbol in zip(stored.keys, stored.parents, stored.symbols, strict=True):
        if meant.setdefault(key, (parent, symbol)) != (parent, symbol):
            shared.add(key)
    return shared


def _plant(cache: Cache, parent: Node, run: list[int], stored: Stored, position: int) -> Node:
    table = cache.residency.table
    blocks: array[int] = table.allocate(len(run))
    table.key[rows(blocks)] = np.frombuffer(b"".join(stored.keys[row] for row in run), dtype=np.uint8).reshape(-1, 32)
    key = b"".join(stored.symbols[row] for row in run)
    slots, checksums = [stored.slots[row] for row in run], [stored.checksums[row] for row in run]
    return cache.residency.plant(parent, key, blocks, position, slots, checksums, Reason.RESTORE)


def _order(cache: Cache, nodes: list[Node], runs: list[_Run]) -> None:
    """Offer the nodes from the least to the most recently used one, descendants before their ancestors."""
    recency = [max(run.rows) for run in runs]
    for place in range(len(runs) - 1, -1, -1):  # a run comes after the one it follows
        parent = runs[place].parent
        if parent is not None:
            recency[parent] = max(recency[parent], recency[place])
    for place in sorted(range(len(runs)), key=lambda place: (recency[place], -place)):
        cache.residency.restored(nodes[place])
