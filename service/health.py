"""How a cache does: computed when it is asked for, never assumed. What can ail it is in `tiercache.service.ailments`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tiercache.clock import Clock
from tiercache.service.ailments import CHECKS, Code, Sign
from tiercache.service.lateness import Lateness

if TYPE_CHECKING:
    from tiercache.service.inprocess import TierCache

__all__ = ["Ailment", "Code", "Examiner", "Health"]

LOOK_SECONDS = 0.2
"""How long an answer waits for a look at the disk; then it says what was seen last, and how old that is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ailment:
    """One thing that is wrong: a stable code for programs, a text for people that names value and limit, and for how long."""

    code: Code
    message: str
    since_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """`status` is ok without ailments, else degraded."""

    ailments: tuple[Ailment, ...]

    @property
    def status(self) -> str:
        """`ok` or `degraded`."""
        return "degraded" if self.ailments else "ok"

    @property
    def codes(self) -> frozenset[Code]:
        """What is wrong, by code."""
        return frozenset(ailment.code for ailment in self.ailments)


class Examiner:
    """Looks at one cache. It remembers when it first saw a sign that has no time of its own, and nothing else.

    Who measures how late the event loop is tells `lateness`.
    """

    def __init__(self, cache: TierCache, clock: Clock) -> None:
        self._cache = cache
        self._clock = clock
        self._seen: dict[tuple[Code, str], float] = {}
        self.lateness = Lateness(clock)

    async def examine(self) -> Health:
        """Look at everything. Waits for the disk for a fifth of a second at most."""
        if self._cache.disk_watch is not None:
            await self._cache.disk_watch.look(LOOK_SECONDS)
        return self.judge()

    def judge(self) -> Health:
        """Return what is wrong by what is known now, without waiting for anything."""
        now = self._clock.now()
        signs = list(self._signs())
        self._seen = {sign.key: min(self._seen.get(sign.key, now), now) for sign in signs}
        found = []
        for sign in signs:
            lasted = now - (self._seen[sign.key] if sign.since is None else sign.since)
            if lasted >= sign.after:
                found.append(Ailment(code=sign.code, message=sign.message, since_seconds=round(max(0.0, lasted), 1)))
        return Health(ailments=tuple(found))

    def _signs(self) -> Iterator[Sign]:
        for check in CHECKS:
            yield from check(self._cache, self._clock.now())
