"""What is measured side by side: the calls of one prompt on our face, and the same calls of an engine beside LMCache."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from tiercache.bench.peer_link import CHUNKS, SEED, Peer
from tiercache.service.face import KV
from tiercache.spec import KVSpec
from tiercache.types import Tier

PAGE = 16
"""Tokens of one block of an engine's own memory."""


class Prompt:
    """The KV of one prompt, where it comes back to, and the same as an engine's pages; every prompt has the same bytes.

    The bytes are made as the engine beside LMCache makes them, so that digests can be compared.
    """

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec
        self.tokens = CHUNKS * spec.block_size
        width = spec.kv_heads * spec.head_dim
        words = np.random.default_rng(SEED).integers(0, 30_000, (2, spec.layers, self.tokens, width), dtype=np.uint16)
        whole = torch.from_numpy(words.view(np.float16)).view(2, spec.layers, self.tokens, spec.kv_heads, spec.head_dim)
        self.kv = whole.transpose(0, 1).contiguous()
        self.back = torch.zeros_like(self.kv)
        self.pages = [self._paged(layer).contiguous() for layer in self.kv]
        self.bytes = words.nbytes
        self.digest = hashlib.sha256(words.tobytes()).hexdigest()

    def returned(self) -> str:
        """Return the digest of what came back, and forget it."""
        found = hashlib.sha256(self.back.transpose(0, 1).contiguous().view(torch.int16).numpy().tobytes()).hexdigest()
        self.back.zero_()
        return found

    def write(self, block: torch.Tensor, number: int) -> None:
        """Fill block `number` from the engine's pages."""
        for layer, here in zip(block, self.pages, strict=True):
            self._paged(layer).copy_(self._part(here, number))

    def read(self, parts: Sequence[torch.Tensor], number: int, layer: int) -> None:
        """Fill the engine's pages from K and V of one layer of block `number`."""
        for part, here in zip(parts, self._part(self.pages[layer], number), strict=True):
            here.copy_(self._paged(part[None])[0])

    def unpage(self) -> None:
        """Copy the engine's pages to `back`."""
        for layer, here in zip(self.back, self.pages, strict=True):
            self._paged(layer).copy_(here)

    def _part(self, pages: torch.Tensor, number: int) -> torch.Tensor:
        count = self.spec.block_size // PAGE
        return pages[:, number * count : (number + 1) * count]

    def _paged(self, layer: torch.Tensor) -> torch.Tensor:
        """Return `[parts, tokens, kv_heads, head_dim]` as an engine's pages, `[parts, pages, kv_heads, PAGE, head_dim]`."""
        parts, tokens, heads, head_dim = layer.shape
        return layer.view(parts, tokens // PAGE, PAGE, heads, head_dim).transpose(2, 3)


class Side(Protocol):
    """One cache and one way to it. Each call on prompt `number` returns the seconds that it took."""

    async def store(self, number: int) -> float:
        """Store the prompt."""
        ...

    async def retrieve(self, number: int) -> float:
        """Bring it back."""
        ...

    async def readable(self, number: int) -> float:
        """Find it, to be read where it lies."""
        ...

    async def lookup(self, number: int) -> float:
        """Ask how much of it is there."""
        ...

    async def digest(self, number: int) -> str:
        """Return the digest of its bytes, retrieved."""
        ...

    async def clear(self) -> None:
        """Forget all prompts that are in memory."""
        ...


class Ours:
    """Our face, copying a tensor of the whole prompt.

    `flushed` waits until what is stored is durable, too. `found_in` are the tiers that what is retrieved must have been found in.
    """

    def __init__(self, kv: KV, prompt: Prompt, *, flushed: bool = False, found_in: set[Tier] | None = None) -> None:
        self._kv = kv
        self._prompt = prompt
        self._flushed = flushed
        self._found_in = found_in

    async def store(self, number: int) -> float:
        """Store the prompt."""
        tokens = self._tokens(number)
        began = time.perf_counter()
        stored = await self._kv.insert(tokens, self._prompt.kv)
        durable = await self._kv.flush(tokens) if self._flushed else len(tokens)
        took = time.perf_counter() - began
        assert stored.stored == durable == len(tokens), f"{stored}, of which {durable} tokens are durable"
        return took

    async def retrieve(self, number: int) -> float:
        """Bring it back."""
        tokens = self._tokens(number)
        began = time.perf_counter()
        async with self._kv.match(tokens) as hit:
            found = await hit.gather(self._prompt.back)
            tiers = set(hit.tiers)
        took = time.perf_counter() - began
        assert self._found_in is None or tiers == self._found_in, f"prompt {number} was found in {tiers}"
        assert found.shape[2] == len(tokens), f"{found.shape[2]} tokens came back"
        return took

    async def readable(self, number: int) -> float:
        """Find it, to be read where it lies."""
        tokens = self._tokens(number)
        began = time.perf_counter()
        async with self._kv.match(tokens) as hit:
            ready = await hit.ready()
            for block in range(CHUNKS):
                hit.view(block, 0)
            took = time.perf_counter() - began
        assert ready == len(tokens)
        return took

    async def lookup(self, number: int) -> float:
        """Ask how much of it is there; the lease is given back in the time."""
        tokens = self._tokens(number)
        began = time.perf_counter()
        async with self._kv.match(tokens) as hit:
            found = hit.tokens
        took = time.perf_counter() - began
        assert found == len(tokens)
        return took

    async def digest(self, number: int) -> str:
        """Return the digest of its bytes, retrieved."""
        await self.retrieve(number)
        return self._prompt.returned()

    async def clear(self) -> None:
        """Forget all prompts."""
        await self._kv.clear()

    def _tokens(self, number: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.arange(self._prompt.tokens, dtype=np.int32) + (number << 16)


class Paged(Ours):
    """Our face in place: an engine's pages are copied to and from the blocks where they lie, without a tensor in between."""

    async def store(self, number: int) -> float:
        """Store the prompt."""
        tokens = self._tokens(number)
        began = time.perf_counter()
        async with self._kv.reserve(tokens) as room:
            for place, block in enumerate(room.blocks):
                self._prompt.write(block, place)
            stored = await room.commit(len(tokens))
        took = time.perf_counter() - began
        assert stored == len(tokens)
        return took

    async def retrieve(self, number: int) -> float:
        """Bring it back."""
        tokens = self._tokens(number)
        began = time.perf_counter()
        async with self._kv.match(tokens) as hit:
            ready = await hit.ready()
            for block in range(ready // self._prompt.spec.block_size):
                for layer in range(self._prompt.spec.layers):
                    self._prompt.read(hit.view(block, layer), block, layer)
        took = time.perf_counter() - began
        assert ready == len(tokens)
        return took

    async def digest(self, number: int) -> str:
        """Return the digest of its bytes, retrieved."""
        for page in self._prompt.pages:
            page.zero_()
        await self.retrieve(number)
        self._prompt.unpage()
        return self._prompt.returned()


class Theirs:
    """An engine beside LMCache."""

    def __init__(self, peer: Peer, way: str) -> None:
        self._peer = peer
        self._way = way

    async def store(self, number: int) -> float:
        """Store the prompt."""
        return float(self._peer.call("store", number, self._way))

    async def retrieve(self, number: int) -> float:
        """Bring it back."""
        return float(self._peer.call("retrieve", number, self._way))

    async def readable(self, number: int) -> float:
        """Find it, to be read where it lies."""
        return float(self._peer.call("readable", number, self._way))

    async def lookup(self, number: int) -> float:
        """Ask how much of it is there."""
        return float(self._peer.call("lookup", number, self._way))

    async def digest(self, number: int) -> str:
        """Return the digest of its bytes, retrieved."""
        return str(self._peer.call("digest", number, self._way))

    async def clear(self) -> None:
        """Forget all prompts that are in memory."""
        self._peer.call("clear")


def memcpy(prompt: Prompt) -> float:
    """Return the seconds of one copy of the prompt's bytes, in one thread."""
    there, here = prompt.back.view(torch.int16).numpy(), prompt.kv.view(torch.int16).numpy()
    began = time.perf_counter()
    np.copyto(there, here)
    return time.perf_counter() - began


async def same(sides: Iterable[Side], prompt: Prompt, numbers: Iterator[int]) -> None:
    """Store one prompt on each side and require that each gives back its bytes. Raises AssertionError."""
    for side in sides:
        number = next(numbers)
        await side.store(number)
        found = await side.digest(number)
        assert found == prompt.digest, f"{side} gave other bytes back than were stored"
