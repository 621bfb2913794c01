"""What should move: room, promotions, copies to a durable tier; and what a finished move changes.

Plans are made and committed here, in steps that never wait; `tiercache.storage.mover` executes them in between. A plan
reserves its destination slots, marks its nodes, and from then on owns both until `complete` takes its report: a caller that
goes away changes nothing about it.

Room is made strictly downwards. A tier's spare copies go first, then the policy's victims: one with a copy further down just
loses the upper one, another is copied down first. What becomes a leaf of its tier when a copy between memories has ended is
waited for: it is not passed over for one that was used later. Nobody waits for a disk in this way.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from tiercache.changes import Reason
from tiercache.keys import ROOT_KEY
from tiercache.residency import Residency
from tiercache.stats import Stats
from tiercache.table import rows
from tiercache.transfer import Discard, Report, State, Transfer
from tiercache.tree import BLOCK_IDS, Node, ancestry

Work = Transfer | Discard
_TRIES = 32
"""Victims that could not be moved before a call for room gives up."""
_AHEAD = 8
"""For how many of these a victim counts of whose way only a part could be written to a durable tier."""


class Moves:
    """Plans and commits the moves of one residency. `batch_blocks` is the most that one transfer to a durable tier takes."""

    def __init__(self, residency: Residency, stats: Stats, *, batch_blocks: int) -> None:
        self.residency = residency
        self._stats = stats
        self.flying: dict[int, Work] = {}
        """Planned and not yet complete, by number."""
        self.leaving = [0] * len(residency.tiers)
        """Slots of each tier that moves in flight will free when they succeed."""
        self.leaving_to_disk = [0] * len(residency.tiers)
        """Of these, the slots whose blocks are being written to a durable tier."""
        self.refusing: set[int] = set()
        """Positions of tiers whose store fails: nothing is planned into them."""
        self._parting: list[Counter[Node]] = [Counter() for _ in residency.tiers]
        """How many children of a node are on their way out of a tier."""
        self._batch = max(1, batch_blocks)
        self._number = 0

    # --- room -----------------------------------------------------------------------------------------------------------

    def make_room(self, position: int, want: int, *, drop: bool = False, spare: bool = True) -> list[Work]:
        """Free slots of the tier until `want` are free or will be, and return the moves that this needs.

        What can be freed at once is free when the call returns; the rest when the returned moves have completed. An empty
        list with fewer than `want` free slots, and nothing in flight, means that no more room can be had: everything else is
        in use. With `drop`, a victim that the tier below can't take now is evicted and counted. A durable tier can't: who asks
        for this has waited long enough, and is not to wait for a disk, nor for what is on its way there.
        """
        residency = self.residency
        pool = residency.slots[position]
        work: list[Work] = []
        bottom = position + 1 == len(residency.tiers)
        # Spare copies of the last tier go last where they outlive the process; elsewhere they are of no use to anybody.
        lasting = bottom and residency.durable[position]
        if not lasting:
            self._drop_spare(position, want, drop=drop)
        stuck, dry = 0, False
        for node in residency.payers.victims(position):
            lack = want - pool.free - self._soon_free(position, drop=drop)
            if lack <= 0 or stuck == _TRIES:
                break
            if not residency.is_free_to_lose(node, position):
                if not drop and not bottom and self._is_next(node, position):
                    break  # it goes when its children have gone, and before what was used later
                continue
            if bottom:
                residency.remove(self._tail(node, lack), Reason.EVICT)
                self._collect_waste(position, work)
            elif residency.has_place_below(node, position):
                residency.lose(self._tail(node, lack), position, Reason.DEMOTE)
            elif (planned := None if dry else self._plan_down(node, position, position + 1, lack, work, drop=drop)) is None:
                # Once the tier below has nothing to give, nobody is to ask it again for each of many victims.
                dry = dry or not residency.slots[position + 1].free
                # What makes room below may have taken the node itself.
                if drop and node.children is None and residency.is_free_to_lose(node, position):
                    residency.remove(self._tail(node, lack), Reason.DROP)
                else:
                    stuck += 1
            elif not planned.drop_count:
                stuck += _AHEAD  # it will free nothing yet; not every long chain is to be written ahead for one slot
        if lasting and spare:
            self._drop_spare(position, want, drop=drop)
        work.extend(self.take_waste())
        return work

    def _is_next(self, node: Node, position: int) -> bool:
        """Return whether all children that the node has in the tier are on their way out of it, and not to a disk."""
        if node.holds or self.residency.durable[position + 1]:
            return False
        return self._parting[position].get(node, 0) >= self.residency.kids(node, position) > 0

    def _soon_free(self, position: int, *, drop: bool) -> int:
        """Return how many slots moves in flight will free; who may drop doesn't count on a disk."""
        return self.leaving[position] - (self.leaving_to_disk[position] if drop else 0)

    def _drop_spare(self, position: int, want: int, *, drop: bool) -> None:
        residency, pool = self.residency, self.residency.slots[position]
        spare = residency.spare[position]
        passed: list[Node] = []
        while spare and (lack := want - pool.free - self._soon_free(position, drop=drop) - len(residency.waste[position])) > 0:
            node, _ = spare.popitem(last=False)
            if not residency.is_free_to_lose(node, position):
                passed.append(node)
                continue
            spare[node] = None
            node = self._tail(node, lack)
            residency.lose(node, position, Reason.DEMOTE)
        for node in passed:
            spare[node] = None

    def _plan_down(self, node: Node, position: int, below: int, lack: int, work: list[Work], *, drop: bool) -> Transfer | None:
        """Plan to move up to `lack` blocks, `node`'s and those above it, into the tier below; return the move, if any.

        Where a durable tier must be given more first than one transfer takes, the move copies only, and frees nothing.
        """
        residency, pool = self.residency, self.residency.slots[below]
        if below in self.refusing or (drop and residency.durable[below]):
            return None
        if not residency.durable[below]:
            need = min(lack, sum(len(other.blocks) for other in self._run(node, position, below, lack)))
            if pool.free < need:
                work.extend(self.make_room(below, need, drop=drop))
            if pool.free == 0 or not residency.is_free_to_lose(node, position):
                return None
            run = self._cut(self._run(node, position, below, lack), min(lack, pool.free))
            count = sum(len(other.blocks) for other in run)
            work.append(moved := self._begin(run, below, Reason.DEMOTE, drop_from=position, drop_count=count))
            return moved
        # A durable tier is closed itself: what it lacks of the way to the tail goes with it, root first, as clean copies.
        chain = self._missing(node, below)
        need = sum(len(other.blocks) for other in chain)
        if not chain or not self._continues(chain[0], below):
            return None  # the part before is on its way; its blocks commit first
        if pool.free < need:
            work.extend(self.make_room(below, need, drop=drop))
            chain = self._missing(node, below)
        fits = min(pool.free, self._batch)
        if fits == 0 or not node.alive or not chain or not self._continues(chain[0], below):
            return None
        if need > fits:
            work.append(ahead := self._begin(self._leading(chain, fits), below, Reason.COPY))
            return ahead
        run = self._cut(self._run(node, position, below, lack), lack)
        count = sum(len(other.blocks) for other in run)
        chain = self._missing(node, below)  # anew: the run was cut
        work.append(moved := self._begin(chain, below, Reason.DEMOTE, drop_from=position, drop_count=count))
        return moved

    def _run(self, node: Node, position: int, below: int, lack: int) -> list[Node]:
        """Return the nodes, root first, that leave the tier in one move with its leaf `node`, as far as `lack` asks for them.

        A parent does when it was last used with its child, is a leaf of the tier once the child has gone, and is not below
        either: it would be the next victim. A prompt that was stored block by block thus goes down in one piece.
        """
        residency = self.residency
        run, count = [node], len(node.blocks)
        while count < lack:
            above = run[-1].parent
            if above is None or above.used != node.used or above.holds or above.moves:
                break
            if above.tag != position or residency.kids(above, position) != 1 or (above.copies | above.arriving) >> below & 1:
                break
            run.append(above)
            count += len(above.blocks)
        run.reverse()
        return run

    def _cut(self, run: list[Node], most: int) -> list[Node]:
        """Return the end of a run that makes up at most `most` blocks, its first node cut to fit."""
        chosen: list[Node] = []
        for node in reversed(run):
            if most <= 0:
                break
            chosen.append(self._tail(node, most))
            most -= len(node.blocks)
        chosen.reverse()
        return chosen

    def _continues(self, first: Node, position: int) -> bool:
        """Return whether the durable tier holds what comes before `first`."""
        above = first.parent
        return above is None or above.parent is None or bool(above.copies >> position & 1)

    def _missing(self, end: Node | None, position: int) -> list[Node]:
        """Return the nodes from the root down to `end` that the tier does not hold: the end part of the path."""
        found: list[Node] = []
        for node in ancestry(end) if end is not None else ():
            if (node.copies | node.arriving) >> position & 1:
                break
            found.append(node)
        found.reverse()
        return found

    def _tail(self, node: Node, count: int) -> Node:
        """Return the last `count` blocks of `node` as a node."""
        if count < len(node.blocks):
            self.residency.split(node, len(node.blocks) - count)
        return node

    def _leading(self, nodes: Sequence[Node], count: int) -> list[Node]:
        """Return the leading nodes of a chain that make up at most `count` blocks, the last one cut to fit."""
        chosen: list[Node] = []
        for node in nodes:
            if count <= 0:
                break
            first = self.residency.split(node, count) if len(node.blocks) > count else node
            chosen.append(first)
            count -= len(first.blocks)
        return chosen

    # --- promotions and copies down ---------------------------------------------------------------------------------------

    def slower(self, end: Node, position: int) -> list[Node]:
        """Return the nodes of the path to `end` that lie below the tier and are not on their way there, root first."""
        found: list[Node] = []
        for node in ancestry(end):
            tag = node.tag
            if tag is None or tag <= position:
                break
            found.append(node)
        found.reverse()
        return list(_until(found, lambda node: not node.alive or bool(node.arriving >> position & 1)))

    def plan_promote(self, end: Node, position: int, *, most: int, layerwise: bool = False) -> Transfer | None:
        """Plan to bring the part of the path to `end` that lies just below the tier up to it, as far as slots are free.

        All blocks of the transfer come from one tier, the one that holds the first of them. Returns None when there is
        nothing to bring, no slot, or the part above is not there yet.
        """
        residency = self.residency
        nodes = self.slower(end, position)
        if not nodes or position in self.refusing:
            return None
        first = nodes[0]
        above = first.parent
        if above is not None and above.parent is not None and (above.tag is None or above.tag > position):
            return None
        source = first.tag
        nodes = list(_until(nodes, lambda node: node.tag != source))
        count = min(most, residency.slots[position].free, sum(len(node.blocks) for node in nodes))
        chosen = self._leading(nodes, count)
        if not chosen:
            return None
        return self._begin(chosen, position, Reason.PROMOTE, layerwise=layerwise)

    def plan_persist(self, end: Node, position: int) -> Transfer | None:
        """Plan to copy what the durable tier lacks of the path to `end`, root first, as far as slots are free."""
        nodes = self._missing(end, position) if end.alive else []
        if not nodes:
            return None
        if not self._continues(nodes[0], position):
            return None  # the part before is on its way; its blocks commit first
        nodes = self._leading(nodes, min(self._batch, self.residency.slots[position].free))
        return self._begin(nodes, position, Reason.COPY) if nodes else None

    # --- begin and complete -----------------------------------------------------------------------------------------------

    def _begin(
        self,
        nodes: Sequence[Node],
        to: int,
        reason: Reason,
        *,
        drop_from: int | None = None,
        drop_count: int = 0,
        layerwise: bool = False,
    ) -> Transfer:
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
            layerwise=layerwise,
        )
        self.flying[transfer.number] = transfer
        if drop_from is not None:
            self.leaving[drop_from] += drop_count
            self.leaving_to_disk[drop_from] += drop_count if residency.durable[to] else 0
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
        assert transfer.parting is not None
        parting = self._parting[position]
        parting[transfer.parting] -= 1
        if not parting[transfer.parting]:
            del parting[transfer.parting]

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
        for source in transfer.sources[: sum(len(node.blocks) for node in done)]:
            self._stats.copied[residency.tiers[source], residency.tiers[transfer.to]] += 1
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
            # A lease taken while the copy ran keeps the upper copy; the one below makes the next demotion free.
            if len(node.blocks) <= rest and node.copies >> position & 1 and self.residency.is_free_to_lose(node, position):
                self.residency.lose(node, position, Reason.DEMOTE)
            rest -= len(node.blocks)

    # --- discards ---------------------------------------------------------------------------------------------------------

    def take_waste(self) -> list[Work]:
        """Return the discards for all slots whose records are to go."""
        work: list[Work] = []
        for position in range(len(self.residency.tiers)):
            self._collect_waste(position, work)
        return work

    def _collect_waste(self, position: int, work: list[Work]) -> None:
        slots = self.residency.waste[position]
        if not slots:
            return
        self.residency.waste[position] = []
        self._number += 1
        discard = Discard(number=self._number, position=position, slots=slots)
        self.flying[discard.number] = discard
        self.leaving[position] += len(slots)
        work.append(discard)

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

    def discarded(self, discard: Discard) -> None:
        """Free the slots of a discard whose records are gone."""
        assert discard.state is not State.DONE
        discard.state = State.DONE
        del self.flying[discard.number]
        self.leaving[discard.position] -= len(discard.slots)
        self.residency.slots[discard.position].give(discard.slots)


def _until(nodes: Iterable[Node], stop: Callable[[Node], bool]) -> Iterator[Node]:
    """Yield nodes up to the first one for which `stop` holds."""
    for node in nodes:
        if stop(node):
            return
        yield node
