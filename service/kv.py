"""The face of one namespace in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tiercache.checks import integer
from tiercache.errors import InvalidConfig, InvalidInput, InvalidStart
from tiercache.keys import pack_tokens
from tiercache.leases import Lease, Reservation
from tiercache.service import tensors
from tiercache.service.face import Stored
from tiercache.service.hit import Claim, Handle, Hit
from tiercache.service.room import Room
from tiercache.spec import KVSpec
from tiercache.storage.reader import Place
from tiercache.types import Tier

_LONGEST_PIN = 10.0**9
"""Seconds; some thirty years."""
_PENDING_SECONDS = 5.0
"""How long an insert waits for another writer of the same blocks."""


class LocalKV:
    """The KV of one namespace; made by `TierCache.open`. Token ids are checked first: a wrong one changes nothing."""

    def __init__(self, handle: Handle, *, limit: int, require_open: Callable[[], object]) -> None:
        self._handle = handle
        self._limit = limit
        self._require_open = require_open
        self._claims: dict[Any, Claim] = {}
        self._pins: dict[bytes, tuple[Lease, asyncio.TimerHandle]] = {}

    @property
    def spec(self) -> KVSpec:
        """The layout of the KV."""
        return self._handle.spec

    # --- reading ------------------------------------------------------------------------------------------------------------

    def match(self, tokens: Any, *, request: Any = None) -> Hit:
        """Return the hit of the longest cached prefix of `tokens`; `async with` takes its lease and releases it.

        With a `request` name, a second match under the same name, while the first is held, shares its lease and is not counted
        again. A runner that needs the last token's logits matches `tokens[:-1]`. Raises InvalidTokens.
        """
        return Hit(self._handle, self._key(tokens), self._claims, request)

    async def prefetch(self, tokens: Any) -> int:
        """Bring the cached prefix up as far as there is room; return how many leading tokens are in memory then."""
        key, stack = self._key(tokens), self._handle.stack
        lease = stack.cache.match(self._handle.session, self._handle.space, key, count=False, charged=False)
        try:
            await stack.traffic.promote(lease).done.wait()
            return len(stack.readable(lease)) * self.spec.block_size
        finally:
            stack.cache.release(lease)

    async def pin(self, tokens: Any, *, ttl: float) -> int:
        """Keep the cached prefix where it is for `ttl` seconds; return how many tokens are pinned.

        Pinning the same tokens again counts from now; `ttl=0` ends it. Raises InvalidInput for a negative `ttl`.
        """
        seconds: object = ttl
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= _LONGEST_PIN:
            raise InvalidInput(f"ttl must be a number of seconds from 0 on, not {ttl!r}", value=ttl)
        key = self._key(tokens)
        self._unpin(key)
        if ttl == 0:
            return 0
        lease = self._handle.stack.cache.match(self._handle.session, self._handle.space, key, count=False)
        self._pins[key] = lease, asyncio.get_running_loop().call_later(ttl, self._unpin, key)
        return lease.blocks * self.spec.block_size

    # --- writing ------------------------------------------------------------------------------------------------------------

    def reserve(self, tokens: Any, *, after: Hit | None = None, tier: Tier | None = None) -> Room:
        """Return room for the blocks of `tokens` that are not cached, to be written in place; `async with` takes and leaves it.

        `after` is a hit on a prefix of `tokens`. `tier` is where the blocks go; by default as far up as what precedes them.
        Raises InvalidTokens, and InvalidStart when the hit is not a prefix.
        """
        key = self._key(tokens)
        if after is not None and not self._begins_with(key, after):
            raise InvalidStart(f"the hit's {after.tokens} tokens are not how this prompt begins", value=after.tokens)
        return Room(self._handle, self._acquire(key, after, self._position(tier)))

    async def insert(self, tokens: Any, tensor: Any, *, start: int = 0, tier: Tier | None = None) -> Stored:
        """Store the KV of `tokens[start:]`, copying it; whole blocks only. Returns what became of their tokens.

        `tensor` is `[layers, parts, len(tokens) - start, kv_heads, head_dim]`. `start` is a block boundary up to which the
        prompt is cached: hold the hit that says so. Waits for room as long as the configuration allows, then the least
        valuable blocks go; what finds no room all the same is refused. Raises InvalidTokens, InvalidTensor, InvalidStart.
        """
        spec, size = self.spec, self.spec.block_size
        packed = pack_tokens(tokens, limit=self._limit)
        count = len(packed) // 4
        integer(start, 0, count, "start", InvalidStart)
        if start % size:
            raise InvalidStart(f"start must be a multiple of the block size {size} from 0 to {count}, not {start!r}", value=start)
        tensor = tensors.require(tensor, spec, count - start, "tensor")
        position = self._position(tier)
        key = self._key(tokens, packed)
        cached = self._handle.stack.cache.covered(self._handle.space, key) * size
        if start > cached:
            raise InvalidStart(f"start is {start}; only {cached} tokens of this prompt are cached", value=start, cached=cached)
        planes = tensors.planes_for_reading(tensor, spec)
        first = start // size
        return await self._store(key, position, first, planes)

    async def flush(self, tokens: Any) -> int:
        """Bring the cached prefix to the durable tier; return how many leading tokens would survive a loss of power now."""
        key, stack = self._key(tokens), self._handle.stack
        lease = stack.cache.match(self._handle.session, self._handle.space, key, count=False, charged=False)
        try:
            return await stack.traffic.persist(lease) * self.spec.block_size
        finally:
            stack.cache.release(lease)
            stack.mover.start(stack.cache.moves.take_waste())

    # --- taking away --------------------------------------------------------------------------------------------------------

    async def delete(self, tokens: Any) -> int:
        """Remove a prompt and what continues it, in every tier; return how many of its tokens went.

        Blocks that other prompts share stay. Not found at once; not found after a restart either when the call has returned.
        Who holds a lease reads on in memory.
        """
        removed = self._handle.stack.cache.delete(self._handle.space, self._key(tokens))
        await self._handle.stack.forgotten()
        return removed * self.spec.block_size

    async def clear(self) -> int:
        """Remove everything of the namespace, in every tier, as `delete` does; return how many tokens that was."""
        self._require_open()
        removed = self._handle.stack.cache.clear(self._handle.space)
        await self._handle.stack.forgotten()
        return removed * self.spec.block_size

    # --- inside -------------------------------------------------------------------------------------------------------------

    def _key(self, tokens: Any, packed: bytes | None = None) -> bytes:
        self._require_open()
        packed = pack_tokens(tokens, limit=self._limit) if packed is None else packed
        return packed[: len(packed) - len(packed) % self._handle.space.tree.stride]

    def _position(self, tier: Tier | None) -> int:
        stack = self._handle.stack
        if tier is not None and tier not in stack.cache.tiers[: stack.memory]:
            places = ", ".join(str(place) for place in stack.cache.tiers[: stack.memory])
            raise InvalidConfig(f"tier {tier!s} can't be written; the tiers in memory are {places or 'none'}", value=tier)
        return stack.position(tier)

    def _acquire(self, key: bytes, after: Hit | None, position: int) -> Callable[[], Awaitable[Reservation]]:
        async def acquire() -> Reservation:
            stack = self._handle.stack
            lease = stack.cache.match(self._handle.session, self._handle.space, key, count=False, charged=False)
            try:
                await self._prepare(lease, key, position)
                self._require_open()
                # With less than the hit's tokens in the tree there is no room: nobody has computed the blocks in between.
                hold = lease if after is None or after.tokens <= lease.blocks * self.spec.block_size else after.lease
                return stack.cache.reserve(self._handle.session, self._handle.space, key, after=hold, position=position)
            finally:
                stack.cache.release(lease)

        return acquire

    def _begins_with(self, key: bytes, hit: Hit) -> bool:
        covered = hit.tokens // self.spec.block_size * self._handle.space.tree.stride
        return hit.lease.space is self._handle.space and key.startswith(hit.lease.key[:covered])

    async def _prepare(self, lease: Lease, key: bytes, position: int) -> None:
        """Bring up what the new blocks follow, and make room for them, as far as that goes."""
        stack = self._handle.stack
        want = len(key) // self._handle.space.tree.stride - lease.blocks
        if want == 0:
            return
        deadline = stack.traffic.patience()
        if (lease.node.tag or 0) > position:
            await stack.traffic.lift_to_write(lease, deadline)
        for place in range(max(position, lease.node.tag or 0), stack.memory):
            if want <= 0:
                break
            await stack.traffic.room_to_write(place, want, deadline)
            want -= stack.cache.residency.slots[place].free

    async def _store(self, key: bytes, position: int, first: int, planes: Any) -> Stored:
        """Store the blocks of `key` from block `first` on, whose bytes `planes` begins with."""
        stack, size = self._handle.stack, self.spec.block_size
        whole = len(key) // self._handle.space.tree.stride
        acquire = self._acquire(key, None, position)
        stored, reached = 0, first
        while True:
            room = await acquire()
            if room.present < reached:
                # What came before has left meanwhile, perhaps for what comes after it: to begin again might never end.
                stack.cache.close(room)
                break
            reached = room.present
            if room.other is not None:
                stack.cache.close(room)
                if await stack.traffic.wait_for(room.other, _PENDING_SECONDS):
                    continue  # the other writer is done: what it left out is ours
                break
            if not len(room.blocks):  # all is there, or there is no room
                stack.cache.close(room)
                break
            done = await stack.finishing.outlast(self._fill(room, planes, first))
            stored += done
            reached += done
            if done == 0 or reached == whole:
                break
        stored = min(stored, reached - first)  # what was deleted meanwhile was stored twice
        refused = whole - reached
        return Stored(stored * size, (whole - first - stored - refused) * size, refused * size)

    async def _fill(self, room: Reservation, planes: Any, first: int) -> int:
        """Copy into reserved slots and commit; return how many blocks were stored. Runs to its end whoever goes away."""
        stack = self._handle.stack
        try:
            places = [Place(position, slot, 0) for position, slot in room.places]
            sums = await stack.reader.scatter(planes, room.present - first, places)
            return stack.cache.commit(room, len(room.blocks), sums)
        finally:
            stack.cache.close(room)
            stack.mover.start(stack.cache.moves.take_waste())
            stack.traffic.drain()

    def _unpin(self, key: bytes) -> None:
        found = self._pins.pop(key, None)
        if found is not None:
            lease, timer = found
            timer.cancel()
            self._handle.stack.cache.release(lease)

    def close(self) -> None:
        """End all pins."""
        for key in list(self._pins):
            self._unpin(key)
