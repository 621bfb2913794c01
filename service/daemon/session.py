"""One session of a client: frames in, replies and notices out, and its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import msgspec

from tiercache.errors import InvalidFrame, JoinRefused, LimitReached, TierCacheError, VersionMismatch
from tiercache.service import wire
from tiercache.service.daemon.claims import Held, unknown
from tiercache.service.daemon.holdings import Holdings
from tiercache.service.daemon.house import House
from tiercache.service.daemon.outbox import Outbox
from tiercache.service.daemon.peers import Watch
from tiercache.service.daemon.prompts import Prompts
from tiercache.service.daemon.requests import WAYS, Answer
from tiercache.service.desk import Desk
from tiercache.sizes import parse_size

log = logging.getLogger(__name__)

_MOST_SPACES = 256
"""Namespaces that a session may open."""
_MOST_MESSAGE = 500
"""Characters of an error's message."""


class Session:
    """Requests in, replies out. Frames are taken in order; what has to wait goes on as a task, and is answered when it is done."""

    def __init__(self, house: House, watch: Watch, outbox: Outbox, *, pid: int) -> None:
        limits, config = house.config.limits, house.config
        self.number = house.number()
        self.token = house.new_token()
        self.watch = watch
        self.pid = pid
        self.done = asyncio.Event()
        """Set when the session has ended and everything that could be given back has been."""
        self.quit: str | None = None
        """Why the session is to end, once it is."""
        self.house = house
        self.holdings = Holdings(limits, house.terms, self._lost)
        self._limits = limits
        self._outbox = outbox
        self._prompts = Prompts(
            count=limits.prompts,
            size=max(parse_size(limits.prompt_bytes), 4 * config.max_tokens),
            most=config.max_tokens,
        )
        self._greeted = False
        self._desks: list[Desk] = []
        self._running: set[asyncio.Task[None]] = set()
        self._telling: set[asyncio.Task[None]] = set()

    # --- frames -----------------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Take one frame and answer it, now or later."""
        answer = self._take(data)
        if answer is not None:
            self._outbox.put(wire.encoder.encode(answer))

    @property
    def greeted(self) -> bool:
        """Whether it has begun."""
        return self._greeted

    def _take(self, data: bytes) -> wire.Reply | None:
        try:
            frame = wire.requests.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return self._refuse(data, error)
        self.house.counts.requests[type(frame).__name__] += 1
        try:
            if not self._greeted and not isinstance(frame, wire.Hello):
                raise InvalidFrame("the first frame of a session is hello")
            answer = self._begin(frame)
            if isinstance(answer, msgspec.Struct):
                return answer
            self._later(frame.id, answer)
        except Exception as error:  # noqa: BLE001 - the seam: every request gets a reply, `_failed` sees to the rest
            return self._failed(frame.id, error)
        return None

    def _begin(self, frame: wire.Request) -> Answer:
        way = WAYS[type(frame)]
        if not way.prompted:
            return way.call(self, frame)
        desk = self.desk(frame.kv)  # type: ignore[union-attr]
        packed = self._prompts.resolve(frame.prompt)  # type: ignore[union-attr]
        if packed is None:
            return wire.Failed(id=frame.id, kind=wire.UNKNOWN_BASE, message="the prompt continues one that is not kept")
        return way.call(self, frame, desk, desk.key(packed))

    def _later(self, request: int, work: Coroutine[Any, Any, wire.Reply]) -> None:
        if len(self._running) >= self._limits.requests:
            work.close()
            raise LimitReached(f"{len(self._running)} requests of this session wait; the limit is {self._limits.requests}")
        task = asyncio.get_running_loop().create_task(self._answer(request, work), name=f"tiercache-request-{self.number}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _answer(self, request: int, work: Coroutine[Any, Any, wire.Reply]) -> None:
        try:
            answer = await work
        except Exception as error:  # noqa: BLE001 - as in `_take`
            answer = self._failed(request, error)
        self._outbox.put(wire.encoder.encode(answer))

    def _failed(self, request: int, error: Exception) -> wire.Failed:
        kind = type(error).__name__ if isinstance(error, TierCacheError) else "TierCacheError"
        message = str(error)
        if not isinstance(error, TierCacheError):
            log.error("a request of session %d broke", self.number, exc_info=error)
            message = f"the request broke the daemon's own rules: {type(error).__name__}"
        self.house.counts.failures[kind] += 1
        return wire.Failed(id=request, kind=kind, message=message[:_MOST_MESSAGE])

    def _refuse(self, data: bytes, error: Exception) -> wire.Failed:
        """Answer a frame that is none, under its number if that can be read."""
        request, version = _glance(data)
        if version is not None and not self._greeted:
            return self._failed(request, self._other_version(version))
        return self._failed(request, InvalidFrame(str(error) or type(error).__name__))

    async def finish(self, seconds: float) -> None:
        """Let running requests end, for at most `seconds`, and their replies be written."""
        try:
            async with asyncio.timeout(seconds):
                while self._running:
                    await asyncio.wait(list(self._running))
                await self._outbox.drain()
        except TimeoutError:
            log.warning("session %d is closed before its requests have ended", self.number)

    # --- beginning --------------------------------------------------------------------------------------------------------

    def greet(self, frame: wire.Hello) -> wire.Welcome:
        """Begin, as the first frame asks. Raises InvalidFrame, VersionMismatch, JoinRefused, LimitReached or Closed."""
        if self._greeted:
            raise InvalidFrame("hello comes once")
        if frame.version != wire.VERSION:
            raise self._other_version(frame.version)
        if frame.join is not None:
            owner = self.house.session(frame.join)
            if owner is None:
                self.quit = "refused"
                raise JoinRefused("the token is no living session's: it is wrong, or that session has ended")
            self.holdings.join(owner.holdings)
        self.house.admit(self)
        self._greeted = True
        limits = self._limits
        return wire.Welcome(
            id=frame.id,
            version=wire.VERSION,
            boot=self.house.boot,
            session=self.number,
            token=self.token,
            descriptors=self.house.descriptors,
            limits={
                "tokens": self.house.config.max_tokens,
                "frame": self.house.most_frame,
                "requests": limits.requests,
                "leases": limits.leases,
                "reservations": limits.reservations,
                "prompts": limits.prompts,
                "prompt_bytes": max(parse_size(limits.prompt_bytes), 4 * self.house.config.max_tokens),
                "lease_ms": int(limits.lease_seconds * 1000),
            },
        )

    def _other_version(self, version: object) -> VersionMismatch:
        self.quit = "another version"
        return VersionMismatch(f"the client speaks version {version!r:.20}, this daemon {wire.VERSION}", version=version)

    def desk(self, number: int) -> Desk:
        """Return an open namespace. Raises UnknownHandle for a number that is none."""
        if not 1 <= number <= len(self._desks):
            raise unknown("namespace", number)
        return self._desks[number - 1]

    def add_desk(self, desk: Desk) -> int:
        """Note a namespace and return its number. Raises LimitReached when there are enough."""
        if len(self._desks) >= _MOST_SPACES:
            raise LimitReached(f"a session may open {_MOST_SPACES} namespaces")
        self._desks.append(desk)
        self.holdings.add_desk(desk)
        return len(self._desks)

    # --- notices ----------------------------------------------------------------------------------------------------------

    def tell(self, notice: wire.Notice) -> None:
        """Send what nobody asked for."""
        self._outbox.put(wire.encoder.encode(notice))

    def _lost(self, number: int, what: str) -> None:
        self.house.counts.lost[what] += 1
        self.tell(wire.Lost(number, f"the {what} was not renewed within {self._limits.lease_seconds:g} s"))

    def announce(self, held: Held) -> None:
        """Tell of each layer of a lease's blocks when it can be read. On a host that is when its block can be."""

        async def announce() -> None:
            await held.claim.promotion.readable.wait()
            for layer in range(held.desk.spec.layers):
                if held.ended:
                    return
                self.tell(wire.Arrived(held.number, layer))

        task = asyncio.get_running_loop().create_task(announce(), name=f"tiercache-layers-{held.number}")
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    # --- the end ----------------------------------------------------------------------------------------------------------

    async def end(self) -> None:
        """End the session: its copying leases end, and what its process may still touch is kept back until it no longer can."""
        self.house.leave(self)
        self._outbox.close()
        tasks = [*self._running, *self._telling]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self.watch.begin(self.holdings.end())
        self.house.keep(self.watch)
        self.done.set()


def _glance(data: bytes) -> tuple[int, object]:
    """Return the number of a frame that is none of ours, 0 if it has none, and the version that it speaks if it is a hello."""
    try:
        parts = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0, None
    if not isinstance(parts, list) or len(parts) < 2 or type(parts[1]) is not int or not 0 <= parts[1] < 1 << 63:
        return 0, None
    version = parts[2] if parts[0] == "hello" and len(parts) > 2 and parts[2] != wire.VERSION else None
    return parts[1], version
