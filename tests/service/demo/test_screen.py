"""What is shown: 80 columns, plain without a terminal, a verdict with its reasons."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from rich.console import Console

from tests.service.demo.conftest import printed
from tiercache.service.demo.result import Outcome, Result
from tiercache.service.demo.screen import Screen
from tiercache.service.demo.workload import Request
from tiercache.service.report import Report, TierReport
from tiercache.types import Tier

MOVES = {(Tier.HBM, Tier.DRAM): 71, (Tier.DRAM, Tier.SSD): 51, (Tier.SSD, Tier.DRAM): 1055, (Tier.DRAM, Tier.HBM): 75}
OUTCOME = Outcome(
    request=Request(label="Cleo, turn 1", prompt=(1,) * 1348, limit=16),
    hit={Tier.HBM: 1024, Tier.SSD: 16},
    computed=308,
    first_token=1.2345,
    first_token_without=12.345,
    texts=["one [bold]two[/bold]\nthree " * 5, "other"],
    expected=["x", "y"],
    same=True,
    drift=2e-5,
)


def report(**changes: Any) -> Report:
    tiers = tuple(
        TierReport(tier=tier, block_size=16, block_bytes=737_280, used=24, capacity=256, queries=14720, hits=12480)
        for tier in (Tier.HBM, Tier.DRAM, Tier.SSD)
    )
    given: dict[str, Any] = {"tiers": tiers, "copied": Counter(MOVES), "evicted": 0, "failures": Counter()} | changes
    return Report(**given)


def result(*outcomes: Outcome, **changes: Any) -> Result:
    found = Result(outcomes=[("Chats: many", outcome) for outcome in outcomes], lives=[report()])
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def test_every_line_fits_80_columns(screen: Screen, console: Console) -> None:
    screen.scene("Chats: many")
    screen.outcome(OUTCOME)
    screen.tiers(report())
    screen.summary(result(OUTCOME, OUTCOME), 123.4)

    assert max(map(len, printed(console).splitlines())) <= 80


def test_without_a_terminal_no_line_is_coloured_or_drawn_over(screen: Screen, console: Console) -> None:
    screen.stage("loading", None)
    screen.stage("loading", 0.5)
    screen.outcome(OUTCOME)

    assert printed(console).count("loading") == 1
    assert "\x1b" not in printed(console) and "\r" not in printed(console)


def test_a_text_is_shown_as_it_is(screen: Screen, console: Console) -> None:
    """A model may write what looks like markup, and lines."""
    screen.outcome(OUTCOME)

    assert "= one [bold]two[/b… +1" in printed(console)


def test_yes_is_one_line(screen: Screen, console: Console) -> None:
    yes = screen.summary(result(OUTCOME), 1.0)

    assert yes
    assert printed(console).splitlines()[-1].startswith("Yes: all 2 texts are the same")


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (result(dataclasses.replace(OUTCOME, same=False)), "other text for 'Cleo, turn 1'"),
        (result(OUTCOME, faults=Counter({"gather: LeaseLost": 2})), "gather: LeaseLost (2x)"),
        (result(OUTCOME, audit=["leases differ"]), "the audit found: leases differ"),
        (result(OUTCOME, lives=[report(copied=Counter({(Tier.HBM, Tier.DRAM): 1}))]), "nothing moved from DRAM to SSD"),
        (result(OUTCOME, lives=[report(failures=Counter({"checksum": 1}))]), "blocks failed: checksum (1x)"),
    ],
)
def test_no_says_why(screen: Screen, console: Console, found: Result, reason: str) -> None:
    yes = screen.summary(found, 1.0)

    assert not yes
    assert "No: " in printed(console) and reason in " ".join(printed(console).split())


def test_the_counts_of_two_lives_add_up(screen: Screen, console: Console) -> None:
    """A cache that was closed and opened counts anew."""
    both = report() + report(copied=Counter({(Tier.HBM, Tier.SSD): 3}), evicted=2)

    assert both.copied[Tier.HBM, Tier.DRAM] == 71
    assert both.leaps() == [(Tier.HBM, Tier.SSD, 3)]
    assert both.written() == 54
    assert (both.evicted, both.tiers[0].hits, both.tiers[0].used) == (2, 2 * 12480, 24)
