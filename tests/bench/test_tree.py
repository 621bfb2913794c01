"""The requests that trees are measured with are the same in every run, and our tree finds what a table of all prefixes says."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from tiercache.bench import tree
from tiercache.bench.run import Run
from tiercache.bench.sglang import NAMES, VARIABLE, Core, Peer, interpreter
from tiercache.bench.tree_ours import Ours
from tiercache.bench.tree_workloads import Turn, Workload, chats, expected_hits, few_shot, leaves, thoughts, traffic

MAKERS: dict[str, Callable[[], Workload]] = {
    "chats": lambda: chats(3, 2048, last=2),
    "few-shot": lambda: few_shot(2, 4),
    "thoughts": lambda: thoughts(2, depth=3),
    "traffic": lambda: traffic(150),
    "leaves": lambda: leaves(20),
}


def turns_of(workload: Workload) -> list[Turn]:
    return [*workload.before, *(turn for batch in workload.batches for turn in batch)]


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_workload_is_made_of_its_seed(make: Callable[[], Workload]) -> None:
    first, second = make(), make()

    assert np.array_equal(first.tokens, second.tokens)
    assert turns_of(first) == turns_of(second)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_turn_lies_within_the_tokens_and_asks_for_a_part_of_what_it_inserts(make: Callable[[], Workload]) -> None:
    workload = make()

    for start, prompt, whole in turns_of(workload):
        assert 0 < prompt <= whole and start + whole <= len(workload.tokens)


@pytest.mark.parametrize("block", [1, 16, 64])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_our_tree_finds_what_the_table_of_prefixes_says(make: Callable[[], Workload], block: int) -> None:
    workload = make()
    ours = Ours(len(workload.tokens) // block + 1, block)

    times = ours.turns(workload.tokens, turns_of(workload))

    assert times.hits == expected_hits(workload, block)
    assert len(times.turn) == len(turns_of(workload)) and min(times.turn) > 0


def test_chats_find_all_but_their_last_turn() -> None:
    """That is what makes them chats: each request knows its history."""
    workload = chats(2, 2048, last=2)
    hits = expected_hits(workload, 16)[len(workload.before) :]
    expected = [turn.whole - 256 for batch in workload.batches for turn in batch]

    assert hits == expected


def test_traffic_finds_more_than_a_third() -> None:
    workload = traffic(1_000)
    asked = sum(turn.prompt for turn in turns_of(workload))

    assert 0.3 < sum(expected_hits(workload, 16)) / asked < 0.45


def test_a_tree_that_finds_something_else_ends_the_comparison() -> None:
    with pytest.raises(AssertionError, match="SGLang found other prefixes"):
        tree._require_same({"tiercache": [16, 32], "SGLang": [16, 16]})


def test_without_a_peer_a_note_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nothing"))
    run = Run(tmp_path, quick=True, console=Console(quiet=True))

    with tree._peer(run) as peer:
        assert peer is None
    assert len(run.notes) == 1 and VARIABLE in run.notes[0]


def test_a_peer_that_does_not_run_is_a_note_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter without SGLang: the child ends before it has said a word."""
    monkeypatch.setenv(VARIABLE, sys.executable)
    run = Run(tmp_path, quick=True, console=Console(quiet=True))

    with tree._peer(run) as peer:
        assert peer is None
    assert len(run.notes) == 1 and "does not run them" in run.notes[0]


@pytest.mark.skipif(interpreter() is None, reason=f"no peer: `make peer-sglang`, or {VARIABLE}")
@pytest.mark.parametrize("core", NAMES)
def test_the_peer_finds_what_the_table_of_prefixes_says(core: Core, tmp_path: Path) -> None:
    workload = chats(2, 1024, last=1)
    file = tmp_path / "tokens"
    file.write_bytes(workload.tokens.tobytes())
    python = interpreter()
    assert python is not None

    with Peer(python) as peer:
        peer_tree = peer.open(core, 16, file)
        times = peer_tree.turns(turns_of(workload))

        assert times.hits == expected_hits(workload, 16)
        assert min(times.turn) > 0
        assert min(peer_tree.evict(16, 2)) > 0
        process = peer._process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
