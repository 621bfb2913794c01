"""An event loop that a test drives turn by turn, whose time goes on only when nothing else can happen, and what hangs on it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, TypeVar

from tiercache.errors import StoreError
from tiercache.storage.copier import Copier, LayerCopier
from tiercache.storage.workers import Lane, LaneState
from tiercache.transfer import Discard, Report, Transfer

T = TypeVar("T")
TURN_SECONDS = 1e-3
"""What a turn costs, so that whoever works without an end meets his deadline."""
HORIZON = 20.0
"""Seconds beyond which no timer is a deadline of a call: who waits for one that late waits for ever."""


class Stuck(AssertionError):
    """Somebody waits for what will never happen."""


class _Selector(selectors.SelectSelector):
    """No file is ever ready here; where a real one would sleep, the loop's time goes on at once."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._loop.idle(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """The order of everything follows from what the test does: no threads, no clock, no files."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns = 0
        self.horizon = HORIZON
        self.last_turn: int | None = None
        self.on_idle: Callable[[], bool] = lambda: False
        """Called when nothing is ready; returns whether it made something ready."""
        self.timers_first: Callable[[], bool] = lambda: True
        """Whether a deadline passes before `on_idle` is asked."""
        self.faults: list[str] = []
        """Errors that nobody looked at."""
        super().__init__(_Selector(self))
        self.set_exception_handler(lambda _, context: self.faults.append(str(context)))

    def time(self) -> float:
        return self.now

    def idle(self, timeout: float | None) -> None:
        self.turns += 1
        self.now += TURN_SECONDS
        if self.last_turn is not None and self.turns > self.last_turn:
            raise Stuck("a call has not ended after very many turns")
        if timeout is not None and timeout <= 0:
            return
        near = timeout is not None and timeout <= self.horizon
        if (near and self.timers_first()) or not self.on_idle():
            if not near:
                raise Stuck("nothing is ready, nothing is held, and no deadline is near")
            assert timeout is not None
            self.now += timeout

    def run(self, work: Coroutine[Any, Any, T], *, limit: int = 20_000) -> T:
        """Run `work` to its end; raise Stuck if that takes more than `limit` turns."""
        return self.finish(self.create_task(work), limit=limit)

    def finish(self, task: asyncio.Task[T], *, limit: int = 20_000) -> T:
        """Run until `task` has ended."""
        self.last_turn = self.turns + limit
        try:
            return self.run_until_complete(task)
        finally:
            self.last_turn = None

    def turn(self, count: int = 1) -> None:
        """Run what is ready now, `count` times; never waits."""
        for _ in range(count):
            self.call_soon(self.stop)
            self.run_forever()

    def wait(self, seconds: float) -> None:
        """Let time go on."""
        self.horizon = float("inf")
        try:
            self.run(asyncio.sleep(seconds))
        finally:
            self.horizon = HORIZON


class LoopClock:
    """The loop's time, for those who ask a clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def now(self) -> float:
        return self._loop.now


class TurnWorkers:
    """Runs every call some turns after it was asked for, whoever still waits then, and reports some turns later."""

    def __init__(self, loop: VirtualLoop, random: Random) -> None:
        self._loop = loop
        self._random = random

    async def run(self, lane: Lane, call: Callable[..., T], *args: Any) -> T:
        future: asyncio.Future[T] = self._loop.create_future()
        self._later(self._do, future, call, args)
        return await future

    def lanes(self) -> tuple[LaneState, ...]:
        return ()

    def close(self) -> None:
        pass

    def _later(self, call: Callable[..., None], *args: Any) -> None:
        def step(left: int) -> None:
            if left:
                self._loop.call_soon(step, left - 1)
            else:
                call(*args)

        self._loop.call_soon(step, self._random.randrange(3))

    def _do(self, future: asyncio.Future[T], call: Callable[..., T], args: tuple[Any, ...]) -> None:
        try:
            result = call(*args)
        except BaseException as error:  # noqa: BLE001 - whatever it is belongs to who waits
            self._later(_settle, future, error, True)
        else:
            self._later(_settle, future, result, False)


def _settle(future: asyncio.Future[Any], value: Any, failed: bool) -> None:
    if not future.done():
        future.set_exception(value) if failed else future.set_result(value)


class HeldCopier:
    """Holds the copies of another copier until they are released or failed, in any order; `open` lets all pass."""

    def __init__(self, inner: Copier) -> None:
        self._inner = inner
        self.open = True
        self.held: list[tuple[str, asyncio.Future[int | None]]] = []
        """What is held: what kind of copy, and the future of how many blocks may go through (None: all)."""

    def release(self, pick: int, *, fail: bool = False, part: int | None = None) -> str:
        """Let one go and return its kind: whole, or its first `part` blocks and then a failure, or only the failure."""
        kind, future = self.held.pop(pick % len(self.held))
        if fail:
            future.set_exception(StoreError("the test lets this copy fail"))
        else:
            future.set_result(part)
        return kind

    def by_layer(self, transfer: Transfer) -> LayerCopier | None:
        return self._inner.by_layer(transfer)

    def chunks(self, transfer: Transfer) -> list[tuple[int, int]]:
        """Return pieces of two blocks, so that a transfer is several copies."""
        return [(low, min(low + 2, transfer.count)) for low in range(0, transfer.count, 2)]

    async def blocks(self, transfer: Transfer, low: int, high: int) -> Report:
        part = await self._pass("blocks")
        if part is None or part >= high - low:
            return await self._inner.blocks(transfer, low, high)
        report = await self._inner.blocks(transfer, low, low + part)
        if report.error is None:
            report.error = StoreError("the test lets this copy fail half-way")
        return report

    async def put(self, transfer: Transfer) -> Report:
        await self._pass("put")
        return await self._inner.put(transfer)

    async def discard(self, discard: Discard) -> None:
        await self._pass("discard")
        await self._inner.discard(discard)

    async def _pass(self, kind: str) -> int | None:
        if self.open:
            return None
        future: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self.held.append((kind, future))
        return await future
