"""When blocks move: room for writers, promotions for readers, copies to the durable tier, and draining ahead of need.

The rules that keep it from locking up:

* Nothing waits for room while it holds room. Who waits stands in a queue per tier, with a deadline, and holds nothing.
* Room is made strictly downwards, and a demotion never waits for a promotion.
* Tasks here may be cancelled at any await: what is under way belongs to the mover.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from tiercache.cache import Cache
from tiercache.clock import Clock
from tiercache.errors import WorkerDied
from tiercache.leases import Lease, Reservation
from tiercache.storage.mover import Flight, Mover
from tiercache.transfer import Transfer
from tiercache.tree import path

_COPY_PATIENCE = 5.0
"""Seconds that a writer waits for copies between memories once room has been decided on; they never wait for a disk."""

_FRUITLESS = 16
"""Rounds in a row without a slot more than before, after which draining ends."""


_TOP = frozenset((0,))
_SET = asyncio.Event()
"""Of every promotion that was over before it began. Nobody waits for it, and nobody clears an event."""
_SET.set()


class Promotion:
    """The way of a lease's blocks up. `readable` is set when all that will be in memory is there, `done` when it is over."""

    __slots__ = ("done", "flights", "own", "readable", "reader")

    def __init__(self, reader: Lease, *, over: bool = False) -> None:
        self.reader = reader
        self.own: Lease | None = None
        """What it holds the blocks with that its reader no longer waits for (`Traffic.carry_on`)."""
        self.readable = _SET if over else asyncio.Event()
        self.done = _SET if over else asyncio.Event()
        self.flights: list[Flight] = []

    @property
    def lease(self) -> Lease:
        """What is brought up; its end stops what has not begun."""
        return self.own or self.reader


class Traffic:
    """Schedules the moves of one cache. Times are in seconds; watermarks are fractions of a tier's slots.

    A promotion of which nothing has come for `promote` and `stall` seconds is waited for no more.
    """

    def __init__(
        self,
        cache: Cache,
        mover: Mover,
        clock: Clock,
        *,
        admit: float,
        promote: float,
        stall: float,
        watermark_low: float,
        watermark_high: float,
    ) -> None:
        self._cache = cache
        self._mover = mover
        self._clock = clock
        self._admit = admit
        self._promote = promote
        self._stall = stall
        self._low = [int(pool.capacity * watermark_low) for pool in cache.residency.slots]
        self._high = [
            max(low, int(pool.capacity * watermark_high)) for low, pool in zip(self._low, cache.residency.slots, strict=True)
        ]
        self._turns = [asyncio.Lock() for _ in cache.tiers]
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._draining: set[int] = set()
        self._closed = False

    # --- room -------------------------------------------------------------------------------------------------------------

    def patience(self) -> float:
        """Return until when an insert that begins now may wait, by the clock."""
        return self._clock.now() + self._admit

    async def lift_to_write(self, lease: Lease, deadline: float) -> None:
        """Bring up what a writer's blocks follow; return when that is over, or at the deadline: disks are not waited for."""
        promotion = self.promote(lease)
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock.now())):
                await promotion.done.wait()
        except TimeoutError:
            pass

    async def room_to_write(self, position: int, want: int, deadline: float) -> None:
        """Make room for a writer: wait for demotions until the deadline, then let the least valuable go.

        Returns when `want` slots are free, or no more can be had.
        """
        want = min(want, self._cache.residency.slots[position].capacity)
        if deadline > self._clock.now():  # else what is now begun to be written to a disk could neither be waited for nor dropped
            await self._room(position, want, deadline)
        moves, pool = self._cache.moves, self._cache.residency.slots[position]
        deadline = self._clock.now() + _COPY_PATIENCE
        while pool.free < want:
            self._mover.start(moves.make_room(position, want, drop=True))
            left = deadline - self._clock.now()
            copied = moves.inflight.copied_away(position)
            if pool.free >= want or not copied or left <= 0 or not await self._mover.change(left):
                break

    async def _room(self, position: int, want: int, deadline: float) -> None:
        """Wait for demotions until `want` slots are free, in the order in which callers came, each until its own deadline."""
        pool, moves, turn = self._cache.residency.slots[position], self._cache.moves, self._turns[position]
        if pool.free >= want and not turn.locked():
            return
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock.now())):
                await turn.acquire()
        except TimeoutError:
            return  # whoever is before may wait longer, for a disk
        try:
            while pool.free < want and not moves.refusing.intersection(range(position + 1, len(self._cache.tiers))):
                self._mover.start(moves.make_room(position, want))
                if pool.free >= want or not self._mover.busy:
                    break
                left = deadline - self._clock.now()
                if left <= 0 or not await self._mover.change(left):
                    break
        finally:
            turn.release()

    async def wait_for(self, other: Reservation, seconds: float) -> bool:
        """Wait until another writer's reservation has ended; return False when `seconds` passed first."""
        if other.closed:
            return True
        ended = asyncio.Event()
        other.on_close.append(ended.set)
        try:
            async with asyncio.timeout(seconds):
                await ended.wait()
        except TimeoutError:
            return False
        return True

    def drain(self) -> None:
        """Begin to free slots ahead of need in every tier that has fallen below its low watermark."""
        for position, pool in enumerate(self._cache.residency.slots):
            if pool.free < self._low[position] and position not in self._draining and not self._closed:
                self._draining.add(position)
                self._spawn(self._drain(position), f"drain-{self._cache.tiers[position]}")

    def unkept(self) -> list[tuple[int, int, int]]:
        """Return the tiers below their low watermark that nothing drains: position, free slots, and how many are to be free."""
        return [
            (position, pool.free, self._low[position])
            for position, pool in enumerate(self._cache.residency.slots)
            if pool.free < self._low[position] and position not in self._draining
        ]

    async def _drain(self, position: int) -> None:
        pool, moves = self._cache.residency.slots[position], self._cache.moves
        try:
            # What one tier copies down, another that drains may drop again: without progress it ends; the next writer asks anew.
            best, rounds = pool.free, 0
            while pool.free < self._high[position] and rounds < _FRUITLESS:
                best, rounds = (pool.free, 1) if pool.free > best else (best, rounds + 1)
                flights = self._mover.start(moves.make_room(position, self._high[position], past=True))
                if not flights and not moves.inflight.leaving[position]:
                    return
                if flights:
                    for flight in flights:
                        report = await flight.wait()
                        if report is not None and report.error is not None:
                            return
                else:
                    await self._mover.change()
        finally:
            self._draining.discard(position)

    # --- promotion --------------------------------------------------------------------------------------------------------

    def promote(self, lease: Lease) -> Promotion:
        """Begin to bring a lease's blocks up, as far as there is room. The lease's end stops what has not begun."""
        if self._closed or self._cache.tiers_of(lease).keys() <= _TOP:
            return Promotion(lease, over=True)
        promotion = Promotion(lease)
        self._spawn(self._lift_all(promotion), "promote")
        self._spawn(self._watch(promotion), "watch")
        return promotion

    def carry_on(self, promotion: Promotion) -> None:
        """Let a promotion go on to its end whatever becomes of the reader's lease, for whoever comes next."""
        reader = promotion.reader
        if promotion.own is None and not promotion.done.is_set() and not reader.ended():
            promotion.own = self._cache.share(reader, reader.session)

    def _over(self, promotion: Promotion) -> None:
        promotion.readable.set()
        promotion.done.set()
        if promotion.own is not None:
            self._cache.release(promotion.own)
            self._mover.start(self._cache.inflight.take_waste())  # what left the tree meanwhile had waited for that lease

    async def _watch(self, promotion: Promotion) -> None:
        """Let readers have what is there when nothing more has come for a while: a disk that hangs is not waited for."""
        seen = -1
        while not promotion.readable.is_set():
            steps = len(promotion.flights) + sum(flight.steps for flight in promotion.flights)
            if steps == seen:
                self._over(promotion)
                return
            seen = steps
            try:
                async with asyncio.timeout(self._promote + self._stall):
                    await promotion.readable.wait()
            except TimeoutError:
                continue

    async def _lift_all(self, promotion: Promotion) -> None:
        lowest = len(self._cache.tiers) - 1
        memory = lowest - 1 if self._cache.residency.durable[lowest] else lowest
        try:
            if memory < 0:
                return
            # The upper part goes up while the lower part is read from disk; then the lower part follows.
            ahead = asyncio.gather(*(self._lift(promotion, to, to + 1) for to in range(memory)))
            # Cancelled below before anybody waited for it, it would be reported as an error that nobody looked at.
            ahead.add_done_callback(lambda done: done.cancelled() or done.exception())
            try:
                if memory < lowest:
                    await self._lift(promotion, memory, lowest)
                promotion.readable.set()
                await ahead
            finally:
                ahead.cancel()
            for to in reversed(range(memory)):
                await self._lift(promotion, to, to + 1)
            if memory < lowest:
                for to in range(memory):  # what the tier between had no room for
                    await self._lift(promotion, to, lowest)
        finally:
            self._over(promotion)

    async def _lift(self, promotion: Promotion, to: int, source: int) -> None:
        """Bring the part of the path that lies in the tier at `source` up to the tier at `to`."""
        cache, moves = self._cache, self._cache.moves
        while not promotion.lease.ended():  # after each wait it may be another one: `carry_on`
            for flight in self._bringing(promotion.lease, to):  # somebody else's promotion of the same blocks
                promotion.flights.append(flight)
                await flight.wait()
            lease = promotion.lease
            if lease.ended():
                return
            nodes = moves.slower(lease.node, to)
            if not nodes or nodes[0].tag != source:
                return
            allowed = cache.allowance(lease.session, to) if promotion.reader.charged else cache.residency.slots[to].capacity
            want = min(allowed, sum(len(node.blocks) for node in nodes if node.tag == source))
            if want == 0:
                return
            await self._room(to, want, self._clock.now() + self._promote)
            lease = promotion.lease
            if lease.ended():
                return
            transfer = moves.plan_promote(lease.node, to, most=allowed, source=source)
            if transfer is None:
                return
            [flight] = self._mover.start([transfer])
            promotion.flights.append(flight)
            report = await flight.wait()
            cache.charge(promotion.reader)
            self.drain()
            if report is None or report.arrived < transfer.count:
                return

    def _bringing(self, lease: Lease, to: int) -> list[Flight]:
        nodes = path(lease.node)
        if not any(node.arriving >> to & 1 for node in nodes):
            return []
        mine = set(map(id, nodes))
        found: list[Flight] = []
        for flight in self._mover.flights():
            work = flight.work
            if (
                isinstance(work, Transfer)
                and work.to == to
                and any(id(node) in mine for node in self._cache.residency.owners(work.blocks))
            ):
                found.append(flight)
        return found

    # --- copies to the durable tier -----------------------------------------------------------------------------------------

    async def persist(self, lease: Lease) -> int:
        """Bring a lease's blocks to the durable tier and return how many of them, from the first on, are there."""
        cache, moves = self._cache, self._cache.moves
        position = len(cache.tiers) - 1
        if not cache.residency.durable[position]:
            return 0
        while True:
            for flight in self._bringing(lease, position):
                await flight.wait()
            missing = sum(len(node.blocks) for node in path(lease.node) if node.alive and not node.copies >> position & 1)
            if missing == 0:
                break
            await self._room(position, min(missing, cache.residency.slots[position].capacity), self._clock.now() + self._promote)
            transfer = moves.plan_persist(lease.node, position)
            if transfer is None:
                if self._bringing(lease, position):
                    continue
                break
            [flight] = self._mover.start([transfer])
            report = await flight.wait()
            if report is None or report.arrived < transfer.count:
                break
        return self.durable(lease)

    def durable(self, lease: Lease) -> int:
        """Return how many of a lease's blocks, from the first on, the durable tier holds."""
        position = len(self._cache.tiers) - 1
        count = 0
        if self._cache.residency.durable[position]:
            for node in path(lease.node):
                if not node.alive or not node.copies >> position & 1:
                    break
                count += len(node.blocks)
        return count

    # --- the end ------------------------------------------------------------------------------------------------------------

    async def settle(self) -> None:
        """Wait until nothing is under way and nothing is being drained."""
        while self._tasks or self._mover.busy:
            if self._tasks:
                await asyncio.wait(list(self._tasks))
            await self._mover.settle()

    async def write_down(self, seconds: float) -> int:
        """Bring to the durable tier what is not there, most recently used prefixes first; return how many blocks are left out.

        Stops after `seconds`, when the store refuses, or when there is no more room without giving up what was used later.
        """
        cache = self._cache
        position = len(cache.tiers) - 1
        if not cache.residency.durable[position]:
            return 0
        deadline = self._clock.now() + seconds
        waiting = [node for node in cache.residency.nodes if node is not None and node.alive and not node.copies >> position & 1]
        waiting.sort(key=lambda node: -node.used)
        refused = False
        for node in waiting:
            while node.alive and not node.copies >> position & 1 and self._clock.now() < deadline:
                transfer = cache.moves.plan_persist(node, position)
                if transfer is None:
                    coldest = next(cache.residency.payers.victims(position), None)
                    worth = coldest is not None and coldest.used < node.used
                    flights = self._mover.start(cache.moves.make_room(position, 1, spare=False)) if worth else []
                    if not flights and not self._mover.busy:
                        break
                    if not await self._mover.change(deadline - self._clock.now()):
                        break
                    continue
                [flight] = self._mover.start([transfer])
                try:
                    async with asyncio.timeout(max(0.0, deadline - self._clock.now())):
                        report = await flight.wait()
                except TimeoutError:
                    break
                if report is None or report.error is not None:
                    # What was rotten, or died with its thread, says nothing about the others.
                    refused = not (report is not None and (report.rotten or isinstance(report.error, WorkerDied)))
                    break
            if refused:
                break
        return sum(
            len(node.blocks)
            for node in cache.residency.nodes
            if node is not None and node.alive and not node.copies >> position & 1
        )

    async def close(self) -> None:
        """Cancel what waits here, and begin nothing more. What is under way goes on in the mover."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> None:
        task = asyncio.get_running_loop().create_task(work, name=f"tiercache-{name}")
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
