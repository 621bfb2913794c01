"""How readers and writers get at slots: copies between slots and the client's own memory, verified as they leave a slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tiercache.errors import Untrusted
from tiercache.kernels.host import Bytes, gather_tokens, scatter_tokens
from tiercache.storage.checksum import checksum, verify
from tiercache.storage.contract import Planes, Store
from tiercache.storage.workers import Lane, Workers


class Place(NamedTuple):
    """Where a reader finds a block: tier position, slot, and the checksum of what must be there."""

    position: int
    slot: int
    checksum: int


class Reader:
    """Copies between slots that are memory and `[planes, tokens * token_bytes]` bytes of a client, on worker threads.

    The caller holds a lease on what it reads and a reservation on what it writes.
    """

    def __init__(self, stores: Sequence[Store], workers: Workers, *, block_size: int) -> None:
        self._stores = stores
        self._workers = workers
        self._block_size = block_size
        self._token_bytes = stores[0].geometry.unit_bytes // block_size

    def view(self, place: Place) -> Planes:
        """Return a block in place."""
        view = self._stores[place.position].view(place.slot)
        assert view is not None, "only memory is read in place"
        return view

    async def gather(self, places: Sequence[Place], into: Bytes) -> int:
        """Copy blocks one after the other into `into`, verify every copy, and return how many leading ones are good."""
        return await self._workers.run(Lane.COPY, self._gather, places, into)

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

    # --- on worker threads ------------------------------------------------------------------------------------------------

    def _gather(self, places: Sequence[Place], into: Bytes) -> int:
        unit = self._block_size * self._token_bytes
        for number, place in enumerate(places):
            gather_tokens(self.view(place), into, number * self._block_size, token_bytes=self._token_bytes)
            try:
                verify(into[:, number * unit : (number + 1) * unit], place.checksum, f"slot {place.slot}")
            except Untrusted:
                return number
        return len(places)

    def _verify(self, places: Sequence[Place]) -> int:
        for number, place in enumerate(places):
            if checksum(self.view(place)) != place.checksum:
                return number
        return len(places)

    def _layer(self, places: Sequence[Place], layer: int, into: Bytes) -> None:
        parts = self._stores[0].geometry.parts
        for number, place in enumerate(places):
            block = self.view(place)[layer * parts : (layer + 1) * parts]
            gather_tokens(block, into, number * self._block_size, token_bytes=self._token_bytes)

    def _scatter(self, tensor: Bytes, first: int, places: Sequence[Place]) -> list[int]:
        sums: list[int] = []
        for number, place in enumerate(places, first):
            block = self.view(place)
            scatter_tokens(tensor, number * self._block_size, block, token_bytes=self._token_bytes)
            sums.append(checksum(block))
        return sums

    def _seal(self, places: Sequence[Place]) -> list[int]:
        return [checksum(self.view(place)) for place in places]
