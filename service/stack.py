"""The composition root of one share: stores, core, mover and traffic for blocks of one geometry, put together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiercache.audit import check
from tiercache.cache import Cache
from tiercache.clock import Clock, MonotonicClock
from tiercache.config import Config
from tiercache.devices import CPU
from tiercache.errors import StoreError, WorkerDied
from tiercache.kernels.device import Device
from tiercache.kernels.opening import open_device
from tiercache.keys import Digest, sha256
from tiercache.leases import Lease
from tiercache.pace import Pace
from tiercache.policy import LRU, PolicyFactory
from tiercache.restore import Stored, restore
from tiercache.service.device_tensors import DeviceTensors
from tiercache.service.streams import Streams
from tiercache.service.writing import write_policy
from tiercache.sizes import parse_size
from tiercache.spec import Geometry
from tiercache.storage.contract import Store
from tiercache.storage.copier import Copier, StoreCopier
from tiercache.storage.device_bus import Bus
from tiercache.storage.device_copier import DeviceCopier
from tiercache.storage.device_passage import Passage
from tiercache.storage.device_port import DevicePort
from tiercache.storage.device_reader import DeviceReader
from tiercache.storage.disk_room import DiskRoom, measure
from tiercache.storage.finishing import Finishing
from tiercache.storage.mover import Flight, Mover
from tiercache.storage.reader import Place, Reader, SlotReader
from tiercache.storage.slots import SlotPool
from tiercache.storage.ssd import SsdStore
from tiercache.storage.ssd_values import LmdbValues
from tiercache.storage.traffic import Traffic
from tiercache.storage.troubles import COPY, Troubles
from tiercache.storage.workers import Lane, ThreadWorkers, Workers
from tiercache.table import NOWHERE, rows
from tiercache.transfer import Discard, Transfer, Work
from tiercache.tree import path
from tiercache.types import Tier

log = logging.getLogger(__name__)

_WRITERS = 4
"""Threads that hand writes to the store: it does one after the other, and what waits together in one transaction."""

_WAITERS = 2
"""Threads that wait for a device in each of its lanes: for a transfer, say, and for a reader or writer beside it."""

BATCHES = 8
"""Write transactions in one move to the disk: while one is written the next is brought together, and one sync and one transaction
of the metadata end them all. On a disk that is too slow for that a move takes fewer, down to one (`_move_seconds`)."""

_MOST_KEPT = 4 << 20
"""Bytes of whereabouts that are kept."""
_SWEEP_PAUSE = 60.0
"""Seconds between two tries of a comparison of metadata with data that the disk fails, at most."""


def _threads(config: Config, clock: Clock) -> Workers:
    return ThreadWorkers(lanes_of(config), clock=clock)


def lanes_of(config: Config) -> dict[Lane, int]:
    """Return how many threads a cache has in which lane."""
    counts = {Lane.COPY: config.copy_threads, Lane.READ: config.read_threads, Lane.WRITE: _WRITERS, Lane.WATCH: 1}
    return counts if config.device == CPU else {**counts, Lane.DOWN: _WAITERS, Lane.UP: _WAITERS, Lane.RUNNER: _WAITERS}


def _as_it_is(copier: Copier) -> Copier:
    return copier


@dataclass(frozen=True, slots=True, kw_only=True)
class Seams:
    """What a test replaces: time, threads, the device, copies, the disk, digests, the policy. Each default is production's.

    `values` is the class whose three operations touch the SSD tier's data, `measure` what looks at its file system. `retry` is
    how many seconds a store that refused is left alone, `patience` how many closing gives moves under way beyond what it may
    take to write down, and readers a promotion of which nothing comes, beyond what it may wait for room. `forgetting` is how
    many a delete waits for the disk. Without `sync` the SSD tier syncs nothing, and says durable of what a loss of power takes:
    only to be measured beside what doesn't sync either.
    """

    clock: Clock = field(default_factory=MonotonicClock)
    workers: Callable[[Config, Clock], Workers] = _threads
    device: Callable[[str], Device] = open_device
    tensors: Callable[[Device], DeviceTensors] = DeviceTensors
    copier: Callable[[Copier], Copier] = _as_it_is
    values: type[LmdbValues] = LmdbValues
    sync: bool = True
    measure: Callable[[Path], DiskRoom] = measure
    retry: float = 1.0
    patience: float = 5.0
    forgetting: float = 30.0
    digest: Digest = sha256
    policy: PolicyFactory = LRU


Pack = Callable[[int, NDArray[np.int32], NDArray[np.uint32], NDArray[np.uint64]], bytes]
"""Writes down where blocks lie: their tier's position, their slots, these slots' generations, the checksums of what is there."""


def _move_seconds(config: Config) -> float:
    """Return how long a move to the disk is to take at most: half of what a writer waits, who may come behind another one.

    With more, slots that the disk is about to free would come too late, and blocks be dropped that it has time for; closing would
    give up half-written moves; and a healthy disk would be told to be slow.
    """
    return min(max(config.admit_ms / 2000, 0.1), 1.0)


class Stack:
    """Everything of one geometry. `stores` are fastest first; the last one may be an SsdStore, which is loaded here.

    `generations` says where the generations of a tier's slots are kept that other processes map: at which byte, and the array.
    `bus` is what they have of a device, when the first store is on one.
    """

    def __init__(
        self,
        config: Config,
        geometry: Geometry,
        block_size: int,
        stores: Sequence[Store],
        workers: Workers,
        seams: Seams,
        generations: Mapping[Tier, tuple[int, NDArray[np.uint32]]] | None = None,
        *,
        bus: Bus | None = None,
    ) -> None:
        self.geometry = geometry
        self.block_size = block_size
        self.stores = tuple(stores)
        self.memory = sum(1 for store in stores if not store.durable)
        """How many tiers, from the fastest on, can be read and written: a device's in place by the device alone."""
        self.bus = bus
        self._kept = 0
        self._workers = workers
        self._config = config
        self._patience = seams.patience
        self._retry = seams.retry
        self._forgetting = seams.forgetting
        self._disk = next((store for store in stores if isinstance(store, SsdStore)), None)
        self._mute = self._disk is None and any(tier.place is Tier.SSD for tier in config.tiers)
        """There is a disk that can't be told what to forget."""
        numbered = generations or {}
        self.generations_at = {tier: begin for tier, (begin, _) in numbered.items()}
        pools = {
            store.tier: SlotPool(
                store.capacity,
                budget=store.budget_units if isinstance(store, SsdStore) else None,
                generations=numbered[store.tier][1] if store.tier in numbered else None,
            )
            for store in stores
        }
        self._pools = tuple(pools.values())
        batch = parse_size(config.batch_bytes)
        self.cache = Cache(
            [store.tier for store in stores],
            pools,
            durable=[store.tier for store in stores if store.durable],
            policy=seams.policy,
            pace=Pace(BATCHES * batch // geometry.block_bytes, least=batch // geometry.block_bytes, seconds=_move_seconds(config)),
            lease_share=config.lease_share,
        )
        inner = StoreCopier(stores, workers, digest=seams.digest)
        copier: Copier = inner
        self.reader: SlotReader = Reader(stores, workers, block_size=block_size, threads=config.copy_threads)
        self.finishing = Finishing("tiercache-finish")
        self.streams: Streams | None = None
        """Of runners whose tensors lie on that device; None where there is none."""
        self.port: DevicePort | None = None
        """To the slots of a device; None where there is none."""
        if bus is not None:
            arena, device = bus.arena, bus.device
            copier = DeviceCopier(inner, stores, arena, device, bus.ring, workers, together=bus.together)
            self.port = DevicePort(device, lambda: arena.pool, geometry, bus.ring, workers)
            self.reader = DeviceReader(self.reader, device, arena, self.port)
            passage = Passage(device, lambda: arena.pool, stores, bus.beside, together=bus.together)
            self.streams = Streams(seams.tensors(device), passage, workers, self.finishing, self.arriving)
        copier = seams.copier(copier)
        self.troubles = Troubles(seams.clock)
        self.mover = Mover(self.cache.moves, copier, self.cache.stats, retry_seconds=seams.retry, troubles=self.troubles)
        self.traffic = Traffic(
            self.cache,
            self.mover,
            seams.clock,
            admit=config.admit_ms / 1000,
            promote=config.promote_ms / 1000,
            stall=seams.patience,
            watermark_low=config.watermark_low,
            watermark_high=config.watermark_high,
        )
        self.writes = write_policy(config, self.cache, self.traffic)
        self._sweeping: asyncio.Task[None] | None = None
        self.sweep_fault: str | None = None
        """Why comparing metadata with data does not go on; None while it does, and when it is done."""

    # --- beginning and end ------------------------------------------------------------------------------------------------

    async def begin(self) -> None:
        """Build the tree from the metadata; compare it with the data in the background. Nobody else works on the stack yet."""
        disk = self._disk
        if disk is None:
            return
        strays = await self._workers.run(Lane.WRITE, self._restore, disk)
        if strays:
            # Before the first put: their slots are free, and what is put there must not be forgotten in their stead.
            try:
                await self._workers.run(Lane.WRITE, disk.discard, strays)
            except StoreError as error:  # they go when their slots are used again, or at the next start
                log.warning("%d blocks that lead nowhere stay on disk: %s", len(strays), str(error))
        self._sweeping = asyncio.get_running_loop().create_task(self._sweep(disk), name="tiercache-sweep")
        self._sweeping.add_done_callback(self._swept)

    def _restore(self, disk: SsdStore) -> list[int]:
        loaded = disk.load()
        position = len(self.stores) - 1
        of: dict[bytes, list[int]] = {}
        for place, namespace in enumerate(loaded.namespaces):
            of.setdefault(namespace, []).append(place)
        whole = Stored(
            slots=loaded.slots.tolist(),
            keys=loaded.keys,
            parents=loaded.parents,
            symbols=loaded.symbols,
            checksums=loaded.checksums,
            charges=loaded.charges.tolist(),
        )
        strays: list[int] = []
        for namespace, places in of.items():
            stored = whole if len(of) == 1 else whole.at(places)
            strays += restore(self.cache, namespace, len(stored.symbols[0]), stored, position)
        return strays

    async def _sweep(self, disk: SsdStore) -> None:
        """Delete what nothing names, and drop what metadata names and data lacks with all that follows it."""
        pause = self._retry
        generations = self.cache.residency.slots[len(self.stores) - 1].generations
        before = generations.copy()
        while True:
            try:
                found = await self._workers.run(Lane.READ, disk.reconcile)
            except StoreError as error:
                self.sweep_fault = str(error)
                log.warning("comparing metadata with data failed, and is tried again in %.0f s: %s", pause, self.sweep_fault)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _SWEEP_PAUSE)
                continue
            self.sweep_fault, pause = None, self._retry
            # By now a reader may have missed it, too: its slot was freed, and may hold a good block that was put since.
            self._drop_absent([slot for slot in found.absent if generations[slot] == before[slot]])
            if found.done:
                return

    def _drop_absent(self, slots: Sequence[int]) -> None:
        position = len(self.stores) - 1
        residency = self.cache.residency
        [blocks] = np.isin(residency.table.slot[position], slots).nonzero()
        for block in blocks.tolist():
            owner = residency.table.owner[block]  # anew each time: what follows a block that is gone has gone with it
            node = residency.nodes[owner] if owner != NOWHERE else None
            if node is not None and node.alive:
                self.cache.stats.failed("absent")
                self.cache.lose_block(node, block)
        self.mover.start(self.cache.inflight.take_waste())

    def _swept(self, sweeping: asyncio.Task[None]) -> None:
        if not sweeping.cancelled() and (error := sweeping.exception()) is not None:
            self.sweep_fault = repr(error)
            log.error("comparing metadata with data ended: %s", self.sweep_fault)

    async def close(self, seconds: float) -> int:
        """Write down what is not durable, for at most `seconds`; return how many blocks were left out."""
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait([self._sweeping])
        await self.writes.close()
        await self.traffic.close()
        idle = await self._finished()
        for session in list(self.cache.sessions):
            self.cache.end_session(session)
        self.mover.start(self.cache.inflight.take_waste())
        lost = 0
        try:
            async with asyncio.timeout(self._patience + seconds):
                await self.mover.settle()
                lost = await self.traffic.write_down(seconds)
                await self.mover.settle()
        except TimeoutError:
            log.warning("a move is stuck; closing without it")
        self.mover.close()
        if self._disk is not None and not self.mover.busy:
            try:
                async with asyncio.timeout(self._patience):
                    await self._workers.run(Lane.WRITE, self._leave_order, self._disk)
            except (StoreError, TimeoutError) as error:
                log.warning("the order of use was not written down: %s", str(error))
        await self._leave_device(idle=idle and not self.mover.busy and self.troubles.death is None)
        for store in self.stores:
            if store is not self._disk and (self.bus is None or store is not self.bus.arena):
                store.close()
        for pool in self._pools:
            pool.detach()
        return lost

    async def _finished(self) -> bool:
        """Wait for the copies of readers and writers; return whether all are over. A device that hangs is not waited for."""
        try:
            async with asyncio.timeout(None if self.port is None else self._patience):
                await self.finishing.wait()
                if self.port is not None:
                    await self.port.settle()
        except TimeoutError:
            return False
        return True

    async def _leave_device(self, *, idle: bool) -> None:
        """Unpin and let go of the device's slots; unless it is `idle`, nothing that it may still touch is given back."""
        if self.bus is None:
            return
        if not idle:
            self.bus.abandon()
            return
        try:
            await self._workers.run(Lane.COPY, self.bus.close)
        except WorkerDied:
            log.warning("the thread died that was to unpin memory")
            self.bus.close()

    def _leave_order(self, disk: SsdStore) -> None:
        position = len(self.stores) - 1
        nodes = [node for node in self.cache.residency.nodes if node is not None and node.alive and node.copies >> position & 1]
        # Ties are of one path: what follows stands before what it follows.
        depth = {node: place for place, node in enumerate(nodes)}
        nodes.sort(key=lambda node: (node.used, -depth[node]))
        order: list[int] = []
        for node in nodes:
            order.extend(reversed(self.cache.residency.table.slots(node.blocks, position)))
        disk.leave_order(order)

    # --- for the face -----------------------------------------------------------------------------------------------------

    def position(self, tier: Tier | None) -> int:
        """Return the position of a tier; of the fastest for None."""
        return 0 if tier is None else self.cache.tiers.index(tier)

    def readable(self, lease: Lease) -> list[Place]:
        """Return where the leading blocks of a lease lie in memory, up to the first that does not, or failed a check."""
        residency = self.cache.residency
        table = residency.table
        places: list[Place] = []
        for node in path(lease.node):
            tag = node.tag
            if tag is None or tag >= self.memory or node in residency.doubtful:
                break
            places.extend(
                Place(tag, slot, int(table.checksum[block]))
                for block, slot in zip(node.blocks, table.slots(node.blocks, tag), strict=True)
            )
        return places

    def arriving(self, lease: Lease, layer: int) -> dict[int, tuple[Flight, int]]:
        """Return which blocks of a lease have a layer on its way into a device: by their number, the flight and the slot there."""
        ways: dict[int, tuple[Flight, int]] = {}
        for flight in self.mover.flights():
            if flight.coming and flight.layers[layer].event is not None and isinstance(flight.work, Transfer):
                slots = zip(flight.work.blocks[: flight.coming], flight.work.slots_to[: flight.coming], strict=True)
                ways.update((block, (flight, slot)) for block, slot in slots)
        if not ways:
            return {}
        blocks = (block for node in path(lease.node) for block in node.blocks)
        return {number: ways[block] for number, block in enumerate(blocks) if block in ways}

    def readable_blocks(self, lease: Lease) -> int:
        """Return how many leading blocks of a lease lie in memory."""
        count = 0
        for node in path(lease.node):
            tag = node.tag
            if tag is None or tag >= self.memory or node in self.cache.residency.doubtful:
                break
            count += len(node.blocks)
        return count

    def whereabouts(self, lease: Lease, pack: Pack) -> bytes:
        """Return where the leading blocks of a lease lie in memory, up to the first that does not, as `pack` writes it down.

        What it wrote of a node is kept until the node's blocks lie elsewhere: one caller, one `pack`.
        """
        residency = self.cache.residency
        parts: list[bytes] = []
        for node in path(lease.node):
            tag = node.tag
            if tag is None or tag >= self.memory or node in residency.doubtful:
                break
            part = residency.whereabouts.get(node)
            if part is None:
                index = rows(node.blocks)
                slots = residency.table.slot[tag, index]
                part = pack(tag, slots, residency.slots[tag].generations[slots], residency.table.checksum[index])
                if self._kept + len(part) > _MOST_KEPT:
                    residency.whereabouts.clear()
                    self._kept = 0
                self._kept += len(part)  # of what was dropped since, too: a bound needs no more
                residency.whereabouts[node] = part
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def recheck(self, lease: Lease, block: int) -> bool:
        """Check every copy in memory of block number `block` of a lease where it lies; remove the block if one fails.

        Returns whether the block was sound. Who says that a block failed its check may be wrong about it, or lie.
        """
        for node in path(lease.node):
            if block < len(node.blocks):
                break
            block -= len(node.blocks)
        else:
            return True
        number = node.blocks[block]
        table = self.cache.residency.table
        expected = int(table.checksum[number])
        copies = [
            Place(position, int(table.slot[position, number]), expected)
            for position in range(self.memory)
            if node.copies >> position & 1
        ]
        if await self.reader.verify(copies) == len(copies) or lease.released:
            return True
        at = sum(len(above.blocks) for above in path(lease.node))  # anew: the path may have been cut meanwhile
        for above in reversed(path(lease.node)):
            at -= len(above.blocks)
            if number in above.blocks:
                self.distrust(lease, at + above.blocks.index(number))
                return False
        return True

    def sweep_waste(self) -> None:
        """Begin to discard the records of what has left the tree."""
        self.mover.start(self.cache.inflight.take_waste())

    def distrust(self, lease: Lease, block: int) -> None:
        """Remove a block that failed its check, and what follows it."""
        self.cache.stats.failed("checksum")
        self.cache.distrust(lease, block)
        self.sweep_waste()

    def failed(self, error: StoreError) -> None:
        """Count a copy of a reader or a writer that failed, and note it where it was the device that did."""
        self.cache.stats.failed(type(error).__name__)
        if error.fields.get("device"):
            self.troubles.failed(0, COPY, error)

    async def forgotten(self) -> None:
        """Wait until what has left the tree has left the durable tier, too, also where a copy was in flight.

        Raises StoreError when the store has not done so in time, or the cache closes first: then a restart may bring it back.
        """
        position = len(self.stores) - 1
        self.mover.start(self.cache.inflight.take_waste())
        if self._disk is None and not self._mute:
            return

        def concerns(work: Work) -> bool:
            if isinstance(work, Discard):
                return work.position == position
            assert isinstance(work, Transfer)
            # A copy between memories, too, keeps the record of what it moves until it has ended.
            gone = [node for node in self.cache.residency.owners(work.blocks) if not node.alive]
            return any(work.to == position or node.copies >> position & 1 for node in gone)

        undone = self._mute
        try:
            async with asyncio.timeout(self._forgetting):
                while flights := [flight for flight in self.mover.flights() if concerns(flight.work)]:
                    for flight in flights:
                        await flight.wait()
                        undone = undone or flight.undone
        except TimeoutError:
            undone = True
        if undone:
            raise StoreError("it is gone from the tree, but the disk has not forgotten it: a restart may bring it back")

    def check(self) -> dict[str, int]:
        """Audit the books. Raises AuditFailed."""
        return check(self.cache)
