"""Copies between the slots of one namespace and the client's own memory, wherever the slots lie.

Mapped slots are copied by worker threads (`tiercache.service.client.copies`), those of a device by way of its port. Both are
verified in the same way: the generation is looked at last, when the bytes and their checksum are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import cast

from tiercache.errors import StoreError, WorkerDied
from tiercache.kernels.device import Event
from tiercache.kernels.host import Bytes
from tiercache.service.client import copies
from tiercache.service.client.device_slots import DeviceSlots
from tiercache.service.client.mapping import Arena, Grip
from tiercache.service.finishing import Finishing
from tiercache.service.wire import Place
from tiercache.storage.reader import SHARE
from tiercache.storage.workers import Lane, Workers, in_parts

Outcome = tuple[int, str | None]
"""How many leading blocks are good, and why the next one is not."""


class Copying:
    """The copies of one namespace in one session. `arenas` are the tiers by position.

    A copy that involves a device goes on when its caller is cancelled, and keeps `grip`, and with it the lease, until it is over.
    Raises StaleHandle where the session has ended before a copy on a device began.
    """

    def __init__(
        self, arenas: Sequence[Arena | DeviceSlots], workers: Workers, *, threads: int, finishing: Finishing
    ) -> None:
        self._arenas = arenas
        self._mapped = cast(Sequence[Arena], arenas)
        """For the functions of `copies`, which are only asked for places in what is mapped."""
        self._workers = workers
        self._threads = threads
        self._finishing = finishing
        self._plain = not any(isinstance(arena, DeviceSlots) for arena in arenas)

    # --- reading ----------------------------------------------------------------------------------------------------------

    async def gather(self, places: Sequence[Place], into: Bytes, grip: Grip) -> Outcome:
        """Copy blocks one after the other into `into`, `[planes, len(places) * unit_bytes]`, and verify each."""
        if self._plain:
            return await self._gather(places, into)
        return await self._finishing.abandon(self._gather_mixed(places, into, grip))

    async def verify(self, places: Sequence[Place], grip: Grip) -> Outcome:
        """Check blocks where they lie."""
        if self._plain:
            return await self._verify(places)
        return await self._finishing.abandon(self._verify_mixed(places, grip))

    async def layer(self, places: Sequence[Place], layer: int, into: Bytes, grip: Grip) -> bool:
        """Copy one layer of blocks into `into`, `[parts, len(places) * unit_bytes]`; return whether all were there to the end.

        Nothing is verified: a checksum covers whole blocks (see `verify`). Raises WorkerDied, and StoreError when a device failed.
        """
        if self._plain:
            return await self._layer(places, layer, into)
        return await self._finishing.abandon(self._layer_mixed(places, layer, into, grip))

    # --- writing ----------------------------------------------------------------------------------------------------------

    def parts(self, places: Sequence[Place]) -> Iterator[tuple[DeviceSlots | None, int, int]]:
        """Go through runs of places of one kind: the slots if they are a device's, the run's first place, and the one after it."""
        low = 0
        for position, run in groupby(places, key=lambda place: place.position):
            high = low + sum(1 for _ in run)
            arena = self._arenas[position]
            yield arena if isinstance(arena, DeviceSlots) else None, low, high
            low = high

    async def fill(self, tensor: Bytes, first: int, places: Sequence[Place], slots: Sequence[Bytes]) -> list[int]:
        """Fill reserved slots from block `first` of `tensor` on; return the checksums of what lies there now.

        `slots` are those of the places that are mapped. Raises WorkerDied, StoreError; all copies are over then.
        """
        if self._plain:
            return await self._workers.run(Lane.COPY, copies.scatter, tensor, first, slots)
        sums: list[int] = []
        unit = tensor.shape[1] 
        return sums
