"""What a generation gives: all at once, or token by token."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from tiercache.errors import InvalidInput
from tiercache.service.face import Stored
from tiercache.types import Tier


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Generation:
    """What one prompt gave, and what it cost."""

    tokens: list[int]
    """The new tokens; the last one is the stop token if one came up."""
    text: str
    """The new tokens decoded, without special tokens."""
    first_logits: torch.Tensor
    """`[vocabulary]`: the model's logits for the first new token."""
    hit: dict[Tier, int]
    """Prompt tokens whose KV came from the cache, by tier."""
    computed: int
    """Prompt tokens whose KV was computed."""
    first_token_seconds: float
    """From the call to the first new token."""
    seconds: float
    """From the call to the end, insert included."""
    inserted: Stored | None
    """What became of the KV afterwards; None without a cache or when it failed."""

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens whose KV came from the cache."""
        return sum(self.hit.values())


class Stream:
    """New tokens as they come: `async for token in stream`; after the last, `generation` tells the rest.

    Closing it early (`aclose`, or leaving `async with`) inserts what was computed and ends the lease; a reader that may stop
    early enters it, or the lease lasts until the garbage collector comes by.
    """

    def __init__(self, start: Callable[[Stream], AsyncGenerator[int, None]]) -> None:
        self._generation: Generation | None = None
        self._tokens = start(self)

    @property
    def generation(self) -> Generation:
        """What the stream gave and what it cost; raises InvalidInput before the end."""
        if self._generation is None:
            raise InvalidInput("the stream has not ended")
        return self._generation

    def finish(self, generation: Generation) -> None:
        """Take what the whole stream gave."""
        self._generation = generation

    def __aiter__(self) -> AsyncIterator[int]:
        return self

    async def __anext__(self) -> int:
        return await anext(self._tokens)

    async def aclose(self) -> None:
        """End the stream where it is."""
        await self._tokens.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()
