"""The face of one namespace in one process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from tiercache.checks import integer
from tiercache.errors import InvalidStart, StoreError
from tiercache.keys import pack_tokens
from tiercache.leases import Refusal, Reservation
from tiercache.prefetch import PrefetchPolicy
from tiercache.service import tensors
from tiercache.service.desk import PENDING_SECONDS, Desk
from tiercache.service.face import Stored
from tiercache.service.hit import Hit
from tiercache.service.room import Room
from tiercache.service.sides import DeviceSource, HostSource, Source
from tiercache.spec import KVSpec
from tiercache.storage.reader import Place
from tiercache.types import Tier


class LocalKV:
    """The KV of one namespace; made by `TierCache.open`. Token ids are checked first: a wrong one changes nothing."""

    def __init__(self, desk: Desk, *, limit: int, policy: PrefetchPolicy, require_open: Callable[[], object]) -> None:
        self._desk = desk
        self._policy = policy
        self._limit = limit
        self._require_open = require_open

    @property
    def spec(self) -> KVSpec:
        """The layout of the KV."""
        return self._desk.spec

    # --- reading ------------------------------------------------------------------------------------------------------------

    def match(self, tokens: Any, *, request: Any = None, prefetch: object = None) -> Hit:
        """Return the hit of the longest cached prefix of `tokens`; `async with` takes its lease and releases it.

        With a `request` name, a second match under the same name, while the first is held, shares its lease and is not counted
        again. A runner that needs the last token's logits matches `tokens[:-1]`. `prefetch` is how long the hit waits for what
        lies on SSD: `wait`, `best-effort` or seconds; None: as the configuration says. Raises InvalidTokens, InvalidInput.
        """
        policy = self._policy if prefetch is None else PrefetchPolicy.of(prefetch)
        return Hit(self._desk, self._key(tokens), request, policy)

    async def prefetch(self, tokens: Any) -> int:
        """Bring the cached prefix up as far as there is room; return how many leading tokens are in memory then."""
        return await self._desk.prefetch(self._key(tokens)) * self.spec.block_size

    async def pin(self, tokens: Any, *, ttl: float) -> int:
        """Keep the cached prefix where it is for `ttl` seconds; return how many tokens are pinned.

        Pinning the same tokens again counts from now; `ttl=0` ends it. Raises InvalidInput for a negative `ttl`.
        """
        return self._desk.pin(self._key(tokens), ttl) * self.spec.block_size

    # --- writing ------------------------------------------------------------------------------------------------------------

    def reserve(self, tokens: Any, *, after: Hit | None = None, tier: Tier | None = None) -> Room:
        """Return room for the blocks of `tokens` that are not cached, to be written in place; `async with` takes and leaves it.

        `after` is a hit on a prefix of `tokens`. `tier` is where the blocks go; by default as far up as what precedes them.
        Raises InvalidTokens, and InvalidStart when the hit is not a prefix.
        """
        key = self._key(tokens)
        if after is not None and not self._begins_with(key, after):
            raise InvalidStart(f"the hit's {after.tokens} tokens are not how this prompt begins", value=after.tokens)
        return Room(self._desk, self._acquire(key, after, self._desk.position(tier)))

    async def insert(self, tokens: Any, tensor: Any, *, start: int = 0, tier: Tier | None = None) -> Stored:
        """Store the KV of `tokens[start:]`, copying it; whole blocks only. Returns what became of their tokens.

        `tensor` is `[layers, parts, len(tokens) - start, kv_heads, head_dim]`. `start` is a block boundary up to which the
        prompt is cached: hold the hit that says so. Waits for room as long as the configuration allows, then the least
        valuable blocks go; what finds no room all the same is refused, as is everything when the prompt is not cached up to
        `start` any more, because somebody deleted it; `refused_because` says why. A tensor on the device is read on its current
        stream, the calling thread's: what was enqueued there before is in it. It must not change before this returns. Raises
        InvalidTokens, InvalidTensor, and InvalidStart for a start that is no block boundary of the prompt.
        """
        size = self.spec.block_size
        packed = pack_tokens(tokens, limit=self._limit)
        count = len(packed) // 4
        integer(start, 0, count, "start", InvalidStart)
        if start % size:
            raise InvalidStart(f"start must be a multiple of the block size {size} from 0 to {count}, not {start!r}", value=start)
        position = self._desk.position(tier)
        source = self._source(tensor, count - start)
        return await self._store(self._key(tokens, packed), position, start // size, source)

    async def flush(self, tokens: Any) -> int:
        """Bring the cached prefix to the durable tier; return how many leading tokens would survive a loss of power now."""
        return await self._desk.flush(self._key(tokens)) * self.spec.block_size

    # --- taking away --------------------------------------------------------------------------------------------------------

    async def delete(self, tokens: Any) -> int:
        """Remove a prompt and what continues it, in every tier; return how many of its tokens went.

        Blocks that other prompts share stay. Not found at once; not found after a restart either when the call has returned.
        Who holds a lease reads on in memory.
        """
        return await self._desk.delete(self._key(tokens)) * self.spec.block_size

    async def clear(self) -> int:
        """Remove everything of the namespace, in every tier, as `delete` does; return how many tokens that was."""
        return await self._desk.clear() * self.spec.block_size

    # --- inside -------------------------------------------------------------------------------------------------------------

    def _key(self, tokens: Any, packed: bytes | None = None) -> bytes:
        self._require_open()
        return self._desk.key(pack_tokens(tokens, limit=self._limit) if packed is None else packed)

    def _acquire(self, key: bytes, after: Hit | None, position: int) -> Callable[[], Awaitable[Reservation]]:
        def acquire() -> Awaitable[Reservation]:
            if after is None:
                return self._desk.acquire(key, None, position)
            return self._desk.acquire(key, after.lease, position, vouched=after.tokens // self.spec.block_size)

        return acquire

    def _begins_with(self, key: bytes, hit: Hit) -> bool:
        covered = hit.tokens // self.spec.block_size * self._desk.stride
        return hit.lease.space is self._desk.space and key.startswith(hit.lease.key[:covered])

    def _source(self, tensor: Any, tokens: int) -> Source:
        """Return the KV of `tokens` tokens as blocks. Raises InvalidTensor."""
        spec, stack = self.spec, self._desk.stack
        streams = stack.streams
        if streams is None or not streams.tensors.holds(tensor):
            given = tensors.require(tensor, spec, tokens, "tensor")
            return HostSource(stack.reader, tensors.planes_for_reading(given, spec))
        given = tensors.require(tensor, spec, tokens, "tensor", place=streams.tensors.device.tensors)
        return DeviceSource(stack.reader, streams, streams.tensors.runner(), streams.tensors.sheet(given, spec, "tensor"))

    async def _store(self, key: bytes, position: int, first: int, source: Source) -> Stored:
        """Store the blocks of `key` from block `first` on, with which `source` begins."""
        desk, size = self._desk, self.spec.block_size
        whole = len(key) // desk.stride
        stored, reached = 0, first
        edition = desk.space.edition
        refusal: Refusal | None = None
        while True:
            room = await desk.acquire(key, None, position)
            if room.present < reached or desk.space.edition != edition:
                # What came before has left meanwhile, perhaps for what comes after it: to begin again might never end. And
                # what was computed before a clear is not to come back after it.
                desk.close(room)
                reached, refusal = max(first, room.present), Refusal.DROPPED
                break
            reached, refusal = room.present, room.refusal
            if room.other is not None:
                desk.close(room)
                if await desk.stack.traffic.wait_for(room.other, PENDING_SECONDS):
                    continue  # the other writer is done: what it left out is ours
                break
            if not len(room.blocks):  # all is there, or there is no room
                desk.close(room)
                break
            done = await desk.stack.finishing.outlast(self._fill(room, source, first))
            stored += done
            reached += done
            if done < len(room.blocks):  # what came before was deleted while the bytes were copied
                reached, refusal = max(first, min(reached, desk.covered(key))), Refusal.DROPPED
            if done == 0 or reached == whole:
                break
        stored = min(stored, reached - first)  # what was deleted meanwhile was stored twice
        refused = whole - reached
        return Stored(stored * size, (reached - first - stored) * size, refused * size, refusal if refused else None)

    async def _fill(self, room: Reservation, source: Source, first: int) -> int:
        """Copy into reserved slots and commit; return how many blocks were stored. Runs to its end whoever goes away."""
        try:
            places = [Place(position, slot, 0) for position, slot in room.places]
            try:
                sums = await source.into(places, room.present - first)
            except StoreError as error:  # a thread died, or a device fails: what it was to store is refused
                self._desk.stack.failed(error)
                return 0
            return self._desk.commit(room, len(room.blocks), sums)
        finally:
            self._desk.close(room)

    def close(self) -> None:
        """End all pins."""
        self._desk.end()
