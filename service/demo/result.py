"""What the demo found: one outcome a request, and the verdict."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tiercache.service.client.counts import ClientStats
from tiercache.service.demo.workload import Request
from tiercache.service.report import Report, TierReport, total
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One run of the daemon."""

    pid: int
    """The process that listens at its socket, as the kernel says."""
    boot: str
    """What the daemon calls this run, in hexadecimal; as no other one."""
    started_seconds: float
    """From the start of the process until a client had a session and its namespace was open."""


@dataclass(slots=True)
class Result:
    """The whole run."""

    outcomes: list[tuple[str, Outcome]] = field(default_factory=list)
    """Scene and outcome."""
    pid: int = field(default_factory=os.getpid)
    """The demo's own process."""
    daemons: list[Life] = field(default_factory=list)
    """As they began."""
    lives: list[Report] = field(default_factory=list)
    """The daemon's books at the end of each of its lives: it was stopped and started in between."""
    stopped_seconds: float = 0.0
    """How long the stop between the lives took."""
    drained: int = 0
    """Blocks that this stop wrote down: so many more were on SSD when the daemon was there again."""
    faults: Counter[str] = field(default_factory=Counter)
    """Calls of the cache that failed and became misses."""
    client: ClientStats | None = None
    """What the client counted."""
    audit: list[str] = field(default_factory=list)
    """Faults that `check` found in the books."""
    broken: str | None = None
    """Why the demo could not be played to its end."""

    @property
    def texts(self) -> int:
        """How many answers were compared."""
        return sum(len(outcome.expected) for _, outcome in self.outcomes)

    @property
    def report(self) -> Report | None:
        """The report of all lives that came to their end."""
        return total(self.lives) if self.lives else None

    def reasons(self) -> list[str]:
        """Return what speaks against the cache, in words; nothing when all is well."""
        if self.broken is not None:
            return [self.broken]
        report = self.report
        found = [f"other text for {outcome.request.label!r}" for _, outcome in self.outcomes if not outcome.same]
        found += self._restart()
        if report is not None:
            found += [f"nothing moved from {source} to {target}" for source, target, count in report.moves() if not count]
            found += [f"blocks failed: {reason} ({count}x)" for reason, count in report.failures.items()]
        found += [f"{call} ({count}x)" for call, count in self.faults.items()]
        if self.client is not None:
            found += [f"the client missed: {reason} ({count}x)" for reason, count in self.client.misses.items()]
        found += [f"the audit found: {fault}" for fault in self.audit]
        return found

    def _restart(self) -> list[str]:
        """Say so unless two runs of the daemon, in two processes beside the demo's, came to their end."""
        found = []
        pids = [life.pid for life in self.daemons]
        if len(self.daemons) != 2 or len(self.lives) != 2:
            found.append(f"of the daemon's two lives {len(self.daemons)} were begun and {len(self.lives)} played to the end")
        if len({self.pid, *pids}) != len(pids) + 1:
            found.append(f"the demo is process {self.pid}, and the daemon was process {' and '.join(map(str, pids))}")
        if len({life.boot for life in self.daemons}) != len(self.daemons):
            found.append("the daemon says that it was not started again")
        return found

    def to_json(self) -> dict[str, Any]:
        """Return all that was found as plain values."""
        reasons, report, client = self.reasons(), self.report, self.client
        return {
            "verdict": {"yes": not reasons, "reasons": reasons},
            "processes": {"demo": self.pid, "daemons": [asdict(life) for life in self.daemons]},
            "stopped_seconds": self.stopped_seconds,
            "requests": [{"scene": scene, **outcome.to_json()} for scene, outcome in self.outcomes],
            "tiers": [_tier_to_json(tier) for tier in report.tiers] if report else [],
            "moved_blocks": {f"{source}->{target}": count for source, target, count in report.moves() + report.leaps()}
            if report
            else {},
            "drained_blocks": self.drained,
            "evicted_blocks": report.evicted if report else 0,
            "bytes": {
                "kv_read": client.read,
                "kv_written": client.written,
                "socket_sent": client.sent,
                "socket_received": client.received,
            }
            if client
            else {},
            "faults": dict(self.faults),
            "misses": dict(client.misses) if client else {},
            "audit": self.audit,
        }


def _tier_to_json(tier: TierReport) -> dict[str, Any]:
    return {
        "tier": tier.tier.name,
        "used_blocks": tier.used,
        "capacity_blocks": tier.capacity,
        "block_bytes": tier.block_bytes,
        "tokens": tier.tokens,
        "asked_tokens": tier.queries,
        "found_tokens": tier.hits,
        "tokens_per_gib": tier.tokens_per_gib,
    }
