"""Playing: requests are compared, everything moves, and the second life begins with what the first wrote down."""

from __future__ import annotations

import asyncio
import io
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.service.demo.conftest import AGAIN, Turns
from tiercache.errors import AuditFailed
from tiercache.service.client.client import Client
from tiercache.service.demo.places import Places
from tiercache.service.demo.play import SLOTS, Player, small_tiers
from tiercache.service.demo.result import Result
from tiercache.service.demo.screen import Screen
from tiercache.service.demo.sidecar import Sidecar
from tiercache.service.demo.workload import Scene
from tiercache.service.inprocess import TierCache
from tiercache.service.report import reports
from tiercache.service.runners.model import Loaded
from tiercache.spec import KVSpec
from tiercache.types import Tier

BLOCK = 4096
"""Bytes of a block of the tiny model."""


async def play(tiny: Loaded, directory: Path, scenes: Sequence[Scene], labels: Sequence[str]) -> Result:
    places = Places.choose(directory)
    with Screen(Console(file=io.StringIO(), width=80)) as screen:
        result = await Player(tiny, screen, sidecar=Sidecar(places), scenes=scenes, labels=labels).play()
    places.run.rmdir()  # the sockets in it are gone
    return result


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the tests' one whole run."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def played(tiny: Loaded, directory: Path) -> Result:
    """What came of that run. Two daemons take seconds: whoever only reads shares it."""
    return asyncio.run(play(tiny, directory, [Turns()], AGAIN))


def test_everything_moves_and_every_text_is_the_same(played: Result) -> None:
    """Nothing speaks against the cache."""
    assert played.reasons() == []
    assert played.report is not None
    assert all(count for *_, count in played.report.moves())
    assert [outcome.request.label for _, outcome in played.outcomes[-2:]] == list(AGAIN)
    assert played.texts == 5 + 5 * 2 + 1 + 2


def test_after_the_restart_prompts_are_found_on_ssd(played: Result) -> None:
    """All whole blocks of the first prompt that is asked again."""
    _, first = played.outcomes[-2]

    assert first.hit == {Tier.SSD: (first.tokens - 1) // 16 * 16}


def test_the_cache_is_beside_this_process_and_was_started_twice(played: Result) -> None:
    """Two processes and two boots, neither of them ours."""
    assert len({os.getpid(), *(life.pid for life in played.daemons)}) == 3
    assert len({life.boot for life in played.daemons}) == 2
    assert all(life.started_seconds > 0 for life in played.daemons)


def test_the_books_are_the_daemons(played: Result) -> None:
    """What each life's daemon says was found where is what the requests of that life were told."""
    told = [played.outcomes[:10], played.outcomes[10:]]

    for life, outcomes in zip(played.lives, told, strict=True):
        found = sum((Counter(outcome.hit) for _, outcome in outcomes), Counter())
        assert {tier.tier: tier.hits for tier in life.tiers if tier.hits} == dict(found)
        assert life.tiers[0].queries >= sum((outcome.tokens - 1) // 16 * 16 for _, outcome in outcomes)


def test_what_was_not_on_ssd_was_written_at_the_stop(played: Result) -> None:
    """The first life ended with so many blocks less on SSD than the second began with."""
    first, second = played.lives

    assert played.drained > 0
    assert first.durable() + played.drained == second.durable()


def test_kv_goes_through_memory_and_not_over_the_socket(played: Result) -> None:
    """Every block of a hit was read once, and what went over the socket is less than one in ten of the tiny model's bytes."""
    client = played.client
    assert client is not None

    assert client.read == sum(sum(outcome.hit.values()) for _, outcome in played.outcomes) // 16 * BLOCK
    assert client.written >= played.lives[-1].durable() * BLOCK
    assert 0 < client.sent + client.received < (client.read + client.written) / 10
    assert client.misses == {}


async def test_what_an_earlier_demo_left_is_cleared(
    played: Result, tiny: Loaded, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept directory makes no first request a hit; here one in which the audit finds a fault, which is a reason."""

    async def check(_: Client) -> Any:
        raise AuditFailed("slot 3 is owned twice", faults=["slot 3 is owned twice"])

    monkeypatch.setattr(Client, "check", check)
    again = await play(tiny, directory, [Turns(requests=2)], AGAIN[:1])

    _, first = again.outcomes[0]
    assert first.request == played.outcomes[0][1].request
    assert first.hit == {}
    assert again.reasons().count("the audit found: slot 3 is owned twice") == 2


@pytest.mark.parametrize(
    "spec",
    [
        KVSpec(layers=30, kv_heads=3, head_dim=64, dtype="float32"),
        KVSpec(layers=2, kv_heads=1, head_dim=8, dtype="float16"),
        KVSpec(layers=5, kv_heads=1, head_dim=100, dtype="bfloat16", latent=True),
    ],
)
async def test_the_small_tiers_hold_so_many_blocks_of_any_model(spec: KVSpec, tiny: Loaded, tmp_path: Path) -> None:
    """At least; where a block is smaller than a page, padding leaves room for more."""
    async with TierCache(small_tiers(spec, str(tmp_path))) as cache:
        await cache.open(tiny.namespace, spec)
        [report] = reports(cache)

        for tier in report.tiers:
            assert tier.capacity >= SLOTS[tier.tier.name.lower()]
    assert report.copied == Counter()
