"""What is where, for people: how full each tier is, who was asked and had it, and what was copied between tiers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tiercache.changes import Reason
from tiercache.service.inprocess import TierCache
from tiercache.service.stack import Stack
from tiercache.sizes import format_size
from tiercache.slots import SlotState
from tiercache.storage.contract import FULL_CHARGE
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

    def written(self) -> int:
        """Return how many blocks were copied to the last tier."""
        return sum(count for (_, target), count in self.copied.items() if target is self.tiers[-1].tier)

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
    return tuple(_report(stack) for stack in cache.stacks)


def total(lives: Iterable[Report]) -> Report:
    """Return the last of the reports of one set of tiers, with the counts of all of them."""
    first, *rest = lives
    for report in rest:
        first = report + first
    return first


def _report(stack: Stack) -> Report:
    stats, residency = stack.cache.stats, stack.cache.residency
    tiers = [
        TierReport(
            tier=tier,
            block_size=stack.block_size,
            block_bytes=stack.geometry.block_bytes,
            used=len(pool.listed(SlotState.OWNED)),
            capacity=pool.budget // FULL_CHARGE,
            queries=queries * stack.block_size,
            hits=hits * stack.block_size,
        )
        for tier, pool, queries, hits in zip(stack.cache.tiers, residency.slots, stats.queries, stats.hits, strict=True)
    ]
    return Report(
        tiers=tuple(tiers),
        copied=Counter(stats.copied),
        evicted=sum(stats.total(reason) for reason in _LOST),
        failures=Counter(stats.failures),
    )


_LOST: Sequence[Reason] = (Reason.EVICT, Reason.DROP)


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
