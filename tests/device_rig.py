"""A stack whose HBM tier lies on a device, mostly the lazy one: everything above the device is what production runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from tests.oracle import oracle_block
from tests.seam_copies import Copies
from tests.storage.blocks import contiguous
from tests.storage.ssd_fixture import capacity_for
from tiercache.config import Config
from tiercache.kernels.device import Device, Pool
from tiercache.kernels.host import Bytes
from tiercache.kernels.lazy import LazyDevice, pool_array
from tiercache.keys import ROOT_KEY, block_keys
from tiercache.leases import Lease, Session
from tiercache.service.stack import Seams, Stack
from tiercache.spec import Geometry
from tiercache.storage.arenas import DramArena
from tiercache.storage.checksum import checksum
from tiercache.storage.contract import Put, Store
from tiercache.storage.copier import Copier, StoreCopier
from tiercache.storage.device_arena import DeviceArena
from tiercache.storage.device_copier import DeviceCopier
from tiercache.storage.layouts import block_first_slot_bytes
from tiercache.storage.memory import HostMemory
from tiercache.storage.pinning import CHUNK, Pinning
from tiercache.storage.ssd import SsdTier
from tiercache.storage.staging import Ring
from tiercache.storage.workers import Lane, ThreadWorkers
from tiercache.transfer import Transfer
from tiercache.tree import path
from tiercache.types import Identity

GEOMETRY = Geometry(layers=3, parts=2, unit_bytes=4096, symbol_bytes=64)
"""Blocks of 24 KiB."""
NAMESPACE = b"d" * 32
STRIDE = GEOMETRY.symbol_bytes

D = TypeVar("D", bound=Device)


class DeviceHouse(Generic[D]):
    """A stack, its device and one session of the core; `pool_of` says what lies in the device's slots."""

    def __init__(self, stack: Stack, device: D, arena: DeviceArena, pool_of: Callable[[Pool], Bytes]) -> None:
        self.stack = stack
        self.device = device
        self.arena = arena
        self._pool_of = pool_of
        self.cache = stack.cache
        self.session: Session = stack.cache.begin_session()
        self.space = stack.cache.residency.space(NAMESPACE, STRIDE)

    def insert(self, key: bytes) -> None:
        """Put all blocks of `key` into the device's slots."""
        reservation = self.cache.reserve(self.session, self.space, key, after=None, position=0)
        sums: list[int] = []
        for place, (position, slot) in enumerate(reservation.places):
            planes = truth(key, place)
            sums.append(checksum(planes))
            identity = Identity(NAMESPACE, 0, 0, b"", b"", b"", sums[-1])
            [outcome] = self.stack.stores[position].put([Put(slot, identity, planes)])
            assert outcome.error is None
        assert self.cache.commit(reservation, len(reservation.blocks), sums) == len(key) // STRIDE
        self.cache.close(reservation)

    def lease(self, key: bytes) -> Lease:
        """Take a lease on what there is of `key`."""
        return self.cache.match(self.session, self.space, key)

    def demote(self, blocks: int) -> list[Transfer]:
        """Begin to free `blocks` more slots of the device."""
        pool = self.cache.residency.slots[0]
        flights = self.stack.mover.start(self.cache.moves.make_room(0, pool.free + blocks))
        return [flight.work for flight in flights if isinstance(flight.work, Transfer)]

    async def promote(self, lease: Lease) -> None:
        """Bring a lease's blocks up, and wait until that is over."""
        await self.stack.traffic.promote(lease).done.wait()

    def found(self, key: bytes) -> list[tuple[int, bytes]]:
        """Return tier position and bytes of every cached block of `key`, from its fastest copy."""
        lease = self.lease(key)
        found: list[tuple[int, bytes]] = []
        keys = block_keys(NAMESPACE, ROOT_KEY, key, STRIDE)
        for node in path(lease.node):
            tag = node.tag
            assert tag is not None
            for slot in self.cache.residency.table.slots(node.blocks, tag):
                place = len(found)
                if tag == 0:
                    planes: Bytes = self._pool_of(self.arena.pool)[:, slot]
                elif (view := self.stack.stores[tag].view(slot)) is not None:
                    planes = view
                else:
                    planes = contiguous(GEOMETRY)
                    parent = keys[place - 1] if place else ROOT_KEY
                    symbol = key[place * STRIDE : (place + 1) * STRIDE]
                    sums = checksum(truth(key, place))
                    self.stack.stores[tag].fetch(slot, Identity(NAMESPACE, 0, 0, keys[place], parent, symbol, sums), planes)
                found.append((tag, planes.tobytes()))
        self.cache.release(lease)
        return found


def truth(key: bytes, place: int) -> Bytes:
    """Return what block number `place` of `key` holds."""
    return oracle_block(NAMESPACE, key[: (place + 1) * STRIDE], GEOMETRY)


def keys_of(seed: int, count: int, blocks: int) -> list[bytes]:
    """Return packed keys of `count` prompts that share nothing."""
    draw = np.random.default_rng(seed)
    return [draw.integers(0, 2**31, blocks * STRIDE // 4, dtype="<i4").tobytes() for _ in range(count)]


def is_exact(found: Sequence[tuple[int, bytes]], key: bytes) -> bool:
    """Return whether these are the leading blocks of `key`, byte for byte."""
    return all(data == truth(key, place).tobytes() for place, (_, data) in enumerate(found))


@asynccontextmanager
async def device_house(
    folder: Path,
    seed: int,
    *,
    hbm: int,
    dram: int | None,
    ssd: int = 256,
    stages: int = 2,
    stage_blocks: int = 2,
    together: int | None = None,
    copies: Copies | None = None,
) -> AsyncIterator[DeviceHouse[LazyDevice]]:
    """Open a stack of so many slots a tier on a lazy device; without `dram` the device stands on the disk.

    Its copies pass by `copies`, if that is given.
    """
    device = LazyDevice(seed)
    arena = DeviceArena(device, GEOMETRY, device.allocate(hbm * GEOMETRY.block_bytes))
    ring = Ring(device, GEOMETRY, stages=stages, blocks=stage_blocks)
    memory = None if dram is None else HostMemory(block_first_slot_bytes(GEOMETRY) * dram)
    async with house_on(
        device, folder, arena, ring, memory, ssd=ssd, pool_of=pool_array, together=together, copies=copies
    ) as house:
        try:
            yield house
        finally:
            device.held = False
            device.run()


@asynccontextmanager
async def pinned_house(
    device: D, folder: Path, *, hbm: int, dram: int, pool_of: Callable[[Pool], Bytes], chunk: int = CHUNK, stage_blocks: int = 1
) -> AsyncIterator[DeviceHouse[D]]:
    """Open a stack of so many slots a tier on any device, with two stages, above memory that is pinned for it."""
    arena = DeviceArena(device, GEOMETRY, device.allocate(hbm * GEOMETRY.block_bytes))
    memory = HostMemory(block_first_slot_bytes(GEOMETRY) * dram)
    pinning = Pinning(device, memory.array, slot_bytes=block_first_slot_bytes(GEOMETRY), chunk=chunk)
    try:
        assert pinning.refused is None
        ring = Ring(device, GEOMETRY, stages=2, blocks=stage_blocks)
        async with house_on(device, folder, arena, ring, memory, pool_of=pool_of, together=pinning.together) as house:
            yield house
    finally:
        pinning.close()


@asynccontextmanager
async def house_on(
    device: D,
    folder: Path,
    arena: DeviceArena,
    ring: Ring,
    memory: HostMemory | None,
    *,
    pool_of: Callable[[Pool], Bytes],
    ssd: int = 256,
    together: int | None = None,
    copies: Copies | None = None,
) -> AsyncIterator[DeviceHouse[D]]:
    """Open a stack of the device's arena, memory and a disk."""
    stores: list[Store] = [arena]
    if memory is not None:
        stores.append(DramArena(memory, GEOMETRY))
        memory.close()  # the arena's views keep the mapping
    tier = SsdTier(folder / "ssd", codec="raw", batch_bytes=1 << 20)
    stores.append(tier.open(GEOMETRY, capacity_bytes=capacity_for(GEOMETRY, ssd), item_bytes=4))
    workers = ThreadWorkers({Lane.COPY: 3, Lane.READ: 2, Lane.WRITE: 2, Lane.DOWN: 1, Lane.UP: 1})

    def on_device(inner: Copier) -> Copier:
        assert isinstance(inner, StoreCopier)
        copier = DeviceCopier(inner, stores, arena, device, ring, workers, together=together)
        return copier if copies is None else copies.around(copier)

    stack = Stack(Config.of(hbm="1 MiB", lease_share=1.0), GEOMETRY, 16, stores, workers, Seams(copier=on_device))
    await stack.begin()
    try:
        yield DeviceHouse(stack, device, arena, pool_of)
    finally:
        await stack.close(10.0)
        workers.close()
        tier.close()
