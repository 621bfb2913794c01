"""What should move: room, promotions, and copies to a durable tier.

Plans are made here, in steps that never wait; `tiercache.inflight` keeps them from then on, and the mover executes them.

Room is made strictly downwards. A tier's spare copies go first, then the policy's victims: one with a copy further down just
loses the upper one, another is copied down first. What becomes a leaf of its tier when a copy between memories has ended is
waited for: it is not passed over for one that was used later. Nobody waits for a disk in this way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from tiercache.changes import Reason
from tiercache.inflight import InFlight
from tiercache.pace import Pace
from tiercache.residency import Residency
from tiercache.transfer import Transfer, Work
from tiercache.tree import Node, ancestry

_TRIES = 32
"""Victims that could not be moved before a call for room gives up."""
_AHEAD = 8
"""For how many of these a victim counts of whose way only a part could be written to a durable tier."""


class Moves:
    """Plans the moves of one residency. `pace` says how much one transfer to a durable tier takes."""

    def __init__(self, residency: Residency, inflight: InFlight, *, pace: Pace) -> None:
        self.residency = residency
        self.inflight = inflight
        self.refusing: set[int] = set()
        """Positions of tiers whose store fails: nothing is planned into them."""
        self.blind: set[int] = set()
        """Positions of tiers whose store reads nothing: what only they hold is promised to nobody."""
        self.failing: set[int] = set()
        """Positions of tiers whose device fails: nothing is planned into them, nor out of them; who needs room there drops."""
        self.pace = pace

    # --- room -----------------------------------------------------------------------------------------------------------

    def make_room(self, position: int, want: int, *, drop: bool = False, spare: bool = True, past: bool = False) -> list[Work]:
        """Free slots of the tier until `want` are free or will be, and return the moves that this needs.

        What can be freed at once is free when the call returns; the rest when the returned moves have completed. An empty
        list with fewer than `want` free slots, and nothing in flight, means that no more room can be had: everything else is
        in use. With `drop`, a victim that the tier below can't take now is evicted and counted. A durable tier can't: who asks
        for this has waited long enough, and is not to wait for a disk, nor for what is on its way there. Without `spare`, a
        durable tier keeps the records of what lies further up, too. With `past`, what the tier below can't take, as all that it
        holds is leased or being written, goes past it: for who makes room ahead. A writer drops instead, since a block that a
        disk is writing can neither be dropped nor waited for.
        """
        work: list[Work] = []
        self._free(position, want, work, drop=drop, spare=spare, past=past)
        work.extend(self.inflight.take_waste())  # the records of all victims in one discard
        return work

    def _free(
        self,
        position: int,
        want: int,
        work: list[Work],
        *,
        drop: bool,
        spare: bool = True,
        past: bool = False,
        keep: Node | None = None,
    ) -> None:
        """Do what `make_room` says and add the transfers to `work`; `keep` is a node that loses no spare copy."""
        residency = self.residency
        pool = residency.slots[position]
        bottom = position + 1 == len(residency.tiers)
        # Spare copies of the last tier go last where they outlive the process; elsewhere they are of no use to anybody.
        lasting = bottom and residency.durable[position]
        if not lasting:
            self._drop_spare(position, want, drop=drop, keep=keep)
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
            elif residency.has_place_below(node, position):
                residency.lose(self._tail(node, lack), position, Reason.DEMOTE)
            elif (planned := None if dry else self._plan_down(node, position, lack, work, drop=drop, past=past)) is None:
                # Once the tier below has nothing to give, nobody is to ask it again for each of many victims.
                dry = dry or not any(pool.free for pool in residency.slots[position + 1 : None if past else position + 2])
                # What makes room below may have taken the node itself.
                if drop and node.children is None and residency.is_free_to_lose(node, position):
                    residency.remove(self._tail(node, lack), Reason.DROP)
                else:
                    stuck += 1
            elif not planned.drop_count:
                stuck += _AHEAD  # it will free nothing yet; not every long chain is to be written ahead for one slot
        if lasting and spare:
            self._drop_spare(position, want, drop=drop, keep=keep)

    def _is_next(self, node: Node, position: int) -> bool:
        """Return whether all children that the node has in the tier are on their way out of it, and not to a disk."""
        if node.holds:
            return False
        return self.inflight.parting(node, position) >= self.residency.kids(node, position) > 0

    def _soon_free(self, position: int, *, drop: bool) -> int:
        """Return how many slots moves in flight, and discards, will free; who may drop doesn't count on a disk."""
        inflight = self.inflight
        leaving = inflight.copied_away(position) if drop else inflight.leaving[position]
        return leaving + len(self.residency.waste[position])

    def _drop_spare(self, position: int, want: int, *, drop: bool, keep: Node | None) -> None:
        residency, pool = self.residency, self.residency.slots[position]
        spare = residency.spare[position]
        passed: list[Node] = []
        while spare and (lack := want - pool.free - self._soon_free(position, drop=drop)) > 0:
            node, _ = spare.popitem(last=False)
            if node is keep or not residency.is_free_to_lose(node, position):
                passed.append(node)
                continue
            spare[node] = None
            node = self._tail(node, lack)
            residency.lose(node, position, Reason.DEMOTE)
        for node in passed:
            spare[node] = None

    def _plan_down(self, node: Node, position: int, lack: int, work: list[Work], *, drop: bool, past: bool) -> Transfer | None:
        """Plan to move up to `lack` blocks, `node`'s and those above it, down; return the move, if any.

        They go to the tier below; with `past`, beyond it where it has no slots and nothing is leaving it.
        """
        residency = self.residency
        if position in self.failing:
            return None
        for below in range(position + 1, len(residency.tiers) if past else position + 2):
            if below > position + 1 and (self._has_place_soon(below - 1) or residency.kids(node, below - 1)):
                return None  # to be waited for; or a child would be faster than its parent
            if below in self.refusing:
                continue
            if not residency.durable[below]:
                planned = self._plan_to_memory(node, position, below, lack, work, drop=drop)
            else:
                planned = None if drop else self._plan_to_disk(node, position, below, lack, work)
            if planned is not None:
                return planned
        return None

    def _has_place_soon(self, position: int) -> bool:
        """Return whether the tier has free slots, or will have some that are on their way out."""
        return bool(self.residency.slots[position].free or self._soon_free(position, drop=False))

    def _plan_to_memory(self, node: Node, position: int, below: int, lack: int, work: list[Work], *, drop: bool) -> Transfer | None:
        pool = self.residency.slots[below]
        need = min(lack, sum(len(other.blocks) for other in self._run(node, position, below, lack)))
        if pool.free < need:
            self._free(below, need, work, drop=drop)
        if pool.free == 0 or not self.residency.is_free_to_lose(node, position):
            return None
        run = self._cut(self._run(node, position, below, lack), min(lack, pool.free))
        count = sum(len(other.blocks) for other in run)
        work.append(moved := self.inflight.begin(run, below, Reason.DEMOTE, drop_from=position, drop_count=count))
        return moved

    def _plan_to_disk(self, node: Node, position: int, below: int, lack: int, work: list[Work]) -> Transfer | None:
        """Do what `_plan_down` says for a durable tier, which is closed itself.

        What it lacks of the way to the node goes with it, root first, as clean copies. Where that is more than one transfer
        takes, or than is free yet, the move copies the first part only, and frees nothing.
        """
        pool = self.residency.slots[below]
        chain = self._missing(node, below)
        need = sum(len(other.blocks) for other in chain)
        if not chain or not self._continues(chain[0], below):
            return None  # the part before is on its way; its blocks commit first
        if pool.free < need:
            # Nothing is written ahead of what can't follow, and nothing goes for it: that would begin anew with every call.
            # Of the path, only the last record there is a leaf of the tier; while that is kept none of it goes for its own end.
            above = chain[0].parent
            assert above is not None
            if need + sum(len(other.blocks) for other in ancestry(above)) > pool.capacity:
                return None
            self._free(below, need, work, drop=False, keep=above)
            if pool.free + self._soon_free(below, drop=False) < need:
                return None
        fits = min(pool.free, self.pace.blocks)
        if fits == 0:
            return None
        if need > fits:
            work.append(ahead := self.inflight.begin(self._leading(chain, fits), below, Reason.COPY))
            return ahead
        run = self._cut(self._run(node, position, below, lack), lack)
        count = sum(len(other.blocks) for other in run)
        chain = self._missing(node, below)  # anew: the run was cut
        work.append(moved := self.inflight.begin(chain, below, Reason.DEMOTE, drop_from=position, drop_count=count))
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

    def plan_promote(self, end: Node, position: int, *, most: int, source: int | None = None) -> Transfer | None:
        """Plan to bring the part of the path to `end` that lies just below the tier up to it, as far as slots are free.

        All blocks of the transfer come from one tier, the one that holds the first of them. Returns None when there is nothing
        to bring, no slot, the part above is not there yet, or the first of them is not in the tier at `source`, if that is
        given: whoever waited for room finds them elsewhere.
        """
        residency = self.residency
        nodes = self.slower(end, position)
        if not nodes or position in self.refusing or position in self.failing:
            return None
        first = nodes[0]
        above = first.parent
        if above is not None and above.parent is not None and (above.tag is None or above.tag > position):
            return None
        origin = first.tag
        if origin is None or (source is not None and origin != source):
            return None
        nodes = list(_until(nodes, lambda node: node.tag != origin))
        count = min(most, residency.slots[position].free, sum(len(node.blocks) for node in nodes))
        chosen = self._leading(nodes, count)
        if not chosen:
            return None
        return self.inflight.begin(chosen, position, Reason.PROMOTE)

    def plan_persist(self, end: Node, position: int) -> Transfer | None:
        """Plan to copy what the durable tier lacks of the path to `end`, root first, as far as slots are free."""
        nodes = self._missing(end, position) if end.alive else []
        if not nodes:
            return None
        if not self._continues(nodes[0], position):
            return None  # the part before is on its way; its blocks commit first
        nodes = self._leading(nodes, min(self.pace.blocks, self.residency.slots[position].free))
        return self.inflight.begin(nodes, position, Reason.COPY) if nodes else None


def _until(nodes: Iterable[Node], stop: Callable[[Node], bool]) -> Iterator[Node]:
    """Yield nodes up to the first one for which `stop` holds."""
    for node in nodes:
        if stop(node):
            return
        yield node
