"""What the tree costs by itself, as it grows: time to match, insert and evict, and bytes of index per cached token.

The core alone, without a byte of KV: slots are numbers. Prompts are turns of chats behind one system prompt.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tiercache.cache import Cache
from tiercache.keys import pack_tokens
from tiercache.residency import Space
from tiercache.storage.slots import SlotPool
from tiercache.types import Tier

BLOCK_SIZE = 16
SYSTEM_BLOCKS = 16
SAMPLES = 300
_DIGEST = bytes(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The tree with `leaves` chats of `edge_blocks` blocks each. Times are medians of one call, in seconds."""

    leaves: int
    edge_blocks: int
    tokens: int
    match: float
    insert: float
    evict: float
    """Freeing one block's slot."""
    bytes_per_token: float

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return asdict(self)


def measure(*, quick: bool) -> list[Growth]:
    """Measure trees of growing size, with edges of one block and of eight."""
    sizes = (100, 1_000) if quick else (1_000, 10_000, 100_000)
    return [_grow(leaves, edge) for edge in (1, 8) for leaves in sizes]


def _grow(leaves: int, edge: int) -> Growth:
    # Room for what is inserted to measure, so that no insert pays for an eviction.
    capacity = SYSTEM_BLOCKS + (leaves + SAMPLES) * edge
    cache = Cache([Tier.HBM], {Tier.HBM: SlotPool(capacity)})
    space = cache.residency.space(_DIGEST, 4 * BLOCK_SIZE)
    session = cache.begin_session()
    keys = _keys(edge)

    def insert(key: bytes) -> None:
        lease = cache.match(session, space, key)
        room = cache.reserve(session, space, key, after=lease, position=0)
        cache.commit(room, len(room.blocks), [0] * len(room.blocks))
        cache.close(room)
        cache.release(lease)

    known = [next(keys) for _ in range(leaves)]
    for key in known:
        insert(key)
    blocks = cache.residency.table.live
    size = index_bytes(cache, space)
    step = max(1, leaves // SAMPLES)
    matched = _each(lambda key: cache.release(cache.match(session, space, key)), known[::step][:SAMPLES])
    inserted = _each(insert, [next(keys) for _ in range(SAMPLES)])
    pool = cache.residency.slots[0]
    evicted = _each(
        lambda want: cache.moves.make_room(0, want), range(pool.free + 1, pool.free + 1 + min(SAMPLES, leaves * edge // 2))
    )
    return Growth(
        leaves=leaves,
        edge_blocks=edge,
        tokens=blocks * BLOCK_SIZE,
        match=statistics.median(matched),
        insert=statistics.median(inserted),
        evict=statistics.median(evicted),
        bytes_per_token=size / (blocks * BLOCK_SIZE),
    )


def _keys(edge: int) -> Iterator[bytes]:
    system = pack_tokens(range(SYSTEM_BLOCKS * BLOCK_SIZE), limit=1 << 26)
    for number in range(1 << 30):
        # Chats differ in their first block, then each goes its own way.
        yield system + pack_tokens([number + 1000, *range(edge * BLOCK_SIZE - 1)], limit=1 << 26)


def index_bytes(cache: Cache, space: Space) -> int:
    """Return the bytes that the tree of `space` and the block table take: objects, keys, arrays, dictionaries, columns."""
    stack, total = [space.tree.root], cache.residency.table.bytes + sys.getsizeof(cache.residency.nodes)
    while stack:
        node = stack.pop()
        total += sys.getsizeof(node) + sys.getsizeof(node.key) + sys.getsizeof(node.blocks)
        if node.children is not None:
            total += sys.getsizeof(node.children) + sum(sys.getsizeof(symbol) for symbol in node.children)
            stack.extend(node.children.values())
    return total


def _each(call: Callable[[Any], object], arguments: Sequence[Any]) -> list[float]:
    """Return the seconds of each call, without the garbage collector's pauses."""
    times: list[float] = []
    gc.collect()
    gc.disable()
    try:
        for argument in arguments:
            began = time.perf_counter()
            call(argument)
            times.append(time.perf_counter() - began)
    finally:
        gc.enable()
    return times


def table(rows: Sequence[Growth]) -> str:
    """Return the figures as a table for people."""
    lines = [f"{'leaves':>8}{'edge':>10}{'tokens':>11}{'match':>10}{'insert':>10}{'evict':>10}{'index bytes a token':>21}"]
    for row in rows:
        times = "".join(f"{seconds * 1e6:>7.1f} µs" for seconds in (row.match, row.insert, row.evict))
        edge = f"{row.edge_blocks} block{'s' if row.edge_blocks > 1 else ''}"
        lines.append(f"{row.leaves:>8}{edge:>10}{row.tokens:>11}{times}{row.bytes_per_token:>21.1f}")
    return "\n".join(lines)
