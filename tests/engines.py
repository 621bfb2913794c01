"""An engine's KV memory in any layout, seen as blocks by torch's own means."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tests.oracle import oracle_kv
from tiercache.kernels.host import Bytes
from tiercache.spec import KVSpec, Namespace
from tiercache.storage.engine_memory import LATENT_LAYOUTS, LAYOUTS

POISON = 0xD7
_CANONICAL = ("block", "kv", "token", "head", "dim")


def layouts(spec: KVSpec) -> Sequence[str]:
    """Return the layouts that an engine may have for the KV."""
    return LATENT_LAYOUTS if spec.latent else LAYOUTS


class Engine:
    """One tensor a layer, poisoned. `order` says how the axes lie in memory, first to last; None: as they are named.

    With `together` all layers are parts of one allocation.
    """

    def __init__(
        self, spec: KVSpec, blocks: int, layout: str, *, order: Sequence[str] | None = None, together: bool = False
    ) -> None:
        self.spec = spec
        self.blocks = blocks
        self.layout = layout
        self.names = layout.replace("(kv dim)", "packed").split()
        sizes = {
            "block": blocks,
            "kv": spec.parts,
            "token": spec.block_size,
            "head": spec.kv_heads,
            "dim": spec.head_dim,
            "packed": spec.parts * spec.head_dim,
        }
        order = self.names if order is None else order
        shape = [sizes[name] for name in order]
        dtype: torch.dtype = getattr(torch, spec.dtype)
        count = spec.layers if together else 1
        self.tensors: list[torch.Tensor] = []
        for _ in range(spec.layers // count):
            raw = torch.full((count * int(np.prod(shape)) * dtype.itemsize,), POISON, dtype=torch.uint8)
            for layer in raw.view(dtype).reshape(count, *shape):
                self.tensors.append(layer.permute([order.index(name) for name in self.names]))

    def block(self, number: int) -> Bytes:
        """Return what lies in a block, as a tier keeps it: `[planes, unit_bytes]`."""
        found = [
            self._canonical(layer)[number].contiguous().view(torch.uint8).reshape(self.spec.parts, -1) for layer in self.tensors
        ]
        return np.concatenate([layer.numpy() for layer in found])

    def write(self, number: int, planes: Bytes) -> None:
        """Put a block there."""
        spec = self.spec
        dtype: torch.dtype = getattr(torch, spec.dtype)
        whole = torch.from_numpy(planes.reshape(-1).copy()).view(dtype)
        whole = whole.reshape(spec.layers, spec.parts, spec.block_size, spec.kv_heads, spec.head_dim)
        for tensor, layer in zip(self.tensors, whole, strict=True):
            self._canonical(tensor)[number].copy_(layer)

    def compute(self, tokens: Sequence[int], block_ids: Sequence[int], *, space: Namespace, start: int = 0) -> None:
        """Put the oracle's KV of `tokens[start:]` into blocks, whole blocks only."""
        first = start // self.spec.block_size
        for place, number in enumerate(block_ids, first):
            self.write(number, truth(self.spec, space, tokens, place))

    def holds(self, tokens: Sequence[int], block_ids: Sequence[int], *, space: Namespace, start: int = 0) -> bool:
        """Return whether blocks are the oracle's KV of `tokens[start:]`, byte for byte."""
        first = start // self.spec.block_size
        return all(
            np.array_equal(self.block(number), truth(self.spec, space, tokens, place))
            for place, number in enumerate(block_ids, first)
        )

    def untouched(self, but: Sequence[int] = ()) -> bool:
        """Return whether all blocks but some are as they were made."""
        return all((self.block(number) == POISON).all() for number in range(self.blocks) if number not in but)

    def _canonical(self, layer: torch.Tensor) -> torch.Tensor:
        names = list(self.names)
        if "packed" in names:
            layer = torch.unflatten(layer, names.index("packed"), (self.spec.parts, self.spec.head_dim))
            names[names.index("packed") :] = ["kv", "dim"]
        for missing in [name for name in _CANONICAL if name not in names]:
            layer, names = layer.unsqueeze(0), [missing, *names]
        return layer.permute([names.index(name) for name in _CANONICAL])


def truth(spec: KVSpec, space: Namespace, tokens: Sequence[int], place: int) -> Bytes:
    """Return what block number `place` of a prompt holds."""
    unit = spec.geometry.unit_bytes
    whole = oracle_kv(space, spec, list(tokens[: (place + 1) * spec.block_size]))
    return whole[:, place * unit : (place + 1) * unit]
