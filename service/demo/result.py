"""What the demo found: one outcome a request, and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tiercache.service.demo.workload import Request
from tiercache.service.report import Report
from tiercache.types import Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One request, answered without the cache and with it. Counts are prompt tokens, times are seconds."""

    request: Request
    hit: dict[Tier, int]
    """Tokens whose KV came from the cache, by the tier in which they were found."""
    computed: int
    first_token: float
    """From the call to the first new token, with the cache."""
    first_token_without: float
    texts: Sequence[str]
    expected: Sequence[str]
    """The texts without the cache."""
    same: bool
    """Whether every new token of every sample is the same."""
    drift: float
    """The largest difference of a logit of the first new token."""

    @property
    def tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt)

    def to_json(self) -> dict[str, Any]:
        """Return the outcome as plain values."""
        return {
            "label": self.request.label,
            "prompt_tokens": self.tokens,
            "hit_tokens": {tier.name: tokens for tier, tokens in self.hit.items()},
            "computed_tokens": self.computed,
            "first_token_seconds": self.first_token,
            "first_token_seconds_without": self.first_token_without,
            "texts": list(self.texts),
            "texts_without": list(self.expected),
            "same": self.same,
            "logit_drift": self.drift,
        }


@dataclass(slots=True)
class Result:
    """The whole run."""

    outcomes: list[tuple[str, Outcome]] = field(default_factory=list)
    """Scene and outcome."""
    lives: list[Report] = field(default_factory=list)
    """The books of the cache at the end of each of its lives: it was closed and opened in between."""
    faults: Counter[str] = field(default_factory=Counter)
    """Calls of the cache that failed and became misses."""
    audit: list[str] = field(default_factory=list)
    """Faults that `check` found in the books."""
    reopened_seconds: float = 0.0

    @property
    def texts(self) -> int:
        """How many answers were compared."""
        return sum(len(outcome.expected) for _, outcome in self.outcomes)

    def reasons(self, report: Report) -> list[str]:
        """Return what speaks against the cache, in words; nothing when all is well. `report` is that of all lives."""
        found = [f"other text for {outcome.request.label!r}" for _, outcome in self.outcomes if not outcome.same]
        found += [f"nothing moved from {source} to {target}" for source, target, count in report.moves() if not count]
        found += [f"{call} ({count}x)" for call, count in self.faults.items()]
        found += [f"blocks failed: {reason} ({count}x)" for reason, count in report.failures.items()]
        found += [f"the audit found: {fault}" for fault in self.audit]
        return found
