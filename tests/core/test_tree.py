"""The radix tree: match, insert, split; structure alone."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from tests.core.house import House
from tiercache.policy import LRU
from tiercache.residency import Space
from tiercache.tree import BLOCK_IDS, Node, RadixTree, ancestry, path, subtree

PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=12)
STRIDE = 4


def key(text: str) -> bytes:
    """Return a key of one symbol a letter."""
    return b"".join(letter.encode().rjust(STRIDE) for letter in text)


def grow(tree: RadixTree, space: Space, parent: Node, text: str) -> Node:
    node = Node(space, parent, key(text), array(BLOCK_IDS, range(len(text))))
    node.copies = 1
    tree.attach(node)
    return node


def planted() -> tuple[RadixTree, Node, Node, Node]:
    """Return a tree with the edges abcd, then ef and gh."""
    space = Space(0, bytes(32), STRIDE, LRU(1))
    tree = space.tree
    top = grow(tree, space, tree.root, "abcd")
    return tree, top, grow(tree, space, top, "ef"), grow(tree, space, top, "gh")


def test_an_empty_tree_matches_nothing() -> None:
    """A walk ends at the root, at no block."""
    tree = Space(0, bytes(32), STRIDE, LRU(1)).tree

    assert tree.walk(key("abc")) == (tree.root, 0, 0)
    assert tree.walk(b"") == (tree.root, 0, 0)


def test_a_walk_says_where_it_ends() -> None:
    """The deepest node, the blocks of it that match, and all that match."""
    tree, top, left, right = planted()

    assert tree.walk(key("abcdef")) == (left, 2, 6)
    assert tree.walk(key("abcdgx")) == (right, 1, 5)
    assert tree.walk(key("abx")) == (top, 2, 2)
    assert tree.walk(key("abcdx")) == (top, 4, 4)
    assert tree.walk(key("x")) == (tree.root, 0, 0)


def test_a_walk_may_go_on_from_a_node() -> None:
    """Who holds a lease walks only the rest of the key; without one matching block it ends where it began."""
    tree, top, left, _ = planted()

    assert tree.walk(key("abcdef"), after=top, at=4 * STRIDE) == (left, 2, 2)
    assert tree.walk(key("abcdx"), after=top, at=4 * STRIDE) == (top, 4, 0)


def test_bytes_after_the_last_whole_symbol_are_ignored() -> None:
    """A key that ends inside a symbol matches its whole symbols, also where the edge goes on with the same bytes."""
    tree, top, _, _ = planted()

    assert tree.walk(key("abc")[:-1]) == (top, 2, 2)
    assert tree.walk(key("a")[:-1]) == (tree.root, 0, 0)


def test_a_symbol_that_begins_alike_is_another_symbol() -> None:
    """Blocks are compared whole: three of four equal bytes are no match."""
    tree, top, _, _ = planted()

    assert tree.walk(key("ab") + b"   x") == (top, 2, 2)
    assert tree.walk(key("abcd") + b"   x") == (top, 4, 4)


def test_a_split_keeps_the_old_object_as_the_tail() -> None:
    """Who ends at the old node's end still does; copies, holds, moves and recency go to both halves."""
    tree, top, left, right = planted()
    top.holds, top.moves, top.used, top.arriving = 2, 1, 7, 2
    head = tree.split(top, 1)

    assert (head.key, top.key) == (key("a"), key("bcd"))
    assert (head.blocks.tolist(), top.blocks.tolist()) == ([0], [1, 2, 3])
    assert (head.parent, top.parent) == (tree.root, head)
    assert tree.root.children == {key("a"): head}
    assert head.children == {key("b"): top}
    assert top.children == {key("e"): left, key("g"): right}
    assert (head.holds, top.holds) == (1, 2), "the leases end with the tail, and a held child holds the head"
    for field in ("copies", "arriving", "moves", "used", "alive", "space"):
        assert getattr(head, field) == getattr(top, field)
    assert (head.kids & 0xFFFFFF, head.kids >> 24) == (1, 1), "the tail is in one tier and on its way into another"
    assert tree.walk(key("abcdef")) == (left, 2, 6)


def test_a_detached_node_is_found_no_more() -> None:
    """With it goes what hangs below; a parent without children is a leaf again."""
    tree, top, left, right = planted()
    tree.detach(left)
    assert tree.walk(key("abcdef")) == (top, 4, 4)
    tree.detach(right)

    assert top.children is None


def test_ways_through_the_tree() -> None:
    """Up to the root without it, down from the root's child, and over all below."""
    tree, top, left, right = planted()

    assert list(ancestry(left)) == [left, top]
    assert path(left) == [top, left]
    assert list(ancestry(tree.root)) == path(tree.root) == []
    assert set(subtree(top)) == {top, left, right}
    assert next(iter(subtree(top))) is top


def test_the_tag_is_the_fastest_copy() -> None:
    """No copy, no tag."""
    node = Node(Space(0, bytes(32), STRIDE, LRU(1)), None, b"", array(BLOCK_IDS))
    tags = []
    for copies in (0b000, 0b001, 0b010, 0b100, 0b110, 0b101):
        node.copies = copies
        tags.append(node.tag)

    assert tags == [None, 0, 1, 2, 1, 0]


@given(prompts=PROMPTS, asked=st.lists(st.integers(0, 2), max_size=12), page=st.integers(1, 3))
def test_the_longest_prefix_is_found(prompts: list[list[int]], asked: list[int], page: int) -> None:
    """Whatever was stored in whatever order, a walk finds what a plain comparison with all prompts finds."""
    house = House(hbm=200, page=page)
    for prompt in prompts:
        house.put(prompt)
    expected = max(common(prompt[: len(prompt) - len(prompt) % page], asked) // page for prompt in prompts)

    assert house.cache.covered(house.space(), house.key(asked)) == min(expected, len(asked) // page)
    assert house.get(asked) == min(expected, len(asked) // page)
    house.check()


def common(left: list[int], right: list[int]) -> int:
    count = 0
    while count < min(len(left), len(right)) and left[count] == right[count]:
        count += 1
    return count
