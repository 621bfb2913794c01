"""The radix tree over packed keys: match, insert, split.

The structure alone: which tiers hold a node's blocks is written here as plain fields and kept right by
`tiercache.residency`. Every walk is a loop, so depth is bounded by memory and not by the recursion limit, and nothing on the
way copies the rest of the key: a node is compared in place (`bytes.startswith` with an offset is one memcmp), a child is
found by its first symbol.

Source of the structure: RadixAttention (Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs",
section 3), with runs of whole blocks on the edges.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiercache.residency import Space

BLOCK_IDS = "i"
KID_BITS = 24
KID_MASK = (1 << KID_BITS) - 1


class Node:
    """An edge of the tree: a run of blocks that are all held by the same tiers.

    `copies` and `arriving` are bit sets over tier positions (0 is the fastest): where the whole run is, and where a transfer
    is bringing it. `kids` packs, `KID_BITS` a tier, how many children are in or on their way into that tier. `holds` counts the
    leases that end here and the children that are held, so that it is above zero all the way up from a lease's end; `moves`
    counts the transfers of it; while one of them is above zero the node loses no copy. `matches` counts readers for who wants to
    know them. `older` and `newer` are the links of the eviction order of the node's fastest tier.
    """

    __slots__ = (
        "alive",
        "arriving",
        "blocks",
        "children",
        "copies",
        "holds",
        "key",
        "kids",
        "matches",
        "moves",
        "newer",
        "number",
        "older",
        "parent",
        "space",
        "used",
    )

    def __init__(self, space: Space, parent: Node | None, key: bytes, blocks: array[int]) -> None:
        self.space = space
        self.parent = parent
        self.key = key
        self.blocks = blocks
        self.children: dict[bytes, Node] | None = None
        self.number = 0
        self.copies = 0
        self.arriving = 0
        self.kids = 0
        self.matches = 0
        self.holds = 0
        self.moves = 0
        self.used = 0
        self.older: Node | None = None
        self.newer: Node | None = None
        self.alive = True

    @property
    def tag(self) -> int | None:
        """Position of the fastest tier that holds the node whole; None where no tier does (the root, a node that is gone)."""
        return (self.copies & -self.copies).bit_length() - 1 if self.copies else None

    def __repr__(self) -> str:
        return f"<Node {self.number}: {len(self.blocks)} blocks, copies {self.copies:b}, holds {self.holds}, moves {self.moves}>"


class RadixTree:
    """The tree of one namespace; `stride` is the width of a symbol in bytes."""

    __slots__ = ("root", "stride")

    def __init__(self, space: Space, stride: int) -> None:
        self.stride = stride
        self.root = Node(space, None, b"", array(BLOCK_IDS))

    def walk(self, key: bytes, *, after: Node | None = None, at: int = 0) -> tuple[Node, int, int]:
        """Return the deepest node that `key` reaches, how many of its blocks match, and how many blocks match in all.

        The walk starts below `after` (default: the root) at byte `at` of the key. When not even a first block matches, the
        node is `after` itself. Bytes after the last whole symbol are ignored.
        """
        stride, begins = self.stride, key.startswith
        node = after if after is not None else self.root
        start, end = at, len(key) - (len(key) - at) % stride
        while at < end:
            children = node.children
            child = children.get(key[at : at + stride]) if children is not None else None
            if child is None:
                break
            edge = child.key
            if not begins(edge, at):
                count = _common(edge, key, at, end, stride)
                return child, count, (at - start) // stride + count
            node, at = child, at + len(edge)
        return node, len(node.blocks), (at - start) // stride

    def attach(self, node: Node) -> None:
        """Hang `node` under its parent, which has no child with that first symbol."""
        parent = node.parent
        assert parent is not None
        symbol = node.key if len(node.key) == self.stride else node.key[: self.stride]
        if parent.children is None:
            parent.children = {}
        assert symbol not in parent.children
        parent.children[symbol] = node

    def detach(self, node: Node) -> None:
        """Take `node`, and with it what hangs below, from its parent."""
        assert node.parent is not None and node.parent.children is not None
        del node.parent.children[node.key[: self.stride]]
        if not node.parent.children:
            node.parent.children = None

    def split(self, node: Node, count: int) -> Node:
        """Cut `node` after its first `count` blocks and return the new head.

        The old object stays the tail: whoever ends at the old node's end (a lease, a reservation, a child) still does. Copies,
        moves and recency go to both halves, and both are held or neither. Neither bytes nor slots are touched.
        """
        assert 0 < count < len(node.blocks)
        cut = count * self.stride
        head = Node(node.space, node.parent, node.key[:cut], node.blocks[:count])
        head.copies, head.arriving, head.alive = node.copies, node.arriving, node.alive
        head.holds = 1 if node.holds else 0  # the tail, where the leases still end
        head.moves, head.used, head.matches = node.moves, node.used, node.matches
        present = node.copies | node.arriving
        position = 0
        while present:
            if present & 1:
                head.kids += 1 << (KID_BITS * position)
            present >>= 1
            position += 1
        if node.alive:
            assert node.parent is not None and node.parent.children is not None
            node.parent.children[node.key[: self.stride]] = head
        node.key, node.blocks, node.parent = node.key[cut:], node.blocks[count:], head
        head.children = {node.key[: self.stride]: node}
        return head


def ancestry(node: Node) -> Iterator[Node]:
    """Yield `node` and its ancestors up to, but not including, the root."""
    current: Node | None = node
    while current is not None and current.parent is not None:
        yield current
        current = current.parent


def path(node: Node) -> list[Node]:
    """Return the nodes from the root's child down to `node`."""
    nodes: list[Node] = []
    current, parent = node, node.parent
    while parent is not None:
        nodes.append(current)
        current, parent = parent, parent.parent
    nodes.reverse()
    return nodes


def subtree(node: Node) -> Iterator[Node]:
    """Yield `node` and all that hangs below it, parents before their children."""
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        if current.children is not None:
            stack.extend(current.children.values())


def _common(edge: bytes, key: bytes, at: int, end: int, stride: int) -> int:
    """Return how many leading symbols of `edge` the key has at `at`; the first is known to be there."""
    low, high = 1, min(len(edge), end - at) // stride
    while low < high:  # at most twice the edge's bytes are compared, half of them each time
        middle = (low + high + 1) // 2
        if key.startswith(edge[low * stride : middle * stride], at + low * stride):
            low = middle
        else:
            high = middle - 1
    return low
