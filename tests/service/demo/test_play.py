"""Playing: requests are compared, everything moves, and the second life begins with what the first wrote down."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.service.demo.conftest import AGAIN, Turns
from tiercache.errors import AuditFailed
from tiercache.service.demo.play import SLOTS, Player, small_tiers
from tiercache.service.demo.screen import Screen
from tiercache.service.inprocess import TierCache
from tiercache.service.report import reports, total
from tiercache.service.runners.model import Loaded
from tiercache.spec import KVSpec
from tiercache.types import Tier


def player(tiny: Loaded, screen: Screen, directory: Path) -> Player:
    return Player(tiny, screen, directory=str(directory), scenes=[Turns()], labels=AGAIN)


async def test_everything_moves_and_every_text_is_the_same(tiny: Loaded, screen: Screen, tmp_path: Path) -> None:
    result = await player(tiny, screen, tmp_path).play()

    report = total(result.lives)
    assert result.reasons(report) == []
    assert all(count for *_, count in report.moves())
    assert [outcome.request.label for _, outcome in result.outcomes[-2:]] == list(AGAIN)
    assert result.texts == 5 + 5 * 2 + 1 + 2


async def test_after_the_restart_prompts_are_found_on_ssd(tiny: Loaded, screen: Screen, tmp_path: Path) -> None:
    result = await player(tiny, screen, tmp_path).play()

    _, first = result.outcomes[-2]
    assert first.hit == {Tier.SSD: (first.tokens - 1) // 16 * 16}


async def test_what_an_earlier_demo_left_is_cleared(tiny: Loaded, screen: Screen, tmp_path: Path) -> None:
    """A kept directory makes no first request a hit."""
    await player(tiny, screen, tmp_path).play()

    again = await player(tiny, screen, tmp_path).play()

    _, first = again.outcomes[0]
    assert first.hit == {}


async def test_a_failed_audit_is_a_reason(tiny: Loaded, screen: Screen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(_: TierCache) -> Any:
        raise AuditFailed("slot 3 is owned twice")

    monkeypatch.setattr(TierCache, "check", check)
    result = await player(tiny, screen, tmp_path).play()

    assert "the audit found: slot 3 is owned twice" in result.reasons(total(result.lives))


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
