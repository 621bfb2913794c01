"""A hit in one process: a lease, the promotion it started, and copies out of slots."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tiercache.checks import hashable, integer
from tiercache.errors import LeaseReleased, StoreError
from tiercache.leases import Lease
from tiercache.prefetch import PrefetchPolicy
from tiercache.service import tensors
from tiercache.service.desk import Claim, Desk
from tiercache.service.sides import DeviceSide, HostSide, Side
from tiercache.storage.reader import Place
from tiercache.types import Tier

if TYPE_CHECKING:
    import torch


class Hit:
    """A lease on the longest cached prefix; `async with kv.match(tokens) as hit` takes and releases it.

    After its end every method raises LeaseReleased.
    """

    def __init__(self, desk: Desk, key: bytes, request: Any, policy: PrefetchPolicy) -> None:
        hashable(request, "request")
        self._desk = desk
        self._key = key
        self._request = request
        self._policy = policy
        self._claim: Claim | None = None
        self._tokens = 0
        self._settled = False
        self._ended = False
        self._streams = desk.stack.streams
        self._use = None if self._streams is None else self._streams.use()

    # --- lifetime ---------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Find the prefix, take the lease and begin the promotion, in one step."""
        self._enter()
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        """Take the lease without a block; `release` ends it."""
        return self.__aenter__().__await__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the lease."""
        if not self._ended:
            self._leave()

    async def release(self) -> None:
        """End the lease. Raises LeaseReleased when it has ended."""
        self._live()
        self._leave()

    def _enter(self) -> None:
        if self._claim is not None:
            raise LeaseReleased("a hit can be entered only once")
        self._claim = self._desk.match(self._key, self._request)
        self._tokens = self._claim.lease.blocks * self._desk.spec.block_size

    def _leave(self) -> None:
        claim = self._claim
        assert claim is not None
        self._ended = True
        if self._use is None:
            self._desk.leave(claim)
        else:
            self._use.end(partial(self._desk.leave, claim))

    def _live(self) -> Claim:
        if self._claim is None or self._ended or self._claim.lease.released:
            raise LeaseReleased("the lease of this hit has ended" if self._claim else "the hit has not been entered")
        return self._claim

    # --- what was found ---------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """How many leading tokens the lease covers: what was promised, and after `ready` what is readable."""
        self._live()
        return self._tokens

    @property
    def tiers(self) -> Mapping[Tier, int]:
        """Where the tokens were found at match, by tier, the fastest first."""
        return {tier: blocks * self._desk.spec.block_size for tier, blocks in self._live().tiers.items()}

    @property
    def lease(self) -> Lease:
        """The lease, for who writes after it."""
        return self._live().lease

    def take(self, tokens: int) -> int:
        """Keep the first `tokens` tokens, rounded down to whole blocks; return how many that are. Raises InvalidInput."""
        claim = self._live()
        self._keep(claim, integer(tokens, 0, sys.maxsize, "tokens") // self._desk.spec.block_size)
        return self._tokens

    def _keep(self, claim: Claim, blocks: int) -> None:
        size = self._desk.spec.block_size
        blocks = min(blocks, self._tokens // size)
        if claim.users == 1 and not (self._use is not None and self._use.begun):  # else a stream may still read what is given up
            self._desk.stack.cache.shorten(claim.lease, blocks)
        self._tokens = blocks * size

    # --- reading ----------------------------------------------------------------------------------------------------------

    async def ready(self, within: object = None) -> int:
        """Wait until what can be in memory is there; return how many leading tokens are readable.

        `within` is how long to wait: `wait`, `best-effort` or seconds; None: as the match said. Fewer than `tokens` when a block
        was not there by then, could not be read, failed its check, or found no room. The hit is shortened to them: what is on
        its way goes on, but is another hit's. What the first call has said holds for all later ones. Raises InvalidInput for a
        `within` that can't be.
        """
        claim = self._live()
        policy = self._policy if within is None else PrefetchPolicy.of(within, "within")
        if not self._settled:
            await self._desk.settle(claim, policy)
            claim = self._live()
        if not self._settled:
            self._settled = True
            self._keep(claim, self._desk.stack.readable_blocks(claim.lease))
        size = self._desk.spec.block_size
        return min(self._desk.stack.readable_blocks(claim.lease) * size, self._tokens)

    async def gather(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the readable KV, `[layers, parts, tokens, kv_heads, head_dim]`: one copy, each block verified as it is copied.

        `out`, if given, has room for at least the readable tokens, and each layer's tokens contiguous; what is returned is its
        leading part. Blocks that fail their check, and what follows them, are left out and removed from the cache; what is given
        up with `take` meanwhile is left out, too.

        An `out` on the device is filled on its current stream, the calling thread's: what is enqueued there afterwards finds the
        KV, and nobody waits. Of these blocks those are verified first that lie in memory of the host; a block that lies on the
        device was verified on its way there.
        """
        side = self._side(out)
        spec = self._desk.spec
        await self.ready()
        places = self._places()
        tokens = len(places) * spec.block_size
        out = tensors.empty(spec, tokens) if out is None else tensors.require_out(out, spec, tokens, place=side.place)
        stack = self._desk.stack
        copy = side.gather(self._live().lease, places, out, spec)
        try:
            good = await stack.finishing.outlast(copy()) if places else 0
        except StoreError as error:
            return out[:, :, : self._nothing(error)]
        # Blocks are checked in their slots, after the copy: of what was released or given up meanwhile, other blocks may have been
        # copied, and the right ones may have come back by the check.
        lease, kept = self._live().lease, self._tokens // spec.block_size
        if good < min(len(places), kept):
            stack.distrust(lease, good)
            self._tokens = good * spec.block_size
        return out[:, :, : min(good, kept) * spec.block_size]

    async def layer(self, layer: int, out: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Return K and V of one layer, each `[tokens, kv_heads, head_dim]`, in tensors of the caller's own; latent: one.

        Waits as `ready` does, and for no way further up: a block is read wherever it lies. Blocks are checked once a hit. `out`,
        if given, is `[parts, tokens, kv_heads, head_dim]`, with room for at least the readable tokens and those of each part
        contiguous; what is returned is its leading part. On the device it is filled as `gather` does, on its current stream. Raises
        InvalidInput for a layer that the model does not have, and InvalidTensor.
        """
        side = self._side(out)
        spec, claim = self._desk.spec, self._live()
        self._require_layer(layer)
        await self.ready()
        places = await self._checked(claim, side)
        whole = tensors.layer_out(out, tensors.one_layer(spec), len(places) * spec.block_size, place=side.place)
        stack = self._desk.stack
        if places:
            copy = side.layer(claim.lease, places, layer, whole, spec)()
            try:
                await (copy if out is None else stack.finishing.outlast(copy))
            except StoreError as error:
                self._nothing(error)
        # Nothing verifies this copy: what was released or given up while the thread ran may hold another block's bytes.
        self._live()
        return tuple(whole[0, :, : self._tokens])

    def view(self, block: int, layer: int) -> tuple[torch.Tensor, ...]:
        """Return K and V of one layer of block number `block` in place, each `[block_size, kv_heads, head_dim]`.

        Not to be written, and valid until the lease ends. A block on the device is a tensor there, to be read on the stream that is
        current now or at the hit's end: the lease outlasts what is enqueued on them by then. Raises InvalidInput for a block that
        is not readable (see `ready`).
        """
        spec = self._desk.spec
        self._require_layer(layer)
        places = self._places()
        integer(block, 0, len(places) - 1, "block")
        if self._use is not None:
            self._use.here()
        planes = self._desk.stack.reader.view(places[block])[layer * spec.parts : (layer + 1) * spec.parts]
        return tensors.parts_of(planes, spec)

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _places(self) -> list[Place]:
        claim = self._live()
        return self._desk.stack.readable(claim.lease)[: self._tokens // self._desk.spec.block_size]

    def _side(self, out: Any) -> Side:
        """Return the side that `out` lies on; the host's for None."""
        if self._use is None or self._streams is None or out is None or not self._streams.tensors.holds(out):
            return HostSide(self._desk.stack.reader)
        return DeviceSide(self._streams, self._use, self._streams.tensors.runner())

    def _require_layer(self, layer: int) -> None:
        integer(layer, 0, self._desk.spec.layers - 1, "layer")

    def _nothing(self, error: StoreError) -> int:
        """Make this hit one of no tokens, and return that: a thread died, or a device fails, and left what is not to be trusted."""
        self._desk.stack.failed(error)
        self._tokens = 0
        return 0

    async def _checked(self, claim: Claim, side: Side) -> list[Place]:
        """Return the places of the hit's blocks that are sound; each is checked once a hit, and once for each side."""
        async with claim.lock:
            places = self._places()
            known = claim.verified.get(side.place, 0)
            rest = places[known:]
            if rest:
                try:
                    known += await side.check(rest)
                except StoreError as error:
                    self._nothing(error)
                    return []
                self._live()  # else the slots were perhaps another block's when they were looked at
                claim.verified[side.place] = known
                if known < len(places):
                    self._desk.stack.distrust(claim.lease, known)
                    self._tokens = min(self._tokens, known * self._desk.spec.block_size)
            return places[:known]
