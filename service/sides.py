"""The two sides that a runner's tensor can lie on: memory of the host, where threads copy, and the device, which copies itself."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tiercache.kernels.device import Event
from tiercache.kernels.host import Bytes
from tiercache.leases import Lease
from tiercache.service import tensors
from tiercache.service.streams import Streams, Use
from tiercache.spec import KVSpec
from tiercache.storage.device_passage import Runner, Sheet
from tiercache.storage.mover import Flight
from tiercache.storage.reader import Place, SlotReader

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Side(Protocol):
    """How blocks come into a reader's tensor. What is returned begins when it is called."""

    @property
    def place(self) -> str:
        """Where the tensor lies, in torch's words."""
        ...

    def gather(
        self, lease: Lease, places: Sequence[Place], out: torch.Tensor, spec: KVSpec
    ) -> Callable[[], Coroutine[Any, Any, int]]:
        """Return what copies the leading blocks of a lease into `out`, and says how many are good. Raises InvalidTensor."""
        ...

    def layer(
        self, lease: Lease, places: Sequence[Place], layer: int, out: torch.Tensor, spec: KVSpec
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        """Return what copies one layer of blocks into `out`, `[1, …]`; nothing is verified. Raises InvalidTensor."""
        ...

    async def check(self, places: Sequence[Place]) -> int:
        """Check blocks where they lie, as far as that is done on this side; return how many leading ones are good."""
        ...


class HostSide:
    """A tensor of the host."""

    place = tensors.CPU

    def __init__(self, reader: SlotReader) -> None:
        self._reader = reader

    def gather(
        self, lease: Lease, places: Sequence[Place], out: torch.Tensor, spec: KVSpec
    ) -> Callable[[], Coroutine[Any, Any, int]]:
        """Return a copy that is over when it returns, each block verified."""
        return partial(self._reader.gather, places, tensors.planes_for_writing(out, spec))

    def layer(
        self, lease: Lease, places: Sequence[Place], layer: int, out: torch.Tensor, spec: KVSpec
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        """Return a copy that is over when it returns."""
        return partial(self._reader.layer, places, layer, tensors.planes_for_writing(out, tensors.one_layer(spec)))

    async def check(self, places: Sequence[Place]) -> int:
        """Check all blocks."""
        return await self._reader.verify(places)


class DeviceSide:
    """A tensor on the device: copies are enqueued on the runner's stream, and happen in their turn."""

    def __init__(self, streams: Streams, use: Use, runner: Runner) -> None:
        self._streams = streams
        self._use = use
        self._runner = runner

    @property
    def place(self) -> str:
        """The device."""
        return self._streams.tensors.device.tensors

    def gather(
        self, lease: Lease, places: Sequence[Place], out: torch.Tensor, spec: KVSpec
    ) -> Callable[[], Coroutine[Any, Any, int]]:
        """Return what enqueues the copies of the leading blocks of which none is bad where the host sees it."""
        sheet = self._streams.tensors.sheet(out, spec, "out")
        return partial(self._enqueue, lease, spec.layers - 1, places, self._streams.passage.gather, sheet)

    def layer(
        self, lease: Lease, places: Sequence[Place], layer: int, out: torch.Tensor, spec: KVSpec
    ) -> Callable[[], Coroutine[Any, Any, None]]:
        """Return what enqueues the copies."""
        sheet = self._streams.tensors.sheet(out, tensors.one_layer(spec), "out")
        return partial(self._enqueue, lease, layer, places, self._streams.passage.fill, sheet, layer * spec.parts)

    async def check(self, places: Sequence[Place]) -> int:
        """Check what lies in memory of the host; what lies on the device was verified on its way there."""
        return await self._streams.enqueue(self._streams.passage.check, places)

    async def _enqueue(
        self, lease: Lease, layer: int, places: Sequence[Place], call: Callable[..., T], sheet: Sheet, *rest: object
    ) -> T:
        """Have `call` enqueue the copies of blocks, those of which a layer is on its way from where that arrives.

        Their sources were checked for this hit as well: until the copies begin a flight may end, and not have brought them.
        """
        where, events = list(places), dict[Flight, Event]()
        for number, (flight, slot) in self._streams.arriving(lease, layer).items():
            event = flight.layers[layer].event
            if number < len(where) and where[number].position and event is not None:
                where[number] = where[number]._replace(position=0, slot=slot)
                events[flight] = event
        for flight in events:
            flight.begin_read()
        passage = self._streams.passage
        try:
            return await self._use.enqueue(self._runner, passage.after, list(events.values()), call, where, sheet, *rest)
        finally:
            if events:
                self._streams.later(self._streams.happened(self._runner.stream.record()), partial(_end_reads, list(events)))


def _end_reads(flights: Sequence[Flight]) -> None:
    for flight in flights:
        flight.end_read()


class Source(Protocol):
    """The blocks that an insert was given."""

    async def into(self, places: Sequence[Place], begin: int) -> list[int]:
        """Copy blocks `begin` and on into reserved slots; return the checksums of what lies there now.

        When this returns or raises nothing of it is still to come. Raises WorkerDied, and StoreError.
        """
        ...


class HostSource:
    """Blocks in memory of the host, `[planes, bytes]`."""

    def __init__(self, reader: SlotReader, planes: Bytes) -> None:
        self._reader = reader
        self._planes = planes

    async def into(self, places: Sequence[Place], begin: int) -> list[int]:
        """Copy them in threads."""
        return await self._reader.scatter(self._planes, begin, places)


class DeviceSource:
    """Blocks in a tensor on the device, which `runner` has written, or will have."""

    def __init__(self, reader: SlotReader, streams: Streams, runner: Runner, sheet: Sheet) -> None:
        self._reader = reader
        self._streams = streams
        self._runner = runner
        self._sheet = sheet

    async def into(self, places: Sequence[Place], begin: int) -> list[int]:
        """Have them copied on the runner's stream within the device; what goes to the host crosses the bus beside it, after it."""
        above = [place.slot for place in places if place.position == 0]
        below = places[len(above) :]
        assert all(place.position for place in below), "the tiers of a path only get slower"
        passage, use, aside = self._streams.passage, self._streams.use(), self._streams.use()
        try:
            await use.enqueue(self._runner, passage.take, self._sheet, begin, above)
        finally:
            await use.over()  # what was enqueued reads the tensor and writes the slots, also when that failed half-way
        if below:
            try:
                await aside.enqueue(passage.own, passage.lower, self._sheet, begin + len(above), below)
            finally:
                await aside.over()
        return await self._reader.seal(places)
