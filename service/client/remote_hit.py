"""A hit of a client: a lease in the daemon, and copies out of the daemon's memory."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tiercache.checks import integer
from tiercache.errors import LeaseLost, LeaseReleased, StaleHandle, StoreError
from tiercache.prefetch import PrefetchPolicy
from tiercache.service import tensors, wire
from tiercache.service.client import copies
from tiercache.service.client.copying import Copying
from tiercache.service.client.device_slots import DeviceSlots
from tiercache.service.client.handle import Claim, Grip, House
from tiercache.spec import KVSpec
from tiercache.types import Tier

if TYPE_CHECKING:
    import torch


class RemoteHit:
    """A lease on the longest cached prefix; `async with kv.match(tokens) as hit` takes and releases it.

    After its end every method raises LeaseReleased. When the daemon has gone meanwhile, `ready` says 0, and `layer`, `gather`
    and `view` raise StaleHandle; what they gave before stays good.
    """

    def __init__(self, house: House, spec: KVSpec, policy: PrefetchPolicy, claim: Callable[[], Awaitable[Claim]]) -> None:
        self._house = house
        self._spec = spec
        self._policy = policy
        self._make = claim
        self._claim: Claim | None = None
        self._entered = False
        self._blocks = 0
        self._settled = False
        self._gave_up = False
        self._ended = False

    # --- lifetime ---------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Find the prefix and take the lease. A daemon that does not answer is a hit of no tokens."""
        if self._entered:
            raise LeaseReleased("a hit can be entered only once")
        self._entered = True
        self._claim = await self._make()
        self._blocks = self._claim.blocks
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        """Take the lease without a block; `release` ends it."""
        return self.__aenter__().__await__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the lease; tensors that were handed out in place keep it until they are gone."""
        if not self._ended and self._claim is not None:
            self._leave(self._claim)

    async def release(self) -> None:
        """End the lease. Raises LeaseReleased when it has ended."""
        self._leave(self._live())

    def note_stream(self) -> None:
        """Let the lease end after what the calling thread's stream on a device does with the tensors that `view` gave."""
        if self._claim is not None:
            self._claim.note()

    def _leave(self, claim: Claim) -> None:
        self._house.require_own()
        self._ended = True
        claim.note()
        claim.leave()

    def _live(self) -> Claim:
        self._house.require_own()
        if self._claim is None or self._ended:
            raise LeaseReleased("the lease of this hit has ended" if self._ended else "the hit has not been entered")
        return self._claim

    def _held(self) -> Claim:
        """Return the claim if the daemon still holds the lease, or there never was one."""
        claim = self._live()
        if claim.handle is not None and claim.handle.connection.is_over:
            raise StaleHandle(f"the daemon that gave this lease is gone: {claim.handle.connection.reason}")
        return claim

    # --- what was found ---------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """How many leading tokens the lease covers: what was promised, and after `ready` what is readable."""
        self._live()
        return self._blocks * self._spec.block_size

    @property
    def tiers(self) -> Mapping[Tier, int]:
        """Where the tokens were found at match, by tier, the fastest first."""
        return self._live().tiers

    @property
    def number(self) -> int | None:
        """The lease's number, for a client that joined this one (`shared_hit`); None without a lease."""
        return self._live().lease

    @property
    def spec(self) -> KVSpec:
        """The layout of the KV."""
        return self._spec

    @property
    def claim(self) -> Claim:
        """The claim, for who writes after it."""
        return self._live()

    @property
    def blocks(self) -> int:
        """How many blocks are kept."""
        return self._blocks

    @property
    def policy(self) -> PrefetchPolicy | None:
        """How long `ready` waits; None when it has been said what is readable."""
        return None if self._settled else self._policy

    @property
    def is_in_place(self) -> bool:
        """Whether the daemon has been told that the blocks are read in place."""
        return self._claim is not None and self._claim.in_place

    def take(self, tokens: int) -> int:
        """Keep the first `tokens` tokens, rounded down to whole blocks; return how many that are. Raises InvalidInput."""
        claim = self._live()
        self._keep(claim, integer(tokens, 0, sys.maxsize, "tokens") // self._spec.block_size)
        return self._blocks * self._spec.block_size

    def _keep(self, claim: Claim, blocks: int) -> None:
        self._blocks = min(blocks, self._blocks)
        if claim.sharing.users == 1:
            claim.shorten(self._blocks)

    # --- reading ----------------------------------------------------------------------------------------------------------

    async def ready(self, within: object = None) -> int:
        """Wait until what can be in memory is there; return how many leading tokens are readable.

        `within` is how long the daemon may wait: `wait`, `best-effort` or seconds; None: as the match said. Fewer than `tokens`
        when a block was not there by then, could not be read, failed its check, or found no room; 0 when the daemon is gone or
        does not say. The hit is shortened to them: what is on its way goes on, but is another hit's. What the first call has said
        holds for all later ones. Raises InvalidInput for a `within` that can't be.
        """
        claim = self._live()
        policy = self._policy if within is None else PrefetchPolicy.of(within, "within")
        if not self._settled:
            await claim.settled(policy)
            claim = self._live()
        if not self._settled:
            self._settled = True
            self._gave_up = policy.seconds is not None and claim.readable < self._blocks
            self._keep(claim, claim.readable)
        return min(claim.readable, self._blocks) * self._spec.block_size if claim.gone is None else 0

    async def gather(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the readable KV, `[layers, parts, tokens, kv_heads, head_dim]`: one copy, each block verified as it is copied.

        `out`, if given, has room for at least the readable tokens, and each layer's tokens contiguous; what is returned is its
        leading part. A block that fails its check, or whose slot was given to another one while it was copied, is left out with
        what follows it. Raises StaleHandle when the daemon is gone.
        """
        spec = self._spec
        self._held()
        await self.ready()
        claim = self._held()
        claim.copied()
        places = self._places(claim) if claim.gone is None else ()
        tokens = len(places) * spec.block_size
        out = tensors.empty(spec, tokens) if out is None else tensors.require_out(out, spec, tokens)
        planes = tensors.planes_for_writing(out, spec)
        good = 0
        if places:
            good, reason = await self._house.finishing.outlast(_copying(claim).gather(places, planes, _grip(claim)))
            self._house.counts.read += good * spec.block_bytes
            if reason is not None:
                self.cut(claim, good, reason)
        return out[:, :, : good * spec.block_size]

    async def layer(self, layer: int, out: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Return K and V of one layer, each `[tokens, kv_heads, head_dim]`, in tensors of the caller's own; latent: one.

        Waits as `ready` does, and then until that layer of all blocks can be read, not for later layers. Blocks are checked once a
        hit. `out`, if given, is `[parts, tokens, kv_heads, head_dim]`, with room for at least the readable tokens and those of each
        part contiguous; what is returned is its leading part. Raises InvalidInput for a layer that the model does not have,
        InvalidTensor, StaleHandle when the daemon is gone, LeaseLost when a slot was given to another block meanwhile.
        """
        spec = self._spec
        self._held()
        self._require_layer(layer)
        places = await self._checked()
        claim = self._held()
        claim.copied()
        if not self._gave_up:
            await claim.arrival(layer)
            claim = self._held()
        one = tensors.one_layer(spec)
        whole = tensors.layer_out(out, one, len(places) * spec.block_size)
        if places:
            into = tensors.planes_for_writing(whole, one)
            copy = _copying(claim).layer(places, layer, into, _grip(claim))
            try:
                there = await (copy if out is None else self._house.finishing.outlast(copy))
            except StoreError as error:
                self.cut(claim, 0, copies.fault_of(error))
            else:
                if not there:
                    raise self._lost(claim)
                self._house.counts.read += into.nbytes
        # Nothing verifies this copy: what was released or given up while the thread ran may hold another block's bytes.
        self._live()
        return tuple(whole[0, :, : self._blocks * spec.block_size])

    def view(self, block: int, layer: int) -> tuple[torch.Tensor, ...]:
        """Return K and V of one layer of block number `block` in place, each `[block_size, kv_heads, head_dim]`.

        Only of what `ready` said. Not to be written: the memory is mapped read-only. The tensors own their lease: it ends when
        they and the hit are gone. Raises InvalidInput for a block that is not readable, StaleHandle when the daemon is gone,
        LeaseLost when the lease ended without the reader's doing.
        """
        spec, claim = self._spec, self._held()
        self._require_layer(layer)
        integer(block, 0, min(claim.readable, self._blocks) - 1, "block")
        place, grip = claim.place(block), _grip(claim)
        claim.read_in_place()
        arena = claim.arenas[place.position]
        if isinstance(arena, DeviceSlots):
            claim.note(arena)
            seen = tuple(arena.in_place(place.slot, spec, grip)[layer])
        else:
            planes = arena.in_place(place.slot, layer * spec.parts, (layer + 1) * spec.parts, grip)
            seen = tensors.parts_of(planes, spec)
        if claim.gone is not None or not copies.is_there(claim.arenas, place):
            raise self._lost(claim)
        return seen

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _places(self, claim: Claim) -> Sequence[wire.Place]:
        return claim.places[: self._blocks]

    def _require_layer(self, layer: int) -> None:
        integer(layer, 0, self._spec.layers - 1, "layer")

    def cut(self, claim: Claim, good: int, reason: str) -> None:
        """Shorten the hit to what is good, for a reason that is counted."""
        claim.cut(good, reason)
        self._blocks = min(self._blocks, good)

    def _lost(self, claim: Claim) -> LeaseLost:
        self._house.counts.missed(copies.LOST, claim.gone or "")
        return LeaseLost(f"the lease ended while it was read: {claim.gone or 'a slot was given to another block'}")

    async def _checked(self) -> Sequence[wire.Place]:
        """Return the places of the hit's blocks that are sound; each is checked once a hit."""
        await self.ready()
        claim = self._held()
        async with claim.lock:
            places = self._places(claim) if claim.gone is None else ()
            rest = places[claim.verified :]
            if rest:
                good, reason = await _copying(claim).verify(rest, _grip(claim))
                claim.verified += good
                if reason is not None:
                    self.cut(claim, claim.verified, reason)
            return places[: claim.verified]


def _copying(claim: Claim) -> Copying:
    assert claim.handle is not None, "without a session there are no places"
    return claim.handle.copying


def _grip(claim: Claim) -> Grip:
    assert claim.grip is not None, "a live claim has one"
    return claim.grip
