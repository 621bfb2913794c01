"""Executes transfers: copy → verify → commit, each as a task of the mover's own.

Whoever waits for a transfer waits for its `Flight`. Cancelling the waiter abandons the wait and nothing else: the task goes on
to the end of the copy, and only then are slots committed or freed. Completions of one tier are committed in the order in which
the store reports them, which for a chain is from its root.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Iterable
from functools import partial

from tiercache.clock import MonotonicClock
from tiercache.errors import StoreError, Untrusted, WorkerDied
from tiercache.kernels.device import Event
from tiercache.moves import Moves
from tiercache.stats import Stats
from tiercache.storage.copier import Copier, LayerCopier
from tiercache.storage.troubles import COPY, FORGET, READ, WRITE, Troubles
from tiercache.transfer import Discard, Report, State, Transfer, Work

log = logging.getLogger(__name__)


class Layer:
    """One layer of all blocks of a transfer, on its way into a device."""

    __slots__ = ("event", "known")

    def __init__(self) -> None:
        self.known = asyncio.Event()
        """Set when its copies are enqueued, and when the transfer has ended."""
        self.event: Event | None = None
        """When it will have arrived; None as long as nothing is enqueued of it, and for ever if nothing was."""

    def comes(self, event: Event) -> None:
        """Take note that it is enqueued."""
        self.event = event
        self.known.set()


class Flight:
    """A transfer or a discard under way. It has `layers` where they arrive one by one, and none where whole blocks are copied.

    Until all of them have arrived, who reads on the device may have his stream wait for a layer's event and read it where it
    arrives. The slots there are the transfer's, which may yet give them back: it ends after all that was begun to be read so.
    """

    __slots__ = ("_reads", "_unread", "coming", "done", "layers", "report", "steps", "undone", "work")

    def __init__(self, work: Work, layers: int) -> None:
        self.work = work
        self.done = asyncio.Event()
        self.layers = [Layer() for _ in range(layers)]
        self.coming = 0
        """How many leading blocks can be read where they arrive: those whose sources are sound; none any more when all is there."""
        self._reads = 0
        self._unread = asyncio.Event()
        self._unread.set()
        self.steps = 0
        """Pieces that have arrived: who waits sees by it whether anything still moves."""
        self.undone = False
        """Of a discard: the records are still there, and it was given up because the cache closes or it died."""
        self.report: Report | None = None
        """What became of it; there when `done` is set, None for a discard and for a copy that broke."""

    def begin_read(self) -> None:
        """Keep the transfer from ending until `end_read`; its blocks are `coming`."""
        self._reads += 1
        self._unread.clear()

    def end_read(self) -> None:
        """Take note that the device has read what `begin_read` was for."""
        self._reads -= 1
        if not self._reads:
            self._unread.set()

    async def unread(self) -> None:
        """Wait until nobody reads where the blocks arrive; from now on nobody begins to."""
        self.coming = 0
        await self._unread.wait()

    async def wait(self) -> Report | None:
        """Wait until the transfer is committed or given up, and return its report."""
        await self.done.wait()
        return self.report


class Mover:
    """Runs the moves that the core plans.

    After a failed write to a durable tier nothing more is planned into it for `retry_seconds`; nor is anything promised that only
    such a tier holds after it could not be read at all. After a copy that a device failed nothing is planned into its tier or out
    of it for as long. `troubles` is told what fails and what works, and how long a write took is told to the core, which plans the
    next ones by it.

    A move whose task dies (it is cancelled from outside, or the books do not fit) says nothing about its copy, which may still
    run: its slots stay its own until the process ends, nobody waits for it, and it is told as a trouble.
    """

    def __init__(
        self, moves: Moves, copier: Copier, stats: Stats, *, retry_seconds: float = 1.0, troubles: Troubles | None = None
    ) -> None:
        self._moves = moves
        self._copier = copier
        self._stats = stats
        self._retry = retry_seconds
        self.troubles = troubles or Troubles(MonotonicClock())
        self._flights: dict[int, Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed: dict[asyncio.Future[None], None] = {}
        """Who waits for a move's end, in the order in which they came: that is the order in which they are woken."""
        self._timers: set[asyncio.TimerHandle] = set()
        self._closing = False

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._flights)

    def start(self, work: Iterable[Work]) -> list[Flight]:
        """Begin to execute what the core planned."""
        flights: list[Flight] = []
        for item in work:
            by_layer = self._copier.by_layer(item) if isinstance(item, Transfer) else None
            flight = Flight(item, 0 if by_layer is None else by_layer.layers)
            self._flights[item.number] = flight
            run = self._discard(item, flight) if isinstance(item, Discard) else self._transfer(item, flight, by_layer)
            task = asyncio.get_running_loop().create_task(run, name=f"tiercache-move-{item.number}")
            self._tasks.add(task)
            task.add_done_callback(partial(self._landed, flight))
            flights.append(flight)
        return flights

    def flights(self) -> list[Flight]:
        """Return everything under way."""
        return list(self._flights.values())

    async def change(self, seconds: float | None = None) -> bool:
        """Wait until a move has ended; return False when `seconds` passed first."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._changed[future] = None
        try:
            async with asyncio.timeout(seconds):
                await future
        except TimeoutError:
            return False
        finally:
            del self._changed[future]
        return True

    async def settle(self) -> None:
        """Wait until nothing is under way."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def close(self) -> None:
        """Stop retrying. Call when nothing is under way."""
        self._closing = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _landed(self, flight: Flight, task: asyncio.Task[None]) -> None:
        """See to it that nobody waits for a move whose task died: a callback, as a task may be cancelled before it begins."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None and flight.done.is_set():
            return
        # Text, not the error: a handler that keeps records would keep the memory of the blocks in its traceback.
        cause = "a cancellation" if error is None else repr(error)
        trace = "" if error is None else "".join(traceback.format_exception(error))
        log.error("move %d died of %s; its slots stay its own until the process ends\n%s", flight.work.number, cause, trace)
        self.troubles.died(flight.work, cause)
        self._moves.inflight.forsake(flight.work)
        flight.undone = True
        if not flight.done.is_set():
            self._ended(flight, [])

    async def _transfer(self, transfer: Transfer, flight: Flight, by_layer: LayerCopier | None) -> None:
        transfer.state = State.COPYING
        try:
            report = await (self._copy(transfer, flight) if by_layer is None else self._copy_layers(transfer, flight, by_layer))
        except StoreError as error:
            report = Report(arrived=0, error=error)
        except Exception as error:  # a copy that breaks must still give its slots back
            log.exception("transfer %d broke", transfer.number)
            report = Report(arrived=0, error=StoreError(f"the copy broke: {error!r}"))
        if report.error is not None:
            self._failed(transfer, report.error)
            self._unread(transfer, report)
        elif report.arrived:
            self._worked(transfer)
        await flight.unread()
        flight.report = report
        more: list[Work] = []
        try:
            more = self._moves.inflight.complete(transfer, report)
        finally:  # whatever the books say, nobody is to wait for ever
            self._ended(flight, more)

    async def _copy(self, transfer: Transfer, flight: Flight) -> Report:
        if self._moves.residency.durable[transfer.to]:
            began = self.troubles.now()
            report = await self._copier.put(transfer)
            if report.arrived == transfer.count:
                self._moves.pace.took(transfer.count, self.troubles.now() - began)
            return report
        pieces = self._copier.chunks(transfer)
        reports = await asyncio.gather(*(self._piece(flight, transfer, low, high) for low, high in pieces), return_exceptions=True)
        arrived = 0
        for (low, high), piece in zip(pieces, reports, strict=True):
            if isinstance(piece, BaseException):
                if not isinstance(piece, StoreError):
                    raise piece
                return Report(arrived=arrived, error=piece)
            arrived += piece.arrived
            if piece.arrived < high - low:
                return Report(arrived=arrived, error=piece.error, rotten=piece.rotten, unread=piece.unread)
        return Report(arrived=arrived)

    async def _copy_layers(self, transfer: Transfer, flight: Flight, by_layer: LayerCopier) -> Report:
        """Have all layers copied, one behind the other, and wait once, at the end.

        A device can't check what arrived. So the sources are checked once more when all has: a block whose bytes are right before
        all copies and after them had the right ones in between.
        """
        before = await by_layer.verify(transfer)
        if not before.arrived:
            return before
        last: Event | None = None
        flight.coming = before.arrived
        try:
            for number, layer in enumerate(flight.layers):
                last = await by_layer.layer(transfer, number, before.arrived)
                layer.comes(last)
        except BaseException:
            await by_layer.over(None)  # what is enqueued writes the slots, also when what was to follow it failed
            raise
        await by_layer.over(last)
        after = await by_layer.verify(transfer)
        return after if after.arrived < before.arrived else before

    async def _piece(self, flight: Flight, transfer: Transfer, low: int, high: int) -> Report:
        report = await self._copier.blocks(transfer, low, high)
        flight.steps += 1
        return report

    async def _discard(self, discard: Discard, flight: Flight) -> None:
        discard.state = State.COPYING
        while not self._closing:
            try:
                await self._copier.discard(discard)
            except StoreError as error:
                # The records are still there: the slots stay taken until they are not.
                self._failed(discard, error)
                await asyncio.sleep(self._retry)
            else:
                self.troubles.worked(discard.position, FORGET)
                self._moves.inflight.discarded(discard)
                self._ended(flight, [])
                return
        flight.undone = True
        self._ended(flight, [])

    def _unread(self, transfer: Transfer, report: Report) -> None:
        """Promise nothing of a durable tier for a while from which nothing can be read."""
        if not report.unread or self._closing:
            return
        source = transfer.sources[report.arrived]
        log.warning("%s can't be read: %s", self._moves.residency.tiers[source], str(report.error))
        self._moves.blind.add(source)
        self._later(self._moves.blind, source)

    def _failed(self, work: Work, error: StoreError) -> None:
        self._stats.failed(error.reason if isinstance(error, Untrusted) else type(error).__name__)
        if isinstance(error, Untrusted | WorkerDied):
            return  # the store did not refuse
        if error.fields.get("device"):
            self._device_failed(error)
            return
        asked = self._asked(work)
        if asked is None:
            return
        position, act = asked
        if act == READ:
            self.troubles.failed(position, act, error)
            return
        # Its text, not the error: a handler that keeps records would keep the memory of the blocks in its traceback.
        log.warning("%s refuses blocks: %s", self._moves.residency.tiers[position], str(error))
        if self._closing:
            return
        self.troubles.failed(position, act, error, retry=self._retry)
        self._moves.refusing.add(position)
        self._later(self._moves.refusing, position)

    def _device_failed(self, error: StoreError) -> None:
        """Plan nothing out of the fastest tier or into it for a while: with all that can be tried at once nobody would do else."""
        log.warning("%s fails its copies: %s", self._moves.residency.tiers[0], str(error))
        if not self._closing:
            self.troubles.failed(0, COPY, error, retry=self._retry)
            self._moves.failing.add(0)
            self._later(self._moves.failing, 0)

    def _later(self, failing: set[int], position: int) -> None:
        """Try a tier again when it has been left alone for a while."""
        self._timers.add(asyncio.get_running_loop().call_later(self._retry, self._retried, failing, position))

    def _worked(self, transfer: Transfer) -> None:
        asked = self._asked(transfer)
        if asked is not None:
            self.troubles.worked(*asked)
        if transfer.to == 0 or transfer.sources[0] == 0:
            self.troubles.worked(0, COPY)

    def _asked(self, work: Work) -> tuple[int, str] | None:
        """Return which durable tier a move asks, and for what; None for a copy between memories."""
        if isinstance(work, Discard):
            return work.position, FORGET
        durable = self._moves.residency.durable
        if durable[work.to]:
            return work.to, WRITE
        return (work.sources[0], READ) if durable[work.sources[0]] else None

    def _retried(self, failing: set[int], position: int) -> None:
        failing.discard(position)
        self._timers = {timer for timer in self._timers if timer.when() > asyncio.get_running_loop().time()}
        self._wake()

    def _ended(self, flight: Flight, more: list[Work]) -> None:
        del self._flights[flight.work.number]
        for layer in flight.layers:
            layer.known.set()
        flight.done.set()
        self.start(more)
        self._wake()

    def _wake(self) -> None:
        for future in self._changed:
            if not future.done():
                future.set_result(None)
