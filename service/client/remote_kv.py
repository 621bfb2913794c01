"""The face of one namespace, for a process beside the daemon."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass
from typing import Any

from tiercache.checks import hashable, integer, seconds
from tiercache.errors import DeviceRefused, InvalidConfig, InvalidStart, StaleHandle, StoreError, TierCacheError
from tiercache.kernels.host import Bytes
from tiercache.keys import pack_tokens
from tiercache.leases import Refusal
from tiercache.prefetch import PrefetchPolicy
from tiercache.service import tensors, wire
from tiercache.service.client import copies
from tiercache.service.client.copying import Copying
from tiercache.service.client.counts import Miss
from tiercache.service.client.device_slots import DeviceSlots, open_slots
from tiercache.service.client.handle import Claim, Handle, Sessions, Sharing
from tiercache.service.client.mapping import Arena, Memory
from tiercache.service.client.remote_hit import RemoteHit
from tiercache.service.client.remote_room import RemoteRoom, Reserved, reason_of
from tiercache.service.face import Stored
from tiercache.spec import KVSpec, Namespace
from tiercache.types import Tier

_PENDING_SECONDS = 5.0
"""How long the daemon lets a reserve wait for another writer of the same blocks, beyond its own deadline for room."""


@dataclass(slots=True)
class _Named:
    """A claim under a request's name, for all hits that share it."""

    key: bytes
    sharing: Sharing
    making: asyncio.Task[Claim]


class RemoteKV:
    """The KV of one namespace; made by `Client.open`. Token ids are checked first: a wrong one changes nothing.

    In a new session it opens itself anew. Leases, reservations and pins end with the session that gave them.
    """

    def __init__(self, sessions: Sessions, space: Namespace, spec: KVSpec, shard: int) -> None:
        self._sessions = sessions
        self._house = sessions.house
        self._space = space
        self._spec = spec
        self._shard = shard
        self._handle: Handle | None = None
        self._opening = asyncio.Lock()
        self._named: dict[Any, _Named] = {}

    @property
    def spec(self) -> KVSpec:
        """The layout of the KV."""
        return self._spec

    # --- reading ------------------------------------------------------------------------------------------------------------

    def match(self, tokens: Any, *, request: Any = None, prefetch: object = None) -> RemoteHit:
        """Return the hit of the longest cached prefix of `tokens`; `async with` takes its lease and releases it.

        With a `request` name, a second match under the same name, while the first is held, shares its lease and is not counted
        again. A runner that needs the last token's logits matches `tokens[:-1]`. `prefetch` is how long the hit waits for what
        lies on SSD: `wait`, `best-effort` or seconds; None: as `connect` said. Raises InvalidTokens, InvalidInput.
        """
        policy = self._sessions.policy if prefetch is None else PrefetchPolicy.of(prefetch)
        key = self._key(tokens)
        hashable(request, "request")

        async def make() -> Claim:
            self._sessions.require_open()
            return await (self._match(key, Sharing()) if request is None else self._match_named(key, request))

        return RemoteHit(self._house, self._spec, policy, make)

    async def prefetch(self, tokens: Any) -> int:
        """Bring the cached prefix up as far as there is room; return how many leading tokens are in memory then."""
        return await self._count(wire.Prefetch, self._key(tokens))

    async def pin(self, tokens: Any, *, ttl: float) -> int:
        """Keep the cached prefix where it is for `ttl` seconds; return how many tokens are pinned.

        Pinning the same tokens again counts from now; `ttl=0` ends it, and so does the end of the session. Raises InvalidInput
        for a negative `ttl`.
        """
        return await self._count(wire.Pin, self._key(tokens), ttl=seconds(ttl, "ttl"))

    # --- writing ------------------------------------------------------------------------------------------------------------

    def reserve(self, tokens: Any, *, after: RemoteHit | None = None, tier: Tier | None = None) -> RemoteRoom:
        """Return room for the blocks of `tokens` that are not cached, to be written in place; `async with` takes and leaves it.

        `after` is a hit on a prefix of `tokens`. `tier` is where the blocks go; by default as far up as what precedes them.
        Raises InvalidTokens, and InvalidStart when the hit is not a prefix.
        """
        key = self._key(tokens)
        claim = after.claim if after is not None else None
        if after is not None and claim is not None and not key.startswith(claim.key[: after.blocks * self._stride]):
            raise InvalidStart(f"the hit's {after.tokens} tokens are not how this prompt begins", value=after.tokens)
        self._require_tier(tier)

        async def acquire() -> Reserved:
            self._sessions.require_open()
            if claim is not None and claim.lease is not None and claim.gone is not None:
                # What the caller goes on from is gone: its first block would be another one than the caller thinks.
                self._house.counts.missed(copies.LOST, claim.gone)
                return Reserved(self._house, None, None)
            hold = claim.lease if claim is not None else None
            return await self._reserve(key, tier, after=hold)

        return RemoteRoom(self._house, self._spec, acquire)

    async def insert(self, tokens: Any, tensor: Any, *, start: int = 0, tier: Tier | None = None) -> Stored:
        """Store the KV of `tokens[start:]`, copying it; whole blocks only. Returns what became of their tokens.

        `tensor` is `[layers, parts, len(tokens) - start, kv_heads, head_dim]`. `start` is a block boundary up to which the
        prompt is cached: hold the hit that says so. Waits for room as long as the daemon's configuration allows, then the least
        valuable blocks go; what finds no room all the same is refused, as is everything when the prompt is not cached up to
        `start` any more (somebody deleted it, or the daemon began anew), or the daemon does not answer; `refused_because` says
        why. Raises InvalidTokens, InvalidTensor, and InvalidStart for a start that is no block boundary of the prompt.

        If the caller is cancelled while bytes are copied, the copy goes on, the slots are given back after it, and nothing is
        committed: what the tensor held by then is not known.
        """
        spec, size = self._spec, self._spec.block_size
        packed = pack_tokens(tokens, limit=self._sessions.limit)
        count = len(packed) // 4
        integer(start, 0, count, "start", InvalidStart)
        if start % size:
            raise InvalidStart(f"start must be a multiple of the block size {size} from 0 to {count}, not {start!r}", value=start)
        self._sessions.require_open()
        tensor = tensors.require(tensor, spec, count - start, "tensor")
        self._require_tier(tier)
        return await self._store(self._key(tokens, packed), tier, start // size, tensors.planes_for_reading(tensor, spec))

    async def flush(self, tokens: Any) -> int:
        """Bring the cached prefix to the durable tier; return how many leading tokens would survive a loss of power now.

        0 when the daemon does not answer in time, though it may still be at it.
        """
        return await self._count(wire.Flush, self._key(tokens))

    # --- taking away --------------------------------------------------------------------------------------------------------

    async def delete(self, tokens: Any) -> int:
        """Remove a prompt and what continues it, in every tier; return how many of its tokens went.

        Blocks that other prompts share stay. Not found at once; not found after a restart either when the call has returned.
        Who holds a lease reads on in memory.
        """
        return await self._count(wire.Delete, self._key(tokens))

    async def clear(self) -> int:
        """Remove everything of the namespace, in every tier, as `delete` does; return how many tokens that was."""
        return await self._count(wire.Clear, None)

    # --- with a client that was joined ----------------------------------------------------------------------------------------

    def shared_hit(self, number: int) -> RemoteHit:
        """Return a hit on a lease of the client that this one joined, by its `number` there; `async with` takes part in it.

        The lease ends when both have left it. A number that is no lease there is a hit of no tokens.
        """

        async def make() -> Claim:
            self._sessions.require_open()
            return await self._take_part(number)

        return RemoteHit(self._house, self._spec, self._sessions.policy, make)

    def shared_room(self, number: int) -> RemoteRoom:
        """Return the room of the client that this one joined, by its `number` there, to be written in place.

        The owner commits. No slot of it is used again before this room is left, too.
        """

        async def acquire() -> Reserved:
            self._sessions.require_open()
            handle = await self.open()
            if isinstance(handle, Miss):
                return Reserved(self._house, None, None)
            reply = await handle.connection.call(wire.Reserved, wire.Use, reservation=number)
            return Reserved(self._house, None, None) if isinstance(reply, Miss) else Reserved(self._house, handle, reply)

        return RemoteRoom(self._house, self._spec, acquire)

    # --- inside: the session ----------------------------------------------------------------------------------------------

    @property
    def _stride(self) -> int:
        return 4 * self._spec.block_size

    def _key(self, tokens: Any, packed: bytes | None = None) -> bytes:
        self._sessions.require_open()
        packed = pack_tokens(tokens, limit=self._sessions.limit) if packed is None else packed
        return packed[: len(packed) - len(packed) % self._stride]

    def _require_tier(self, tier: Tier | None) -> None:
        if tier is not None and self._handle is not None and tier not in self._handle.tiers[: len(self._handle.arenas)]:
            places = ", ".join(str(place) for place in self._handle.tiers[: len(self._handle.arenas)])
            raise InvalidConfig(f"tier {tier!s} can't be written; the tiers in memory are {places or 'none'}", value=tier)

    async def open(self, *, raises: tuple[type[TierCacheError], ...] = ()) -> Handle | Miss:
        """Return the namespace in the present session, opened there if it is not yet.

        A refusal of a kind among `raises` is raised; any other is a miss, as is no answer.
        """
        connection = self._sessions.connection()
        if isinstance(connection, Miss):
            return connection
        if self._handle is not None and self._handle.connection is connection:
            return self._handle
        async with self._opening:
            if self._handle is not None and self._handle.connection is connection:
                return self._handle
            opened = await connection.call(
                wire.Opened,
                wire.Open,
                raises=raises,
                namespace=asdict(self._space),
                spec=asdict(self._spec),
                shard=self._shard,
            )
            if isinstance(opened, Miss):
                return opened
            try:
                memory = await connection.memory_of(opened.arenas)
                arenas = [await self._arena(memory, at) for at in opened.arenas]
                tiers = [Tier[name] for name in opened.tiers]
            except (OSError, ValueError, KeyError, TimeoutError, StoreError) as error:
                reason = "away" if connection.ended.is_set() else "unmapped"
                return self._house.counts.missed(reason, f"the daemon's memory can't be mapped: {error}")
            except DeviceRefused as error:
                if connection.ended.is_set():  # the memory went with the daemon
                    return self._house.counts.missed("away", connection.reason)
                if isinstance(error, raises):
                    raise
                return self._house.counts.missed(type(error).__name__, str(error))
            copying = Copying(arenas, self._house.workers, threads=self._house.threads, finishing=self._house.finishing)
            self._handle = Handle(connection, opened.kv, self._spec, tiers, arenas, copying)
            return self._handle

    async def _arena(self, memory: Memory, at: wire.ArenaAt) -> Arena | DeviceSlots:
        if at.layout != wire.DEVICE_LAYOUT:
            return Arena(memory, at, self._spec.geometry)
        return await open_slots(memory, at, self._spec.geometry, self._house.device, self._house.workers)

    async def _count(self, request: type[wire.Request], key: bytes | None, **fields: Any) -> int:
        """Ask for a number of blocks; return it in tokens."""
        self._sessions.require_open()
        handle = await self.open()
        if isinstance(handle, Miss):
            return 0
        count = await handle.connection.call(wire.Count, request, key=key, kv=handle.number, **fields)
        return 0 if isinstance(count, Miss) else count.count * self._spec.block_size

    # --- inside: claims ---------------------------------------------------------------------------------------------------

    async def _match(self, key: bytes, sharing: Sharing) -> Claim:
        handle = await self.open()
        if isinstance(handle, Miss):
            return Claim(self._house, self._spec, key, None, None, sharing)
        connection = handle.connection

        def undo(reply: wire.Reply) -> None:
            if isinstance(reply, wire.Leased):
                connection.release(reply.lease)

        leased = await connection.call(wire.Leased, wire.Match, key=key, undo=undo, kv=handle.number)
        if isinstance(leased, Miss):
            return Claim(self._house, self._spec, key, None, None, sharing)
        return Claim(self._house, self._spec, key, handle, leased, sharing)

    async def _take_part(self, number: int) -> Claim:
        handle = await self.open()
        asked = time.monotonic()
        answer = handle if isinstance(handle, Miss) else await handle.connection.call(wire.Places, wire.Ready, lease=number)
        if isinstance(handle, Miss) or isinstance(answer, Miss):
            return Claim(self._house, self._spec, b"", None, None, Sharing())
        handle.connection.take_part(number, asked)
        blocks = len(answer.places) // wire.PLACE_BYTES
        leased = wire.Leased(id=0, lease=number, blocks=blocks, tiers={}, lifting=False, places=answer.places)
        return Claim(self._house, self._spec, b"", handle, leased, Sharing())

    async def _match_named(self, key: bytes, request: Any) -> Claim:
        """Return the claim under a name: the one that is held, if it is of the same prompt."""
        named = self._named.get(request)
        if named is not None and named.key == key and named.sharing.users and not _is_gone(named.making):
            named.sharing.users += 1
        else:
            sharing = Sharing()
            named = _Named(key, sharing, self._house.finishing.start(self._match(key, sharing)))
            self._named = {name: other for name, other in self._named.items() if other.sharing.users}
            self._named[request] = named
        try:
            return await asyncio.shield(named.making)
        except asyncio.CancelledError:
            named.making.add_done_callback(_leave)
            raise

    # --- inside: writing --------------------------------------------------------------------------------------------------

    async def _reserve(self, key: bytes, tier: Tier | None, *, after: int | None = None, wait: bool = False) -> Reserved:
        handle = await self.open()
        if isinstance(handle, Miss):
            return Reserved(self._house, None, None)
        self._require_tier(tier)
        connection = handle.connection

        def undo(reply: wire.Reply) -> None:
            if isinstance(reply, wire.Reserved):
                connection.close_reservation(reply.reservation)

        reply = await connection.call(
            wire.Reserved,
            wire.Reserve,
            key=key,
            patience=_PENDING_SECONDS,
            undo=undo,
            kv=handle.number,
            after=after,
            tier=None if tier is None else tier.name,
            wait=wait,
        )
        return Reserved(self._house, None if isinstance(reply, Miss) else handle, None if isinstance(reply, Miss) else reply)

    async def _store(self, key: bytes, tier: Tier | None, first: int, planes: Bytes) -> Stored:
        """Store the blocks of `key` from block `first` on, whose bytes `planes` begins with."""
        size = self._spec.block_size
        whole = len(key) // self._stride
        stored, reached = 0, first
        refusal: Refusal | None = None
        while whole:
            room = await self._reserve(key, tier, wait=True)
            if room.present < reached or not room.places:
                # Everything is there, there is no more room, or what came before has left meanwhile, perhaps for what comes after
                # it: to begin again might never end.
                room.close()
                refusal = Refusal.DROPPED if room.answered and room.present < reached else room.refusal
                if room.answered:
                    reached = max(first, room.present)
                break
            reached = room.present
            done = await self._fill(room, planes, first)
            if done is None:
                refusal = Refusal.UNREACHED
                break
            stored, reached, refusal = stored + done, reached + done, room.refusal
            if done < len(room.places):  # what came before was deleted while the bytes were copied
                there = await self._count(wire.Covered, key) // size
                reached, refusal = max(first, min(reached, there)), Refusal.DROPPED
            if done == 0 or reached >= whole:
                break
        stored = min(stored, reached - first)  # what was deleted meanwhile was stored twice
        refused = whole - reached
        return Stored(stored * size, (reached - first - stored) * size, refused * size, refusal if refused else None)

    async def _fill(self, room: Reserved, planes: Bytes, first: int) -> int | None:
        """Copy into reserved slots and commit; return how many blocks were stored, None when there was no memory or answer."""
        copying = self._house.finishing.start(room.fill(planes, first))
        try:
            sums = await asyncio.shield(copying)
        except (OSError, StoreError, StaleHandle) as error:
            room.close()
            self._house.counts.missed(reason_of(error), str(error))
            return None
        except BaseException:
            # The thread may still be writing, and what it reads may be the caller's again: neither free nor cached.
            copying.add_done_callback(lambda _: room.close())
            raise
        try:
            answered = await room.commit(len(room.places), sums)
        finally:
            room.close()
        return room.committed if answered else None


def _is_gone(making: asyncio.Task[Claim]) -> bool:
    if not making.done():
        return False
    return making.cancelled() or making.exception() is not None or making.result().gone is not None


def _leave(making: asyncio.Task[Claim]) -> None:
    if not making.cancelled() and making.exception() is None:
        making.result().leave()
