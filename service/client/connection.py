"""One session with one run of the daemon: requests and their replies, notices, and what ends it."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import time
from collections import deque
from typing import Any, Protocol, TypeVar

import msgspec

from tiercache import errors
from tiercache.errors import JoinRefused, TierCacheError
from tiercache.service import wire
from tiercache.service.client.channel import Channel
from tiercache.service.client.counts import Counts, Miss
from tiercache.service.client.mapping import Memory
from tiercache.service.client.prompts import Prompts
from tiercache.service.client.renewal import Renewal

R = TypeVar("R")

_MOST_MESSAGE = 256 << 20
"""Bytes of one message; the places of a million blocks are 24 MB."""
_MOST_WAITING = 4096
"""Requests under way."""
_MOST_QUEUED = 64 << 20
"""Bytes that wait for the daemon to read them."""
_MOST_EARLY = 1024
"""Notices of leases whose match has not been told to who asked."""
_LAG = 0.05
"""Seconds. A deadline that is noticed this late was missed by our own loop; what came meanwhile is read first."""
_EARLY = 0.002
"""Seconds that a timer of the loop may come too soon by."""
_PROMPTS, _PROMPT_BYTES = 16, 16 << 20
_NOTICES = frozenset((wire.Arrived, wire.Lost, wire.Draining))


class Listener(Protocol):
    """Who is told what becomes of a lease."""

    def arrived(self, layer: int) -> None:
        """A layer of all blocks is where it is read."""
        ...

    def lost(self, reason: str) -> None:
        """The lease has ended."""
        ...


_Waiter = tuple[asyncio.Future[Any], type[wire.Request], int, float]
"""Who waits, for the answer to what, how much had been heard when it was asked, and when the answer is due."""


class Connection:
    """Requests to one run of the daemon; made by `connect`. What does not come back is a `Miss`, counted, never an exception."""

    def __init__(self, counts: Counts, deadline: float) -> None:
        self._counts = counts
        self.deadline = deadline
        """Seconds that a reply may take."""
        self._loop = asyncio.get_running_loop()
        self._channel: Channel | None = None
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Waiter] = {}
        self._posted: set[int] = set()
        self._renewal = Renewal(self.renew)
        self._renewing: dict[int, float] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf  # by the monotonic clock: one timer for all deadlines
        self._excused = False  # whether the alarm is one that was put off, as our own loop was late
        self._most = _MOST_WAITING
        self._listeners: dict[int, Listener] = {}
        self._early: deque[wire.Arrived | wire.Lost] = deque(maxlen=_MOST_EARLY)
        self._heard = 0
        self._silent = False
        self._memory: Memory | None = None
        self._welcome: wire.Welcome | None = None
        self.prompts = Prompts(_PROMPTS, _PROMPT_BYTES)
        self.ended = asyncio.Event()
        """Set when the session is over, whoever ended it."""
        self.is_over = False
        """Whether it is."""
        self.reason = ""
        """Why it is over."""

    # --- beginning and end ------------------------------------------------------------------------------------------------

    @classmethod
    async def connect(cls, path: str, counts: Counts, *, deadline: float, join: bytes | None) -> Connection | Miss:
        """Open a session on the daemon's socket at `path`.

        Raises what the daemon says of `join` when it refuses it: that is the caller's mistake, and trying again is no use.
        """
        connection = cls(counts, deadline)
        try:
            async with asyncio.timeout(deadline):
                miss = await connection._begin(path, join)
        except TimeoutError:
            miss = Miss("slow", f"no session within {deadline} s")
        except OSError as error:
            crowded = connection._channel is not None and connection._channel.crowded
            miss = Miss("busy" if crowded else "away", f"no session: {error}")
        except BaseException:
            connection.end("closed")
            raise
        if miss is not None:
            connection.end(miss.message)
            return miss
        counts.sessions += 1
        return connection

    async def _begin(self, path: str, join: bytes | None) -> Miss | None:
        def make() -> Channel:
            return Channel(self._counts, self._take, self._end, limit=_MOST_MESSAGE)

        _, self._channel = await self._loop.create_unix_connection(make, path)
        await self._channel.shake_hands(wire.SESSION_PATH)
        welcome = await self.call(wire.Welcome, wire.Hello, raises=(JoinRefused,), version=wire.VERSION, join=join)
        if isinstance(welcome, Miss):
            return welcome
        if welcome.version != wire.VERSION:
            return Miss("version", f"the daemon speaks version {welcome.version}, this client {wire.VERSION}")
        self._welcome = welcome
        limits = welcome.limits
        self._most = max(1, limits.get("requests", _MOST_WAITING))
        self._renewal.term = limits.get("lease_ms", 0) / 1000
        self.prompts = Prompts(limits.get("prompts", _PROMPTS), limits.get("prompt_bytes", _PROMPT_BYTES))
        self._memory = await Memory.connect(welcome.descriptors, welcome.boot)
        self._counts.sent += await self._memory.fetch(welcome.token)
        return None

    def end(self, reason: str) -> None:
        """End the session; whoever waits gets a miss."""
        if self._channel is not None:
            self._channel.end(reason)
        self._end(reason)

    def let_go(self) -> None:
        """In a forked child: point the descriptors of the parent's connections elsewhere."""
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in (
            self._channel.descriptor if self._channel is not None else -1,
            self._memory.channel if self._memory is not None else -1,
        ):
            if descriptor >= 0:
                os.dup2(null, descriptor, inheritable=False)
        os.close(null)

    async def close(self) -> None:
        """End the session and wait until the connection is gone."""
        self.end("closed")
        if self._channel is not None:
            await self._channel.close()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that it runs on."""
        return self._loop

    @property
    def welcome(self) -> wire.Welcome:
        """What the daemon said of itself."""
        assert self._welcome is not None, "`connect` gives no connection without it"
        return self._welcome

    async def memory_of(self, arenas: list[wire.ArenaAt]) -> Memory:
        """Return the daemon's memory, with all descriptors that `arenas` need. Raises OSError or TimeoutError."""
        memory = self._memory
        if memory is None:  # the reply that named the arenas had come, and then the session ended
            raise ConnectionError(self.reason)
        if not all(memory.has(at) for at in arenas):
            async with asyncio.timeout(self.deadline):
                self._counts.sent += await memory.fetch(self.welcome.token)
        return memory

    # --- requests ---------------------------------------------------------------------------------------------------------

    async def call(
        self,
        expected: type[R],
        request: type[wire.Request],
        *,
        key: bytes | None = None,
        patience: float = 0.0,
        raises: tuple[type[TierCacheError], ...] = (),
        **fields: Any,
    ) -> R | Miss:
        """Send a request and return its reply, which is an `expected`, or why there is none.

        `key` is a packed prompt, of which what the daemon does not know goes along. `patience` is added to the deadline, for
        what the daemon may wait for on purpose. What a reply gives that comes after the caller has gone or given up goes back.
        What the daemon refuses by a name among `raises` is raised.
        """
        channel, waiting = self._channel, self._waiting
        if self.is_over or channel is None:
            return self._counts.missed("away", self.reason)
        if self._silent:
            return self._counts.missed("slow", "the daemon has not answered since its last deadline")
        if len(waiting) + len(self._posted) >= self._most or channel.queued > _MOST_QUEUED:
            return self._counts.missed("busy", f"{len(waiting)} requests, {channel.queued} bytes are under way")
        if key is not None:
            fields["prompt"] = self.prompts.say(key)
        future = self._loop.create_future()
        sent = time.monotonic()
        due = sent + self.deadline + patience
        number = self._send(request, fields)
        waiting[number] = future, request, self._heard, due
        if due < self._alarm_at:
            self._set_alarm(due, sent)
        try:
            answer = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self._undo(future.result())
            raise
        if isinstance(answer, expected):
            if isinstance(answer, wire.Leased):
                if not fields.get("in_place"):
                    self._renewal.take(answer.lease, sent)
            elif isinstance(answer, wire.Reserved):
                self._renewal.take(answer.reservation, sent)
            return answer
        if isinstance(answer, Miss):
            return answer
        if isinstance(answer, wire.Failed):
            kind = getattr(errors, answer.kind, None)
            if isinstance(kind, type) and issubclass(kind, raises):
                raise kind(answer.message)
            if answer.kind == wire.UNKNOWN_BASE and key is not None and fields["prompt"].base is not None:
                self.prompts.forget()
                return await self.call(expected, request, key=key, patience=patience, raises=raises, **fields)
            return self._counts.missed(answer.kind, answer.message)
        self._undo(answer)
        return self._counts.missed("malformed", f"a {type(answer).__name__} is no answer to {request.__name__}")

    def post(self, request: type[wire.Request], **fields: Any) -> None:
        """Send a request whose answer nobody waits for."""
        if not self.is_over:
            self._posted.add(self._send(request, fields))

    def listen(self, lease: int, listener: Listener) -> None:
        """Tell `listener` what becomes of a lease, also what came since the lease began."""
        self._listeners[lease] = listener
        if self._early:
            for notice in [notice for notice in self._early if notice.lease == lease]:
                self._early.remove(notice)
                self._notify(listener, notice)
        if self.is_over:
            listener.lost(self.reason)

    def take_part(self, lease: int, asked: float) -> None:
        """Hold a lease of another session, too, that the daemon was asked for at `asked` by the monotonic clock, or later."""
        self._renewal.take(lease, asked)

    def release(self, lease: int) -> None:
        """End a lease, whose listener is told no more."""
        self._listeners.pop(lease, None)
        self._renewal.drop(lease)
        self.post(wire.Release, lease=lease)

    def close_reservation(self, reservation: int) -> None:
        """Give back what is reserved."""
        self._renewal.drop(reservation)
        self.post(wire.Close, reservation=reservation)

    def read_in_place(self, lease: int) -> bool:
        """Say that a lease is read in place; return whether the daemon hears it before it could take the lease for lost.

        False when it was not renewed for so long, because this process was stopped or the daemon did not answer, that it may have
        ended; and while something before it waits to be written, since then nothing says when it will be.
        """
        self.post(wire.InPlace, lease=lease)
        if not self._renewal.term:
            return True
        # Looked at after the frame is in the socket: this process may be stopped anywhere, for any time.
        sure = self._channel is not None and not self._channel.queued and self._renewal.is_sure(lease)
        self._renewal.drop(lease)
        return sure

    def renew(self) -> None:
        """Let all leases and reservations stand for another term, from now on."""
        if not self.is_over:
            sent = time.monotonic()  # before it is: this process may be stopped in between
            number = self._send(wire.Renew, {})
            self._posted.add(number)
            self._renewing[number] = sent

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _send(self, request: type[wire.Request], fields: dict[str, Any]) -> int:
        assert self._channel is not None
        number = next(self._numbers)
        self._counts.requests += 1
        self._channel.send(wire.encoder.encode(request(id=number, **fields)))
        return number

    def _set_alarm(self, due: float, now: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = due
        self._alarm = self._loop.call_later(due - now, self._ring)

    def _ring(self) -> None:
        """Give up what is due, and be called again for what is due next."""
        now = time.monotonic()
        late = now - self._alarm_at > _LAG
        self._alarm, self._alarm_at = None, math.inf
        # Once: a loop that is late in every turn has read what came by the next one, and would find an excuse for ever.
        self._excused = late and not self._excused
        if self._excused:
            self._set_alarm(now + _LAG, now)
            return
        following = math.inf
        for future, request, heard, due in list(self._waiting.values()):
            if future.done():
                continue
            if due > now + _EARLY:
                following = min(following, due)
                continue
            # Nothing at all was heard since: the next calls would only wait as long. The first thing that is heard ends that.
            self._silent = self._silent or heard == self._heard
            future.set_result(self._counts.missed("slow", f"no reply to {request.__name__} within the deadline"))
        if following < math.inf:
            self._set_alarm(following, now)

    def _take(self, message: bytes) -> None:
        self._heard += 1
        self._silent = False
        try:
            frame = wire.answers.decode(message)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            # Whose reply it was can't be told; a daemon that sends such things is not to be waited for.
            self._counts.missed("malformed", str(error))
            self.end(f"a frame that can't be read: {error}")
            return
        if type(frame) in _NOTICES:
            self._take_notice(frame)  # type: ignore[arg-type]
            return
        number = frame.id  # type: ignore[union-attr]
        waiter = self._waiting.pop(number, None)
        if waiter is not None:
            future = waiter[0]
            if future.done():
                self._undo(frame)
            else:
                future.set_result(frame)
            return
        self._posted.discard(number)
        renewed = self._renewing.pop(number, None)
        if renewed is not None and isinstance(frame, wire.Done):
            self._renewal.heard(renewed)
        if isinstance(frame, wire.Failed):
            self._counts.missed(frame.kind, frame.message)

    def _take_notice(self, notice: wire.Notice) -> None:
        if isinstance(notice, wire.Draining):
            return
        if isinstance(notice, wire.Lost):
            self._renewal.drop(notice.lease)
            self._counts.missed("lost", notice.reason)
        listener = self._listeners.get(notice.lease)
        if listener is None:
            self._early.append(notice)
        else:
            self._notify(listener, notice)

    @staticmethod
    def _notify(listener: Listener, notice: wire.Arrived | wire.Lost) -> None:
        if isinstance(notice, wire.Arrived):
            listener.arrived(notice.layer)
        else:
            listener.lost(notice.reason)

    def _undo(self, answer: Any) -> None:
        """Give back what a reply gave that nobody waits for."""
        if isinstance(answer, wire.Leased):
            self.release(answer.lease)
        elif isinstance(answer, wire.Reserved):
            self.close_reservation(answer.reservation)

    def _end(self, reason: str) -> None:
        if self.is_over:
            return
        self.is_over = True
        self.ended.set()
        self.reason = reason
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._renewal.end()
        waiting, self._waiting = self._waiting, {}
        for future, *_ in waiting.values():
            if not future.done():
                future.set_result(self._counts.missed("away", reason))
        # Cleared, too: what ends a lease when its last tensor goes holds this connection, and must not hold that tensor's lease.
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.lost(reason)
        if self._memory is not None:
            self._memory.end()
        self._memory = None
