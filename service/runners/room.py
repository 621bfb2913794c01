"""The memory that a model's attention reads and writes, in the cache's own layout."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from tiercache.service import tensors
from tiercache.service.runners.layers import Arriving
from tiercache.spec import KVSpec


def cache_argument(model: Any) -> str:
    """Return the name under which the model's forward takes its cache: transformers renamed it, one version after another."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class Room:
    """KV of `batch` sequences of equal length, with room for `capacity` tokens: `[batch, layers, 2, capacity, kv_heads, head_dim]`.

    A sequence lies as the cache hands it out and takes it in, so that a hit is gathered straight into it and an insert reads
    straight from it; the model's attention reads it through strided views. Nothing grows: transformers' DynamicCache copies
    all KV of a sequence with each token.

    Memory is touched only as far as it is written.
    """

    def __init__(self, spec: KVSpec, capacity: int, *, batch: int = 1, device: torch.device | str = "cpu") -> None:
        layers, parts, _, heads, width = spec.shape(capacity)
        self.spec = spec
        self.capacity = capacity
        shape = (batch, layers, parts, capacity, heads, width)
        if torch.device(device).type == "cpu":
            self.memory = tensors.new(shape, spec.dtype)
        else:
            self.memory = torch.empty(shape, dtype=getattr(torch, spec.dtype), device=device)
        self.cache: Any = Cache(layers=[RoomLayer(self.memory[:, layer], layer) for layer in range(layers)])

    @property
    def length(self) -> int:
        """Tokens that every layer holds."""
        return int(self.cache.layers[-1].length)

    def kv(self, start: int, stop: int, *, row: int = 0) -> torch.Tensor:
        """Return the KV of tokens `start` to `stop` of one sequence, a view `[layers, 2, tokens, kv_heads, head_dim]`.

        Each `[tokens, kv_heads, head_dim]` of it is contiguous; the whole is not.
        """
        return self.memory[row, :, :, start:stop]

    def resize(self, length: int) -> None:
        """Make the first `length` tokens the valid ones: those of a hit, or to use the memory anew with 0."""
        for layer in self.cache.layers:
            layer.length = length

    def expect(self, arriving: Arriving | None) -> None:
        """Have each layer wait, in the model's thread, until its valid tokens have arrived; None: they all have."""
        for layer in self.cache.layers:
            layer.arriving = arriving

    def repeat(self, batch: int, capacity: int) -> Room:
        """Return a new room in which each of `batch` sequences begins with this one's tokens."""
        other = Room(self.spec, capacity, batch=batch, device=self.memory.device)
        other.memory[:, :, :, : self.length] = self.memory[:, :, :, : self.length]
        other.resize(self.length)
        return other


class RoomLayer(CacheLayerMixin):
    """One layer of a Room, as transformers' attention uses it: `update` takes and gives `[batch, kv_heads, tokens, head_dim]`."""

    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, memory: torch.Tensor, number: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = number
        self.length = 0
        self.arriving: Arriving | None = None
        planes = memory.transpose(-3, -2)  # [batch, 2, kv_heads, capacity, head_dim]
        self.keys, self.values = planes[:, 0], planes[:, 1]
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the room was there first."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the K and V of new tokens; return those of all tokens, as soon as they are there."""
        if self.arriving is not None:
            self.arriving.wait(self.number)
        start = self.length
        stop = start + key_states.shape[-2]
        self.keys[:, :, start:stop] = key_states
        self.values[:, :, start:stop] = value_states
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many tokens a query of `query_length` sees, and the first of them."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return how many tokens are valid."""
        return self.length

    def get_max_length(self) -> int:
        """Return how many tokens fit."""
        return int(self.keys.shape[-2])
