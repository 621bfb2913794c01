"""The copies of a transfer that begin or end on a device: enqueued on a stream, waited for by its events alone.

* Out of the device and into it there is a stream and a lane of waiting each, so that neither way stands behind the other.
* A copy is over when its event has happened, not when it is enqueued. Until then the transfer owns its slots, whatever befell
  the enqueueing or the thread that waits: the event is recorded and waited for also when that failed half-way.
* Layers that come up are enqueued one behind the other, an event each, and no thread waits between them.
* Slots that are neighbours in host memory cross the bus in one copy: a copy costs the driver and the interpreter some microseconds,
  in which a bus moves a block. The order of blocks in a stage is free, so they lie there as their slots in host memory do.
* A stage on the device goes to its next user at once, with the event after which that one's stream may touch it. A stage in host
  memory is given back only after the event: threads write it without looking at any stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiercache.errors import Untrusted
from tiercache.kernels.device import Device, Event, Stream
from tiercache.kernels.host import Bytes
from tiercache.storage.checksum import verify
from tiercache.storage.contract import Planes, Store
from tiercache.storage.copier import LayerCopier, StoreCopier
from tiercache.storage.device_arena import DeviceArena
from tiercache.storage.device_way import Way
from tiercache.storage.neighbours import Run, neighbours
from tiercache.storage.staging import Ring, Stage
from tiercache.storage.workers import Lane, Workers, outlive
from tiercache.transfer import Discard, Report, Transfer


class DeviceCopier:
    """A Copier whose tier at position 0 is `arena`; copies between the tiers below are those of `inner`.

    `together` is how many slots of host memory were pinned by one call (`Pinning.together`): no copy goes over a multiple of it.
    """

    def __init__(
        self,
        inner: StoreCopier,
        stores: Sequence[Store],
        arena: DeviceArena,
        device: Device,
        ring: Ring,
        workers: Workers,
        *,
        together: int | None = None,
    ) -> None:
        self._inner = inner
        self._stores = stores
        self._arena = arena
        self._ring = ring
        self._workers = workers
        self._together = together
        self._ways = {lane: Way(device, lane) for lane in (Lane.DOWN, Lane.UP)}

    @property
    def layers(self) -> int:
        """How many layers the blocks have."""
        return self._arena.geometry.layers

    def by_layer(self, transfer: Transfer) -> LayerCopier | None:
        """Return itself for what comes up from host memory: a layer that is in the pool can be read while the next one crosses."""
        return self if transfer.to == 0 and not self._stores[transfer.sources[0]].durable else None

    def chunks(self, transfer: Transfer) -> Sequence[tuple[int, int]]:
        """Return ranges of at most a stage's blocks where a stage is needed."""
        if not self._concerns(transfer):
            return self._inner.chunks(transfer)
        step = self._ring.blocks
        return [(low, min(low + step, transfer.count)) for low in range(0, transfer.count, step)]

    async def verify(self, transfer: Transfer) -> Report:
        """Check every block in its source slot, in host memory."""
        return await self._workers.run(Lane.COPY, self._verify, transfer)

    async def layer(self, transfer: Transfer, layer: int, count: int) -> Event:
        """Have one layer of the first `count` blocks copied up, in the stream's order; return the event of its arrival."""
        assert count, "no blocks have no layer"
        step = self._ring.blocks * self._arena.geometry.layers
        low = 0
        while True:
            high = min(low + step, count)
            async with self._ring.lend(Lane.UP) as stage:
                event = await self._enqueued(Lane.UP, stage, self._layer_up, transfer, layer, low, high)
            if high == count:
                return event
            low = high

    async def over(self, event: Event | None) -> None:
        """Wait for an event of the stream that leads up, for None until it has come to an end of what it has now."""
        await self._over(Lane.UP, event)

    async def blocks(self, transfer: Transfer, low: int, high: int) -> Report:
        """Copy blocks `low` to `high` down into host memory, or from a disk up, each verified on the host's side."""
        if not self._concerns(transfer):
            return await self._inner.blocks(transfer, low, high)
        if transfer.to == 0:
            return await self._up(transfer, low, high)
        async with self._ring.lend(Lane.DOWN) as stage:
            event = await self._enqueued(Lane.DOWN, stage, self._down, transfer, low, high)
        await self._over(Lane.DOWN, event)
        return await self._workers.run(Lane.COPY, self._arrived, transfer, low, high)

    async def put(self, transfer: Transfer) -> Report:
        """Write all blocks to a durable store, in chain order, those of the device by way of stages."""
        if not self._concerns(transfer):
            return await self._inner.put(transfer)
        total = Report(arrived=0)
        for low, high in self.chunks(transfer):
            async with self._ring.lend(Lane.DOWN) as stage:
                event = await self._enqueued(Lane.DOWN, stage, self._to_host, transfer, low, high)
                await self._over(Lane.DOWN, event)
                views = self._views(transfer, low, high, stage)
                parent = total.keys[-1] if total.keys else transfer.parent_key
                report = await self._inner.put_views(transfer, low, high, parent, views)
            total.arrived += report.arrived
            total.keys += report.keys
            total.charges += report.charges
            if report.error is not None:
                total.error, total.rotten = report.error, report.rotten
                break
        return total

    async def discard(self, discard: Discard) -> None:
        """Remove records from a durable store."""
        await self._inner.discard(discard)

    # --- on the event loop ------------------------------------------------------------------------------------------------

    def _concerns(self, transfer: Transfer) -> bool:
        return transfer.to == 0 or 0 in transfer.sources

    async def _up(self, transfer: Transfer, low: int, high: int) -> Report:
        async with self._ring.lend(Lane.UP) as stage:
            durable = any(self._stores[position].durable for position in transfer.sources[low:high])
            report = await self._workers.run(Lane.READ if durable else Lane.COPY, self._fetch, transfer, low, high, stage)
            if report.arrived:
                event = await self._enqueued(Lane.UP, stage, self._from_host, transfer, low, low + report.arrived)
                await self._over(Lane.UP, event)
        return report

    def _views(self, transfer: Transfer, low: int, high: int, stage: Stage) -> list[Planes]:
        views: list[Planes] = []
        for place in range(low, high):
            view = self._stores[transfer.sources[place]].view(transfer.slots_from[place])
            views.append(stage.host[place - low] if view is None else view)
        return views

    async def _enqueued(self, lane: Lane, stage: Stage, enqueue: Callable[..., None], *args: object) -> Event:
        """Have a copy enqueued by way of `stage`, and return its event; it is also in `stage.after`."""

        def work(stream: Stream) -> None:
            enqueue(stream, stage, *args)

        return await self._workers.run(Lane.COPY, self._ways[lane].enqueue, stage, work)

    async def _over(self, lane: Lane, event: Event | None) -> None:
        """Wait until a copy is over, also when a thread that waits for it dies."""
        await outlive(self._workers, lane, self._wait, lane, event)

    # --- on worker threads ------------------------------------------------------------------------------------------------

    def _wait(self, lane: Lane, event: Event | None) -> None:
        (self._ways[lane].end() if event is None else event).wait()

    def _down(self, stream: Stream, stage: Stage, transfer: Transfer, low: int, high: int) -> None:
        """Enqueue the way from the device's pool to slots in host memory."""
        assert not any(transfer.sources[low:high]), "what goes down into memory comes from the tier above it"
        order, runs = neighbours([transfer.to] * (high - low), transfer.slots_to[low:high], together=self._together)
        stream.gather(self._arena.pool, [transfer.slots_from[low + place] for place in order], stage.memory)
        at = 0
        for run in runs:
            into = self._rows(run, 0, self._arena.geometry.planes)
            stream.read(stage.memory, at, into)
            at += into.size

    def _to_host(self, stream: Stream, stage: Stage, transfer: Transfer, low: int, high: int) -> None:
        """Enqueue the way of those blocks that lie on the device to the stage's host memory."""
        own = [place for place in range(low, high) if transfer.sources[place] == 0]
        if not own:
            return
        first, last = own[0], own[-1] + 1
        assert last - first == len(own), "the tiers of a path only get slower, so the device's blocks come first"
        stream.gather(self._arena.pool, transfer.slots_from[first:last], stage.memory)
        stream.read(stage.memory, 0, stage.host[first - low : last - low].reshape(-1))

    def _from_host(self, stream: Stream, stage: Stage, transfer: Transfer, low: int, high: int) -> None:
        """Enqueue the way from the stage's host memory to the device's pool."""
        stream.write(stage.host[: high - low].reshape(-1), stage.memory, 0)
        planes = self._arena.geometry.planes
        stream.scatter(stage.memory, self._arena.pool, transfer.slots_to[low:high], first=0, planes=planes)

    def _layer_up(self, stream: Stream, stage: Stage, transfer: Transfer, layer: int, low: int, high: int) -> None:
        """Enqueue the way of one layer from slots in host memory to the device's pool."""
        parts = self._arena.geometry.parts
        first, at = layer * parts, 0
        order, runs = neighbours(transfer.sources[low:high], transfer.slots_from[low:high], together=self._together)
        for run in runs:
            source = self._rows(run, first, parts)
            stream.write(source, stage.memory, at)
            at += source.size
        slots = [transfer.slots_to[low + place] for place in order]
        stream.scatter(stage.memory, self._arena.pool, slots, first=first, planes=parts)

    def _rows(self, run: Run, first: int, planes: int) -> Bytes:
        """Return planes of neighbouring slots in host memory in place, a row a block, `[blocks, bytes]`."""
        blocks = self._stores[run.position].views(run.first, run.length)
        assert blocks is not None and blocks[0].flags.c_contiguous, "the tier below is block-first memory"
        return blocks[:, first : first + planes].reshape(run.length, -1)

    def _fetch(self, transfer: Transfer, low: int, high: int, stage: Stage) -> Report:
        """Bring blocks from below into the stage's host memory, verified."""
        return self._inner.fetch(transfer, low, list(stage.host[: high - low]))

    def _verify(self, transfer: Transfer) -> Report:
        """Verify what is to come up, where it lies."""
        for block in range(transfer.count):
            store, slot = self._stores[transfer.sources[block]], transfer.slots_from[block]
            view = store.view(slot)
            assert view is not None, "a copy by layers reads from memory"
            try:
                verify(view, transfer.checksums[block], f"{store.tier} slot {slot}")
            except Untrusted as error:
                return Report(arrived=block, error=error, rotten=True)
        return Report(arrived=transfer.count)

    def _arrived(self, transfer: Transfer, low: int, high: int) -> Report:
        """Verify what came down, where it lies now."""
        target = self._stores[transfer.to]
        for place in range(low, high):
            view = target.view(transfer.slots_to[place])
            assert view is not None
            try:
                verify(view, transfer.checksums[place], f"copy in {target.tier} slot {transfer.slots_to[place]}")
            except Untrusted as error:
                return Report(arrived=place - low, error=error, rotten=True)
        return Report(arrived=high - low)
