"""The face: what a runner sees, whether the cache is in its process or beside it.

These are Protocols; `tiercache.service.inprocess` has the implementation in one process. Every implementation passes
`tests/service/face_suite.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from tiercache.leases import Refusal
from tiercache.spec import KVSpec, Namespace
from tiercache.types import Tier

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import torch


class _Counts(NamedTuple):
    stored: int
    present: int
    refused: int


class Stored(_Counts):
    """What became of an insert, in tokens of whole blocks: `stored` now, `present` already, and `refused`.

    Together they are the whole blocks that were given. Those that are refused are not cached when the call returns, and come
    after all others; `refused_because` says why, and is None where there are none. It is no part of the tuple.
    """

    refused_because: Refusal | None = None

    def __new__(cls, stored: int, present: int, refused: int, refused_because: Refusal | None = None) -> Self:
        """Return the three counts, with the reason beside them."""
        self = super().__new__(cls, stored, present, refused)
        self.refused_because = refused_because
        return self


class Extent(NamedTuple):
    """A namespace and how much of it went, or is there. Who it is, is None where the disk knows nothing but its digest."""

    digest: bytes
    namespace: Namespace | None
    spec: KVSpec | None
    blocks: int
    tokens: int


class Hit(Protocol):
    """A lease on the longest cached prefix of a prompt."""

    @property
    def tokens(self) -> int:
        """How many leading tokens the cache held at match, and after `ready` how many are readable; whole blocks."""
        ...

    @property
    def tiers(self) -> Mapping[Tier, int]:
        """Where these tokens were found."""
        ...

    async def ready(self, within: object = None) -> int:
        """Wait until what can be in memory is, and return how many leading tokens are readable. Never raises for bad blocks.

        `within` is how long to wait: `wait`, `best-effort` or seconds; None: as the match said. The hit is shortened to what is
        readable then, and the first answer holds.
        """
        ...

    async def layer(self, layer: int, out: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Return K and V of one layer, each `[tokens, kv_heads, head_dim]` and the caller's own; one tensor if latent.

        Waits for that layer only. `out` is `[parts, tokens, kv_heads, head_dim]`, for at least the readable tokens. On the device
        it is filled on the stream that is current when the call begins, and nobody waits; without it the tensors are the host's.
        """
        ...

    async def gather(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return all readable KV, `[layers, parts, tokens, kv_heads, head_dim]`, copied once and verified; `out` as in `layer`."""
        ...

    def view(self, block: int, layer: int) -> tuple[torch.Tensor, ...]:
        """Return K and V of one layer of one block in place, each `[block_size, kv_heads, head_dim]`.

        Where the block lies on the device so do they, to be read on the stream that is current now or at the hit's end.
        """
        ...

    def take(self, tokens: int) -> int:
        """Keep the lease on the first `tokens` tokens, rounded down to whole blocks, and return how many that are."""
        ...

    async def release(self) -> None:
        """End the lease, which stands until the device has done what was enqueued under it."""
        ...

    async def __aenter__(self) -> Self:
        """Take the lease."""
        ...

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the lease."""
        ...


class Room(Protocol):
    """Slots for new blocks, to be written in place."""

    @property
    def present(self) -> int:
        """Tokens of the prompt that were cached already."""
        ...

    @property
    def pending(self) -> int:
        """Tokens after those that another writer holds now."""
        ...

    @property
    def blocks(self) -> Sequence[torch.Tensor]:
        """The new blocks in place, each `[layers, parts, block_size, kv_heads, head_dim]`; valid until the room is left.

        On the device they are written on the stream that is current now or at the commit, which covers what is enqueued by then.
        """
        ...

    async def commit(self, upto: int) -> int:
        """Hand the blocks that end at or before token `upto` of the prompt to the cache; return how many tokens are cached."""
        ...

    async def __aenter__(self) -> Self:
        """Take the slots."""
        ...

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Give back what was not committed."""
        ...


class KV(Protocol):
    """The KV of one namespace. `tokens` is a sequence or integer array of token ids."""

    def match(self, tokens: Any, *, request: Hashable | None = None, prefetch: object = None) -> Hit:
        """Return the hit of the longest cached prefix, to be entered with `async with`; `prefetch` is how long it waits."""
        ...

    def reserve(self, tokens: Any, *, after: Any = None, tier: Tier | None = None) -> Room:
        """Return room for the blocks of `tokens` that are not cached, to be entered with `async with`."""
        ...

    async def insert(self, tokens: Any, tensor: Any, *, start: int = 0, tier: Tier | None = None) -> Stored:
        """Store the KV of `tokens[start:]`, copying it; of a tensor on the device what its current stream will have written."""
        ...

    async def flush(self, tokens: Any) -> int:
        """Make the cached prefix durable and return how many leading tokens are."""
        ...

    async def prefetch(self, tokens: Any) -> int:
        """Bring the cached prefix up as far as there is room and return how many leading tokens are in memory."""
        ...

    async def pin(self, tokens: Any, *, ttl: float) -> int:
        """Keep the cached prefix where it is for `ttl` seconds; 0 ends it. Returns how many tokens are pinned."""
        ...

    async def delete(self, tokens: Any) -> int:
        """Remove a prompt and what continues it, but not what other prompts share; returns how many of its tokens went."""
        ...

    async def clear(self) -> int:
        """Remove everything of the namespace and return how many tokens that was."""
        ...
