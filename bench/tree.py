"""What the tree costs by itself: requests of several kinds beside SGLang's trees, and how the index grows.

The core alone, without a byte of KV: slots are numbers. Ours and the peer's trees are given the same requests in turns, each with
keys in its own packed form, made before the clock runs; what they find must be the same.
"""

from __future__ import annotations

from contextlib import nullcontext

from tiercache.bench.figures import Goal, Reference, Spread
from tiercache.bench.plot import Plot
from tiercache.bench.run import Run
from tiercache.bench.sglang import ABSENT, NAMES, Core, Peer, interpreter
from tiercache.bench.timing import quiet
from tiercache.bench.tree_ours import Ours, Times
from tiercache.bench.tree_shapes import (
    measure_block_sizes,
    measure_depth,
    measure_eviction,
    measure_growth,
    measure_keys,
    measure_million,
)
from tiercache.bench.tree_workloads import Workload, chats, few_shot, thoughts, traffic

_BLOCK = 16
_OURS = "tiercache"
_GOALS = {"radix": Goal(key="tree-python", at_most=0.2), "native": Goal(key="tree-native", at_most=1.0)}

PLOTS = (
    Plot("tree-chats", "One request of a chat: match, lease, insert, release", ("chat",), x="tokens", series=("tree",)),
    Plot("tree-growth", "One call, as the tree grows", ("match", "insert", "split"), x="leaves", series=("name", "edge blocks")),
    Plot("tree-evict", "Freeing one block of a full tree", ("evict", "evict, peer"), x="leaves", series=("name", "tree", "leases")),
    Plot("tree-depth", "Match of a chain of one-block nodes", ("match, deep",), x="depth"),
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
    """Measure requests beside the peer, then the index alone."""
    with _peer(run) as peer:
        for length, count, last, rounds in run.pick(((1024, 2, 2, 1),), ((2048, 20, 2, 5), (8192, 12, 4, 3), (32_768, 4, 8, 1))):
            _compare_chats(run, peer, length, count, last, rounds)
        if not run.quick:
            _compare_chats(run, peer, 102_400, 2, 10, 1)
        for workload in run.pick((few_shot(2, 3),), (few_shot(8, 40), thoughts(4), traffic(1_000))):
            timed = _make(run, peer, workload, _cores(run))
            for tree, times in timed.items():
                run.add("request", times.turn, "s", at={"workload": workload.name, "tree": tree})
        measure_eviction(run, peer)
        measure_keys(run, peer)
    measure_growth(run)
    measure_depth(run)
    measure_million(run)
    measure_block_sizes(run)


def _peer(run: Run) -> Peer | nullcontext[None]:
    python = interpreter()
    if python is None:
        run.note(ABSENT)
        return nullcontext()
    try:
        return Peer(python)
    except EOFError as error:
        run.note(f"SGLang's trees are not measured beside ours: {python} does not run them ({error})")
        return nullcontext()


def _cores(run: Run) -> tuple[Core, ...]:
    return run.pick(("native",), ("radix", "unified", "native"))


def _compare_chats(run: Run, peer: Peer | None, length: int, count: int, last: int, rounds: int) -> None:
    """Take chats that grow to `length` tokens, `rounds` times in new trees, and add a figure for each tree and each peer's goal."""
    cores = _cores(run)
    parts: dict[str, list[Times]] = {}
    for number in range(rounds):
        for tree, times in _make(run, peer, chats(count, length, last=last, seed=number), cores).items():
            parts.setdefault(tree, []).append(times)
    whole = {tree: [seconds for part in found for seconds in part.turn] for tree, found in parts.items()}
    for tree, found in parts.items():
        at: dict[str, str | int | float] = {"tokens": length, "tree": tree}
        run.add("chat", whole[tree], "s", at=at)
        run.add("chat, match", [seconds for part in found for seconds in part.match], "s", at=at)
        run.add("chat, insert", [seconds for part in found for seconds in part.insert], "s", at=at)
    for core in cores:
        if NAMES[core] in whole:
            beside = Reference(NAMES[core], Spread.of(whole[NAMES[core]]))
            goal = _GOALS.get(core)
            run.add("chat, beside a peer", whole[_OURS], "s", at={"tokens": length, "peer": core}, reference=beside, goal=goal)


def _make(run: Run, peer: Peer | None, workload: Workload, cores: tuple[Core, ...]) -> dict[str, Times]:
    """Make a workload's turns in new trees, ours and the peer's, batch by batch in turns; return the times of the batches."""
    file = run.folder / "tokens"
    file.write_bytes(workload.tokens.tobytes())
    ours = Ours(len(workload.tokens) // _BLOCK)
    theirs = [peer.open(core, _BLOCK, file) for core in cores] if peer is not None else []
    found = {_OURS: ours.turns(workload.tokens, workload.before).hits}
    found |= {NAMES[tree.core]: tree.turns(workload.before).hits for tree in theirs}
    _require_same(found)
    times: dict[str, list[Times]] = {tree: [] for tree in found}
    with quiet():
        for batch in run.track(workload.batches, f"{workload.name}, {len(workload.tokens):,} tokens"):
            times[_OURS].append(ours.turns(workload.tokens, batch))
            for tree in theirs:
                times[NAMES[tree.core]].append(tree.turns(batch))
            _require_same({tree: made[-1].hits for tree, made in times.items()})
    file.unlink()
    return {tree: _joined(made) for tree, made in times.items()}


def _require_same(found: dict[str, list[int]]) -> None:
    """Raise AssertionError unless all trees found the same tokens for the same requests."""
    for tree, hits in found.items():
        assert hits == found[_OURS], f"{tree} found other prefixes"


def _joined(made: list[Times]) -> Times:
    return Times(
        [hit for times in made for hit in times.hits],
        [seconds for times in made for seconds in times.match],
        [seconds for times in made for seconds in times.insert],
    )
