"""What a client counts: bytes on its sockets, bytes of KV, and why something was a miss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Miss(NamedTuple):
    """Why the daemon gave no answer that can be used: `reason` is for the counters, `message` for people.

    Reasons of the client's own: `away` (no connection), `slow` (no reply within the deadline), `malformed` (a reply that can't
    be), `version` (a daemon of another protocol), `busy` (too many requests under way here, or connections there), `lost` (a
    lease or a slot that is gone), `checksum`, `died` (the thread that copied), `device` (one of its copies
    failed), `unmapped` (memory that can't be mapped, or copied from there). Others are the names of the daemon's errors.
    """

    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStats:
    """A client's counters since it was made.

    `sent` and `received` are bytes on the sockets, all framing included; `read` and `written` are bytes of KV that were copied
    out of and into shared memory. `misses` says how often something was a miss for want of the daemon, by reason.

    For an engine's memory on a device the daemon's memory is pinned here: `pinned` bytes are now, `pageable` bytes were refused, so
    that copies from there are slower, and `pageable_because` is what the device said, the last time.
    """

    sessions: int
    requests: int
    sent: int
    received: int
    read: int
    written: int
    misses: Mapping[str, int]
    pinned: int = 0
    pageable: int = 0
    pageable_because: str | None = None


@dataclass(slots=True)
class Counts:
    """The counters, as they grow."""

    sessions: int = 0
    requests: int = 0
    sent: int = 0
    received: int = 0
    read: int = 0
    written: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    pinned: int = 0
    pageable: int = 0
    pageable_because: str | None = None

    def missed(self, reason: str, message: str) -> Miss:
        """Count a miss and return it."""
        self.misses[reason] += 1
        return Miss(reason, message)

    def frozen(self) -> ClientStats:
        """Return what was counted up to now."""
        return ClientStats(
            sessions=self.sessions,
            requests=self.requests,
            sent=self.sent,
            received=self.received,
            read=self.read,
            written=self.written,
            misses=dict(self.misses),
            pinned=self.pinned,
            pageable=self.pageable,
            pageable_because=self.pageable_because,
        )
