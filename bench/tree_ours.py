"""The core alone, without a byte of KV: slots are numbers. One tree that is asked turns and told to evict."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiercache.bench.tree_workloads import Turn
from tiercache.cache import Cache
from tiercache.keys import pack_tokens
from tiercache.leases import Lease
from tiercache.storage.slots import SlotPool
from tiercache.types import Tier

_DIGEST = bytes(32)


class Times(NamedTuple):
    """Tokens found by each turn, and its seconds: match and lease; reserve, commit and the end of both claims."""

    hits: list[int]
    match: list[float]
    insert: list[float]

    @property
    def turn(self) -> list[float]:
        """Seconds of each turn as a whole."""
        return [match + insert for match, insert in zip(self.match, self.insert, strict=True)]


class Ours:
    """A cache with one tier of `capacity` blocks and one namespace."""

    def __init__(self, capacity: int, block_size: int = 16) -> None:
        self.pool = SlotPool(capacity)
        self.cache = Cache([Tier.HBM], {Tier.HBM: self.pool})
        self.space = self.cache.residency.space(_DIGEST, 4 * block_size)
        self.session = self.cache.begin_session()
        self.block_size = block_size

    def turns(self, tokens: NDArray[np.int32], turns: Iterable[Turn]) -> Times:
        """Make the turns, as a runner does: match, reserve after the hit, commit, end both claims.

        The caller keeps the garbage collector away.
        """
        packed = pack_tokens(tokens, limit=1 << 30)
        return self.packed_turns(
            [(packed[4 * start : 4 * (start + prompt)], packed[4 * start : 4 * (start + whole)]) for start, prompt, whole in turns]
        )

    def packed_turns(self, turns: Sequence[tuple[bytes, bytes]]) -> Times:
        """Make turns of prompts and wholes that are packed keys."""
        clock, cache, session, space = time.perf_counter, self.cache, self.session, self.space
        hits, matched, inserted = [], [], []
        for prompt, whole in turns:
            sums = [0] * (len(whole) // space.tree.stride)
            began = clock()
            lease = cache.match(session, space, prompt)
            middle = clock()
            hit = lease.blocks
            room = cache.reserve(session, space, whole, after=lease, position=0)
            cache.commit(room, len(room.blocks), sums[: len(room.blocks)])
            cache.close(room)
            cache.release(lease)
            ended = clock()
            hits.append(hit * self.block_size)
            matched.append(middle - began)
            inserted.append(ended - middle)
        return Times(hits, matched, inserted)

    def match(self, key: bytes) -> Lease:
        """Take a lease on what is cached of `key`."""
        return self.cache.match(self.session, self.space, key)

    def find(self, key: bytes) -> None:
        """Match and release."""
        self.cache.release(self.match(key))

    def put(self, key: bytes, *, by: int | None = None) -> None:
        """Insert `key`; with `by`, commit that many blocks at a time, so that each of these runs is a node."""
        room = self.cache.reserve(self.session, self.space, key, after=None, position=0)
        count = len(room.blocks)
        for end in range(by or count, count + 1, by or count) if count else ():
            self.cache.commit(room, end, [0] * (end - room.committed))
        self.cache.close(room)

    def evict(self) -> None:
        """Free one block."""
        self.cache.moves.make_room(0, self.pool.free + 1)

    @property
    def tokens(self) -> int:
        """How many tokens are cached."""
        return self.cache.residency.table.live * self.block_size

    def index_bytes(self) -> int:
        """Return the bytes that tree and block table take: objects, keys, arrays, dictionaries, columns."""
        residency = self.cache.residency
        stack, total = [self.space.tree.root], residency.table.bytes + sys.getsizeof(residency.nodes)
        while stack:
            node = stack.pop()
            total += sys.getsizeof(node) + sys.getsizeof(node.key) + sys.getsizeof(node.blocks)
            if node.children is not None:
                total += sys.getsizeof(node.children) + sum(sys.getsizeof(symbol) for symbol in node.children)
                stack.extend(node.children.values())
        return total
