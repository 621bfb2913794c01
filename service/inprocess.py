"""The cache in one process: tiers, tree and movement behind the same face as the daemon's."""

from __future__ import annotations

import asyncio
import errno
import logging
from itertools import accumulate, pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tiercache.config import Config
from tiercache.errors import (
    Closed,
    DirectoryRefused,
    InvalidSpec,
    NoShare,
    SpecMismatch,
    StoreError,
    TierCacheError,
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
from tiercache.sizes import parse_size
from tiercache.spec import ANY, ITEM_BYTES, Geometry, KVSpec, Namespace, Selection, Unsaid
from tiercache.storage.arenas import DramArena, HostHbmArena
from tiercache.storage.contract import Store
from tiercache.storage.disk_room import DiskWatch
from tiercache.storage.finishing import Finishing
from tiercache.storage.layouts import SLOT_ALIGNMENT
from tiercache.storage.memory import HostMemory, require_memory
from tiercache.storage.ssd import SsdStore, SsdTier
from tiercache.storage.workers import Lane, LaneState, Workers
from tiercache.types import Tier

log = logging.getLogger(__name__)

_ARENAS = {Tier.HBM: HostHbmArena, Tier.DRAM: DramArena}
_GENERATION_BYTES = 4
_DISK_ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
"""A directory that is refused for these is the right one, on a disk that fails."""


class TierCache:
    """All tiers of a configuration in this process; an async context manager.

    Entering allocates the host memory for real, takes the SSD tier's directory, and makes what it holds findable; leaving
    writes down what is not durable yet. `seams` is for tests.

    Entering raises MemoryRefused, DirectoryRefused or DirectoryLocked; nothing is left behind then. A disk that fails is no
    reason not to start: the cache does without SSD until it is started anew, and `health` says so. Where SSD is the only tier
    it raises StoreError.
    """

    def __init__(self, config: Config, *, seams: Seams | None = None) -> None:
        self.config = config
        self._seams = seams or Seams()
        self._sizes = {tier.place: tier.bytes for tier in config.tiers}
        self._memory: dict[Tier, HostMemory] = {}
        self._generations: HostMemory | None = None
        self._numbered = {tier: _numbers(config, size) for tier, size in self._sizes.items() if tier in _ARENAS}
        """By memory tier, how many generations each share of it has, in the order of `_edges`."""
        self._disk: SsdTier | None = None
        self._stacks: dict[Geometry, Stack] = {}
        self._sessions: dict[Geometry, Session] = {}
        self._specs: dict[Namespace, set[KVSpec]] = {}
        self._kvs: list[LocalKV] = []
        self._workers: Workers | None = None
        self._taken: dict[int, Geometry] = {}
        self._opening = asyncio.Lock()
        self._finishing = Finishing("tiercache-finish")
        self._closing: asyncio.Task[None] | None = None
        self.ssd_faults: dict[str, str] = {}
        """Why there is no SSD tier, by what is without it."""
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
            await workers.run(Lane.WRITE, self._allocate)
        except BaseException:
            self._free()
            workers.close()
            raise
        self._workers = workers
        if self._disk is not None:
            self.disk_watch = DiskWatch(self.config.path, workers, self._seams.clock, self._seams.measure)

    def _abandon(self, starting: asyncio.Task[None]) -> None:
        if not starting.cancelled() and starting.exception() is None and self._workers is not None:
            self._workers.close()
            self._workers = None
            self._free()

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
            if self._disk is not None:
                await closers.run(Lane.WRITE, self._disk.close, self._seams.patience)
        finally:
            closers.close()
            workers.close()
            self._free()

    def _allocate(self) -> None:
        memory = {tier: size for tier, size in self._sizes.items() if tier in _ARENAS}
        numbers = sum(map(sum, self._numbered.values())) * _GENERATION_BYTES
        require_memory(sum(memory.values()) + numbers)
        if memory:
            self._generations = HostMemory(numbers, name="tiercache-generations")
        for tier, size in memory.items():
            self._memory[tier] = HostMemory(size, name=f"tiercache-{tier.name.lower()}")
        if Tier.SSD in self._sizes:
            try:
                self._disk = SsdTier(
                    self.config.path,
                    codec=self.config.codec,
                    batch_bytes=parse_size(self.config.batch_bytes),
                    sync=self._seams.sync,
                    values=self._seams.values,
                )
            except (StoreError, DirectoryRefused) as error:
                # Any other directory is refused for what it is: a mistake, which is said at once rather than worked around.
                if not memory or (isinstance(error, DirectoryRefused) and error.fields.get("errno") not in _DISK_ERRORS):
                    raise
                del self._sizes[Tier.SSD]
                self._do_without("all blocks", error)

    def _do_without(self, what: str, error: TierCacheError) -> None:
        self.ssd_faults[what] = str(error)
        log.error("going on without SSD for %s: %s", what, self.ssd_faults[what])

    def _free(self) -> None:
        for memory in self._memory.values():
            memory.close()
        self._memory.clear()
        if self._generations is not None:
            self._generations.close()
            self._generations = None
        if self._disk is not None:
            self._disk.close(0.0)  # a second time, if it was closed in order; what hangs in it has been waited for
            self._disk = None

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
                stores = await workers.run(Lane.WRITE, self._open_stores, spec, share)
                numbered = self._number_slots(stores, share)
                stack = Stack(self.config, spec.geometry, spec.block_size, stores, workers, self._seams, numbered)
                await stack.begin()
                self._stacks[spec.geometry] = stack
                self._sessions[spec.geometry] = stack.cache.begin_session()
            self._specs.setdefault(space, set()).add(spec)
            if self._disk is not None:
                try:
                    await workers.run(Lane.WRITE, self._disk.remember, space, spec)
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
    def ssd_limit(self) -> int:
        """How many bytes the SSD tier's files of blocks may take together, for the models that are open."""
        return sum(store.limit_bytes for stack in self.stacks for store in stack.stores if isinstance(store, SsdStore))

    @property
    def aside(self) -> Path | None:
        """The folder that unreadable files of the SSD tier were moved to since the start; None if there were none."""
        return self._disk.aside if self._disk is not None else None

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
                if self._disk is not None:
                    await workers.run(Lane.WRITE, going.forget_closed, self._disk, frozenset(self._stacks), known)
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
            if self._disk is not None:
                found += await workers.run(Lane.READ, held_closed, self._disk, frozenset(self._stacks), known, choose)
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
        found = await workers.run(Lane.READ, self._disk.namespaces) if self._disk is not None else {}
        return {**found, **self.spaces}

    @property
    def memory(self) -> tuple[HostMemory, ...]:
        """The memories of the tiers that can be mapped, the fastest tier first. Raises Closed."""
        self.require_open()
        return tuple(self._memory.values())

    @property
    def memory_tiers(self) -> tuple[Tier, ...]:
        """The tiers of `memory`, in its order."""
        return tuple(self._memory)

    @property
    def generations(self) -> HostMemory | None:
        """The memory of the generations of all slots that can be mapped; None when there are none. Raises Closed."""
        self.require_open()
        return self._generations

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

    def _open_stores(self, spec: KVSpec, share: int) -> list[Store]:
        stores: list[Store] = []
        try:
            for tier, size in self._sizes.items():
                offset, end = _edges(self.config, size)[share]
                if tier in _ARENAS:
                    most = self._numbered[tier][share]
                    stores.append(_ARENAS[tier](self._memory[tier], spec.geometry, offset=offset, length=end - offset, most=most))
                else:
                    assert self._disk is not None
                    try:
                        item_bytes = ITEM_BYTES[spec.dtype]
                        stores.append(self._disk.open(spec.geometry, capacity_bytes=end - offset, item_bytes=item_bytes))
                    except StoreError as error:
                        if not stores:
                            raise
                        self._do_without(f"blocks of {spec.block_bytes} bytes", error)
        except BaseException as error:
            for store in stores:
                store.close()
            if isinstance(error, TierTooSmall):
                self._taken.pop(spec.block_bytes, None)
            raise
        return stores

    def _number_slots(self, stores: list[Store], share: int) -> dict[Tier, tuple[int, NDArray[np.uint32]]]:
        """Return where the generations of each mapped tier's slots begin, in bytes, and themselves. Raises Closed."""
        found: dict[Tier, tuple[int, NDArray[np.uint32]]] = {}
        for store in stores:
            if store.tier in _ARENAS:
                if self._generations is None:
                    raise Closed("the cache was closed while the disk hung")
                faster = (numbers for tier, numbers in self._numbered.items() if tier > store.tier)
                begin = sum(map(sum, faster)) + sum(self._numbered[store.tier][:share])
                whole = self._generations.array.view(np.uint32)
                found[store.tier] = begin * _GENERATION_BYTES, whole[begin : begin + store.capacity]
        return found


def _edges(config: Config, size: int) -> list[tuple[int, int]]:
    """Return where the shares of a tier of `size` bytes begin and end, at page boundaries or the tier's end.

    Both ends by one rule: where a share ends the next one begins, and no byte is in two.
    """
    ends = list(accumulate(share.fraction for share in config.shares)) or [1.0]
    places = [0, *(size if end > 1 - 1e-9 else int(size * end) // SLOT_ALIGNMENT * SLOT_ALIGNMENT for end in ends)]
    return list(pairwise(places))


def _numbers(config: Config, size: int) -> list[int]:
    """Return how many slots each share of a tier of `size` bytes can have: all that are a page and more, and some smaller ones.

    So the slots of one share take no generations from those of another, however small they are.
    """
    lengths = [end - begin for begin, end in _edges(config, size)]
    return [max(length // SLOT_ALIGNMENT, min(length // 64, 1 << 16), 1) for length in lengths]
