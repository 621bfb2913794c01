"""The audit behind `check()`: everything that must be true of the books, computed anew from the tree."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tiercache.cache import Cache
from tiercache.errors import AuditFailed
from tiercache.slots import SlotState
from tiercache.table import NOWHERE, rows
from tiercache.transfer import Discard, Transfer
from tiercache.tree import BLOCK_IDS, Node, ancestry, subtree


def check(cache: Cache) -> dict[str, int]:
    """Compare the books of `cache` with what the tree says; return how much was looked at.

    Every slot is in exactly one of {free, owned by one block, held by one transfer or reservation, quarantined}; used = sum
    over blocks = capacity - free; tiers are closed towards the root, durable ones as copies too; lease counts equal the live
    leases; nothing is negative. Raises AuditFailed with every fault found.
    """
    faults: list[str] = []
    nodes = [node for space in cache.residency.spaces.values() for node in subtree(space.tree.root) if node.parent is not None]
    _check_structure(cache, nodes, faults)
    _check_claims(cache, nodes, faults)
    _check_slots(cache, faults)
    _check_orders(cache, nodes, faults)
    if faults:
        raise AuditFailed(f"{len(faults)} faults: " + "; ".join(faults[:10]), faults=faults)
    return {
        "nodes": len(nodes),
        "blocks": sum(len(node.blocks) for node in nodes),
        "leases": sum(len(session.leases) for session in cache.sessions),
    }


def _check_structure(cache: Cache, nodes: list[Node], faults: list[str]) -> None:
    residency, table = cache.residency, cache.residency.table
    kids: Counter[tuple[int, int]] = Counter()
    blocks, owner = _blocks(nodes)
    numbers = np.array([node.number for node in nodes], np.int64)
    astray = {int(place) for place in owner[table.owner[blocks] != numbers[owner]]}
    misplaced: list[set[int]] = []
    for position in range(len(residency.tiers)):
        copied = np.array([bool(node.copies >> position & 1) for node in nodes], np.bool_)
        misplaced.append({int(place) for place in owner[(table.slot[position][blocks] != NOWHERE) != copied[owner]]})
    for place, node in enumerate(nodes):
        stride, parent = node.space.tree.stride, node.parent
        assert parent is not None
        if not len(node.blocks) or len(node.key) != len(node.blocks) * stride:
            faults.append(f"{node!r} has a key of {len(node.key)} bytes")
        if parent.children is None or parent.children.get(node.key[:stride]) is not node:
            faults.append(f"{node!r} is not its parent's child")
        if not node.alive or residency.nodes[node.number] is not node or place in astray:
            faults.append(f"{node!r} is not the owner of its blocks")
        if not node.copies or node.copies & node.arriving:
            faults.append(f"{node!r} has no copy, or one that is also on its way ({node.arriving:b})")
        tag, above = node.tag, parent.tag
        if tag is not None and parent.parent is not None and (above is None or above > tag):
            faults.append(f"{node!r} is in a faster tier than its parent {parent!r}")
        for position, durable in enumerate(residency.durable):
            bit = 1 << position
            if durable and node.copies & bit and parent.parent is not None and not parent.copies & bit:
                faults.append(f"{node!r} is durable and its parent is not")
            if (node.copies | node.arriving) & bit:
                kids[id(parent), position] += 1
            if place in misplaced[position]:
                faults.append(f"{node!r}: slots in {residency.tiers[position]} do not agree with its copies")
    for node in [*nodes, *(space.tree.root for space in residency.spaces.values())]:
        for position in range(len(residency.tiers)):
            counted, there = residency.kids(node, position), kids[id(node), position]
            if counted != there:
                faults.append(f"{node!r} counts {counted} children at {position}, has {there}")
    named, counts = np.unique(blocks, return_counts=True)
    faults.extend(f"block {named[at]} is in {counts[at]} nodes" for at in np.flatnonzero(counts > 1))


def _blocks(nodes: Sequence[Node]) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Return the blocks that `nodes` name, and for each the place in `nodes` of who names it: read at once, not node by node."""
    together = array(BLOCK_IDS)
    for node in nodes:
        together.extend(node.blocks)
    return rows(together), np.repeat(np.arange(len(nodes), dtype=np.int64), [len(node.blocks) for node in nodes])


def _check_claims(cache: Cache, nodes: list[Node], faults: list[str]) -> None:
    holds: Counter[int] = Counter()
    leased: Counter[tuple[int, int]] = Counter()
    held: dict[int, Node] = {}
    for session in cache.sessions:
        for lease in session.leases:
            if lease.node.parent is not None:
                holds[id(lease.node)] += 1
            held.update((id(node), node) for node in ancestry(lease.node))
            for position, blocks in enumerate(lease.charge):
                leased[session.number, position] += blocks
        for position, blocks in enumerate(session.leased):
            if blocks != leased[session.number, position] or blocks < 0:
                faults.append(f"session {session.number} is charged {blocks} blocks at {position}")
    for node in held.values():
        if node.parent is not None and node.parent.parent is not None:
            holds[id(node.parent)] += 1
    for position in range(len(cache.tiers)):
        count = sum(len(node.blocks) for node in cache.residency.nodes if node is not None and node.holds and node.tag == position)
        if count != cache.residency.held[position]:
            faults.append(f"{count} blocks of {cache.tiers[position]} are leased, the books say {cache.residency.held[position]}")
    moves: Counter[int] = Counter()
    for work in cache.inflight.flying.values():
        if isinstance(work, Transfer):
            for node in cache.residency.owners(work.blocks):
                moves[id(node)] += 1
    buried = [node for node in cache.residency.nodes if node is not None and not node.alive]
    for node in [*nodes, *buried]:
        if node.holds != holds[id(node)]:
            faults.append(f"{node!r} counts {node.holds} leases and held children, there are {holds[id(node)]}")
        if node.moves != moves[id(node)]:
            faults.append(f"{node!r} counts {node.moves} transfers, there are {moves[id(node)]}")
    if len(buried) != cache.residency.buried_held:
        faults.append(f"{len(buried)} nodes are gone and held, the books say {cache.residency.buried_held}")


def _check_slots(cache: Cache, faults: list[str]) -> None:
    residency, table = cache.residency, cache.residency.table
    reserved = [(place, r) for session in cache.sessions for r in session.reservations for place in r.places[r.committed :]]
    for position, pool in enumerate(residency.slots):
        tier = residency.tiers[position]
        column = table.slot[position]
        owned = np.sort(column[column != NOWHERE])
        if not np.array_equal(owned, pool.listed(SlotState.OWNED)):
            faults.append(f"{tier}: {len(owned)} slots belong to blocks, the pool says {len(pool.listed(SlotState.OWNED))}")
        held = [slot for (where, slot), _ in reserved if where == position]
        for work in cache.inflight.flying.values():
            if isinstance(work, Discard) and work.position == position:
                held.extend(work.slots)
            elif isinstance(work, Transfer) and work.to == position:
                held.extend(work.slots_to)
        held.extend(residency.waste[position])
        if sorted(held) != pool.listed(SlotState.HELD).tolist():
            faults.append(
                f"{tier}: {len(held)} slots are held by moves and writers, the pool says {len(pool.listed(SlotState.HELD))}"
            )
        apart = sorted(slot for kept in cache.quarantines for where, slot in kept.places if where == position)
        if apart != pool.listed(SlotState.QUARANTINED).tolist():
            faults.append(f"{tier}: {len(apart)} slots are in quarantine, the pool says {len(pool.listed(SlotState.QUARANTINED))}")
        census = pool.census()
        faults.extend(f"{tier}: {fault}" for fault in census.faults)
        if census.free + census.held + census.owned + census.quarantined != pool.capacity:
            faults.append(f"{tier}: the states do not add up to {pool.capacity}")
    named = sum(len(node.blocks) for node in residency.nodes if node is not None)
    loose = sum(len(r.blocks) - r.committed for session in cache.sessions for r in session.reservations)
    if named + loose != table.live:
        faults.append(f"{named} blocks are in nodes and {loose} reserved, the table has {table.live}")


def _check_orders(cache: Cache, nodes: list[Node], faults: list[str]) -> None:
    residency = cache.residency
    listed: Counter[tuple[int, int]] = Counter()
    for space in residency.spaces.values():
        for position in range(len(residency.tiers)):
            for node in space.policy.victims(position):
                listed[id(node), position] += 1
    for node in nodes:
        for position in range(len(residency.tiers)):
            expected = int(node.tag == position and not node.holds)
            if listed[id(node), position] != expected:
                faults.append(f"{node!r} is {listed[id(node), position]} times in the order of {residency.tiers[position]}")
            spare = (
                bool(node.copies >> position & 1) and node.tag != position and not node.holds and not residency.kids(node, position)
            )
            if (node in residency.spare[position]) != spare:
                faults.append(f"{node!r} is{'' if spare else ' not'} to be a spare copy of {residency.tiers[position]}")
    if sum(listed.values()) != sum(1 for node in nodes if not node.holds):
        faults.append("an order holds a node that is not in the tree")
