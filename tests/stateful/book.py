"""The plain model: which prefixes of a namespace were inserted and not taken away, as a set of packed keys."""

from __future__ import annotations

from collections.abc import Iterator

from tiercache.residency import Space
from tiercache.tree import Node, path, subtree


class Book:
    """The prefixes of one namespace, each `stride` bytes a block, closed towards the empty one (which is not in it)."""

    def __init__(self, stride: int) -> None:
        self.stride = stride
        self.keys: set[bytes] = set()

    def prefixes(self, key: bytes, *, upto: int | None = None) -> set[bytes]:
        """Return the prefixes of `key` that are whole blocks, at most `upto` of them."""
        blocks = len(key) // self.stride
        count = blocks if upto is None else min(upto, blocks)
        return {key[: end * self.stride] for end in range(1, count + 1)}

    def longest(self, key: bytes) -> int:
        """Return how many leading blocks of `key` are here."""
        count = 0
        while len(key) >= (count + 1) * self.stride and key[: (count + 1) * self.stride] in self.keys:
            count += 1
        return count

    def children(self, key: bytes) -> set[bytes]:
        """Return the prefixes that are one block longer than `key`."""
        return {other for other in self.keys if len(other) == len(key) + self.stride and other.startswith(key)}

    def below(self, key: bytes) -> set[bytes]:
        """Return `key` and what continues it."""
        return {other for other in self.keys if other.startswith(key)}

    def doomed(self, key: bytes) -> tuple[set[bytes], int]:
        """Return what deleting the prompt `key` takes away, and how many blocks of the prompt that are."""
        end = key[: self.longest(key) * self.stride]
        whole = len(key) - len(key) % self.stride
        if not end or (len(end) < whole and self.children(end)):
            return set(), 0
        removed = 1
        while len(end) > self.stride and len(self.children(end[: -self.stride])) == 1:
            end = end[: -self.stride]
            removed += 1
        gone = self.below(end)
        return gone, len(gone & self.prefixes(key))


def key_of(node: Node) -> bytes:
    """Return the whole key from the root to the end of `node`."""
    return b"".join(step.key for step in path(node))


def blocks_of(space: Space) -> Iterator[tuple[bytes, Node, int]]:
    """Yield every block of a tree: its whole key, its node and its id."""
    stride = space.tree.stride
    for node in subtree(space.tree.root):
        if node.parent is None:
            continue
        key = key_of(node)
        start = len(key) - len(node.key)
        for place, block in enumerate(node.blocks):
            yield key[: start + (place + 1) * stride], node, block
