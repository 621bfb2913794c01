"""What is where, for people: how full each tier is, who was asked and had it, and what was copied between tiers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from tiercache.changes import Reason
from tiercache.service.daemon.report import figures
from tiercache.service.inprocess import TierCache
from tiercache.sizes import format_size
from tiercache.types import Tier

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class TierReport:
    """One tier of one block size. `queries` counts the tokens it was asked for (no faster tier had them), `hits` what it had."""

    tier: Tier
    block_size: int
    block_bytes: int
    used: int
    """Blocks that have a copy here."""
    capacity: int
    """Blocks that fit."""
    queries: int
    hits: int

    @property
    def tokens(self) -> int:
        """Tokens that have a copy here."""
        return self.used * self.block_size

    @property
    def used_bytes(self) -> int:
        """Bytes of KV that lie here."""
        return self.used * self.block_bytes

    @property
    def capacity_bytes(self) -> int:
        """Bytes of KV that fit."""
        return self.capacity * self.block_bytes

    @property
    def tokens_per_gib(self) -> int:
        """Tokens whose KV takes one GiB."""
        return GIB * self.block_size // self.block_bytes

    def __str__(self) -> str:
        return (
            f"{self.tier}: {self.used} of {self.capacity} blocks, {format_size(self.used_bytes)} of "
            f"{format_size(self.capacity_bytes)}, {self.tokens} tokens; {self.hits} of {self.queries} tokens asked for were here"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The tiers of one block size, fastest first, and what happened in them since the cache was opened. Counts only grow."""

    tiers: tuple[TierReport, ...]
    copied: Counter[tuple[Tier, Tier]]
    """Blocks that were copied, by the tier they came from and the one they went to."""
    evicted: int
    """Blocks that left the last tier, or could go nowhere, for want of room."""
    failures: Counter[str]
    """Blocks and moves that failed, by reason: each became a miss."""

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Self:
        """Return the report that the figures of one block size make, as `/v1/stats` lists them."""
        size = found["block_size"]
        return cls(
            tiers=tuple(
                TierReport(
                    tier=Tier[tier["tier"]],
                    block_size=size,
                    block_bytes=found["block_bytes"],
                    used=tier["blocks"],
                    capacity=tier["capacity"],
                    queries=tier["queries"] * size,
                    hits=tier["hits"] * size,
                )
                for tier in found["tiers"]
            ),
            copied=Counter({(Tier[way["from"]], Tier[way["to"]]): way["blocks"] for way in found["copied"]}),
            evicted=sum(change["blocks"] for change in found["moved"] if change["reason"] in _LOST),
            failures=Counter(found["failures"]),
        )

    def moves(self) -> list[tuple[Tier, Tier, int]]:
        """Return how many blocks went each way between neighbouring tiers, zeros included: all ways down, then all ways up."""
        places = [tier.tier for tier in self.tiers]
        down = list(itertools.pairwise(places))
        up = [(lower, upper) for upper, lower in reversed(down)]
        return [(source, target, self.copied[source, target]) for source, target in [*down, *up]]

    def leaps(self) -> list[tuple[Tier, Tier, int]]:
        """Return how many blocks went past a tier, such as from HBM straight to SSD when the cache closes; no zeros."""
        steps = {(source, target) for source, target, _ in self.moves()}
        return [(source, target, count) for (source, target), count in self.copied.items() if (source, target) not in steps]

    def durable(self) -> int:
        """Return how many blocks have a copy in the last tier."""
        return self.tiers[-1].used

    def __add__(self, earlier: Report) -> Report:
        """Return this report with the counts of an earlier life of the same tiers added."""
        counts = {report.tier: report for report in earlier.tiers}
        return Report(
            tiers=tuple(_added(report, counts[report.tier]) for report in self.tiers),
            copied=self.copied + earlier.copied,
            evicted=self.evicted + earlier.evicted,
            failures=self.failures + earlier.failures,
        )


def reports(cache: TierCache) -> tuple[Report, ...]:
    """Return a report for each block size that is open in `cache`; also after its end, when its counts are complete."""
    return tuple(Report.read(figures(stack)) for stack in cache.stacks)


def reports_of(stats: Mapping[str, Any]) -> tuple[Report, ...]:
    """Return the same from what a daemon answers to `/v1/stats`."""
    return tuple(Report.read(found) for found in stats["stacks"])


def total(lives: Iterable[Report]) -> Report:
    """Return the last of the reports of one set of tiers, with the counts of all of them."""
    first, *rest = lives
    for report in rest:
        first = report + first
    return first


_LOST = frozenset({Reason.EVICT.value, Reason.DROP.value})


def _added(now: TierReport, before: TierReport) -> TierReport:
    return TierReport(
        tier=now.tier,
        block_size=now.block_size,
        block_bytes=now.block_bytes,
        used=now.used,
        capacity=now.capacity,
        queries=now.queries + before.queries,
        hits=now.hits + before.hits,
    )
