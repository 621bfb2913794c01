"""A client's room: reserved slots of the daemon's memory, mapped to be written in place."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tiercache.checks import integer
from tiercache.errors import InvalidStart, LeaseReleased, StaleHandle, StoreError
from tiercache.kernels.host import Bytes
from tiercache.leases import Refusal
from tiercache.service import tensors, wire
from tiercache.service.client import copies
from tiercache.service.client.counts import Miss
from tiercache.service.client.device_slots import DeviceSlots
from tiercache.service.client.handle import Handle, House
from tiercache.service.client.mapping import Arena
from tiercache.spec import KVSpec
from tiercache.storage.workers import Lane

if TYPE_CHECKING:
    import torch


class Reserved:
    """Slots that the daemon holds for this client; without a daemon there are none."""

    def __init__(self, house: House, handle: Handle | None, reply: wire.Reserved | None) -> None:
        self._house = house
        self._handle = handle
        self._reply = reply
        self._mapped: dict[int, Bytes] | None = None
        self.present = reply.present if reply is not None else 0
        self.pending = reply.pending if reply is not None else 0
        places = self._read(handle, reply) if handle is not None and reply is not None else None
        self.places = places or []
        self.refusal = _refusal(reply.refusal) if reply is not None and places is not None else Refusal.UNREACHED
        self.number = reply.reservation if reply is not None else None
        self.answered = reply is not None
        self.committed = 0
        self.closed = False

    def tensors(self, spec: KVSpec) -> list[torch.Tensor]:
        """Return all slots in place. Raises OSError when they can't be mapped, StaleHandle."""
        found: list[torch.Tensor] = []
        for device, low, high in self._parts(0, len(self.places)):
            if device is None:
                found += [tensors.as_tensor(slot, spec, spec.block_size) for slot in self._writable(low, high)]
            else:
                found += [device.in_place(place.slot, spec, self) for place in self.places[low:high]]
        return found

    async def fill(self, planes: Bytes, first: int) -> list[int]:
        """Copy a tensor's blocks into all slots; `planes` begins with block number `first` of the prompt. Returns their checksums.

        Raises OSError when slots can't be mapped, WorkerDied, StoreError when a device failed, StaleHandle. It is over then.
        """
        at, sums = self.present - first, list[int]()
        for device, low, high in self._parts(0, len(self.places)):
            if device is None:
                sums += await self._house.workers.run(Lane.COPY, self._scatter, planes, at, low, high)
            else:
                unit = device.unit_bytes
                sums += await device.port.write(planes[:, (at + low) * unit : (at + high) * unit], self._numbers(low, high))
        return sums

    async def seal(self, low: int, high: int) -> list[int]:
        """Return the checksums of slots that were filled in place. Raises as `fill` does."""
        sums: list[int] = []
        for device, first, end in self._parts(low, high):
            if device is None:
                sums += await self._house.workers.run(Lane.COPY, self._seal, first, end)
            else:
                sums += await device.port.sums(self._numbers(first, end))
        return sums

    async def commit(self, upto: int, sums: Sequence[int]) -> bool:
        """Hand the blocks before `upto` over; return whether the daemon said how many it took."""
        if self._handle is None or self._reply is None:
            return False
        packed = b"".join(value.to_bytes(8, "little") for value in sums)
        count = await self._handle.connection.call(
            wire.Count, wire.Commit, reservation=self._reply.reservation, upto=upto, checksums=packed
        )
        if isinstance(count, Miss):
            return False
        self.committed = min(count.count, len(self.places))
        self._house.counts.written += len(sums) * self._handle.spec.block_bytes
        return True

    def close(self) -> None:
        """Give back what was not committed. Closing it again does nothing."""
        if not self.closed and self._handle is not None and self._reply is not None:
            self._handle.connection.close_reservation(self._reply.reservation)
        self.closed = True

    def _parts(self, low: int, high: int) -> Iterator[tuple[DeviceSlots | None, int, int]]:
        if self._handle is None:
            return
        for device, first, end in self._handle.copying.parts(self.places[low:high]):
            yield device, low + first, low + end

    def _numbers(self, low: int, high: int) -> list[int]:
        return [place.slot for place in self.places[low:high]]

    # --- in any thread ----------------------------------------------------------------------------------------------------

    def _writable(self, low: int, high: int) -> list[Bytes]:
        """Return mapped slots in place, each `[planes, unit_bytes]`. Raises OSError when they can't be mapped."""
        if self._mapped is None:
            mapped: dict[int, Bytes] = {}
            for position, arena in enumerate(self._handle.arenas if self._handle is not None else ()):
                numbers = [number for number, place in enumerate(self.places) if place.position == position]
                if numbers and isinstance(arena, Arena):
                    mapped.update(zip(numbers, arena.writable([self.places[number].slot for number in numbers]), strict=True))
            self._mapped = mapped
        return [self._mapped[number] for number in range(low, high)]

    def _scatter(self, planes: Bytes, at: int, low: int, high: int) -> list[int]:
        return copies.scatter(planes, at + low, self._writable(low, high))

    def _seal(self, low: int, high: int) -> list[int]:
        return copies.seal(self._writable(low, high))

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _read(self, handle: Handle, reply: wire.Reserved) -> list[wire.Place] | None:
        try:
            copies.require_places(handle.arenas, reply.places)
            places = wire.unpack_places(reply.places)
        except ValueError as error:
            self._house.counts.missed("malformed", str(error))
            return None
        return places


def reason_of(error: OSError | StoreError | StaleHandle) -> str:
    """Return the reason of a miss that is due to `error`: slots that can't be mapped, a thread, a device, the end of a session."""
    match error:
        case OSError():
            return "unmapped"
        case StaleHandle():
            return "away"
        case _:
            return copies.fault_of(error)


def _refusal(word: str | None) -> Refusal | None:
    if word is None:
        return None
    # A later daemon may know more words: whatever it says, there was no room for these blocks.
    return Refusal(word) if word in list(Refusal) else Refusal.NO_ROOM


class RemoteRoom:
    """Slots for the blocks of a prompt that are not cached; `async with kv.reserve(tokens, after=hit) as room`.

    What was written is the cache's with `commit`; leaving gives the rest back. After its end every method raises LeaseReleased,
    and what `blocks` gave must not be touched any more. A daemon that does not answer is a room without blocks; when it goes
    away later, what was written is dropped, and `commit` says 0.
    """

    def __init__(self, house: House, spec: KVSpec, acquire: Callable[[], Awaitable[Reserved]]) -> None:
        self._house = house
        self._spec = spec
        self._acquire = acquire
        self._entered = False
        self._reserved: Reserved | None = None
        self._committing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Take the slots; waits for room at most as long as an insert may."""
        if self._entered:
            raise LeaseReleased("a room can be entered only once")
        self._entered = True
        self._reserved = await self._acquire()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Give back what was not committed."""
        if self._reserved is not None:
            self._house.require_own()
            self._reserved.close()

    def _live(self) -> Reserved:
        self._house.require_own()
        if self._reserved is None or self._reserved.closed:
            raise LeaseReleased("this room has been left" if self._reserved else "the room has not been entered")
        return self._reserved

    @property
    def number(self) -> int | None:
        """The reservation's number, for a client that joined this one (`shared_room`); None without a reservation."""
        return self._live().number

    @property
    def present(self) -> int:
        """Tokens of the prompt that were cached already: the first block of `blocks` holds those after them."""
        return self._live().present * self._spec.block_size

    @property
    def pending(self) -> int:
        """Tokens after those that another writer holds now; `blocks` is empty then."""
        return self._live().pending * self._spec.block_size

    @property
    def tokens(self) -> int:
        """Up to which token of the prompt there is room: where the last of `blocks` ends."""
        reserved = self._live()
        return (reserved.present + len(reserved.places)) * self._spec.block_size

    @property
    def blocks(self) -> Sequence[torch.Tensor]:
        """The new blocks in place, each `[layers, parts, block_size, kv_heads, head_dim]`; fewer when room was short."""
        reserved, spec = self._live(), self._spec
        try:
            return reserved.tensors(spec)
        except (OSError, StaleHandle) as error:
            self._house.counts.missed(reason_of(error), str(error))
            reserved.places = []
            return []

    async def commit(self, upto: int) -> int:
        """Hand the blocks that end at or before token `upto` of the prompt to the cache; return how many tokens are cached now.

        May be called again as more blocks get full. The checksum is taken here: what is written later is rot. Returns less
        than asked for when what comes before has been deleted meanwhile, and 0 when the daemon does not answer. Raises
        InvalidStart for an `upto` outside the room.
        """
        size = self._spec.block_size
        async with self._committing:  # two at once would both take the checksums of the first one's blocks
            reserved = self._live()
            first = (reserved.present + reserved.committed) * size
            integer(upto, first, self.tokens + size - 1, "upto", InvalidStart)
            end = min(upto // size - reserved.present, len(reserved.places))
            sums: list[int] = []
            if end > reserved.committed:
                try:
                    sums = await reserved.seal(reserved.committed, end)
                except (StoreError, StaleHandle) as error:
                    self._house.counts.missed(reason_of(error), str(error))
                    return first
            reserved = self._live()
            if sums and not await reserved.commit(end, sums):
                return 0
            return (reserved.present + reserved.committed) * size
