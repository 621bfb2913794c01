"""What all sessions of one daemon share: the cache, its numbers and tokens, who is there, and counts."""

from __future__ import annotations

import hmac
import itertools
import secrets
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tiercache.clock import Clock
from tiercache.config import Config
from tiercache.errors import Closed, LimitReached
from tiercache.service.daemon.connections import Connections
from tiercache.service.daemon.peers import Watch
from tiercache.service.daemon.terms import Terms
from tiercache.service.inprocess import TierCache
from tiercache.types import Tier

if TYPE_CHECKING:
    from tiercache.service.daemon.session import Session

_FRAME_OVERHEAD = 64 * 1024


@dataclass(slots=True)
class Counts:
    """What the sessions did. They only grow."""

    sessions: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    """By the type of the frame."""
    failures: Counter[str] = field(default_factory=Counter)
    """Error replies, by the kind of the error."""
    distrusted: Counter[bool] = field(default_factory=Counter)
    """Blocks that a client distrusted, by whether they were sound."""
    overrun: int = 0
    """Sessions that were ended because the client did not read, and too much waited."""
    stalled: int = 0
    """Sessions that were ended because the client did not read, and a reply waited too long."""
    lost: Counter[str] = field(default_factory=Counter)
    """Claims that ended because they were not renewed: `lease` or `reservation`."""

    def note_overrun(self) -> None:
        """Count a session that was ended because too much waited."""
        self.overrun += 1

    def note_stall(self) -> None:
        """Count a session that was ended because a reply waited too long."""
        self.stalled += 1


class House:
    """What sessions know of the daemon. `descriptors` is the path of the socket that hands descriptors out."""

    def __init__(self, config: Config, cache: TierCache, descriptors: str, clock: Clock) -> None:
        self.config = config
        self.cache = cache
        self.descriptors = descriptors
        self.boot = secrets.token_bytes(16)
        self.counts = Counts()
        self.terms = Terms(clock)
        self.connections = Connections(config.limits.most_connections, config.limits.sessions)
        self.draining = False
        self._numbers = itertools.count(1)
        self._sessions: dict[bytes, Session] = {}
        self._watches: set[Watch] = set()

    @property
    def most_frame(self) -> int:
        """Bytes of the longest frame: twice what the longest prompt takes, so that one that is too long gets an answer."""
        return 2 * 4 * self.config.max_tokens + _FRAME_OVERHEAD

    @property
    def sessions(self) -> list[Session]:
        """Who is there."""
        return list(self._sessions.values())

    @property
    def kept_back(self) -> int:
        """How many ended sessions have left something that their process may still touch."""
        self._watches = {watch for watch in self._watches if watch.waiting}
        return len(self._watches)

    def number(self) -> int:
        """Return a number for a session, lease or reservation that no other one has."""
        return next(self._numbers)

    def new_token(self) -> bytes:
        """Return a token that can't be guessed."""
        return secrets.token_bytes(32)

    def session(self, token: bytes) -> Session | None:
        """Return the living session that has the token."""
        for known, session in self._sessions.items():
            if hmac.compare_digest(known, token):
                return session
        return None

    def admit(self, session: Session) -> None:
        """Let a session begin. Raises Closed while the daemon stops, LimitReached when there are enough."""
        if self.draining:
            raise Closed("the daemon is stopping")
        if len(self._sessions) >= self.config.limits.sessions:
            raise LimitReached(f"there are {len(self._sessions)} sessions; the limit is {self.config.limits.sessions}")
        self._sessions[session.token] = session
        self.counts.sessions += 1

    def leave(self, session: Session) -> None:
        """Forget a session; its token is worth nothing from now on."""
        self._sessions.pop(session.token, None)

    def keep(self, watch: Watch) -> None:
        """Remember a watch that has begun, as long as it waits."""
        if watch.waiting:
            self._watches = {other for other in self._watches if other.waiting} | {watch}

    def memory_number(self, tier: Tier) -> int:
        """Return which memory a tier lies in, in the order in which descriptors are handed out."""
        return self.cache.memory_tiers.index(tier)

    def close(self) -> None:
        """Stop all watches."""
        for watch in self._watches:
            watch.close()
        self._watches.clear()
