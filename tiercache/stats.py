"""Counters of one share: what was asked for, what was found where, what moved and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tiercache.changes import Change, Reason
from tiercache.types import Tier


@dataclass(slots=True)
class Stats:
    """All counts are in blocks and only grow.

    `queries[position]` counts the blocks that a tier was asked for: what no faster tier had. `moved` counts blocks by
    (before, after, reason) of their fastest copy.
    """

    tiers: Sequence[Tier]
    matches: int = 0
    asked: int = 0
    missed: int = 0
    queries: list[int] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    moved: Counter[tuple[Tier | None, Tier | None, Reason]] = field(default_factory=Counter)
    copied: Counter[tuple[Tier, Tier]] = field(default_factory=Counter)
    """Blocks that transfers copied and committed, by the tier they were read from and the one they were written to."""
    clips: int = 0
    """Blocks that a match found and did not lease, because the session had its share."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed transfers, reads and writes, by reason."""

    def __post_init__(self) -> None:
        self.queries = [0] * len(self.tiers)
        self.hits = [0] * len(self.tiers)

    def matched(self, asked: int, found: Mapping[int, int]) -> None:
        """Count one match of `asked` blocks that found `found[position]` in each tier."""
        self.matches += 1
        self.asked += asked
        rest = asked
        for position in range(len(self.tiers)):
            self.queries[position] += rest
            hit = found.get(position, 0)
            self.hits[position] += hit
            rest -= hit
        self.missed += rest

    def clipped(self, blocks: int) -> None:
        """Count blocks that were there and not leased."""
        self.clips += blocks

    def failed(self, reason: str, count: int = 1) -> None:
        """Count a failure that became a miss or a refusal."""
        self.failures[reason] += count

    def changed(self, change: Change) -> None:
        """Count a committed change."""
        self.moved[change.before, change.after, change.reason] += len(change.blocks)

    def total(self, reason: Reason) -> int:
        """Return how many blocks changed for `reason`."""
        return sum(count for (_, _, why), count in self.moved.items() if why is reason)

    def between(self, before: Tier | None, after: Tier | None) -> int:
        """Return how many blocks went from having `before` as their fastest tier to `after`, for whatever reason."""
        return sum(count for (source, target, _), count in self.moved.items() if (source, target) == (before, after))
