"""Moves in flight: what a plan reserves, and what changes when its copy has ended.

From `begin` on a transfer owns its destination slots and keeps its nodes, until `complete` takes its report: a caller that goes
away changes nothing about it. Everything is a step that never waits; `tiercache.storage.mover` copies in between.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import islice

from tiercache.changes import Reason
from tiercache.keys import ROOT_KEY
from tiercache.residency import Residency
from tiercache.stats import Stats
from tiercache.table import rows
from tiercache.transfer import Discard, Report, State, Transfer, Work
from tiercache.tree import BLOCK_IDS, Node


class InFlight:
    """The moves of one residency that were begun and are not yet complete, and what they will free."""

    def __init__(self, residency: Residency, stats: Stats) -> None:
        self.residency = residency
        self._stats = stats
        self.flying: dict[int, Work] = {}
        """By number."""
        self.leaving = [0] * len(residency.tiers)
        """Slots of each tier that moves in flight will free when they succeed."""
        self.leaving_to_disk = [0] * len(residency.tiers)
        """Of these, the slots whose blocks are being written to a durable tier."""
        self._parting: list[Counter[Node]] = [Counter() for _ in residency.tiers]
        """How many children of a node are on their way out of a tier, by copies between memories."""
        self._number = 0

    def parting(self, node: Node, position: int) -> int:
        """Return how many children of the node are on their way out of the tier, and not to a disk."""
        return self._parting[position].get(node, 0)

    def copied_away(self, position: int) -> int:
        """Return how many slots of the tier copies between memories, and discards, will free: what never waits for a write."""
        return self.leaving[position] - self.leaving_to_disk[position]

    # --- begin and complete -----------------------------------------------------------------------------------------------

    def begin(
        self,
        nodes: Sequence[Node],
        to: int,
        reason: Reason,
        *,
        drop_from: int | None = None,
        drop_count: int = 0,
    ) -> Transfer:
        """Reserve slots of the tier at `to` for the blocks of a chain of nodes, mark these, and return the transfer.

        There are slots for all of them. With `drop_from`, that tier loses the last `drop_count` blocks once they have arrived.
        """
        residency, table = self.residency, self.residency.table
        blocks = array(BLOCK_IDS)
        sources: list[int] = []
        slots_from: list[int] = []
        for node in nodes:
            tag = node.tag
            assert tag is not None and node.alive
            blocks.extend(node.blocks)
            sources.extend([tag] * len(node.blocks))
            slots_from.extend(table.slots(node.blocks, tag))
        index = rows(blocks)
        slots_to = residency.slots[to].take(len(blocks))
        assert len(slots_to) == len(blocks)
        residency.begin_move(nodes, to)
        above = nodes[0].parent
        assert above is not None
        space = nodes[0].space
        keyed = any(residency.durable[source] for source in sources)
        self._number += 1
        transfer = Transfer(
            number=self._number,
            end=nodes[-1],
            blocks=blocks,
            generations=table.generation[index],
            sources=sources,
            slots_from=slots_from,
            to=to,
            slots_to=slots_to,
            checksums=table.checksum[index].tolist(),
            symbols=b"".join(node.key for node in nodes),
            stride=space.tree.stride,
            namespace=space.digest,
            parent_key=table.keys(above.blocks[-1:])[0] if above.parent is not None else ROOT_KEY,
            keys=table.keys(blocks) if keyed else None,
            reason=reason,
            drop_from=drop_from,
            drop_count=drop_count,
        )
        self.flying[transfer.number] = transfer
        if drop_from is not None:
            self.leaving[drop_from] += drop_count
            self.leaving_to_disk[drop_from] += drop_count if residency.durable[to] else 0
            if not residency.durable[to]:
                transfer.parting = self._above(nodes, drop_count)
                self._parting[drop_from][transfer.parting] += 1
        return transfer

    @staticmethod
    def _above(nodes: Sequence[Node], count: int) -> Node:
        """Return the parent of the first of the last nodes of a chain that make up `count` blocks."""
        node = nodes[-1]
        for node in reversed(nodes):
            count -= len(node.blocks)
            if count <= 0:
                break
        assert node.parent is not None
        return node.parent

    def complete(self, transfer: Transfer, report: Report) -> list[Work]:
        """Commit the blocks that arrived, in chain order, give back what did not, and return the moves that this entails.

        A block is committed only when its node is still in the tree, it is the same block as when the transfer began, and its
        parent is where the destination needs it; the first that is not ends the commit.
        """
        residency, table, to = self.residency, self.residency.table, transfer.to
        assert transfer.state is not State.DONE
        transfer.state = State.DONE
        del self.flying[transfer.number]
        self._let_go(transfer)
        assert (table.generation[rows(transfer.blocks)] == transfer.generations).all(), "a block in flight was freed"
        for slot, charge in zip(transfer.slots_to, report.charges, strict=False):
            residency.slots[to].settle(slot, charge)
        done: list[Node] = []
        failed: list[Node] = []
        at = 0
        for node in residency.owners(transfer.blocks):
            fits = min(len(node.blocks), report.arrived - at) if not failed else 0
            at += len(node.blocks)
            if fits == 0 or not node.alive or not self._parent_is_there(node, to, done):
                failed.append(node)
            elif fits < len(node.blocks):
                done.append(residency.split(node, fits))
                failed.append(node)
            else:
                done.append(node)
        self._commit(transfer, done, report)
        for node in [*done, *failed]:
            residency.end_move(node, to)
        committed = sum(len(node.blocks) for node in done)
        if residency.durable[to]:  # what was written and not committed has a record
            residency.waste[to].extend(transfer.slots_to[committed : report.arrived])
            residency.slots[to].give(transfer.slots_to[max(committed, report.arrived) :])
        else:
            residency.slots[to].give(transfer.slots_to[committed:])
        self._drop_upper(transfer, done, failed)
        if transfer.reason is Reason.PROMOTE and done:
            residency.touch(done[-1])
        if report.rotten and committed == report.arrived and failed:
            residency.distrust(failed[0])
        return self.take_waste()

    def _let_go(self, transfer: Transfer) -> None:
        """Take back that a transfer will free slots above."""
        position = transfer.drop_from
        if position is None:
            return
        self.leaving[position] -= transfer.drop_count
        self.leaving_to_disk[position] -= transfer.drop_count if self.residency.durable[transfer.to] else 0
        if transfer.parting is not None:
            parting = self._parting[position]
            parting[transfer.parting] -= 1
            if not parting[transfer.parting]:
                del parting[transfer.parting]

    def forsake(self, work: Work) -> None:
        """Count no more on the slots that a move was to free: it has ended without a report, and may still touch them.

        What it reserved stays reserved, its blocks stay where they are, and neither can be used for anything else.
        """
        if work.number not in self.flying:
            return
        if isinstance(work, Discard):
            self.leaving[work.position] -= len(work.slots)
        elif work.drop_from is not None:
            self._let_go(work)
            work.drop_from, work.drop_count = None, 0

    def _parent_is_there(self, node: Node, to: int, done: Sequence[Node]) -> bool:
        parent = node.parent
        if parent is None or parent.parent is None or (done and parent is done[-1]):
            return True
        if self.residency.durable[to]:
            return bool(parent.copies >> to & 1)
        tag = parent.tag
        return tag is not None and tag <= to

    def _commit(self, transfer: Transfer, done: Sequence[Node], report: Report) -> None:
        residency, table = self.residency, self.residency.table
        slots = iter(transfer.slots_to)
        keys = iter(report.keys)
        for source, count in Counter(transfer.sources[: sum(len(node.blocks) for node in done)]).items():
            self._stats.copied[residency.tiers[source], residency.tiers[transfer.to]] += count
        for node in done:
            for block, key in zip(node.blocks, islice(keys, len(node.blocks)), strict=False):
                table.key[block] = memoryview(key)
            residency.gain(node, transfer.to, list(islice(slots, len(node.blocks))), transfer.reason)

    def _drop_upper(self, transfer: Transfer, done: Sequence[Node], failed: Sequence[Node]) -> None:
        if transfer.drop_from is None:
            return
        position = transfer.drop_from
        rest = transfer.drop_count - sum(len(node.blocks) for node in failed)
        for node in reversed(done):
            if rest <= 0:
                break
            # A lease taken while the copy ran keeps the upper copy, as does a child that came to a tier in between; the copy
            # below makes the next demotion free.
            if len(node.blocks) <= rest and node.copies >> position & 1 and self._may_lose(node, position):
                self.residency.lose(node, position, Reason.DEMOTE)
            rest -= len(node.blocks)

    def _may_lose(self, node: Node, position: int) -> bool:
        return self.residency.is_free_to_lose(node, position) and self.residency.has_place_below(node, position)

    # --- discards ---------------------------------------------------------------------------------------------------------

    def take_waste(self) -> list[Work]:
        """Return the discards, one a tier, for all slots whose records are to go."""
        work: list[Work] = []
        for position, slots in enumerate(self.residency.waste):
            if slots:
                self.residency.waste[position] = []
                self._number += 1
                discard = Discard(number=self._number, position=position, slots=slots)
                self.flying[discard.number] = discard
                self.leaving[position] += len(slots)
                work.append(discard)
        return work

    def discarded(self, discard: Discard) -> None:
        """Free the slots of a discard whose records are gone."""
        assert discard.state is not State.DONE
        discard.state = State.DONE
        del self.flying[discard.number]
        self.leaving[discard.position] -= len(discard.slots)
        self.residency.slots[discard.position].give(discard.slots)
