"""What is shown: 80 columns, plain without a terminal, a verdict with its reasons."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.service.demo.conftest import printed
from tiercache.service.client.counts import ClientStats
from tiercache.service.demo.places import Places
from tiercache.service.demo.result import Life, Outcome, Result
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


FIRST = Life(pid=4_194_301, boot="0123456789abcdef" * 2, started_seconds=12.345)
SECOND = Life(pid=4_194_302, boot="fedcba9876543210" * 2, started_seconds=12.345)
MANY = 1 << 40
COUNTED = ClientStats(sessions=2, requests=900, sent=10 << 20, received=90 << 20, read=MANY, written=MANY, misses={})


def counted(**misses: int) -> ClientStats:
    return dataclasses.replace(COUNTED, misses=misses)


def result(*outcomes: Outcome, **changes: Any) -> Result:
    found = Result(
        outcomes=[("Chats: many", outcome) for outcome in outcomes],
        pid=4_194_300,
        daemons=[FIRST, SECOND],
        lives=[report(), report()],
        client=COUNTED,
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def test_every_line_fits_80_columns(screen: Screen, console: Console) -> None:
    """Long names, large counts, a minute of waiting: nothing is wrapped, and no table is cut."""
    screen.serving(4_194_300, FIRST, Places(Path("/tmp/tiercache-demo-4194300-01234567"), Path("/tmp/run")))
    screen.scene("Chats: many")
    screen.outcome(OUTCOME)
    screen.tiers(report())
    screen.stopped(FIRST, 12.345)
    screen.restarted(SECOND, 256)
    leap = report(copied=Counter({**MOVES, (Tier.HBM, Tier.SSD): 1024}), evicted=1024)
    screen.summary(result(OUTCOME, OUTCOME, lives=[leap, report()], drained=1024), 123.4)

    lines = printed(console).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[-1] for line in lines if line.startswith(("scene", "tier ", "blocks moved"))] == [
        "ratio",
        "GiB",
        "evicted",
    ]
    assert not any("…" in line for line in lines if "=" not in line and "≠" not in line)


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


NO_MOVES = [report(copied=Counter({(Tier.HBM, Tier.DRAM): 1})), report(copied=Counter())]


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (result(dataclasses.replace(OUTCOME, same=False)), "other text for 'Cleo, turn 1'"),
        (result(OUTCOME, faults=Counter({"gather: LeaseLost": 2})), "gather: LeaseLost (2x)"),
        (result(OUTCOME, client=counted(slow=3)), "the client missed: slow (3x)"),
        (result(OUTCOME, audit=["leases differ"]), "the audit found: leases differ"),
        (result(OUTCOME, lives=NO_MOVES), "nothing moved from DRAM to SSD"),
        (result(OUTCOME, lives=[report(failures=Counter({"checksum": 1})), report()]), "blocks failed: checksum (1x)"),
        (result(OUTCOME, lives=[report()]), "of the daemon's two lives 2 were begun and 1 played to the end"),
        (result(OUTCOME, daemons=[FIRST]), "of the daemon's two lives 1 were begun and 2 played to the end"),
        (result(OUTCOME, daemons=[FIRST, dataclasses.replace(SECOND, pid=FIRST.pid)]), "process 4194301 and 4194301"),
        (result(OUTCOME, pid=FIRST.pid), "the demo is process 4194301"),
        (result(OUTCOME, daemons=[FIRST, dataclasses.replace(SECOND, boot=FIRST.boot)]), "was not started again"),
        (result(OUTCOME, broken="daemon 7 was ended by signal 9 (Killed)"), "No: daemon 7 was ended by signal 9 (Killed)."),
        (result(lives=[], daemons=[FIRST], broken="daemon 7 ended"), "No: daemon 7 ended."),
    ],
)
def test_no_says_why(screen: Screen, console: Console, found: Result, reason: str) -> None:
    yes = screen.summary(found, 1.0)

    assert not yes
    assert "No: " in printed(console) and reason in " ".join(printed(console).split())


def test_the_counts_of_two_lives_add_up(screen: Screen, console: Console) -> None:
    """A daemon that was started again counts anew."""
    both = report() + report(copied=Counter({(Tier.HBM, Tier.SSD): 3}), evicted=2)

    assert both.copied[Tier.HBM, Tier.DRAM] == 71
    assert both.leaps() == [(Tier.HBM, Tier.SSD, 3)]
    assert (both.evicted, both.tiers[0].hits, both.tiers[0].used) == (2, 2 * 12480, 24)
