"""Room in one process: reserved slots that the caller writes in place."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tiercache.checks import integer
from tiercache.errors import InvalidStart, LeaseReleased, StoreError
from tiercache.leases import Reservation
from tiercache.service import tensors
from tiercache.service.desk import Desk
from tiercache.storage.reader import Place

if TYPE_CHECKING:
    import torch


class Room:
    """Slots for the blocks of a prompt that are not cached; `async with kv.reserve(tokens, after=hit) as room`.

    What was written is the cache's with `commit`; leaving gives the rest back. After its end every method raises LeaseReleased,
    and what `blocks` gave must not be touched any more.
    """

    def __init__(self, desk: Desk, acquire: Callable[[], Awaitable[Reservation]]) -> None:
        self._desk = desk
        self._acquire = acquire
        self._reservation: Reservation | None = None
        self._committing = asyncio.Lock()
        self._left = False
        streams = desk.stack.streams
        self._use = None if streams is None else streams.use()

    async def __aenter__(self) -> Self:
        """Take the slots; waits for room at most as long as an insert may."""
        if self._reservation is not None:
            raise LeaseReleased("a room can be entered only once")
        self._reservation = await self._acquire()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Give back what was not committed, when the device has done what the streams have that may write it.

        Who is cancelled meanwhile does not wait for that.
        """
        reservation = self._reservation
        if reservation is None or self._left:
            return
        self._left = True
        close = partial(self._desk.close, reservation)
        if self._use is None or reservation.committed == len(reservation.blocks):
            close()  # what was committed was written before its checksum was taken
        else:
            await self._use.end(close)

    def _live(self) -> Reservation:
        if self._reservation is None or self._reservation.closed or self._left:
            raise LeaseReleased("this room has been left" if self._reservation else "the room has not been entered")
        return self._reservation

    @property
    def present(self) -> int:
        """Tokens of the prompt that were cached already: the first block of `blocks` holds those after them."""
        return self._live().present * self._desk.spec.block_size

    @property
    def pending(self) -> int:
        """Tokens after those that another writer holds now; `blocks` is empty then."""
        return self._live().pending * self._desk.spec.block_size

    @property
    def tokens(self) -> int:
        """Up to which token of the prompt there is room: where the last of `blocks` ends."""
        reservation = self._live()
        return (reservation.present + len(reservation.blocks)) * self._desk.spec.block_size

    @property
    def blocks(self) -> Sequence[torch.Tensor]:
        """The new blocks in place, each `[layers, parts, block_size, kv_heads, head_dim]`; fewer when room was short.

        On the device they are tensors there, to be written on the stream that is current now, or at the commit: what is enqueued on
        them by then is in the checksum.
        """
        spec = self._desk.spec
        if self._use is not None:
            self._use.here()
        views = [self._desk.stack.reader.view(place) for place in self._places(self._live())]
        return [tensors.as_tensor(view, spec, spec.block_size) for view in views]

    async def commit(self, upto: int) -> int:
        """Hand the blocks that end at or before token `upto` of the prompt to the cache; return how many tokens are cached now.

        May be called again as more blocks get full. The checksum is taken here: what is written later is rot. Returns less
        than asked for when what comes before has been deleted meanwhile, or the checksums could not be taken. Raises
        InvalidStart for an `upto` outside the room.
        """
        size = self._desk.spec.block_size
        async with self._committing:  # two at once would both take the checksums of the first one's blocks
            reservation = self._live()
            first = (reservation.present + reservation.committed) * size
            integer(upto, first, self.tokens + size - 1, "upto", InvalidStart)
            end = min(upto // size - reservation.present, len(reservation.blocks))
            places = self._places(reservation)[reservation.committed : end]
            try:
                sums = await self._seal(places) if places else []
            except StoreError as error:  # nothing of this call is cached; it can be asked for again
                self._desk.stack.failed(error)
                return first
            done = self._desk.commit(self._live(), max(end, reservation.committed), sums)
            return (reservation.present + done) * size

    async def _seal(self, places: Sequence[Place]) -> list[int]:
        """Return the checksums of what the caller has written, his streams' last copies included."""
        if self._use is not None:
            self._use.here()
            await self._use.over()
        return await self._desk.stack.reader.seal(places)

    def _places(self, reservation: Reservation) -> list[Place]:
        return [Place(position, slot, 0) for position, slot in reservation.places]
