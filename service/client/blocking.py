"""The blocking client: the same face without async, for engines whose workers have no event loop.

All names, arguments and errors are those of the async face (`tiercache.service.client`); `with` stands where `async with` does.
Objects may be used from several threads.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from tiercache.errors import Closed
from tiercache.kernels.device import Device
from tiercache.service.client.client import BackOff, connect
from tiercache.service.client.counts import ClientStats
from tiercache.service.client.portal import Portal
from tiercache.service.client.remote_hit import RemoteHit
from tiercache.service.client.remote_kv import RemoteKV
from tiercache.service.client.remote_room import RemoteRoom
from tiercache.service.face import Extent, Stored
from tiercache.spec import ANY, KVSpec, Namespace, Unsaid
from tiercache.types import Tier

if TYPE_CHECKING:
    import torch

R = TypeVar("R")


class BlockingClient:
    """A client of the daemon at `address`, with an event loop in a thread of its own; a context manager.

    Arguments and errors are those of `connect`. A process that is forked off can't use it (Closed): it makes a client itself.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        deadline: float = 5.0,
        join: bytes | None = None,
        back_off: BackOff | None = None,
        prefetch: object = "wait",
        device: str | Device | None = None,
    ) -> None:
        self._client = connect(address, deadline=deadline, join=join, back_off=back_off, prefetch=prefetch, device=device)
        self._portal: Portal | None = None
        self._closed = False

    def __enter__(self) -> Self:
        """Start the thread and try once to get a session; without one, try on in the background."""
        if self._portal is not None or self._closed:
            raise Closed("a client can be entered only once; make another")
        self._portal = Portal("tiercache-loop", self._client.close)
        self._portal.start()
        try:
            self._portal.run(self._client.__aenter__())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the session and the thread."""
        self.close()

    def close(self) -> None:
        """Close the client; every later call raises Closed. May be called twice."""
        self._closed = True
        portal, self._portal = self._portal, None
        if portal is None or not self._client.is_own:
            return
        try:
            portal.run(self._client.close())
        except Closed:
            pass  # its thread is gone already
        portal.stop()

    def open(self, space: Namespace, spec: KVSpec, *, shard: int = 0) -> BlockingKV:
        """Return the KV of a namespace, as `Client.open` does."""
        return BlockingKV(self, self.run(self._client.open(space, spec, shard=shard)))

    def invalidate(
        self,
        *,
        model: str | Unsaid = ANY,
        weights: str | Unsaid = ANY,
        adapter: str | Unsaid | None = ANY,
        salt: str | Unsaid | None = ANY,
    ) -> list[Extent]:
        """Remove everything of all namespaces whose fields have exactly the values given, as `Client.invalidate` does."""
        return self.run(self._client.invalidate(model=model, weights=weights, adapter=adapter, salt=salt))

    def check(self) -> dict[str, int]:
        """Audit the daemon's books, as `Client.check` does."""
        return self.run(self._client.check())

    def connected(self) -> None:
        """Wait until there is a session."""
        self.run(self._client.connected())

    def stats(self) -> ClientStats:
        """Return the counters."""
        return self._client.stats()

    @property
    def boot(self) -> bytes | None:
        """Which run of the daemon the session is with; None without a session."""
        return self._client.boot

    @property
    def token(self) -> bytes | None:
        """What another process joins this session with; None without a session."""
        return self._client.token

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine of the client's in its thread. Raises Closed after the end, and in a forked process."""
        portal = self._portal
        try:
            if portal is None:
                raise Closed("the client is closed" if self._closed else "the client has not been entered")
            self._client.require_own()
        except Closed:
            work.close()
            raise
        return portal.run(work)


class BlockingKV:
    """The KV of one namespace; made by `BlockingClient.open`."""

    def __init__(self, client: BlockingClient, kv: RemoteKV) -> None:
        self._client = client
        self._kv = kv

    @property
    def spec(self) -> KVSpec:
        """The layout of the KV."""
        return self._kv.spec

    def match(self, tokens: Any, *, request: Any = None, prefetch: object = None) -> BlockingHit:
        """Return the hit of the longest cached prefix of `tokens`, to be entered with `with`."""
        return BlockingHit(self._client, self._kv.match(tokens, request=request, prefetch=prefetch))

    def reserve(self, tokens: Any, *, after: BlockingHit | None = None, tier: Tier | None = None) -> BlockingRoom:
        """Return room for the blocks of `tokens` that are not cached, to be entered with `with`."""
        hit = after.hit if after is not None else None
        return BlockingRoom(self._client, self._kv.reserve(tokens, after=hit, tier=tier))

    def insert(self, tokens: Any, tensor: Any, *, start: int = 0, tier: Tier | None = None) -> Stored:
        """Store the KV of `tokens[start:]`, copying it."""
        return self._client.run(self._kv.insert(tokens, tensor, start=start, tier=tier))

    def flush(self, tokens: Any) -> int:
        """Bring the cached prefix to the durable tier; return how many leading tokens are durable."""
        return self._client.run(self._kv.flush(tokens))

    def prefetch(self, tokens: Any) -> int:
        """Bring the cached prefix up; return how many leading tokens are in memory."""
        return self._client.run(self._kv.prefetch(tokens))

    def pin(self, tokens: Any, *, ttl: float) -> int:
        """Keep the cached prefix where it is for `ttl` seconds; return how many tokens are pinned."""
        return self._client.run(self._kv.pin(tokens, ttl=ttl))

    def delete(self, tokens: Any) -> int:
        """Remove a prompt and what continues it; return how many of its tokens went."""
        return self._client.run(self._kv.delete(tokens))

    def clear(self) -> int:
        """Remove everything of the namespace; return how many tokens that was."""
        return self._client.run(self._kv.clear())


class BlockingHit:
    """A lease on the longest cached prefix; see `RemoteHit`."""

    def __init__(self, client: BlockingClient, hit: RemoteHit) -> None:
        self._client = client
        self.hit = hit

    def __enter__(self) -> Self:
        """Take the lease."""
        self._client.run(self.hit.__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the lease."""
        try:
            self._client.run(self.hit.__aexit__(None, None, None))
        except Closed:
            pass  # the session ended before, and the lease with it

    def release(self) -> None:
        """End the lease. Raises LeaseReleased when it has ended."""
        self._client.run(self.hit.release())

    @property
    def tokens(self) -> int:
        """How many leading tokens the lease covers."""
        return self.hit.tokens

    @property
    def tiers(self) -> Mapping[Tier, int]:
        """Where the tokens were found at match."""
        return self.hit.tiers

    def take(self, tokens: int) -> int:
        """Keep the first `tokens` tokens, rounded down to whole blocks; return how many that are."""

        async def take() -> int:
            return self.hit.take(tokens)

        return self._client.run(take())

    def ready(self, within: object = None) -> int:
        """Wait until what can be in memory is there, as long as `within` allows; return how many leading tokens are readable."""
        return self._client.run(self.hit.ready(within))

    def gather(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the readable KV in one copy."""
        return self._client.run(self.hit.gather(out))

    def layer(self, layer: int, out: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Return K and V of one layer in tensors of the caller's own."""
        return self._client.run(self.hit.layer(layer, out))

    def view(self, block: int, layer: int) -> tuple[torch.Tensor, ...]:
        """Return K and V of one layer of one block in place."""
        if self.hit.is_in_place:
            return self.hit.view(block, layer)  # the daemon knows: nothing is left to be sent

        async def view() -> tuple[torch.Tensor, ...]:
            return self.hit.view(block, layer)

        return self._client.run(view())


class BlockingRoom:
    """Slots for new blocks, to be written in place; see `RemoteRoom`."""

    def __init__(self, client: BlockingClient, room: RemoteRoom) -> None:
        self._client = client
        self._room = room

    def __enter__(self) -> Self:
        """Take the slots."""
        self._client.run(self._room.__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Give back what was not committed."""
        try:
            self._client.run(self._room.__aexit__(None, None, None))
        except Closed:
            pass  # the session ended before, and the reservation with it

    @property
    def present(self) -> int:
        """Tokens of the prompt that were cached already."""
        return self._room.present

    @property
    def pending(self) -> int:
        """Tokens after those that another writer holds now."""
        return self._room.pending

    @property
    def tokens(self) -> int:
        """Up to which token of the prompt there is room."""
        return self._room.tokens

    @property
    def blocks(self) -> Sequence[torch.Tensor]:
        """The new blocks in place."""
        return self._room.blocks

    def commit(self, upto: int) -> int:
        """Hand the blocks that end at or before token `upto` to the cache; return how many tokens are cached."""
        return self._client.run(self._room.commit(upto))
