"""A request's dealings with the cache, of which nothing may go wrong: what the cache can't do is a miss."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

import torch

from tiercache.errors import InvalidInput, LeaseLost
from tiercache.prefetch import PrefetchPolicy
from tiercache.service.face import Stored
from tiercache.service.runners.layers import Arriving
from tiercache.types import Tier

log = logging.getLogger(__name__)

_AT_ONCE = 2
"""Copies under way: while one is being asked for, the other is being made."""


class Hit(Protocol):
    """The part of `tiercache.service.face.Hit` that a runner needs."""

    @property
    def tokens(self) -> int:
        """Tokens that were promised."""

    @property
    def tiers(self) -> Mapping[Tier, int]:
        """Tokens that were promised, by tier."""

    async def ready(self, within: object = None) -> int:
        """Return how many leading tokens are readable."""

    async def gather(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the readable KV, of fewer tokens where a block turned out bad: the leading part of `out`, in its first tokens.

        `out` has room for what was promised; only its `[tokens, kv_heads, head_dim]` of each part is contiguous.
        """

    async def layer(self, layer: int, out: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Return K and V of one layer of the readable tokens, of fewer where a block turned out bad: the leading part of `out`.

        `out` has room for what was promised; only its `[tokens, kv_heads, head_dim]` of each part is contiguous.
        """


class KV(Protocol):
    """The part of `tiercache.service.face.KV` that a runner needs."""

    def match(self, tokens: Sequence[int]) -> contextlib.AbstractAsyncContextManager[Hit]:
        """Return the longest cached prefix of `tokens`, leased while it is entered."""

    async def insert(self, tokens: Sequence[int], tensor: torch.Tensor, *, start: int) -> Stored:
        """Store the KV of `tokens[start:]`, copying it; of `tensor`, too, only the last three dimensions are contiguous."""


class Prefix:
    """One request's hit, its lease, and what is inserted after it; leaving it as an async context manager ends the lease.

    No Exception of the cache leaves it, InvalidInput excepted, which says that the program is wrong: it is counted in
    `faults` under the call and the error's name and logged, and the request computes what the cache did not give.
    """

    def __init__(self, kv: KV | None, tokens: Sequence[int], faults: Counter[str], *, policy: PrefetchPolicy | None = None) -> None:
        self.promised = 0
        """Tokens that the match found."""
        self.loaded = 0
        """Tokens whose KV comes from the cache."""
        self.tiers: dict[Tier, int] = {}
        """Where they came from."""
        self._kv = kv
        self._tokens = tokens
        self._faults = faults
        self._policy = policy
        self._hit: Hit | None = None
        self._lease = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # Not the stack's own __aexit__: an error of the request must leave as it is, and one of the release must not.
        with _Counted(self._faults, "release"):
            await self._lease.aclose()

    async def match(self) -> None:
        """Find the longest cached prefix and lease it."""
        if self._kv is not None:
            with _Counted(self._faults, "match"):
                self._hit = await self._lease.enter_async_context(self._kv.match(self._tokens))
                self.promised = self._hit.tokens

    async def load(self, out: torch.Tensor) -> bool:
        """Copy what is readable into `out`; `loaded` and `tiers` tell how much that is.

        `out` is `[layers, parts, tokens, kv_heads, head_dim]`, with room for all that was promised. Returns False when the copy
        failed. `out` must not be used then: nobody says that a copy into it has ended.
        """
        hit = await self._readable()
        if hit is None:
            return True
        with _Counted(self._faults, "gather"):
            found = await hit.gather(out)
            count = found.shape[2]
            if count and found.data_ptr() != out.data_ptr():
                out[:, :, :count].copy_(found)
            self._count_loaded(hit, count)
            return True
        return False

    async def begin(self, out: torch.Tensor) -> bool:
        """Copy the first layer of what is readable into `out`, as `load` does; the other layers come with `follow`."""
        hit = await self._readable()
        if hit is None:
            return True
        with _Counted(self._faults, "layer"):
            # How many tokens are sound is known with the first layer, and the pass begins behind them.
            self._count_loaded(hit, await _copied(hit, 0, out))
            return True
        return False

    async def follow(self, out: torch.Tensor, arriving: Arriving) -> None:
        """Copy the layers after the first into `out`, and tell `arriving` of each; it is given up when one of them fails.

        A caller that is cancelled leaves when no copy into `out` is under way.
        """
        hit, rest = self._hit, iter(range(1, len(out)))
        assert hit is not None, "a hit was loaded"

        async def bring() -> None:
            try:
                for layer in rest:
                    if arriving.is_over:
                        return
                    if await _copied(hit, layer, out) < self.loaded:
                        raise LeaseLost(f"layer {layer} has fewer tokens than those before it", layer=layer)
                    arriving.arrived(layer)
            except BaseException:
                arriving.give_up()
                raise

        with _Counted(self._faults, "layer"):
            found = await asyncio.gather(*(bring() for _ in range(_AT_ONCE)), return_exceptions=True)
            for error in found:
                if error is not None:
                    raise error

    def forget(self) -> None:
        """Take nothing for loaded: the pass that used it was given up."""
        self.loaded = 0
        self.tiers.clear()

    async def insert(self, tokens: Sequence[int], kv: torch.Tensor) -> Stored | None:
        """Insert the KV of all `tokens`, of which those loaded are in the cache; None when the cache failed or there is none."""
        if self._kv is None:
            return None
        with _Counted(self._faults, "insert"):
            return await self._kv.insert(tokens, kv[:, :, self.loaded :], start=self.loaded)
        return None

    async def _readable(self) -> Hit | None:
        """Wait for what can be read, as long as the policy allows; return the hit if that is anything."""
        if self._hit is None or not self.promised:
            return None
        with _Counted(self._faults, "ready"):
            if await self._hit.ready(self._policy):
                return self._hit
        return None

    def _count_loaded(self, hit: Hit, count: int) -> None:
        self.loaded = count
        for tier, tokens in sorted(hit.tiers.items(), reverse=True):  # a path's tiers only get slower
            if used := min(tokens, count):
                self.tiers[tier] = used
            count -= used


async def _copied(hit: Hit, layer: int, out: torch.Tensor) -> int:
    """Copy one layer to its place in `out`; return of how many tokens."""
    parts = await hit.layer(layer, out=out[layer])
    count = len(parts[0])
    for part, into in zip(parts, out[layer], strict=True):
        if part.data_ptr() != into.data_ptr():
            into[:count].copy_(part)
    return count


class _Counted:
    """Lets no Exception out but InvalidInput; counts the others under the call's name, and logs them.

    Cancellation and the like are no Exception and pass. What is logged says where it happened, not with which values: a
    message of another library may hold token ids.
    """

    def __init__(self, faults: Counter[str], call: str) -> None:
        self._faults = faults
        self._call = call

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        # A bug in the cache is a miss as well; not the runner's own InvalidInput, nor a cancellation, which is no Exception.
        if not isinstance(error, Exception) or isinstance(error, InvalidInput):
            return False
        self._faults[f"{self._call}: {type(error).__name__}"] += 1
        frames = traceback.extract_tb(trace)
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"
        log.warning("%s failed with %s at %s; taken for a miss", self._call, type(error).__name__, place)
        return True
