"""The cache in one process: tiers, tree and movement behind the same face as the daemon's."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from tiercache.config import Config
from tiercache.errors import (
    Closed,
    InvalidSpec,
    MemoryRefused,
    NoShare,
    SpecMismatch,
    StoreError,
    TierTooSmall,
    UnsupportedSpec,
)
from tiercache.leases import Session
from tiercache.prefetch import PrefetchPolicy
from tiercache.residency import Space
from tiercache.service.desk import Desk
from tiercache.service.face import Extent
from tiercache.service.health import Examiner, Health
from tiercache.service.invalidation import Choice, Invalidation, chosen_by, held_closed, held_open
from tiercache.service.kv import LocalKV
from tiercache.service.stack import Seams, Stack
from tiercache.service.tiers import Tiers
from tiercache.spec import ANY, Geometry, KVSpec, Namespace, Selection, Unsaid
from tiercache.storage.disk_room import DiskWatch
from tiercache.storage.finishing import Finishing
from tiercache.storage.memory import HostMemory
from tiercache.storage.ssd import SsdStore
from tiercache.storage.workers import Lane, LaneState, Workers
from tiercache.types import Tier

log = logging.getLogger(__name__)


class TierCache:
    """All tiers of a configuration in this process; an async context manager.

    Entering opens the device, allocates memory for real, takes the SSD tier's directory, and makes what it holds findable;
    leaving writes down what is not durable yet. `seams` is for tests.

    Entering raises MemoryRefused, DirectoryRefused or DirectoryLocked, and InvalidConfig for a device that nothing here can open;
    nothing is left behind then. A disk that fails is no reason not to start: the cache does without SSD until it is started anew,
    and `health` says so. Where SSD is the only tier it raises StoreError.
    """

    def __init__(self, config: Config, *, seams: Seams | None = None) -> None:
        self.config = config
        self._seams = seams or Seams()
        self._tiers = Tiers(config, self._seams)
        self._stacks: dict[Geometry, Stack] = {}
        self._sessions: dict[Geometry, Session] = {}
        self._specs: dict[Namespace, set[KVSpec]] = {}
        self._kvs: list[LocalKV] = []
        self._workers: Workers | None = None
        self._taken: dict[int, Geometry] = {}
        self._opening = asyncio.Lock()
        self._finishing = Finishing("tiercache-finish")
        self._closing: asyncio.Task[None] | None = None
        self.disk_watch: DiskWatch | None = None
        """The file system that holds the SSD tier; None where there is none."""
        self.examiner = Examiner(self, self._seams.clock)

    # --- beginning and end ------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Allocate the tiers. If the caller is cancelled, what the thread then still takes is given back when it has ended."""
        if self._workers is not None:
            raise Closed("this cache is open already; make another")
        starting = asyncio.get_running_loop().create_task(self._start(), name="tiercache-start")
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._abandon)
            raise
        return self

    async def _start(self) -> None:
        workers = self._seams.workers(self.config, self._seams.clock)
        try:
            await workers.run(Lane.WRITE, self._tiers.allocate)
        except BaseException:
            self._tiers.free()
            workers.close()
            raise
        self._workers = workers
        if self._tiers.disk is not None:
            self.disk_watch = DiskWatch(self.config.path, workers, self._seams.clock, self._seams.measure)

    def _abandon(self, starting: asyncio.Task[None]) -> None:
        if not starting.cancelled() and starting.exception() is None and self._workers is not None:
            self._workers.close()
            self._workers = None
            self._tiers.free()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Write down what is not durable, and give everything back."""
        await self.close()

    async def close(self) -> None:
        """Close the cache; every later call raises Closed. May be called twice; a caller that is cancelled does not stop it."""
        workers, self._workers = self._workers, None
        if workers is not None:
            self._closing = asyncio.get_running_loop().create_task(self._close(workers), name="tiercache-close")
        if self._closing is not None:
            await asyncio.shield(self._closing)

    async def _close(self, workers: Workers) -> None:
        # Threads of their own: those of `workers` may all hang in the disk.
        closers = self._seams.workers(self.config, self._seams.clock)
        try:
            try:
                async with asyncio.timeout(self._seams.patience):
                    await self._finishing.wait()
            except TimeoutError:
                log.warning("opening hangs in the disk; closing without it")
            if self.disk_watch is not None:
                await self.disk_watch.close()
            for kv in self._kvs:
                kv.close()
            end = self._seams.clock.now() + self.config.drain_seconds  # of all models together
            for stack in self._stacks.values():
                await stack.close(max(0.0, end - self._seams.clock.now()))
            if self._tiers.disk is not None:
                await closers.run(Lane.WRITE, self._tiers.disk.close, self._seams.patience)
        finally:
            closers.close()
            workers.close()
            for stack in self._stacks.values():
                if stack.bus is not None:
                    stack.bus.abandon()  # of a stack that did not come to its end nobody knows what is still copied
            self._tiers.free()

    # --- the face ---------------------------------------------------------------------------------------------------------

    async def open(self, space: Namespace, spec: KVSpec, *, shard: int = 0) -> LocalKV:
        """Return the KV of the namespace `space` with the layout `spec`.

        What an earlier run left on SSD under the same namespace and layout is there. Raises SpecMismatch when the namespace
        is open with another layout that has no share of its own, NoShare when no share of the tiers is left for blocks of
        this size, TierTooSmall when a tier can't hold one block, UnsupportedSpec for more than one shard.
        """
        stack, place = await self.locate(space, spec, shard=shard)
        desk = Desk(stack, place, spec, self._sessions[spec.geometry], require_open=self.require_open)
        policy = PrefetchPolicy.of(self.config.prefetch)
        kv = LocalKV(desk, limit=self.config.max_tokens, policy=policy, require_open=self.require_open)
        self._kvs.append(kv)
        return kv

    async def locate(self, space: Namespace, spec: KVSpec, *, shard: int = 0) -> tuple[Stack, Space]:
        """Return the stack that serves a namespace, and its place there; `open` without a face. Raises as `open` does."""
        workers = self.require_open()
        for value, kind in ((space, Namespace), (spec, KVSpec)):
            if not isinstance(value, kind):
                raise InvalidSpec(f"expected a {kind.__name__}, not {type(value).__name__}", value=value)
        if space.world != 1 or shard != 0:
            raise UnsupportedSpec(
                f"world={space.world}, shard={shard}: this version stores KV that is not split (world=1, shard=0)",
                world=space.world,
                shard=shard,
            )
        stack = await self._finishing.abandon(self._stack(workers, space, spec))
        self.require_open()
        return stack, stack.cache.residency.space(space.digest(spec), 4 * spec.block_size)

    async def _stack(self, workers: Workers, space: Namespace, spec: KVSpec) -> Stack:
        """Return the stack for the spec's geometry, opened if it is new; the namespace is noted on the disk."""
        async with self._opening:
            self._require_same(space, spec)
            stack = self._stacks.get(spec.geometry)
            if stack is None:
                share = self._share(spec)
                try:
                    made = await workers.run(Lane.WRITE, self._tiers.open, spec, share)
                except (TierTooSmall, MemoryRefused):
                    self._taken.pop(spec.block_bytes, None)
                    raise
                size, of = spec.block_size, spec.geometry
                try:
                    stack = Stack(self.config, of, size, made.stores, workers, self._seams, made.generations, bus=made.bus)
                    await stack.begin()
                except BaseException:
                    self._taken.pop(spec.block_bytes, None)
                    if made.bus is not None:
                        made.bus.close()  # else its memory could not be pinned for who opens it again
                    raise
                self._stacks[spec.geometry] = stack
                self._sessions[spec.geometry] = stack.cache.begin_session()
            self._specs.setdefault(space, set()).add(spec)
            if self._tiers.disk is not None:
                try:
                    await workers.run(Lane.WRITE, self._tiers.disk.remember, space, spec)
                except StoreError as error:  # a full disk: its blocks are found again by their digest, only their name is not
                    stack.cache.stats.failed(type(error).__name__)
                    log.warning("the name of a namespace was not written down: %s", str(error))
            return stack

    async def health(self) -> Health:
        """Return how the cache does, and what ails it; computed now. Never waits for a disk. Raises Closed."""
        self.require_open()
        return await self.examiner.examine()

    def lanes(self) -> tuple[LaneState, ...]:
        """Return how the worker threads do; nothing when the cache is closed."""
        return self._workers.lanes() if self._workers is not None else ()

    @property
    def ssd_faults(self) -> Mapping[str, str]:
        """Why there is no SSD tier, by what is without it."""
        return self._tiers.disk_faults

    @property
    def ssd_limit(self) -> int:
        """How many bytes the SSD tier's files of blocks may take together, for the models that are open."""
        return sum(store.limit_bytes for stack in self.stacks for store in stack.stores if isinstance(store, SsdStore))

    @property
    def aside(self) -> Path | None:
        """The folder that unreadable files of the SSD tier were moved to since the start; None if there were none."""
        return self._tiers.disk.aside if self._tiers.disk is not None else None

    async def invalidate(
        self,
        *,
        model: str | Unsaid = ANY,
        weights: str | Unsaid = ANY,
        adapter: str | Unsaid | None = ANY,
        salt: str | Unsaid | None = ANY,
    ) -> list[Extent]:
        """Remove everything of all namespaces whose fields have exactly the values given; return how much went of each.

        None is a value: `adapter=None` is the model without an adapter, `salt=None` what belongs to no tenant. What is not named
        may be anything. Namespaces that an earlier run left on SSD are included, whether this run has opened them or not.

        Not found at once; not found after a restart either when the call has returned. What is in flight comes to nothing, also
        inserts and reservations that were begun before. Who holds a hit reads its bytes until its release. Raises InvalidSpec when
        no field is named or a value can't be, StoreError when the disk has not forgotten in time.
        """
        return await self.forget(chosen_by(Selection(model=model, weights=weights, adapter=adapter, salt=salt)))

    async def forget(self, choose: Choice) -> list[Extent]:
        """Remove everything of the namespaces that `choose` picks; else as `invalidate`."""
        workers = self.require_open()
        going = Invalidation(choose)
        going.clear(self.stacks, self.spaces)  # at once; what only the disk can name comes below
        return await self._finishing.abandon(self._forget(workers, going))

    async def _forget(self, workers: Workers, going: Invalidation) -> list[Extent]:
        try:
            async with self._opening:
                known = await self.known_spaces()
                going.clear(self.stacks, known)
                if self._tiers.disk is not None:
                    await workers.run(Lane.WRITE, going.forget_closed, self._tiers.disk, frozenset(self._stacks), known)
        finally:
            await going.forgotten()
        return going.extents

    async def digests(self) -> set[bytes]:
        """Return the digests of all namespaces: opened, left on SSD by an earlier run, or only known by their digest."""
        known = await self.known_spaces()
        return {*known, *(digest for stack in self.stacks for digest in stack.cache.residency.spaces)}

    async def extents(self, choose: Choice) -> list[Extent]:
        """Return what the namespaces that `choose` picks hold, in all tiers, whether this run has opened them or not."""
        workers = self.require_open()
        async with self._opening:
            known = await self.known_spaces()
            found = held_open(self.stacks, known, choose)
            if self._tiers.disk is not None:
                found += await workers.run(Lane.READ, held_closed, self._tiers.disk, frozenset(self._stacks), known, choose)
        return found

    async def check(self) -> dict[str, int]:
        """Audit the books of every tier; return how many nodes, blocks and leases were looked at.

        Raises AuditFailed, listing every fault. Meant for tests and operators: it walks everything.
        """
        self.require_open()
        total: dict[str, int] = {}
        for stack in self._stacks.values():
            for name, count in stack.check().items():
                total[name] = total.get(name, 0) + count
        return total

    async def settle(self) -> None:
        """Wait until nothing moves any more: demotions, promotions, writes, background draining."""
        self.require_open()
        for stack in self._stacks.values():
            await stack.finishing.wait()
            await stack.traffic.settle()

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The parts of the cache, one a geometry: for statistics and drawing."""
        return tuple(self._stacks.values())

    @property
    def spaces(self) -> dict[bytes, tuple[Namespace, KVSpec]]:
        """The namespaces that were opened in this run, by digest."""
        return {space.digest(spec): (space, spec) for space, specs in self._specs.items() for spec in specs}

    async def known_spaces(self) -> dict[bytes, tuple[Namespace, KVSpec]]:
        """Return the namespaces that this run opened, and those that the SSD tier knows of earlier ones, by digest."""
        workers = self.require_open()
        found = await workers.run(Lane.READ, self._tiers.disk.namespaces) if self._tiers.disk is not None else {}
        return {**found, **self.spaces}

    @property
    def memory(self) -> tuple[HostMemory, ...]:
        """The host memories of the tiers that can be mapped, the fastest tier first. Raises Closed."""
        self.require_open()
        return tuple(self._tiers.memory.values())

    @property
    def memory_tiers(self) -> tuple[Tier, ...]:
        """The tiers of `memory`, in its order."""
        return tuple(self._tiers.memory)

    @property
    def generations(self) -> HostMemory | None:
        """The memory of the generations of all slots that can be mapped; None when there are none. Raises Closed."""
        self.require_open()
        return self._tiers.generations

    # --- inside -----------------------------------------------------------------------------------------------------------

    def require_open(self) -> Workers:
        """Return the workers. Raises Closed when the cache is not open."""
        if self._workers is None:
            raise Closed("the cache is closed")
        return self._workers

    def _require_same(self, space: Namespace, spec: KVSpec) -> None:
        others = self._specs.get(space, set()) - {spec}
        if not others or any(share.block_bytes == spec.block_bytes for share in self.config.shares):
            return
        other = next(iter(others))
        raise SpecMismatch(f"the namespace of {space.model!r} is open with {other}; got {spec}", found=spec, expected=other)

    def _share(self, spec: KVSpec) -> int:
        """Return the number of the share of the spec's blocks, and note that it is taken. Raises NoShare."""
        geometry, size = spec.geometry, spec.block_bytes
        taken = self._taken.get(size)
        if taken is not None and taken != geometry:
            raise NoShare(
                f"blocks of {size} bytes have the shape {taken} here; {geometry} can't share slots with it", block_bytes=size
            )
        if not self.config.shares:
            if self._taken and size not in self._taken:
                [other] = self._taken
                raise NoShare(
                    f"all of the tiers belongs to blocks of {other} bytes; to store blocks of {size} bytes beside them, name both "
                    f"in the configuration's shares",
                    block_bytes=size,
                    taken=other,
                )
            self._taken[size] = geometry
            return 0
        for number, share in enumerate(self.config.shares):
            if share.block_bytes == size:
                self._taken[size] = geometry
                return number
        known = ", ".join(str(share.block_bytes) for share in self.config.shares)
        raise NoShare(
            f"no share of the tiers is for blocks of {size} bytes; the configuration has shares for {known}", block_bytes=size
        )
