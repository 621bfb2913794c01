"""How readers and writers get at slots where the fastest tier lies on a device: those by its port, the others as ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from tiercache.errors import AuditFailed
from tiercache.kernels.device import Device, Event
from tiercache.kernels.host import Bytes
from tiercache.storage.device_arena import DeviceArena
from tiercache.storage.device_port import DevicePort
from tiercache.storage.reader import Place, SlotReader

T = TypeVar("T")


class DeviceReader:
    """Places at position 0 go by `port`, whose slots are `arena`'s; those below are `inner`'s.

    What comes out of the device is verified where it arrived in host memory. `after`, where it is given, is an event that the
    device waits for before it looks at a slot: whoever wrote there last recorded it.
    """

    def __init__(self, inner: SlotReader, device: Device, arena: DeviceArena, port: DevicePort) -> None:
        self._inner = inner
        self._device = device
        self._arena = arena
        self._port = port

    def view(self, place: Place) -> Any:
        """Return a block in place: of the device an array of its own."""
        if place.position:
            return self._inner.view(place)
        pool = self._arena.pool
        if not 0 <= place.slot < pool.slots:
            raise AuditFailed(f"slot {place.slot} does not exist in {self._arena.tier}; there are {pool.slots}", slot=place.slot)
        return self._device.array(pool.memory, pool.planes, pool.slots, pool.unit_bytes)[:, place.slot]

    async def gather(self, places: Sequence[Place], into: Bytes) -> int:
        """Copy blocks one after the other into `into`, verify each, and return how many leading ones are good."""
        above, below = _split(places)
        edge = len(above) * self._arena.geometry.unit_bytes
        return _leading(
            above,
            await _all(
                _good(above, self._port.read(_slots(above), into[:, :edge])) if above else None,
                self._inner.gather(below, into[:, edge:]) if below else None,
            ),
        )

    async def verify(self, places: Sequence[Place], *, after: Event | None = None) -> int:
        """Check blocks, those of the device where they arrive, and return how many leading ones are good."""
        above, below = _split(places)
        return _leading(
            above,
            await _all(
                _good(above, self._port.sums(_slots(above), after=after)) if above else None,
                self._inner.verify(below) if below else None,
            ),
        )

    async def layer(self, places: Sequence[Place], layer: int, into: Bytes) -> None:
        """Copy one layer of blocks into `into`, `[parts, tokens * token_bytes]`. Nothing is verified."""
        above, below = _split(places)
        edge = len(above) * self._arena.geometry.unit_bytes
        await _all(
            self._port.layer(_slots(above), layer, into[:, :edge]) if above else None,
            self._inner.layer(below, layer, into[:, edge:]) if below else None,
        )

    async def scatter(self, tensor: Bytes, first: int, places: Sequence[Place]) -> list[int]:
        """Fill reserved slots from block `first` of `tensor` on; return the checksums of what they were filled with."""
        above, below = _split(places)
        unit, middle = self._arena.geometry.unit_bytes, first + len(above)
        found = await _all(
            self._port.write(tensor[:, first * unit : middle * unit], _slots(above)) if above else None,
            self._inner.scatter(tensor, middle, below) if below else None,
        )
        return [one for part in found for one in part]

    async def seal(self, places: Sequence[Place], *, after: Event | None = None) -> list[int]:
        """Return the checksums of slots that a writer filled in place."""
        above, below = _split(places)
        found = await _all(
            self._port.sums(_slots(above), after=after) if above else None,
            self._inner.seal(below) if below else None,
        )
        return [one for part in found for one in part]


def _split(places: Sequence[Place]) -> tuple[Sequence[Place], Sequence[Place]]:
    """Return the places on the device, and those below it, which follow them."""
    edge = next((number for number, place in enumerate(places) if place.position), len(places))
    assert all(place.position for place in places[edge:]), "the tiers of a path only get slower"
    return places[:edge], places[edge:]


def _slots(places: Sequence[Place]) -> list[int]:
    return [place.slot for place in places]


async def _good(places: Sequence[Place], sums: Awaitable[list[int]]) -> int:
    """Return how many leading blocks have the checksum that they must have."""
    found = await sums
    return next((number for number, one in enumerate(found) if one != places[number].checksum), len(places))


def _leading(above: Sequence[Place], counts: Sequence[int]) -> int:
    """Return how many leading blocks are good, of those on the device and then of those below it."""
    if above and counts[0] < len(above):
        return counts[0]
    return sum(counts)


async def _all(*parts: Awaitable[T] | None) -> list[T]:
    """Await those that there are, at once; return what came of each when all have ended. Raises what the first one raised."""
    work = [part for part in parts if part is not None]
    if len(work) == 1:
        return [await work[0]]
    found = await asyncio.gather(*work, return_exceptions=True)
    whole: list[T] = []
    for one in found:
        if isinstance(one, BaseException):
            raise one
        whole.append(one)
    return whole
