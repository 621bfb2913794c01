"""A hit in one process: a lease, the promotion it started, and copies out of slots."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tiercache.checks import hashable, integer
from tiercache.errors import LeaseReleased, StoreError
from tiercache.leases import Lease
from tiercache.prefetch import PrefetchPolicy
from tiercache.service import tensors
from tiercache.service.desk import Claim, Desk
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
        self._desk.leave(claim)

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
        if claim.users == 1:
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
        """
        spec = self._desk.spec
        await self.ready()
        places = self._places()
        tokens = len(places) * spec.block_size
        out = tensors.empty(spec, tokens) if out is None else tensors.require_out(out, spec, tokens)
        planes = tensors.planes_for_writing(out, spec)
        stack = self._desk.stack
        try:
            good = await stack.finishing.outlast(stack.reader.gather(places, planes)) if places else 0
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
        contiguous; what is returned is its leading part. Raises InvalidInput for a layer that the model does not have, and
        InvalidTensor.
        """
        spec, claim = self._desk.spec, self._live()
        self._require_layer(layer)
        await self.ready()
        places = await self._checked(claim)
        one = tensors.one_layer(spec)
        whole = tensors.layer_out(out, one, len(places) * spec.block_size)
        stack = self._desk.stack
        if places:
            copy = stack.reader.layer(places, layer, tensors.planes_for_writing(whole, one))
            try:
                await (copy if out is None else stack.finishing.outlast(copy))
            except StoreError as error:
                self._nothing(error)
        # Nothing verifies this copy: what was released or given up while the thread ran may hold another block's bytes.
        self._live()
        return tuple(whole[0, :, : self._tokens])

    def view(self, block: int, layer: int) -> tuple[torch.Tensor, ...]:
        """Return K and V of one layer of block number `block` in place, each `[block_size, kv_heads, head_dim]`.

        Not to be written, and valid until the lease ends. Raises InvalidInput for a block that is not readable (see `ready`).
        """
        spec = self._desk.spec
        self._require_layer(layer)
        places = self._places()
        integer(block, 0, len(places) - 1, "block")
        planes = self._desk.stack.reader.view(places[block])[layer * spec.parts : (layer + 1) * spec.parts]
        return tensors.parts_of(planes, spec)

    # --- inside -----------------------------------------------------------------------------------------------------------

    def _places(self) -> list[Place]:
        claim = self._live()
        return self._desk.stack.readable(claim.lease)[: self._tokens // self._desk.spec.block_size]

    def _require_layer(self, layer: int) -> None:
        integer(layer, 0, self._desk.spec.layers - 1, "layer")

    def _nothing(self, error: StoreError) -> int:
        """Make this hit one of no tokens, and return that: a thread died, or a device fails, and left what is not to be trusted."""
        self._desk.stack.failed(error)
        self._tokens = 0
        return 0

    async def _checked(self, claim: Claim) -> list[Place]:
        """Return the places of the hit's blocks that are sound; each is checked once a hit."""
        async with claim.lock:
            places = self._places()
            rest = places[claim.verified :]
            if rest:
                try:
                    claim.verified += await self._desk.stack.reader.verify(rest)
                except StoreError as error:
                    self._nothing(error)
                    return []
                self._live()  # else the slots were perhaps another block's when they were looked at
                if claim.verified < len(places):
                    self._desk.stack.distrust(claim.lease, claim.verified)
                    self._tokens = min(self._tokens, claim.verified * self._desk.spec.block_size)
            return places[: claim.verified]
