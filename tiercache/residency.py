"""Which tier holds what: the one place where copies, holds and slots of nodes change.

Every method keeps these true, and `tiercache.audit` checks them:

* all blocks of a node have copies in exactly the node's tiers;
* tiers are closed towards the root: a child's fastest tier is never faster than its parent's, and on a durable tier a child's
  copy implies its parent's;
* a parent counts its children in or on their way into each tier (`kids`), so "leaf of a tier" is one comparison;
* a node with a lease or a transfer loses no copy; when it leaves the tree all the same (delete, clear, rot) it can't be found
  any more, and its slots are freed with the last lease and transfer;
* a slot of a durable tier is not free before its record is gone from the store: it goes to `waste`, and whoever executes moves
  discards it there.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from tiercache.changes import Change, Reason
from tiercache.policy import Payers, Policy, PolicyFactory
from tiercache.slots import Slots
from tiercache.table import NOWHERE, BlockTable, rows
from tiercache.tree import BLOCK_IDS, KID_BITS, KID_MASK, Node, RadixTree, ancestry, subtree
from tiercache.types import Tier


class Space:
    """One namespace inside the core: its tree and its eviction order.

    `edition` grows whenever the namespace is cleared: what was claimed under an older one is about bytes that were to go.
    """

    __slots__ = ("digest", "edition", "number", "policy", "tree")

    def __init__(self, number: int, digest: bytes, stride: int, policy: Policy) -> None:
        self.number = number
        self.digest = digest
        self.policy = policy
        self.edition = 0
        self.tree = RadixTree(self, stride)


class Residency:
    """Nodes, their copies and their slots. `tiers` is fastest first; positions index it.

    `slots` are the pools of the tiers; `durable[position]` says whether a tier outlives the process.
    """

    def __init__(self, tiers: Sequence[Tier], slots: Sequence[Slots], durable: Sequence[bool], policy: PolicyFactory) -> None:
        self.tiers = tuple(tiers)
        self.slots = tuple(slots)
        self.durable = tuple(durable)
        self.table = BlockTable(len(tiers))
        self.nodes: list[Node | None] = []
        self.spaces: dict[bytes, Space] = {}
        self.spare: list[OrderedDict[Node, None]] = [OrderedDict() for _ in tiers]
        """A tier's leaves that a faster tier also holds: dropping one loses nothing, so no policy is asked."""
        self.waste: list[list[int]] = [[] for _ in tiers]
        """Slots of durable tiers whose records are to be discarded before the slots are free."""
        self.payers = Payers(len(tiers))
        self.listeners: list[Callable[[Change], None]] = []
        self.buried_held = 0
        """Nodes that left the tree while a lease or a transfer held them and that still hold slots."""
        self.doubtful: set[Node] = set()
        """Those of them whose bytes failed a check: a lease's readers stop before them."""
        self.whereabouts: dict[Node, bytes] = {}
        """What others have written down of where a node's blocks lie; dropped in the step that changes it."""
        self.held = [0] * len(tiers)
        """Blocks under a lease, each once, by the position of their fastest tier."""
        self._policy = policy
        self._numbers: list[int] = []
        self._stamp = 0
        self._seq = 0

    # --- namespaces -----------------------------------------------------------------------------------------------------

    def space(self, digest: bytes, stride: int) -> Space:
        """Return the namespace with that digest, made when it is new."""
        found = self.spaces.get(digest)
        if found is None:
            found = Space(len(self.spaces), digest, stride, self._policy(len(self.tiers)))
            self.spaces[digest] = found
        return found

    # --- structure ------------------------------------------------------------------------------------------------------

    def plant(
        self,
        parent: Node,
        key: bytes,
        blocks: array[int],
        position: int,
        slots: Sequence[int],
        checksums: Sequence[int],
        reason: Reason,
    ) -> Node:
        """Hang a new node with `blocks`, which lie in `slots` of one tier and have `checksums`, under `parent` and return it.

        The caller's lease, which ended with the parent, ends with the new node from now on. The parent's count stays the same:
        a child that is held has come in the lease's place.
        """
        node = Node(parent.space, parent, key, blocks)
        node.number = self._number(node)
        node.holds = 1
        node.copies = 1 << position
        self.held[position] += len(blocks)
        self.table.place(blocks, position, slots, checksums, node.number)
        self.slots[position].own(slots)
        parent.space.tree.attach(node)
        self._count_kid(parent, position, 1)
        self.announce(node, None, reason)
        return node

    def split(self, node: Node, count: int) -> Node:
        """Cut `node` after `count` blocks and return the head; the old object stays the tail."""
        head = node.space.tree.split(node, count)
        self.whereabouts.pop(node, None)
        head.number = self._number(head)
        self.table.owner[rows(head.blocks)] = head.number
        if node.newer is not None:
            tag = node.tag
            assert tag is not None
            node.space.policy.split(head, node, tag)
        if not node.alive and (node.holds or node.moves):
            self.buried_held += 1
            if node in self.doubtful:
                self.doubtful.add(head)
        self._refresh(head)
        self._refresh(node)
        return head

    def remove(self, top: Node, reason: Reason) -> None:
        """Take `top` and all that hangs below it out of the tree, at once and for good."""
        self.remove_all([top], reason)

    def remove_all(self, tops: Sequence[Node], reason: Reason) -> None:
        """Do as `remove` does with each of `tops`, none of which hangs below another; slots and rows are freed together."""
        gone: list[Node] = []
        for top in tops:
            assert top.parent is not None
            gone.extend(subtree(top))
            top.space.tree.detach(top)
            for position in range(len(self.tiers)):
                if (top.copies | top.arriving) >> position & 1:
                    self._count_kid(top.parent, position, -1)
        buried: list[Node] = []
        held: list[Node] = []
        for node in reversed(gone):  # children first: a parent's slots are never free before its children's
            before = node.tag
            if node.newer is not None:
                assert before is not None
                node.space.policy.withheld(node, before)
            node.alive = False
            self._refresh(node)
            self.announce(node, before, reason, gone=True)
            (held if node.holds or node.moves else buried).append(node)
        self._bury(buried)
        for node in held:  # after what nobody holds: what follows a held node may be free, what it follows is held
            self.buried_held += 1
            self._forget_durable(node)

    def distrust(self, node: Node) -> None:
        """Take `node`, whose bytes failed a check, and what follows it out of the tree and out of every lease's reach."""
        if node.alive:
            self.remove(node, Reason.UNTRUSTED)
        if node.holds:
            self.doubtful.add(node)

    # --- leases and transfers -------------------------------------------------------------------------------------------

    def hold(self, end: Node) -> None:
        """Count one more lease that ends with `end`. What lies above a node that is held already is held by it."""
        withheld = end.space.policy.withheld
        node, parent = end, end.parent
        while parent is not None:
            holds = node.holds
            node.holds = holds + 1
            if holds:
                return
            copies = node.copies
            lowest = copies & -copies
            tag = lowest.bit_length() - 1
            if copies:
                self.held[tag] += len(node.blocks)
            if node.alive:
                if node.newer is not None:
                    withheld(node, tag)
                if copies != lowest:
                    self._refresh(node)
            node, parent = parent, parent.parent

    def release(self, end: Node) -> None:
        """Take back one lease that ends with `end`.

        From the end towards the root, up to a node that another lease holds, so that ancestors are offered after their
        descendants.
        """
        self._stamp = stamp = self._stamp + 1
        space = end.space
        offered = space.policy.offered
        announced = 0  # bit set of the positions where the namespace was made known: once is enough
        node, parent = end, end.parent
        while parent is not None:
            holds = node.holds
            assert holds > 0
            node.holds = holds - 1
            if holds > 1:
                return
            copies = node.copies
            lowest = copies & -copies
            tag = lowest.bit_length() - 1
            if copies:
                self.held[tag] -= len(node.blocks)
            node.used = stamp
            if node.alive:
                assert copies
                offered(node, tag)
                if not announced & lowest:
                    announced |= lowest
                    self.payers.announce(space.number, space.policy, tag)
                if copies != lowest:
                    self._refresh(node)
            elif node.moves == 0:
                self.buried_held -= 1
                self._bury([node])
            node, parent = parent, parent.parent

    def begin_move(self, nodes: Iterable[Node], to: int | None) -> None:
        """Count one more transfer on each of `nodes`; with `to`, they are on their way into that tier."""
        for node in nodes:
            node.moves += 1
            if to is not None:
                assert not (node.copies | node.arriving) >> to & 1
                node.arriving |= 1 << to
                assert node.parent is not None
                self._count_kid(node.parent, to, 1)

    def end_move(self, node: Node, to: int | None) -> None:
        """Take back one transfer of `node`; what it was bringing to `to` and did not commit is on its way no more."""
        assert node.moves > 0
        node.moves -= 1
        if to is not None and node.arriving >> to & 1:
            node.arriving &= ~(1 << to)
            if node.alive:
                assert node.parent is not None
                self._count_kid(node.parent, to, -1)
        if not node.alive and not node.moves:
            if node.holds:
                self._forget_durable(node)
            else:
                self.buried_held -= 1
                self._bury([node])

    # --- copies ---------------------------------------------------------------------------------------------------------

    def gain(self, node: Node, position: int, slots: Sequence[int], reason: Reason) -> None:
        """The node has a copy in `slots` of the tier from now on; a transfer brought it."""
        assert node.alive and node.arriving >> position & 1
        before = node.tag
        self.whereabouts.pop(node, None)
        self._count_held(node, -1)
        self.table.slot[position, rows(node.blocks)] = slots
        self.slots[position].own(slots)
        node.arriving &= ~(1 << position)
        node.copies |= 1 << position
        self._count_held(node, 1)
        self._retag(node, before)
        self.announce(node, before, reason if node.tag != before else Reason.COPY)

    def lose(self, node: Node, position: int, reason: Reason) -> None:
        """Drop the node's copy in the tier, which is not its last."""
        assert node.alive and not node.holds and node.copies >> position & 1 and node.copies != 1 << position
        assert self.kids(node, position) == 0 and (position != node.tag or self.has_place_below(node, position))
        before = node.tag
        node.copies &= ~(1 << position)
        self._clear_slots([node], position)
        assert node.parent is not None
        self._count_kid(node.parent, position, -1)
        self._retag(node, before)
        self.announce(node, before, reason if node.tag != before else Reason.TRIM)

    def kids(self, node: Node, position: int) -> int:
        """Return how many children of `node` are in, or on their way into, the tier."""
        return node.kids >> (KID_BITS * position) & KID_MASK

    def is_free_to_lose(self, node: Node, position: int) -> bool:
        """Return whether the node's copy in the tier could go now: nobody reads it, moves it or hangs below it there."""
        return node.alive and not node.holds and not node.moves and self.kids(node, position) == 0

    def has_place_below(self, node: Node, position: int) -> bool:
        """Return whether the node, which is in the tier, could do without that copy: another one is no slower than any child."""
        rest = node.copies & ~(1 << position)
        return bool(rest) and not any(self.kids(node, between) for between in range(position, (rest & -rest).bit_length() - 1))

    def touch(self, end: Node) -> None:
        """Make the path from `end` to the root the most recently used one."""
        self._stamp += 1
        for node in ancestry(end):
            node.used = self._stamp
            if node.newer is not None:
                tag = node.tag
                assert tag is not None
                node.space.policy.withheld(node, tag)
                self._offer(node)

    def restored(self, node: Node) -> None:
        """Offer a node that recovery planted; the order of calls is the order of recency."""
        self._stamp += 1
        node.used = self._stamp
        self._count_held(node, -1)
        node.holds = 0
        self._offer(node)

    def owners(self, blocks: array[int]) -> list[Node]:
        """Return the nodes that name `blocks`, a part of one chain, in chain order."""
        numbers = self.table.owner[rows(blocks)].tolist()
        found: list[Node] = []
        last = NOWHERE
        for number in numbers:
            if number != last:
                node = self.nodes[number]
                assert node is not None
                found.append(node)
                last = number
        return found

    def announce(self, node: Node, before: int | None, reason: Reason, *, gone: bool = False) -> None:
        """Tell the listeners that the node's fastest tier was `before` and is what it is now."""
        if not self.listeners:
            return
        self._seq += 1
        after = None if gone else node.tag
        change = Change(
            self._seq,
            node.space.digest,
            node.blocks,
            None if before is None else self.tiers[before],
            None if after is None else self.tiers[after],
            reason,
        )
        for listener in self.listeners:
            listener(change)

    # --- the books ------------------------------------------------------------------------------------------------------

    def _number(self, node: Node) -> int:
        """Enter the node among all nodes and return its number there."""
        if self._numbers:
            number = self._numbers.pop()
            self.nodes[number] = node
            return number
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _bury(self, nodes: Sequence[Node]) -> None:
        """Free what nodes that have left the tree still have: with one call a tier, since many may go at once."""
        for position in range(len(self.tiers)):
            self._clear_slots([node for node in nodes if node.copies >> position & 1], position)
        self.table.free(_blocks_of(nodes))
        for node in nodes:
            node.copies = 0
            self.doubtful.discard(node)
            self.nodes[node.number] = None
            self._numbers.append(node.number)

    def _forget_durable(self, node: Node) -> None:
        """Give up the durable copies of a node that has left the tree, though a lease holds it.

        Readers only read memory; and a record that outlived an acknowledged delete would be back after the next start.
        """
        if node.moves:
            return  # a transfer may be reading it; `end_move` comes back here
        self._count_held(node, -1)
        for position, durable in enumerate(self.durable):
            if durable and node.copies >> position & 1:
                node.copies &= ~(1 << position)
                self._clear_slots([node], position)
        self._count_held(node, 1)

    def _count_held(self, node: Node, step: int) -> None:
        """Count the node's blocks in (1) or out (-1) where its tag says, if a lease holds it."""
        if node.holds and node.copies:
            self.held[(node.copies & -node.copies).bit_length() - 1] += step * len(node.blocks)

    def _clear_slots(self, nodes: Sequence[Node], position: int) -> None:
        if not nodes:
            return
        for node in nodes:
            self.whereabouts.pop(node, None)
        blocks = _blocks_of(nodes)
        freed = self.table.slots(blocks, position)
        self.table.slot[position, rows(blocks)] = NOWHERE
        self.slots[position].hold(freed)
        if self.durable[position]:
            self.waste[position].extend(freed)
        else:
            self.slots[position].give(freed)

    def _offer(self, node: Node) -> None:
        tag = node.tag
        assert tag is not None
        node.space.policy.offered(node, tag)
        self.payers.announce(node.space.number, node.space.policy, tag)
        if node.copies & (node.copies - 1):
            self._refresh(node)

    def _retag(self, node: Node, before: int | None) -> None:
        tag = node.tag
        assert tag is not None
        if node.newer is not None and before is not None and before != tag:
            node.space.policy.moved(node, before, tag)
            self.payers.announce(node.space.number, node.space.policy, tag)
        self._refresh(node)

    def _count_kid(self, parent: Node, position: int, step: int) -> None:
        parent.kids += step << (KID_BITS * position)
        if parent.copies & (parent.copies - 1):
            self._refresh(parent)

    def _refresh(self, node: Node) -> None:
        """Put the node into, or take it out of, the spare copies of each tier."""
        extra = node.copies & (node.copies - 1) if node.alive and not node.holds else 0
        for position, spare in enumerate(self.spare):
            if extra >> position & 1 and self.kids(node, position) == 0:
                spare.setdefault(node, None)
            else:
                spare.pop(node, None)


def _blocks_of(nodes: Sequence[Node]) -> array[int]:
    if len(nodes) == 1:
        return nodes[0].blocks
    blocks = array(BLOCK_IDS)
    for node in nodes:
        blocks.extend(node.blocks)
    return blocks
