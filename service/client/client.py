"""The async client: sessions with the daemon, one after the other, and the namespaces opened in them."""

from __future__ import annotations

import asyncio
import os
import random
import weakref
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from tiercache.errors import (
    AuditFailed,
    Closed,
    DeviceRefused,
    InvalidInput,
    InvalidSpec,
    JoinRefused,
    NoShare,
    Refused,
    StoreError,
    TierTooSmall,
    UnsupportedSpec,
)
from tiercache.kernels.device import Device
from tiercache.prefetch import PrefetchPolicy
from tiercache.service import wire
from tiercache.service.address import socket_path
from tiercache.service.client.connection import Connection
from tiercache.service.client.counts import ClientStats, Counts, Miss
from tiercache.service.client.handle import House
from tiercache.service.client.own_device import DEVICE_LANES, OwnDevice
from tiercache.service.client.remote_kv import RemoteKV
from tiercache.service.face import Extent
from tiercache.spec import ANY, KVSpec, Namespace, Selection, Unsaid
from tiercache.storage.workers import Lane, ThreadWorkers

R = TypeVar("R")

_THREADS = 2
_FORGETTING_SECONDS = 60.0
"""How long the daemon may wait for its disk to forget, beyond the deadline of a call."""
_ANY_LIMIT = 1 << 26
"""Tokens of a prompt, while no daemon has said its limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """Seconds between attempts to get a session: from `first` on twice as many each time, at most `most`, each shaken by half."""

    first: float = 0.05
    most: float = 5.0

    def seconds(self, attempt: int) -> float:
        """Return how long to wait after so many attempts that failed."""
        return min(self.most, self.first * float(2 ** min(attempt, 30))) * random.uniform(0.5, 1.0)


def connect(
    address: str | None = None,
    *,
    deadline: float = 5.0,
    join: bytes | None = None,
    back_off: BackOff | None = None,
    prefetch: object = "wait",
    device: str | Device | None = None,
) -> Client:
    """Return a client of the daemon at `address`, such as `unix:///run/user/1000/tiercache.sock`; enter it with `async with`.

    Without an address it is where a daemon without one listens. `deadline` is how many seconds a call may take. `join` is the
    `token` of another process's client, whose leases and reservations this one may use. `prefetch` is how long a hit waits for
    what lies on SSD, unless it says it itself: `wait`, `best-effort`, or seconds. `device`, such as `cuda:0`, is this process's
    name for the card on which a daemon may have its HBM tier; it is opened when it is needed. Raises InvalidInput for an address, a
    deadline, a `prefetch` or a `device` that can't be.
    """
    policy = PrefetchPolicy.of(prefetch)
    own = OwnDevice(device)
    return Client(_path(address), deadline=deadline, join=join, back_off=back_off or BackOff(), policy=policy, device=own)


def _path(address: str | None) -> str:
    scheme, mark, _ = (address or "").partition("://")
    if mark and scheme != "unix":
        raise InvalidInput(f"a daemon's address is unix:///path/to/its/socket, not {address!r}", value=address)
    return os.fspath(socket_path(address))


class Client:
    """The cache of a daemon beside this process; made by `connect`, an async context manager, for one event loop.

    Whatever the daemon does not do, it is away, slow, or refuses, is a miss, counted by reason in `stats`: the caller computes
    as if there were no cache. A session that ends is replaced in the background; until then every call is a miss.
    """

    def __init__(
        self,
        path: str,
        *,
        deadline: float,
        join: bytes | None,
        back_off: BackOff,
        policy: PrefetchPolicy,
        device: OwnDevice,
    ) -> None:
        if not 0 < deadline < float("inf"):
            raise InvalidInput(f"deadline must be a number of seconds above 0, not {deadline!r}", value=deadline)
        self._path = path
        self._deadline = deadline
        self._join = join
        self._back_off = back_off
        self._policy = policy
        self._device = device
        self._counts = Counts()
        self._house: House | None = None
        self._connection: Connection | None = None
        self._last: Miss | None = None
        self._limit = _ANY_LIMIT
        self._connected = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._closed = False

    # --- beginning and end ------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Try once to get a session; without one, try on in the background.

        Raises what the daemon says of `join` if it refuses it.
        """
        if self._house is not None or self._closed:
            raise Closed("a client can be entered only once; make another")
        lanes = {Lane.COPY: _THREADS, **(DEVICE_LANES if self._device.is_given else {})}
        self._house = House(self._counts, ThreadWorkers(lanes, name="tiercache-client"), _THREADS, self._device)
        try:
            await self._attempt()
        except BaseException:
            await self.close()
            raise
        self._keeping = asyncio.get_running_loop().create_task(self._keep(), name="tiercache-client")
        os.register_at_fork(after_in_child=partial(_let_go, weakref.ref(self)))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the session, and with it its leases, reservations and pins."""
        await self.close()

    async def close(self) -> None:
        """Close the client; every later call raises Closed. May be called twice.

        Tensors that were handed out in place stay readable.
        """
        if self._house is None or self._closed:
            self._closed = True
            return
        self._house.require_own()
        self._closed = True
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])
        await self._house.finishing.wait()
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
        self._house.workers.close()

    async def _keep(self) -> None:
        """Replace a session that has ended."""
        attempt = 0
        while True:
            if self._connection is not None:
                await self._connection.ended.wait()
                self._connected.clear()
                connection, self._connection = self._connection, None
                self._last = Miss("away", connection.reason)
                await connection.close()
                del connection
                attempt = 0
            await asyncio.sleep(self._back_off.seconds(attempt))
            attempt += 1
            try:
                await self._attempt()
            except JoinRefused as error:
                self._last = self._counts.missed(type(error).__name__, str(error))

    async def _attempt(self) -> None:
        found = await Connection.connect(self._path, self._counts, deadline=self._deadline, join=self._join)
        if isinstance(found, Miss):
            self._last = found
            return
        self._connection = found
        self._limit = found.welcome.limits.get("tokens", _ANY_LIMIT)
        self._connected.set()

    # --- the face ---------------------------------------------------------------------------------------------------------

    async def open(self, space: Namespace, spec: KVSpec, *, shard: int = 0) -> RemoteKV:
        """Return the KV of the namespace `space` with the layout `spec`.

        Raises SpecMismatch, NoShare, TierTooSmall or UnsupportedSpec when the daemon says so, and DeviceRefused when its HBM tier
        lies on a device that this client does not have. When the daemon does not answer, every call of the namespace is a miss
        until it does.
        """
        self.require_open()
        for value, kind in ((space, Namespace), (spec, KVSpec)):
            if not isinstance(value, kind):
                raise InvalidSpec(f"expected a {kind.__name__}, not {type(value).__name__}", value=value)
        if space.world != 1 or shard != 0:
            raise UnsupportedSpec(
                f"world={space.world}, shard={shard}: this version stores KV that is not split (world=1, shard=0)",
                world=space.world,
                shard=shard,
            )
        kv = RemoteKV(self, space, spec, shard)
        await kv.open(raises=(InvalidSpec, NoShare, TierTooSmall, DeviceRefused))
        return kv

    async def invalidate(
        self,
        *,
        model: str | Unsaid = ANY,
        weights: str | Unsaid = ANY,
        adapter: str | Unsaid | None = ANY,
        salt: str | Unsaid | None = ANY,
    ) -> list[Extent]:
        """Remove everything of all namespaces whose fields have exactly the values given; return how much went of each.

        As `TierCache.invalidate`, whoever opened them. No answer is no miss here: whoever forgets a tenant must know that it is
        done. Raises InvalidSpec, StoreError when the daemon's disk has not forgotten in time, and Refused when there is no answer.
        """
        self.require_open()
        selection = Selection(model=model, weights=weights, adapter=adapter, salt=salt)
        connection = self.connection()
        found = (
            connection
            if isinstance(connection, Miss)
            else await connection.call(
                wire.Invalidated,
                wire.Invalidate,
                patience=_FORGETTING_SECONDS,
                raises=(InvalidSpec, StoreError),
                fields=dict(selection.named),
            )
        )
        if isinstance(found, Miss):
            raise Refused(f"the daemon did not say that it has forgotten: {found.message}", reason=found.reason)
        return [_extent(extent) for extent in found.extents]

    async def check(self) -> dict[str, int]:
        """Audit the daemon's books; return how many nodes, blocks and leases were looked at.

        Raises AuditFailed, listing every fault, and Refused when there is no answer: for tests and operators.
        """
        self.require_open()
        connection = self.connection()
        audited = connection if isinstance(connection, Miss) else await connection.call(wire.Audited, wire.Check)
        if isinstance(audited, Miss):
            raise Refused(f"the daemon did not audit its books: {audited.message}", reason=audited.reason)
        if audited.faults:
            raise AuditFailed("; ".join(audited.faults), faults=audited.faults)
        return audited.counts

    async def connected(self) -> None:
        """Wait until there is a session."""
        self.require_open()
        await self._connected.wait()

    def stats(self) -> ClientStats:
        """Return the counters: bytes on the socket, bytes of KV, misses by reason."""
        return self._counts.frozen()

    @property
    def boot(self) -> bytes | None:
        """Which run of the daemon the session is with; None without a session."""
        return self._connection.welcome.boot if self._connection is not None else None

    @property
    def token(self) -> bytes | None:
        """What another process of the same engine joins this session with; None without a session."""
        return self._connection.welcome.token if self._connection is not None else None

    # --- for namespaces ---------------------------------------------------------------------------------------------------

    @property
    def house(self) -> House:
        """What all namespaces share."""
        assert self._house is not None, "namespaces are opened in a client that was entered"
        return self._house

    @property
    def limit(self) -> int:
        """The longest prompt, in tokens."""
        return self._limit

    @property
    def policy(self) -> PrefetchPolicy:
        """How long hits wait, unless they say it themselves."""
        return self._policy

    def require_open(self) -> None:
        """Raise Closed before the client's beginning, after its end, and in a forked process."""
        if self._house is None or self._closed:
            raise Closed("the client is closed" if self._closed else "the client has not been entered")
        self._house.require_own()

    @property
    def is_own(self) -> bool:
        """False in a process that was forked off the client's."""
        return self._house is None or self._house.pid == os.getpid()

    def require_own(self) -> None:
        """Raise Closed in a forked process."""
        if self._house is not None:
            self._house.require_own()

    def connection(self) -> Connection | Miss:
        """Return the present session, or a counted miss."""
        if self._connection is None or self._connection.ended.is_set():
            last = self._last or Miss("away", "there is no session")
            return self._counts.missed(last.reason, last.message)
        return self._connection

    def let_go(self) -> None:
        """In a forked child: hold the parent's connections no more, so that their end is seen when the parent ends."""
        if self._connection is not None:
            self._connection.let_go()


def _extent(extent: wire.ExtentOf) -> Extent:
    space, spec = Namespace(**extent.namespace), KVSpec(**extent.spec)
    return Extent(space.digest(spec), space, spec, extent.blocks, extent.blocks * spec.block_size)


def _let_go(client: weakref.ref[Client]) -> None:
    found = client()
    if found is not None:
        found.let_go()
