"""Two tiers, HBM on a device and pinned DRAM, under the product's own core, mover and copier; no disk, no daemon."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import numpy as np

from tiercache.bench.gpu_rig import Rig
from tiercache.cache import Cache
from tiercache.errors import MemoryRefused
from tiercache.kernels.host import Bytes
from tiercache.leases import Lease
from tiercache.spec import Geometry
from tiercache.storage.arenas import DramArena
from tiercache.storage.checksum import checksum
from tiercache.storage.copier import StoreCopier
from tiercache.storage.device_arena import DeviceArena
from tiercache.storage.device_copier import DeviceCopier
from tiercache.storage.layouts import block_first_slot_bytes
from tiercache.storage.memory import HostMemory
from tiercache.storage.mover import Mover
from tiercache.storage.pinning import Pinning
from tiercache.storage.slots import SlotPool
from tiercache.storage.staging import Ring
from tiercache.storage.workers import Lane, ThreadWorkers, Workers
from tiercache.transfer import Transfer
from tiercache.tree import path
from tiercache.types import Tier

HBM, DRAM = 0, 1
NAMESPACE = b"g" * 32


class Times(NamedTuple):
    """Seconds from the beginning of a promotion until its first layer is there, and until all of it is."""

    first: float
    whole: float


class House:
    """A cache and its mover. Every block is `content(number)`."""

    def __init__(
        self, rig: Rig, geometry: Geometry, pools: Sequence[SlotPool], arena: DeviceArena, dram: DramArena, workers: Workers
    ) -> None:
        self.rig = rig
        self.workers = workers
        self.geometry = geometry
        self.arena = arena
        self.dram = dram
        self.cache = Cache((Tier.HBM, Tier.DRAM), dict(zip((Tier.HBM, Tier.DRAM), pools, strict=True)))
        self.session = self.cache.begin_session()
        self.space = self.cache.residency.space(NAMESPACE, geometry.symbol_bytes)
        self.mover: Mover
        self._common = np.random.default_rng(1).integers(0, 256, (geometry.planes, geometry.unit_bytes), np.uint8)

    def content(self, number: int) -> Bytes:
        """Return what block `number` holds: every plane of every block differs from all others."""
        planes: Bytes = self._common.copy()
        stamps = np.arange(self.geometry.planes, dtype=np.uint32) + np.uint32(number * self.geometry.planes)
        planes[:, :4] = stamps.view(np.uint8).reshape(-1, 4)
        return planes

    def key(self, first: int, count: int) -> bytes:
        """Return the key of a prompt whose blocks are `first` and on."""
        symbols = np.zeros((count, self.geometry.symbol_bytes // 4), "<u4")
        symbols[:, 0] = np.arange(first, first + count)
        return symbols.tobytes()

    def fill(self, first: int, count: int) -> None:
        """Put a prompt into DRAM."""
        reservation = self.cache.reserve(self.session, self.space, self.key(first, count), after=None, position=DRAM)
        assert len(reservation.blocks) == count, "DRAM is too small for the prompt"
        sums: list[int] = []
        for number, (position, slot) in enumerate(reservation.places, first):
            assert position == DRAM
            view = self.dram.view(slot)
            view[...] = self.content(number)
            sums.append(checksum(view))
        self.cache.commit(reservation, count, sums)
        self.cache.close(reservation)

    def lease(self, first: int, count: int) -> Lease:
        """Take a lease on a prompt."""
        lease = self.cache.match(self.session, self.space, self.key(first, count))
        assert lease.blocks == count, "the prompt is not there"
        return lease

    async def promote(self, first: int, count: int) -> Times:
        """Bring a prompt up."""
        lease = self.lease(first, count)
        try:
            began = time.perf_counter()
            transfer = self.cache.moves.plan_promote(lease.node, HBM, most=count)
            assert transfer is not None and transfer.count == count, "HBM is too small for the prompt"
            [flight] = self.mover.start([transfer])
            await flight.layers[0].known.wait()
            event = flight.layers[0].event
            if event is not None:
                await self.workers.run(Lane.COPY, event.wait)
            until_first = time.perf_counter() - began
            report = await flight.wait()
            assert report is not None and report.error is None and report.arrived == count, report
            return Times(until_first, time.perf_counter() - began)
        finally:
            self.cache.release(lease)

    async def demote(self, count: int) -> list[Transfer]:
        """Free `count` more slots of HBM: at once what DRAM has too, by moves what it has not; return these."""
        pool = self.cache.residency.slots[HBM]
        flights = self.mover.start(self.cache.moves.make_room(HBM, pool.free + count))
        for flight in flights:
            await flight.wait()
        return [flight.work for flight in flights if isinstance(flight.work, Transfer)]

    def forget_dram(self, first: int, count: int) -> None:
        """Let go of the copies in DRAM of a prompt that HBM has, so that its next way down is a copy."""
        pool = self.cache.residency.slots[DRAM]
        self.cache.moves.make_room(DRAM, pool.free + count)

    def is_exact(self, first: int, count: int, tier: int) -> bool:
        """Return whether a prompt lies in the tier, byte for byte."""
        lease = self.lease(first, count)
        try:
            pool = self.arena.pool
            there = self.rig.peek(pool.memory).reshape(pool.planes, pool.slots, pool.unit_bytes) if tier == HBM else None
            number = first
            for node in path(lease.node):
                if not node.copies >> tier & 1:
                    return False
                for slot in self.cache.residency.table.slots(node.blocks, tier):
                    found = there[:, slot] if there is not None else self.dram.view(slot)
                    if not np.array_equal(found, self.content(number)):
                        return False
                    number += 1
            return number == first + count
        finally:
            self.cache.release(lease)


@asynccontextmanager
async def house(
    rig: Rig, geometry: Geometry, *, hbm: int, dram: int, stages: int, stage_blocks: int, copiers: int = 4
) -> AsyncIterator[House]:
    """Open a house of so many slots. Raises MemoryRefused where host memory can't be pinned."""
    slot_bytes = block_first_slot_bytes(geometry)
    memory = HostMemory(slot_bytes * dram)
    pinning = Pinning(rig.device, memory.array, slot_bytes=slot_bytes)
    workers = ThreadWorkers({Lane.COPY: copiers, Lane.READ: 1, Lane.WRITE: 1, Lane.DOWN: 1, Lane.UP: 1})
    try:
        if pinning.refused is not None:
            raise MemoryRefused(pinning.refused)
        below = DramArena(memory, geometry)
        arena = DeviceArena(rig.device, geometry, rig.device.allocate(hbm * geometry.block_bytes))
        made = House(rig, geometry, (SlotPool(hbm), SlotPool(dram)), arena, below, workers)
        stores = (arena, below)
        ring = Ring(rig.device, geometry, stages=stages, blocks=stage_blocks)
        copier = DeviceCopier(StoreCopier(stores, workers), stores, arena, rig.device, ring, workers, together=pinning.together)
        made.mover = Mover(made.cache.moves, copier, made.cache.stats)
        yield made
        await made.mover.settle()
        made.mover.close()
        arena.close()
        below.close()
    finally:
        workers.close()
        pinning.close()
        memory.close()
