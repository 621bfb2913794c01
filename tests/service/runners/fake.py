"""A cache in a dictionary, with the face that a runner uses, and ways to make it fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import torch

from tiercache.errors import TierCacheError
from tiercache.leases import Refusal
from tiercache.service.face import Stored
from tiercache.types import Tier


class FakeHit:
    """What is ready, and what of it is good, may be less than what is promised: the cache says."""

    def __init__(self, cache: FakeKV, blocks: list[torch.Tensor]) -> None:
        self._cache = cache
        self._blocks = blocks

    @property
    def tokens(self) -> int:
        return len(self._blocks) * self._cache.block_size

    @property
    def tiers(self) -> Mapping[Tier, int]:
        fast = min(self.tokens, self._cache.fast_tokens)
        return {tier: count for tier, count in ((Tier.SSD, self.tokens - fast), (Tier.HBM, fast)) if count}

    async def ready(self, within: object = None) -> int:
        self._cache.patience.append(within)
        self._cache.called("ready")
        return min(self.tokens, self._cache.ready_tokens)

    async def gather(self, out: torch.Tensor | None = None) -> torch.Tensor:
        cache = self._cache
        blocks = self._blocks[: min(self.tokens, cache.ready_tokens, cache.good_tokens) // cache.block_size]
        if "gather" in cache.failures and out is not None:
            out.fill_(float("nan"))  # a copy that fails leaves anything behind
        cache.called("gather")
        if out is None or cache.own_tensors:
            return torch.cat([self._blocks[0][:, :, :0], *blocks], dim=2)
        for i, block in enumerate(blocks):
            out[:, :, i * cache.block_size : (i + 1) * cache.block_size] = block
        return out[:, :, : len(blocks) * cache.block_size]

    async def layer(self, layer: int, out: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        cache = self._cache
        gate = cache.gates.get(layer)
        if gate is not None:
            await gate.wait()
        count = min(self.tokens, cache.ready_tokens, cache.good_tokens, cache.good_in_layer.get(layer, 1 << 30))
        blocks = self._blocks[: count // cache.block_size]
        if {"layer", f"layer {layer}"} & cache.failures.keys() and out is not None:
            out.fill_(float("nan"))  # a copy that fails leaves anything behind
        cache.called("layer")
        cache.called(f"layer {layer}")
        if out is None or cache.own_tensors:
            return tuple(torch.cat([self._blocks[0][layer, :, :0], *(block[layer] for block in blocks)], dim=1))
        for i, block in enumerate(blocks):
            out[:, i * cache.block_size : (i + 1) * cache.block_size] = block[layer]
        return tuple(out[:, :count])


class FakeKV:
    """Keeps the KV of each block under the tokens up to the block's end."""

    def __init__(self, block_size: int = 4) -> None:
        self.block_size = block_size
        self.blocks: dict[tuple[int, ...], torch.Tensor] = {}
        self.failures: dict[str, Callable[[], TierCacheError]] = {}
        self.calls: Counter[str] = Counter()
        self.inserts: list[tuple[int, Stored]] = []
        self.leases = 0
        self.gates: dict[int, asyncio.Event] = {}
        """What a layer's copy waits for."""
        self.good_in_layer: dict[int, int] = {}
        self.patience: list[object] = []
        self.ready_tokens = self.good_tokens = self.fast_tokens = 1 << 30
        self.own_tensors = False

    def called(self, call: str) -> None:
        self.calls[call] += 1
        if call in self.failures:
            raise self.failures[call]()

    @contextlib.asynccontextmanager
    async def match(self, tokens: Sequence[int]) -> AsyncIterator[FakeHit]:
        self.called("match")
        self.leases += 1
        try:
            yield FakeHit(self, [self.blocks[key] for key in self._cached(tokens)])
            self.called("release")
        finally:
            self.leases -= 1

    async def insert(self, tokens: Sequence[int], tensor: torch.Tensor, *, start: int) -> Stored:
        self.called("insert")
        assert self.leases or start == 0, "an insert after a hit happens under its lease"
        assert tensor.shape[1:3] == (2, len(tokens) - start)
        assert start % self.block_size == 0
        if start > len(self._cached(tokens)) * self.block_size:
            return Stored(0, 0, len(tokens) // self.block_size * self.block_size - start, Refusal.DROPPED)
        new = present = 0
        for end in range(start + self.block_size, len(tokens) + 1, self.block_size):
            key = tuple(tokens[:end])
            if key in self.blocks:
                present += self.block_size
            else:
                self.blocks[key] = tensor[:, :, end - self.block_size - start : end - start].clone()
                new += self.block_size
        self.inserts.append((start, Stored(new, present, 0)))
        return self.inserts[-1][1]

    def _cached(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        keys = []
        for end in ends:
            if (key := tuple(tokens[:end])) not in self.blocks:
                break
            keys.append(key)
        return keys
