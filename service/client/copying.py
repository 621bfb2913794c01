"""Copies out of the slots of one namespace, wherever the slots lie.

Mapped slots are copied by worker threads (`tiercache.service.client.copies`), those of a device by way of its port. Both are
verified in the same way: the generation is looked at last, when the bytes and their checksum are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import cast

from tiercache.errors import StoreError, WorkerDied
from tiercache.kernels.host import Bytes
from tiercache.service.client import copies
from tiercache.service.client.device_slots import DeviceSlots
from tiercache.service.client.mapping import Arena, Grip
from tiercache.service.wire import Place
from tiercache.storage.finishing import Finishing
from tiercache.storage.reader import SHARE
from tiercache.storage.workers import Lane, Workers, in_parts

Outcome = tuple[int, str | None]
"""How many leading blocks are good, and why the next one is not."""


class Copying:
    """The copies of one namespace in one session. `arenas` are the tiers by position.

    A copy that involves a device goes on when its caller is cancelled, and keeps `grip`, and with it the lease, until it is over.
    Every call raises StaleHandle where the session ended before a copy on a device began.
    """

    def __init__(self, arenas: Sequence[Arena | DeviceSlots], workers: Workers, *, threads: int, finishing: Finishing) -> None:
        self._arenas = arenas
        self._mapped = cast(Sequence[Arena], arenas)
        """For the functions of `copies`, which are asked for places in mapped slots alone."""
        self._workers = workers
        self._threads = threads
        self._finishing = finishing
        self._plain = not any(isinstance(arena, DeviceSlots) for arena in arenas)

    def parts(self, places: Sequence[Place]) -> Iterator[tuple[DeviceSlots | None, int, int]]:
        """Go through runs of places of one tier: its slots if they are a device's, the run's first place, and the one after it."""
        if self._plain:
            yield None, 0, len(places)
            return
        low = 0
        for position, run in groupby(places, key=lambda place: place.position):
            high = low + sum(1 for _ in run)
            arena = self._arenas[position]
            yield arena if isinstance(arena, DeviceSlots) else None, low, high
            low = high

    async def gather(self, places: Sequence[Place], into: Bytes, grip: Grip) -> Outcome:
        """Copy blocks one after the other into `into`, `[planes, len(places) * unit_bytes]`, and verify each."""
        if self._plain:
            return await self._gather(places, into)
        return await self._finishing.abandon(self._gather_all(places, into, grip))

    async def verify(self, places: Sequence[Place], grip: Grip) -> Outcome:
        """Check blocks where they lie."""
        if self._plain:
            return await self._verify(places)
        return await self._finishing.abandon(self._verify_all(places, grip))

    async def layer(self, places: Sequence[Place], layer: int, into: Bytes, grip: Grip) -> bool:
        """Copy one layer of blocks into `into`, `[parts, len(places) * unit_bytes]`; return whether all were there to the end.

        Nothing is verified: a checksum covers whole blocks (see `verify`). Raises WorkerDied, and StoreError when a device failed.
        """
        if self._plain:
            return await self._layer(places, layer, into)
        return await self._finishing.abandon(self._layer_all(places, layer, into, grip))

    # --- in parts ---------------------------------------------------------------------------------------------------------

    async def _gather_all(self, places: Sequence[Place], into: Bytes, _grip: Grip) -> Outcome:
        unit = into.shape[1] // len(places)
        for device, low, high in self.parts(places):
            part, out = places[low:high], into[:, low * unit : high * unit]
            good, reason = await (self._gather(part, out) if device is None else self._fetch(device, part, out))
            if reason is not None:
                return low + good, reason
        return len(places), None

    async def _verify_all(self, places: Sequence[Place], _grip: Grip) -> Outcome:
        for device, low, high in self.parts(places):
            part = places[low:high]
            good, reason = await (self._verify(part) if device is None else self._fetch(device, part))
            if reason is not None:
                return low + good, reason
        return len(places), None

    async def _layer_all(self, places: Sequence[Place], layer: int, into: Bytes, _grip: Grip) -> bool:
        unit = into.shape[1] // len(places)
        for device, low, high in self.parts(places):
            part, out = places[low:high], into[:, low * unit : high * unit]
            if device is None:
                await self._layer(part, layer, out)
            else:
                await device.port.layer([place.slot for place in part], layer, out)
        return all(copies.is_there(self._arenas, place) for place in places)

    # --- of a device ------------------------------------------------------------------------------------------------------

    async def _fetch(self, device: DeviceSlots, places: Sequence[Place], into: Bytes | None = None) -> Outcome:
        """Copy blocks into `into`, or only look at them, and verify what arrived in host memory."""
        slots = [place.slot for place in places]
        try:
            sums = await (device.port.sums(slots) if into is None else device.port.read(slots, into))
        except StoreError as error:
            return 0, copies.fault_of(error)
        for number, (place, found) in enumerate(zip(places, sums, strict=True)):
            if not copies.is_there(self._arenas, place):
                return number, copies.LOST
            if found != place.checksum:
                return number, copies.ROTTEN
        return len(places), None

    # --- of what is mapped ------------------------------------------------------------------------------------------------

    async def _gather(self, places: Sequence[Place], into: Bytes) -> Outcome:
        """Gather in as many threads as it is worth."""
        unit = into.shape[1] // len(places)

        async def part(low: int, high: int) -> Outcome:
            return await self._workers.run(
                Lane.COPY, copies.gather, self._mapped, places[low:high], into[:, low * unit : high * unit]
            )

        for low, one in await in_parts(len(places), min(self._threads, into.nbytes // SHARE), part):
            if isinstance(one, BaseException) and not isinstance(one, WorkerDied):
                raise one
            good, reason = (0, copies.DIED) if isinstance(one, BaseException) else one
            if reason is not None:
                return low + good, reason
        return len(places), None

    async def _verify(self, places: Sequence[Place]) -> Outcome:
        try:
            return await self._workers.run(Lane.COPY, copies.verify, self._mapped, places)
        except WorkerDied:
            return 0, copies.DIED

    async def _layer(self, places: Sequence[Place], layer: int, into: Bytes) -> bool:
        return await self._workers.run(Lane.COPY, copies.layer, self._mapped, places, layer * len(into), into)
