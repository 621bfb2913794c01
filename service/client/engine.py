"""An engine that owns its KV memory, and the cache beside it: hits are loaded into its blocks, and its blocks are stored.

The client copies between the daemon's mapped memory and the engine's tensors itself; the daemon needs no device for that, and the
engine gives nothing away. What a block's bytes are in a tier does not depend on the engine's layout (`engine_memory`), so whatever
wrote a block, another reads it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from tiercache.checks import integer
from tiercache.errors import InvalidInput, InvalidStart, SpecMismatch, StoreError, WorkerDied
from tiercache.kernels.device import Device, Event
from tiercache.service import wire
from tiercache.service.client import copies, engine_tensors
from tiercache.service.client.device_slots import DeviceSlots
from tiercache.service.client.handle import Claim, House
from tiercache.service.client.mapping import Arena
from tiercache.service.client.remote_hit import RemoteHit
from tiercache.service.client.remote_room import Reserved
from tiercache.service.face import Stored
from tiercache.spec import KVSpec
from tiercache.storage.engine_copies import DeviceEngine, EngineMemory, HostEngine, Origin, require_aligned
from tiercache.storage.engine_memory import Numbers
from tiercache.storage.finishing import ended, outlast
from tiercache.storage.reader import SHARE
from tiercache.storage.workers import Lane, in_parts
from tiercache.types import Tier

ABSENT = "absent"
"""Why a block was not loaded: it is not cached, or not readable."""
UNMAPPED = "unmapped"
"""Why it was not, though it is readable: it lies where the engine's memory can't be copied from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What became of a load. `blocks` leading ones of the engine's blocks hold what was asked for, `bad` are the others.

    What the others hold is not known. `tokens` is up to which token of the prompt the engine has its KV; `reason` says why it is
    not all of them: `absent`, or a reason of `ClientStats.misses`.
    """

    tokens: int
    blocks: int
    bad: tuple[int, ...]
    reason: str | None


class Namespaced(Protocol):
    """What is asked of the namespace that blocks are stored in."""

    @property
    def spec(self) -> KVSpec:
        """The layout of the KV."""
        ...

    def part_of(self, tokens: Any, start: int, tier: Tier | None) -> tuple[bytes, int]:
        """Return the packed key of a prompt of which `tokens[start:]` are to be stored, and how many tokens it has."""
        ...

    async def store(
        self, key: bytes, tier: Tier | None, first: int, fill: Callable[[Reserved], Coroutine[Any, Any, list[int]]]
    ) -> Stored:
        """Store the blocks of `key` from block `first` on, which `fill` copies into their slots."""
        ...


async def attach(house: House, kv: Namespaced, tensors: Any, layout: str | None) -> PagedKV:
    """Return an engine's tensors as `PagedKV`; see `RemoteKV.attach`."""
    spec, own, workers = kv.spec, house.device, house.workers
    layers, name = engine_tensors.layers_of(tensors, spec, layout)
    device = await own.opened(workers) if own.is_given else None
    known = own.tensors(device) if device is not None else None
    if device is None or known is None or not known.holds(layers[0][0]):
        host = engine_tensors.on_host(layers)
        await workers.run(Lane.COPY, engine_tensors.require_apart, layers)
        return PagedKV(house, kv, HostEngine(spec.geometry, host, workers, threads=house.threads), name, None)
    await workers.run(Lane.COPY, engine_tensors.require_apart, layers)
    for tensor, rows in layers:
        require_aligned(rows, tensor.data_ptr())
    ring = await own.ring(workers, spec.geometry)
    memory = engine_tensors.on_device(device, layers)
    engine = DeviceEngine(device, spec.geometry, memory, ring, workers, runner=lambda: known.runner().stream)
    return PagedKV(house, kv, engine, name, device)


class PagedKV:
    """An engine's KV memory beside one namespace; made by `RemoteKV.attach`. Blocks are the engine's own numbers.

    On a device all is ordered by events: copies begin after what the calling thread's stream of torch was given before the call, or
    after `after`, and `Loading.layer` lets that stream wait. On the host copies begin when the call is made.
    """

    def __init__(self, house: House, kv: Namespaced, memory: EngineMemory, layout: str, device: Device | None) -> None:
        self._house = house
        self._kv = kv
        self._memory = memory
        self._device = device
        self.layout = layout
        """The axes of a layer's tensor, as they were found or said."""

    @property
    def blocks(self) -> int:
        """How many blocks the engine's memory has."""
        return self._memory.blocks

    def now(self) -> Event | None:
        """Return the point that the calling thread's stream has reached, to be given as `after` later; None on the host."""
        return self._memory.now()

    def load(
        self, hit: RemoteHit, block_ids: Sequence[int], *, start: int = 0, after: Event | None = None, by_layer: bool = False
    ) -> Loading:
        """Begin to copy a hit's blocks into the engine's, and return what tells of it; `await` it for the outcome.

        `block_ids[0]` gets the block that begins at token `start`, which is a multiple of the block size; ids for which the hit has
        nothing readable are left as they are. Until it is over the engine's blocks are the copy's, also if whoever waits is
        cancelled; the hit may be left meanwhile, its lease is kept. Every block is verified after its copy, and what failed is
        named. With `by_layer` they are verified before it, too, and `Loading.layer` tells of a layer before the next is copied.

        Raises InvalidInput for ids that are no blocks of the engine's or come twice, InvalidStart, LeaseReleased, and SpecMismatch
        for a hit of a namespace whose KV has another layout.
        """
        if hit.spec != self._kv.spec:
            raise SpecMismatch(
                f"a hit on KV of {hit.spec} for an engine's of {self._kv.spec}", found=hit.spec, expected=self._kv.spec
            )
        ids = self._numbers(block_ids)
        first = self._first(start)
        point = self.now() if after is None else after
        return Loading(self._house, self._kv.spec, self._memory, self._device, hit, ids, first, point, by_layer)

    def store(
        self, tokens: Any, block_ids: Sequence[int], *, start: int = 0, tier: Tier | None = None, after: Event | None = None
    ) -> Storing:
        """Begin to store the KV of `tokens[start:]` from the engine's blocks, and return what tells of it; `await` it.

        `block_ids` are those of the whole blocks of `tokens[start:]`, in order. What becomes of the tokens, and what `start` and
        `tier` mean, is as at `RemoteKV.insert`. Until it is over the engine's blocks must not change. Whoever waits for it and is
        cancelled leaves when they are not read any more; of what was under way nothing is stored, unless its commit was on its way.

        Raises InvalidInput for ids that are no blocks of the engine's, come twice, or are not as many as the blocks;
        InvalidTokens, InvalidStart, InvalidConfig as `insert` does.
        """
        size = self._kv.spec.block_size
        key, count = self._kv.part_of(tokens, start, tier)
        ids = self._numbers(block_ids)
        wanted = count // size - start // size
        if len(ids) != wanted:
            raise InvalidInput(f"{len(ids)} block ids for {wanted} whole blocks", field="block_ids", value=len(ids))
        point = self.now() if after is None else after
        return Storing(self._house, self._kv, self._memory, key, tier, start // size, ids, point)

    def follow(self, event: Event | None) -> None:
        """Let the calling thread's stream wait for what `Loading.arrival` returned; the thread does not."""
        self._memory.follow(event)

    def _numbers(self, block_ids: Sequence[int]) -> Numbers:
        try:
            found = np.asarray(block_ids)
        except (TypeError, ValueError, RuntimeError) as error:  # lists of several lengths; tensors that are not numbers of the host
            raise InvalidInput(f"block ids must be a list of integers: {error}", field="block_ids") from error
        if found.size == 0 and found.ndim == 1:
            return found.astype(np.int64)
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise InvalidInput(f"block ids must be a list of integers, not {found.dtype} {found.shape}", field="block_ids")
        if found.min() < 0 or found.max() >= self.blocks:
            wrong = int(found[(found < 0) | (found >= self.blocks)][0])
            raise InvalidInput(
                f"block {wrong} is none of the engine's: they are 0 to {self.blocks - 1}", field="block_ids", value=wrong
            )
        numbers, counts = np.unique(found, return_counts=True)
        if len(numbers) != len(found):
            twice = int(numbers[counts > 1][0])
            raise InvalidInput(f"block {twice} comes twice", field="block_ids", value=twice)
        return found.astype(np.int64)

    def _first(self, start: int) -> int:
        size = self._kv.spec.block_size
        integer(start, 0, sys.maxsize, "start", InvalidStart)
        if start % size:
            raise InvalidStart(f"start must be a multiple of the block size {size}, not {start!r}", value=start)
        return start // size


class Loading:
    """A load under way, on the client's event loop; `await` it for what became of it. `done` may be read in any thread."""

    def __init__(
        self,
        house: House,
        spec: KVSpec,
        memory: EngineMemory,
        device: Device | None,
        hit: RemoteHit,
        ids: Numbers,
        first: int,
        after: Event | None,
        by_layer: bool,
    ) -> None:
        self._house = house
        self._spec = spec
        self._memory = memory
        self._device = device
        loop = asyncio.get_running_loop()
        self._layers: list[asyncio.Future[Event | None]] = [loop.create_future() for _ in range(spec.layers)]
        self._begun: asyncio.Future[int] = loop.create_future()
        claim = hit.claim
        work = self._run(hit, claim, claim.grip, hit.blocks, ids, first, after, by_layer)
        self._task = house.finishing.start(work)

    @property
    def done(self) -> bool:
        """Whether it is over: the blocks are the engine's again."""
        return self._task.done()

    def __await__(self) -> Generator[Any, None, Loaded]:
        """Wait until it is over. A caller that is cancelled leaves then, too, and not before."""
        return outlast(self._task).__await__()

    async def layer(self, layer: int) -> int:
        """Wait for a layer; return how many of the engine's leading blocks have it.

        On a device the calling thread's stream waits, the caller does not. These blocks were sound when their copy began; whether
        they still were when it ended is said by `await loading`, and what was computed of them counts after that.
        Raises InvalidInput for a layer that the model does not have.
        """
        self._memory.follow(await self.arrival(layer))
        return await self.begun()

    async def begun(self) -> int:
        """Wait until copies have begun, if there are any; return how many of the engine's leading blocks they are for."""
        return await asyncio.shield(self._begun)

    async def arrival(self, layer: int) -> Event | None:
        """Wait until a layer's copy has ended, or on a device is enqueued; return the event after which it is there, if any."""
        integer(layer, 0, self._spec.layers - 1, "layer")
        return await asyncio.shield(self._layers[layer])

    # --- inside -----------------------------------------------------------------------------------------------------------

    async def _run(
        self,
        hit: RemoteHit,
        claim: Claim,
        grip: object,
        blocks: int,
        ids: Numbers,
        first: int,
        after: Event | None,
        by_layer: bool,
    ) -> Loaded:
        """Copy while `grip` is held, and with it the lease."""
        good, reason = 0, None
        try:
            if hit.policy is not None:
                await claim.settled(hit.policy)
            there = min(blocks, claim.readable) if claim.gone is None else 0
            places = claim.places[first : min(there, first + len(ids))]
            places, reason = self._reachable(claim.arenas, places)
            if by_layer and places:
                places, reason = await self._sound(hit, claim, first, places, reason)
            self._begun.set_result(len(places))
            if places:
                failed = await self._copied(claim.arenas, places, ids[: len(places)], after, by_layer)
                if failed is None:
                    places, reason = await self._sound(hit, claim, first, places, reason)
                    good = len(places)
                else:
                    reason = self._house.counts.missed(failed[0], failed[1]).reason
            if reason is None and good < len(ids):
                reason = ABSENT
        finally:
            del grip
            if not self._begun.done():
                self._begun.set_result(0)
            for layer in range(self._spec.layers):
                self._arrived(layer, None)
        self._house.counts.read += good * self._spec.block_bytes
        tokens = (first + good) * self._spec.block_size
        return Loaded(tokens=tokens, blocks=good, bad=tuple(ids[good:].tolist()), reason=reason)

    def _reachable(
        self, arenas: Sequence[Arena | DeviceSlots], places: Sequence[wire.Place]
    ) -> tuple[Sequence[wire.Place], str | None]:
        """Return the leading places from which the engine's memory can be reached, and why not the next, if that is the reason."""
        far = {position for position, arena in enumerate(arenas) if not self._reaches(arena)}
        for number, place in enumerate(places):
            if place.position in far:
                self._house.counts.missed(UNMAPPED, "blocks of a tier of the daemon's that the engine's memory is not copied from")
                return places[:number], UNMAPPED
        return places, None

    def _reaches(self, arena: Arena | DeviceSlots) -> bool:
        return isinstance(arena, Arena) and (self._device is None or arena.slot_bytes is not None)

    async def _sound(
        self, hit: RemoteHit, claim: Claim, first: int, places: Sequence[wire.Place], reason: str | None
    ) -> tuple[Sequence[wire.Place], str | None]:
        """Check blocks in their slots; return the leading ones that are what was asked for, and why not the next."""

        async def part(low: int, high: int) -> tuple[int, str | None]:
            mapped = cast(Sequence[Arena], claim.arenas)  # `_reachable` left no others among the places
            return await self._house.workers.run(Lane.COPY, copies.verify, mapped, places[low:high])

        parts = min(self._house.threads, len(places) * self._spec.block_bytes // SHARE)
        for low, one in await in_parts(len(places), parts, part):
            if isinstance(one, BaseException) and not isinstance(one, WorkerDied):
                raise one
            good, why = (0, copies.DIED) if isinstance(one, BaseException) else one
            if why is not None:
                hit.cut(claim, first + low + good, why)
                return places[: low + good], why
        return places, reason

    async def _copied(
        self, arenas: Sequence[Arena | DeviceSlots], places: Sequence[wire.Place], ids: Numbers, after: Event | None, by_layer: bool
    ) -> tuple[str, str] | None:
        """Copy; return why that failed, as a reason and a message."""
        house = self._house
        positions = np.array([place.position for place in places], np.int64)
        slots = np.array([place.slot for place in places], np.int64)
        try:
            used = {position: arenas[position] for position in np.unique(positions).tolist()}
            mapped = {position: arena for position, arena in used.items() if isinstance(arena, Arena)}
            device, workers = self._device, house.workers
            together = await house.pins.pin(device, list(mapped.values()), workers) if device is not None else None
            memory = {position: arena.slots for position, arena in mapped.items()}
            origin = Origin(memory=memory, positions=positions, slots=slots, together=together)
            await self._memory.load(origin, ids, after, self._arrived if by_layer else None)
        except StoreError as error:
            return copies.fault_of(error), str(error)
        return None

    def _arrived(self, layer: int, event: Event | None) -> None:
        if not self._layers[layer].done():
            self._layers[layer].set_result(event)


class Storing:
    """A store under way, on the client's event loop; `await` it for what became of it. `done` may be read in any thread."""

    def __init__(
        self,
        house: House,
        kv: Namespaced,
        memory: EngineMemory,
        key: bytes,
        tier: Tier | None,
        first: int,
        ids: Numbers,
        after: Event | None,
    ) -> None:
        self._house = house
        self._memory = memory
        self._ids = ids
        self._first = first
        self._after = after
        self._reading: list[asyncio.Task[Any]] = []
        self._task = house.finishing.start(kv.store(key, tier, first, self._fill))

    @property
    def done(self) -> bool:
        """Whether it is over: the blocks may change again."""
        return self._task.done() and all(task.done() for task in self._reading)

    def __await__(self) -> Generator[Any, None, Stored]:
        """Wait until it is over. A caller that is cancelled ends it: it leaves when the engine's blocks are not read any more."""
        return self._ended().__await__()

    async def _ended(self) -> Stored:
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            self._task.cancel()
            await ended(self._task)
            for task in self._reading:  # not before: the last of them may have been made as the cancellation came
                await ended(task)
            raise

    async def _fill(self, room: Reserved) -> list[int]:
        task = asyncio.current_task()
        assert task is not None
        self._reading.append(task)
        slots = await self._house.workers.run(Lane.COPY, room.writable)
        low = room.present - self._first
        return await self._memory.store(self._ids[low : low + len(slots)], slots, self._after)
