"""What the tiers of one configuration lie in: memory of the host and of a device, the generations of their slots, a directory."""

from __future__ import annotations

import errno
import logging
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiercache.config import Config
from tiercache.devices import CPU
from tiercache.errors import Closed, DirectoryRefused, StoreError, TierCacheError
from tiercache.kernels.device import LEAST_EXPORT, Device, Memory
from tiercache.service.stack import Seams
from tiercache.sizes import parse_size
from tiercache.spec import ITEM_BYTES, KVSpec
from tiercache.storage.arenas import DramArena, HostArena, HostHbmArena
from tiercache.storage.contract import Store
from tiercache.storage.device_bus import Bus
from tiercache.storage.layouts import SLOT_ALIGNMENT, block_first_slot_bytes
from tiercache.storage.memory import HostMemory, require_memory
from tiercache.storage.ssd import SsdTier
from tiercache.types import Tier

log = logging.getLogger(__name__)

_ARENAS = {Tier.HBM: HostHbmArena, Tier.DRAM: DramArena}
_GENERATION_BYTES = 4
_DISK_ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
"""A directory that is refused for these is the right one, on a disk that fails."""


class Opening(NamedTuple):
    """The stores of one share, fastest first; by memory tier where the generations of its slots begin, in bytes, and themselves."""

    stores: list[Store]
    generations: dict[Tier, tuple[int, NDArray[np.uint32]]]
    bus: Bus | None
    """What they have of a device, whose arena is then the first store."""


class Tiers:
    """Memory and directory of all tiers, shared out among the sizes of blocks. Its calls block: they are made by worker threads.

    A disk that fails is no reason not to start: `disk_faults` says what is without SSD then, and why.
    """

    def __init__(self, config: Config, seams: Seams) -> None:
        self._config = config
        self._seams = seams
        self._sizes = {tier.place: tier.bytes for tier in config.tiers}
        self._numbered = {tier: _numbers(config, size) for tier, size in self._sizes.items() if tier in _ARENAS}
        """By memory tier, how many generations each share of it has, in the order of `_edges`."""
        self._parts: list[Memory] = []
        """Of the HBM tier on a device, the memory of each share: an allocation of its own, which another process can open."""
        self._buses: list[Bus] = []
        self.memory: dict[Tier, HostMemory] = {}
        """Of the tiers that lie in host memory."""
        self.generations: HostMemory | None = None
        self.device: Device | None = None
        """Where the HBM tier lies; None: in host memory."""
        self.disk: SsdTier | None = None
        self.disk_faults: dict[str, str] = {}

    def allocate(self) -> None:
        """Take everything. What was taken when it raises is given back by `free`.

        Raises MemoryRefused, DirectoryRefused or DirectoryLocked, InvalidConfig for a device that nothing here can open, and
        StoreError when SSD is the only tier and fails.
        """
        if self._config.device != CPU:
            self.device = self._seams.device(self._config.device)
            for start, end in _edges(self._config, self._sizes[Tier.HBM]):
                self._parts.append(self.device.allocate(max(end - start, LEAST_EXPORT)))
        memory = {tier: size for tier, size in self._sizes.items() if tier in _ARENAS and not self._on_device(tier)}
        numbers = sum(map(sum, self._numbered.values())) * _GENERATION_BYTES
        require_memory(sum(memory.values()) + numbers)
        if self._numbered:
            self.generations = HostMemory(numbers, name="tiercache-generations")
        for tier, size in memory.items():
            self.memory[tier] = HostMemory(size, name=f"tiercache-{tier.name.lower()}")
        if Tier.SSD in self._sizes:
            self._take_directory()

    def _take_directory(self) -> None:
        try:
            self.disk = SsdTier(
                self._config.path,
                codec=self._config.codec,
                batch_bytes=parse_size(self._config.batch_bytes),
                sync=self._seams.sync,
                values=self._seams.values,
            )
        except (StoreError, DirectoryRefused) as error:
            # Any other directory is refused for what it is: a mistake, which is said at once rather than worked around.
            alone = not self._numbered
            if alone or (isinstance(error, DirectoryRefused) and error.fields.get("errno") not in _DISK_ERRORS):
                raise
            del self._sizes[Tier.SSD]
            self._do_without("all blocks", error)

    def open(self, spec: KVSpec, share: int) -> Opening:
        """Make the stores for blocks of `spec` in share number `share`; nothing is left of them when it raises.

        Raises TierTooSmall when a tier can't hold one block, MemoryRefused when a device or the host has no room for the way
        between them, StoreError when SSD is the only tier and fails, Closed.
        """
        stores: list[Store] = []
        bus: Bus | None = None
        try:
            arenas = [self._arena(tier, spec, share) for tier in self._sizes if tier in _ARENAS and not self._on_device(tier)]
            stores += arenas
            if self.device is not None:
                bus = self._bus(self.device, spec, share, arenas[0] if arenas else None)
                stores.insert(0, bus.arena)
            # The disk last: it may hang, and the cache be closed and its memory gone when it comes back.
            if Tier.SSD in self._sizes:
                self._open_disk(spec, share, stores)
            return Opening(stores, self._number_slots(stores, share), bus)
        except BaseException:
            if bus is not None:
                bus.close()
            for store in stores:
                store.close()
            raise

    def _arena(self, tier: Tier, spec: KVSpec, share: int) -> HostArena:
        start, end = _edges(self._config, self._sizes[tier])[share]
        most = self._numbered[tier][share]
        return _ARENAS[tier](self.memory[tier], spec.geometry, offset=start, length=end - start, most=most)

    def _open_disk(self, spec: KVSpec, share: int, stores: list[Store]) -> None:
        assert self.disk is not None
        start, end = _edges(self._config, self._sizes[Tier.SSD])[share]
        try:
            stores.append(self.disk.open(spec.geometry, capacity_bytes=end - start, item_bytes=ITEM_BYTES[spec.dtype]))
        except StoreError as error:
            if not self._numbered:
                raise
            self._do_without(f"blocks of {spec.block_bytes} bytes", error)

    def _bus(self, device: Device, spec: KVSpec, share: int, below: HostArena | None) -> Bus:
        slot_bytes = block_first_slot_bytes(spec.geometry)
        array = None
        if below is not None:
            array = self.memory[below.tier].array[below.offset : below.offset + below.capacity * slot_bytes]
        start, end = _edges(self._config, self._sizes[Tier.HBM])[share]
        bus = Bus(
            device,
            spec.geometry,
            self._parts[share],
            length=end - start,
            most=self._numbered[Tier.HBM][share],
            below=array,
            slot_bytes=slot_bytes,
        )
        self._buses.append(bus)
        return bus

    def _number_slots(self, stores: list[Store], share: int) -> dict[Tier, tuple[int, NDArray[np.uint32]]]:
        found: dict[Tier, tuple[int, NDArray[np.uint32]]] = {}
        for store in stores:
            if store.tier in _ARENAS:
                if self.generations is None:
                    raise Closed("the cache was closed while the disk hung")
                faster = (numbers for tier, numbers in self._numbered.items() if tier > store.tier)
                begin = sum(map(sum, faster)) + sum(self._numbered[store.tier][:share])
                whole = self.generations.array.view(np.uint32)
                found[store.tier] = begin * _GENERATION_BYTES, whole[begin : begin + store.capacity]
        return found

    def _on_device(self, tier: Tier) -> bool:
        return tier is Tier.HBM and self._config.device != CPU

    def _do_without(self, what: str, error: TierCacheError) -> None:
        self.disk_faults[what] = str(error)
        log.error("going on without SSD for %s: %s", what, self.disk_faults[what])

    def free(self) -> None:
        """Give everything back: what is pinned first, then memory. May be called twice."""
        for bus in self._buses:
            bus.close()
        self._buses.clear()
        self._parts.clear()
        self.device = None
        for memory in self.memory.values():
            memory.close()
        self.memory.clear()
        if self.generations is not None:
            self.generations.close()
            self.generations = None
        if self.disk is not None:
            self.disk.close(0.0)  # a second time, if it was closed in order; what hangs in it has been waited for
            self.disk = None


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
