"""What the tree costs by itself, as it grows: time to match, insert and evict, and bytes of index per cached token.

The core alone, without a byte of KV: slots are numbers. Prompts are turns of chats behind one system prompt.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tiercache.bench.figures import Goal
from tiercache.bench.plot import Plot
from tiercache.bench.run import Run
from tiercache.bench.timing import each
from tiercache.cache import Cache
from tiercache.keys import pack_tokens
from tiercache.residency import Space
from tiercache.storage.slots import SlotPool
from tiercache.types import Tier

BLOCK_SIZE = 16
SYSTEM_BLOCKS = 16
SAMPLES = 300
_DIGEST = bytes(32)


PLOTS = (
    Plot("tree-growth", "One call, as the tree grows", ("match", "insert", "evict"), x="leaves", series=("name", "edge blocks")),
    Plot(
        "tree-index",
        "Bytes of index per cached token",
        ("index",),
        x="leaves",
        series=("edge blocks",),
        label="bytes a token",
        log=False,
    ),
)


def measure(run: Run) -> None:
    """Measure trees of growing size, with edges of one block and of eight."""
    sizes = run.pick((100, 1_000), (1_000, 10_000, 100_000))
    cases = [(edge, leaves) for edge in (1, 8) for leaves in sizes]
    for edge, leaves in run.track(cases, "trees"):
        _grow(run, leaves, edge)


def _grow(run: Run, leaves: int, edge: int) -> None:
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
    matched = each(lambda key: cache.release(cache.match(session, space, key)), known[::step][:SAMPLES])
    inserted = each(insert, [next(keys) for _ in range(SAMPLES)])
    pool = cache.residency.slots[0]
    evicted = each(
        lambda want: cache.moves.make_room(0, want), range(pool.free + 1, pool.free + 1 + min(SAMPLES, leaves * edge // 2))
    )
    at: dict[str, str | int | float] = {"leaves": leaves, "edge blocks": edge}
    for name, times in (("match", matched), ("insert", inserted), ("evict", evicted)):
        run.add(name, times, "s", at=at)
    goal = Goal(key="index-long", of="value", at_most=16) if edge >= 8 else Goal(key="index-short", of="value", at_most=40)
    run.add("index", [size / (blocks * BLOCK_SIZE)], "B", at=at, goal=goal)


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
