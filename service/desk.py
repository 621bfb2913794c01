"""Requests of one namespace in one session, in packed keys and blocks: what the faces in one process and over a socket share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiercache.checks import seconds
from tiercache.errors import InvalidConfig
from tiercache.leases import Lease, Reservation, Session
from tiercache.prefetch import PrefetchPolicy
from tiercache.residency import Space
from tiercache.service.stack import Stack
from tiercache.spec import KVSpec
from tiercache.storage.traffic import Promotion
from tiercache.types import Tier

PENDING_SECONDS = 5.0
"""How long a writer waits for another writer of the same blocks."""


@dataclass(slots=True, eq=False, kw_only=True)
class Claim:
    """A lease that is being promoted, and how many hits share it (requests that ask twice under one name)."""

    lease: Lease
    promotion: Promotion
    tiers: Mapping[Tier, int]
    """Where the blocks were found, the fastest tier first."""
    request: Any = None
    users: int = 1
    verified: dict[str, int] = field(default_factory=dict)
    """Leading blocks that were checked in their slots, by where the tensor lies that they were checked for."""
    _lock: asyncio.Lock | None = None

    @property
    def lock(self) -> asyncio.Lock:
        """Of who checks blocks."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock


class Desk:
    """One namespace of a stack, for one session of the core. Keys are packed token ids of whole blocks; counts are of blocks.

    `require_open` raises Closed when the cache is; steps that have waited call it before they take anything.
    """

    def __init__(self, stack: Stack, space: Space, spec: KVSpec, session: Session, *, require_open: Callable[[], object]) -> None:
        self.stack = stack
        self.space = space
        self.spec = spec
        self.session = session
        self._require_open = require_open
        self._claims: dict[Any, Claim] = {}
        self._pins: dict[bytes, tuple[Lease, asyncio.TimerHandle]] = {}

    @property
    def stride(self) -> int:
        """Bytes of one block in a key."""
        return self.space.tree.stride

    @property
    def pins(self) -> int:
        """How many prompts are pinned."""
        return len(self._pins)

    def key(self, packed: bytes) -> bytes:
        """Return the part of packed token ids that makes whole blocks. Raises Closed when the cache is closed."""
        self._require_open()
        return packed[: len(packed) - len(packed) % self.stride]

    def position(self, tier: Tier | None) -> int:
        """Return the position of a tier that can be written, of the fastest for None. Raises InvalidConfig for another."""
        stack = self.stack
        if tier is not None and tier not in stack.cache.tiers[: stack.memory]:
            places = ", ".join(str(place) for place in stack.cache.tiers[: stack.memory])
            raise InvalidConfig(f"tier {tier!s} can't be written; the tiers in memory are {places or 'none'}", value=tier)
        return stack.position(tier)

    # --- reading ------------------------------------------------------------------------------------------------------------

    def match(self, key: bytes, request: Any = None) -> Claim:
        """Take a lease on the longest cached prefix and begin its promotion, in one step.

        With a `request` name, a second match under it while the first is held shares its lease and is not counted again. Each
        match wants a `leave`.
        """
        claim = self._claims.get(request) if request is not None else None
        if claim is not None and claim.lease.key == key:
            claim.users += 1
            return claim
        cache = self.stack.cache
        lease = cache.match(self.session, self.space, key)
        found = {cache.tiers[position]: blocks for position, blocks in enumerate(lease.charge) if blocks}
        claim = Claim(lease=lease, promotion=self.stack.traffic.promote(lease), tiers=found, request=request)
        if request is not None:
            self._claims[request] = claim
        self.stack.writes.matched(lease)
        return claim

    async def settle(self, claim: Claim, policy: PrefetchPolicy) -> None:
        """Wait, as long as the policy allows, until what can be in memory is there.

        What is on its way is brought up all the same, also when the claim is shortened to what is there now.
        """
        try:
            async with asyncio.timeout(policy.seconds):
                await claim.promotion.readable.wait()
        except TimeoutError:
            pass
        self.carry_on(claim)

    def carry_on(self, claim: Claim) -> None:
        """Have brought up, for whoever comes next, what the claim's readers are not going to wait for."""
        if not claim.lease.released and self.stack.readable_blocks(claim.lease) < claim.lease.blocks:
            self.stack.traffic.carry_on(claim.promotion)

    def leave(self, claim: Claim) -> bool:
        """End one use of a claim; return whether it was the last, and the lease has ended."""
        claim.users -= 1
        if claim.users:
            return False
        self.forget(claim)
        self.stack.cache.release(claim.lease)
        self.stack.sweep_waste()
        return True

    def forget(self, claim: Claim) -> None:
        """Let the claim's name be used for another one."""
        if claim.request is not None and self._claims.get(claim.request) is claim:
            del self._claims[claim.request]

    def covered(self, key: bytes) -> int:
        """Return how many leading blocks are cached."""
        return self.stack.cache.covered(self.space, key)

    async def prefetch(self, key: bytes) -> int:
        """Bring the cached prefix up as far as there is room; return how many leading blocks are in memory then."""
        stack = self.stack
        lease = stack.cache.match(self.session, self.space, key, count=False, charged=False)
        try:
            await stack.traffic.promote(lease).done.wait()
            return stack.readable_blocks(lease)
        finally:
            stack.cache.release(lease)

    def pin(self, key: bytes, ttl: float) -> int:
        """Keep the cached prefix where it is for `ttl` seconds; 0 ends that. Returns how many blocks are pinned.

        Raises InvalidInput for a `ttl` that is no time.
        """
        seconds(ttl, "ttl")
        self._unpin(key)
        if ttl == 0:
            return 0
        lease = self.stack.cache.match(self.session, self.space, key, count=False)
        self._pins[key] = lease, asyncio.get_running_loop().call_later(ttl, self._unpin, key)
        return lease.blocks

    # --- writing ------------------------------------------------------------------------------------------------------------

    async def acquire(
        self, key: bytes, after: Lease | None, position: int, *, vouched: int | None = None, edition: int | None = None
    ) -> Reservation:
        """Make room for the blocks of `key` that are not cached, and take slots for them.

        `after` is a lease on a prefix of `key`, of which `vouched` blocks are sound (None: all). `edition` is the namespace's when
        the blocks were asked for (None: it is now): under another one there are no slots. Waits for room as long as the
        configuration allows.
        """
        stack = self.stack
        lease = stack.cache.match(self.session, self.space, key, count=False, charged=False)
        if edition is not None:
            lease.edition = edition
        try:
            await self._prepare(lease, key, position)
            self._require_open()
            # With less than the vouched blocks in the tree there is no room: nobody has computed the blocks in between.
            needed = 0 if after is None or after.released else after.blocks if vouched is None else vouched
            # And none where the namespace was cleared since: what follows an older hit is of the bytes that were to go.
            stale = after is not None and not after.released and after.stale
            hold = after if after is not None and (stale or needed > lease.blocks) else lease
            return stack.cache.reserve(self.session, self.space, key, after=hold, position=position)
        finally:
            stack.cache.release(lease)

    async def reserve(self, key: bytes, after: Lease | None, position: int, *, wait: bool) -> Reservation:
        """Do as `acquire` does; with `wait`, wait a bounded time for another writer of the same blocks, and try again."""
        edition = self.space.edition
        while True:
            reservation = await self.acquire(key, after, position, edition=edition)
            other = reservation.other
            if not wait or other is None:
                return reservation
            self.close(reservation)
            if not await self.stack.traffic.wait_for(other, PENDING_SECONDS):
                wait = False

    def commit(self, reservation: Reservation, upto: int, sums: Sequence[int]) -> int:
        """Hand the reserved blocks before block `upto` to the cache; return how many of the reservation's are committed."""
        done = self.stack.cache.commit(reservation, upto, sums)
        self.stack.writes.written(reservation.lease)
        return done

    def close(self, reservation: Reservation) -> None:
        """Give back what was reserved and not committed."""
        self.stack.cache.close(reservation)
        self.stack.sweep_waste()
        self.stack.traffic.drain()

    async def flush(self, key: bytes) -> int:
        """Bring the cached prefix to the durable tier; return how many leading blocks would survive a loss of power now."""
        stack = self.stack
        lease = stack.cache.match(self.session, self.space, key, count=False, charged=False)
        try:
            return await stack.traffic.persist(lease)
        finally:
            stack.cache.release(lease)
            stack.sweep_waste()

    # --- taking away --------------------------------------------------------------------------------------------------------

    async def delete(self, key: bytes) -> int:
        """Remove a prompt and what continues it, in every tier; return how many of its blocks went."""
        removed = self.stack.cache.delete(self.space, key)
        await self.stack.forgotten()
        return removed

    async def clear(self) -> int:
        """Remove everything of the namespace, in every tier; return how many blocks that was."""
        self._require_open()
        removed = self.stack.cache.clear(self.space)
        await self.stack.forgotten()
        return removed

    def end(self) -> None:
        """End all pins."""
        for key in list(self._pins):
            self._unpin(key)

    # --- inside -------------------------------------------------------------------------------------------------------------

    async def _prepare(self, lease: Lease, key: bytes, position: int) -> None:
        """Bring up what the new blocks follow, and make room for them, as far as that goes."""
        stack = self.stack
        want = len(key) // self.stride - lease.blocks
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

    def _unpin(self, key: bytes) -> None:
        found = self._pins.pop(key, None)
        if found is not None:
            lease, timer = found
            timer.cancel()
            self.stack.cache.release(lease)
