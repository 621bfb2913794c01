"""The index alone, as it grows: leaves, depth, one node of a million tokens, block sizes, bytes a token, and what a key costs."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

import numpy as np

from tiercache.bench.figures import Goal, Reference, Spread
from tiercache.bench.run import Run
from tiercache.bench.sglang import NAMES, Peer
from tiercache.bench.timing import each, in_turns, quiet, seconds
from tiercache.bench.tree_ours import Ours
from tiercache.bench.tree_workloads import VOCABULARY, Workload, chats, leaves
from tiercache.keys import pack_tokens

_BLOCK = 16
_SYSTEM_BLOCKS = 16
_SAMPLES = 300
_LIMIT = 1 << 30
_TURN = 20
"""Evictions of one tree, before the next has its turn."""


def measure_growth(run: Run) -> None:
    """Match, insert, split and bytes of index, with more and more chats behind one system prompt, of one block and of eight."""
    sizes = run.pick((100, 1_000), (1_000, 10_000, 100_000))
    for edge, count in run.track([(edge, count) for edge in (1, 8) for count in sizes], "trees that grow"):
        _grow(run, count, edge)


def _grow(run: Run, count: int, edge: int) -> None:
    ours = Ours(_SYSTEM_BLOCKS + (count + _SAMPLES) * edge + _SAMPLES)
    keys = _chat_keys(edge)
    known = [next(keys) for _ in range(count)]
    for key in known:
        ours.put(key)
    at: dict[str, str | int | float] = {"leaves": count, "edge blocks": edge}
    goal = Goal(key="index-long", of="value", at_most=16) if edge >= 8 else Goal(key="index-short", of="value", at_most=40)
    run.add("index", [ours.index_bytes() / ours.tokens], "B", at=at, goal=goal)
    some = known[:: max(1, count // _SAMPLES)][:_SAMPLES]
    run.add("match", each(ours.find, some), "s", at=at)
    run.add("insert", each(ours.put, [next(keys) for _ in range(_SAMPLES)]), "s", at=at)
    if edge > 1:  # asked for up to the middle of an edge: a match cuts it there
        middle = -edge // 2 * _BLOCK * 4
        run.add("split", each(ours.find, [key[:middle] for key in some]), "s", at=at)


def _chat_keys(edge: int) -> Iterator[bytes]:
    system = pack_tokens(range(_SYSTEM_BLOCKS * _BLOCK), limit=_LIMIT)
    for number in range(1 << 30):
        # Chats differ in their first block, then each goes its own way.
        yield system + pack_tokens([number + 1000, *range(edge * _BLOCK - 1)], limit=_LIMIT)


def measure_eviction(run: Run, peer: Peer | None) -> None:
    """Evict one block and put another into a full tree, trees of all sizes in turns; then a peer's eviction at the same sizes."""
    sizes = run.pick((100, 1_000), (1_000, 10_000, 100_000))
    rounds = run.pick(3, 20)
    trees: dict[tuple[int, int], tuple[Ours, Iterator[bytes]]] = {}
    for count in run.track(sizes, "full trees"):
        workload = leaves(count)
        packed = workload.tokens.tobytes()
        size = 4 * _BLOCK
        keys = [packed[at : at + size] for at in range(0, len(packed), size)]
        for leased in (0, count // 10):
            ours = Ours(count)
            for key in keys[:count]:
                ours.put(key)
            for key in keys[: leased * 2 : 2]:  # every second one of the oldest: the way to a victim leads past them
                ours.match(key)
            trees[count, leased] = ours, iter(keys[count:])
    evicted: dict[tuple[int, int], list[float]] = {case: [] for case in trees}
    put: dict[tuple[int, int], list[float]] = {case: [] for case in trees}
    with quiet():
        for _ in run.track(range(rounds), "evict one, put one"):
            for case, (ours, fresh) in trees.items():
                for key in [next(fresh) for _ in range(_TURN)]:
                    evicted[case].append(seconds(ours.evict))
                    assert ours.pool.free == 1, "exactly one block went"
                    put[case].append(seconds(lambda ours=ours, key=key: ours.put(key)))  # type: ignore[misc]
    first = sizes[0]
    for (count, leased), times in evicted.items():
        at: dict[str, str | int | float] = {"leaves": count, "leases": "a tenth leased" if leased else "none leased"}
        small = Reference(f"the same at {first:,} leaves", Spread.of(evicted[first, first // 10 if leased else 0]))
        largest = count == sizes[-1]
        run.add(
            "evict",
            times,
            "s",
            at=at,
            reference=small if count != first else None,
            goal=Goal(key="evict-growth", at_most=2.0) if largest else None,
        )
        run.add("put", put[count, leased], "s", at=at)
        if largest:
            run.add("evict at most", times, "s", at=at, goal=Goal(key="evict", of="value", at_most=1e-3))
    del trees
    if peer is not None:
        for count in run.track(sizes, "full trees of the peer"):
            _evict_peer(run, peer, leaves(count), count)


def _evict_peer(run: Run, peer: Peer, workload: Workload, count: int) -> None:
    file = run.folder / "leaves"
    file.write_bytes(workload.tokens.tobytes())
    for core in run.pick(("native",), ("radix", "unified", "native")):
        tree = peer.open(core, _BLOCK, file)
        assert max(tree.turns(workload.before).hits) == 0
        run.add("evict, peer", tree.evict(_BLOCK, run.pick(1, 7)), "s", at={"leaves": count, "tree": NAMES[core]})
    file.unlink()


def measure_depth(run: Run) -> None:
    """Match a chain of one-block nodes of depth n and 2n in turns: twice as deep is to cost twice as much."""
    for depth in run.track(run.pick((250,), (5_000, 10_000)), "chains"):
        shallow, deep = _chain(depth), _chain(2 * depth)
        times = in_turns({"n": shallow, "2n": deep}, run.pick(3, 15))
        run.add("match, deep", times["n"], "s", at={"depth": depth})
        run.add(
            "match, deep",
            times["2n"],
            "s",
            at={"depth": 2 * depth},
            reference=Reference("the same at half the depth", Spread.of(times["n"])),
        )


def _chain(depth: int) -> Callable[[], None]:
    key = pack_tokens(np.arange(depth * _BLOCK) % VOCABULARY, limit=_LIMIT)
    ours = Ours(depth)
    ours.put(key, by=1)
    assert len(ours.cache.residency.nodes) == depth
    return lambda: ours.find(key)


def measure_million(run: Run) -> None:
    """A prompt of one million tokens, in one node and in a node a block."""
    blocks = run.pick(625, 62_500)
    key = pack_tokens(np.arange(blocks * _BLOCK) % VOCABULARY, limit=_LIMIT)
    rounds = run.pick(3, 7)
    for by in run.track((None, 1), "one long prompt"):
        at: dict[str, str | int | float] = {"tokens": blocks * _BLOCK, "nodes": blocks if by else 1}
        inserted: list[float] = []
        ours = Ours(blocks)
        for _ in range(rounds):
            ours = Ours(blocks)
            inserted += each(lambda _, ours=ours, by=by: ours.put(key, by=by), [None])  # type: ignore[misc]
        run.add("insert, one prompt", inserted, "s", at=at)
        run.add("match, one prompt", each(ours.find, [key] * rounds), "s", at=at)
        run.add("index, one prompt", [ours.index_bytes() / ours.tokens], "B", at=at)


def measure_block_sizes(run: Run) -> None:
    """A turn of a chat of 8k tokens, and bytes of index a token, at three block sizes."""
    length, count = run.pick(1024, 8192), run.pick(2, 20)
    for block in run.track((1, 16, 64), "block sizes"):
        workload = chats(count, length, last=2, seed=5)
        ours = Ours(count * length // block, block)
        ours.turns(workload.tokens, workload.before)
        at: dict[str, str | int | float] = {"block size": block, "tokens": length}
        with quiet():
            turns = [ours.turns(workload.tokens, batch) for batch in workload.batches]
        run.add("turn, by block size", [taken for batch in turns for taken in batch.turn], "s", at=at)
        run.add("index, by block size", [ours.index_bytes() / ours.tokens], "B", at=at)


def measure_keys(run: Run, peer: Peer | None) -> None:
    """What it costs to check token ids and pack them, beside a conversion by `array` that checks no more than their width."""
    for count in run.track(run.pick((2048,), (2048, 32_768, 102_400)), "keys"):
        ids = np.random.default_rng(6).integers(0, VOCABULARY, count)
        listed: list[int] = ids.tolist()
        narrow = ids.astype(np.int32)
        calls: dict[str, Callable[[], object]] = {
            "list": lambda listed=listed: pack_tokens(listed, limit=_LIMIT),  # type: ignore[misc]
            "int64 array": lambda ids=ids: pack_tokens(ids, limit=_LIMIT),  # type: ignore[misc]
            "int32 array": lambda narrow=narrow: pack_tokens(narrow, limit=_LIMIT),  # type: ignore[misc]
            "reference": lambda listed=listed: array("q", listed),  # type: ignore[misc]
        }
        assert len({calls[kind]() for kind in ("list", "int64 array", "int32 array")}) == 1
        times = in_turns(calls, run.pick(5, 100))
        reference = Reference("array('q', list)", Spread.of(times.pop("reference")))
        for kind, samples in times.items():
            run.add("pack", samples, "s", at={"tokens": count, "of": kind}, reference=reference)
        if peer is not None:
            file = run.folder / "ids"
            file.write_bytes(narrow.tobytes())
            theirs = peer.open("radix", _BLOCK, file).convert(count, run.pick(5, 100))
            run.add("pack, peer", theirs, "s", at={"tokens": count, "tree": "SGLang, list"}, reference=reference)
            file.unlink()
