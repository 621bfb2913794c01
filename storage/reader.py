"""How readers and writers get at slots: copies between slots and the client's own memory, verified as they leave a slot.

A block is verified in its slot, right after its copy: there it is one run and in the processor's cache, which its copy, in planes
far apart, is not. A slot that changed before its copy or under it is still another one after it: while the reader's lease lasts
nobody puts the block back. Who reads looks at its lease once more, after the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from tiercache.kernels.host import Bytes, copy_run, scatter_tokens
from tiercache.storage.checksum import checksum
from tiercache.storage.contract import Planes, Store
from tiercache.storage.layouts import runs
from tiercache.storage.workers import Lane, Workers, in_parts

SHARE = 4 << 20
"""Bytes; below it one thread is done before a second one would begin."""


class Place(NamedTuple):
    """Where a reader finds a block: tier position, slot, and the checksum of what must be there."""

    position: int
    slot: int
    checksum: int


class SlotReader(Protocol):
    """Copies between slots that are memory and `[planes, tokens * token_bytes]` bytes of a client, away from the event loop.

    The caller holds a lease on what it reads and a reservation on what it writes. Blocks are in the order of their prompt, so that
    their tiers only get slower. Raises StoreError where memory can't be read or written (a thread that died, a device that fails).
    """

    def view(self, place: Place) -> Any:
        """Return a block in place, `[planes, unit_bytes]` bytes: numpy's, or an array of the device that torch takes by DLPack."""
        ...

    async def gather(self, places: Sequence[Place], into: Bytes) -> int:
        """Copy blocks one after the other into `into`, verify each, and return how many leading ones are good."""
        ...

    async def verify(self, places: Sequence[Place]) -> int:
        """Check blocks and return how many leading ones are good."""
        ...

    async def layer(self, places: Sequence[Place], layer: int, into: Bytes) -> None:
        """Copy one layer of blocks into `into`, `[parts, tokens * token_bytes]`. Nothing is verified."""
        ...

    async def scatter(self, tensor: Bytes, first: int, places: Sequence[Place]) -> list[int]:
        """Fill reserved slots from block `first` of `tensor` on; return the checksums of what they were filled with."""
        ...

    async def seal(self, places: Sequence[Place]) -> list[int]:
        """Return the checksums of slots that a writer filled in place."""
        ...


class Reader:
    """Reads and writes slots that are host memory, on worker threads."""

    def __init__(self, stores: Sequence[Store], workers: Workers, *, block_size: int, threads: int = 1) -> None:
        self._stores = stores
        self._workers = workers
        self._threads = threads
        self._block_size = block_size
        self._token_bytes = stores[0].geometry.unit_bytes // block_size

    def view(self, place: Place) -> Planes:
        """Return a block in place."""
        view = self._stores[place.position].view(place.slot)
        assert view is not None, "only memory is read in place"
        return view

    async def gather(self, places: Sequence[Place], into: Bytes) -> int:
        """Copy blocks one after the other into `into`, verify each, and return how many leading ones are good.

        In as many threads as it is worth; all have ended when this returns or raises.
        """
        unit = self._stores[0].geometry.unit_bytes

        async def part(low: int, high: int) -> int | None:
            good = await self._workers.run(Lane.COPY, self._gather, places[low:high], into[:, low * unit : high * unit])
            return None if low + good == high else low + good

        parts = min(self._threads, into.nbytes // SHARE)
        for _, bad in await in_parts(len(places), parts, part):
            if isinstance(bad, BaseException):
                raise bad
            if bad is not None:
                return bad
        return len(places)

    async def verify(self, places: Sequence[Place]) -> int:
        """Check blocks where they lie and return how many leading ones are good."""
        return await self._workers.run(Lane.COPY, self._verify, places)

    async def layer(self, places: Sequence[Place], layer: int, into: Bytes) -> None:
        """Copy one layer of blocks into `into`, `[parts, tokens * token_bytes]`. Nothing is verified."""
        await self._workers.run(Lane.COPY, self._layer, places, layer, into)

    async def scatter(self, tensor: Bytes, first: int, places: Sequence[Place]) -> list[int]:
        """Fill reserved slots from block `first` of `tensor` on; return the checksums of what lies there now.

        In blocks, not tokens: layouts of one geometry share a reader, and may differ in how many tokens make a block.
        """
        return await self._workers.run(Lane.COPY, self._scatter, tensor, first, places)

    async def seal(self, places: Sequence[Place]) -> list[int]:
        """Return the checksums of slots that a writer filled in place."""
        return await self._workers.run(Lane.COPY, self._seal, places)

    def _views(self, place: Place, count: int) -> Planes:
        views = self._stores[place.position].views(place.slot, count)
        assert views is not None, "only memory is read in place"
        return views

    # --- on worker threads ------------------------------------------------------------------------------------------------

    def _gather(self, places: Sequence[Place], into: Bytes) -> int:
        geometry = self._stores[0].geometry
        unit = geometry.unit_bytes
        for low, high in runs(places, geometry.block_bytes):
            blocks = self._views(places[low], high - low)
            copy_run(blocks, into[:, low * unit : high * unit])
            for number in range(low, high):
                if checksum(blocks[number - low]) != places[number].checksum:
                    return number
        return len(places)

    def _verify(self, places: Sequence[Place]) -> int:
        for number, place in enumerate(places):
            if checksum(self.view(place)) != place.checksum:
                return number
        return len(places)

    def _layer(self, places: Sequence[Place], layer: int, into: Bytes) -> None:
        geometry = self._stores[0].geometry
        unit, first = geometry.unit_bytes, layer * geometry.parts
        for low, high in runs(places, geometry.parts * unit):
            blocks = self._views(places[low], high - low)[:, first : first + geometry.parts]
            copy_run(blocks, into[:, low * unit : high * unit])

    def _scatter(self, tensor: Bytes, first: int, places: Sequence[Place]) -> list[int]:
        sums: list[int] = []
        for number, place in enumerate(places, first):
            block = self.view(place)
            scatter_tokens(tensor, number * self._block_size, block, token_bytes=self._token_bytes)
            sums.append(checksum(block))
        return sums

    def _seal(self, places: Sequence[Place]) -> list[int]:
        return [checksum(self.view(place)) for place in places]
