"""What hits and rooms of a client work on, and the claim that a hit shares with others of its name."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from tiercache.errors import Closed, LeaseLost
from tiercache.prefetch import PrefetchPolicy
from tiercache.service import wire
from tiercache.service.client import copies
from tiercache.service.client.connection import Connection
from tiercache.service.client.copying import Copying
from tiercache.service.client.counts import Counts, Miss
from tiercache.service.client.device_slots import DeviceSlots
from tiercache.service.client.mapping import Arena
from tiercache.service.client.own_device import OwnDevice
from tiercache.spec import KVSpec
from tiercache.storage.finishing import Finishing
from tiercache.storage.workers import Workers
from tiercache.types import Tier

R = TypeVar("R")
_TIERS = frozenset(Tier.__members__)


@dataclass(frozen=True, slots=True)
class Handle:
    """One namespace in one session: its number there, and the tiers that are mapped, fastest first."""

    connection: Connection
    number: int
    spec: KVSpec
    tiers: Sequence[Tier]
    arenas: Sequence[Arena | DeviceSlots]
    copying: Copying


@dataclass(frozen=True, slots=True)
class House:
    """What all of one client's namespaces share."""

    counts: Counts
    workers: Workers
    threads: int
    device: OwnDevice = field(default_factory=OwnDevice)
    finishing: Finishing = field(default_factory=lambda: Finishing("tiercache-finish"))
    """What must not be cut short: closing the client waits for it."""
    pid: int = field(default_factory=os.getpid)

    def require_own(self) -> None:
        """Raise Closed in a process that was forked off: its parent goes on using the same sockets."""
        if os.getpid() != self.pid:
            raise Closed(f"this client is process {self.pid}'s; a process that is forked off it connects itself", pid=self.pid)


class Sessions(Protocol):
    """What a namespace asks of its client."""

    @property
    def house(self) -> House:
        """What all namespaces share."""
        ...

    @property
    def limit(self) -> int:
        """The longest prompt, in tokens."""
        ...

    @property
    def policy(self) -> PrefetchPolicy:
        """How long hits wait, unless they say it themselves."""
        ...

    def require_open(self) -> None:
        """Raise Closed after the client's end."""
        ...

    def connection(self) -> Connection | Miss:
        """Return the present session, or a counted miss."""
        ...


class Grip:
    """Held by the hits of a claim and by every tensor that was handed out in place; the lease ends with the last of them."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True)
class Sharing:
    """How many hits hold a claim, or will when it is there."""

    users: int = 1


class Claim:
    """A lease of the daemon's, and how many hits share it. A miss is a claim on nothing.

    It listens to what becomes of the lease.
    """

    def __init__(
        self, house: House, spec: KVSpec, key: bytes, handle: Handle | None, leased: wire.Leased | None, sharing: Sharing
    ) -> None:
        self.house = house
        self.spec = spec
        self.key = key
        self.handle = handle
        self.lease = leased.lease if leased is not None else None
        self.blocks = leased.blocks if leased is not None else 0
        self.tiers: Mapping[Tier, int] = _tiers(leased.tiers, spec) if leased is not None else {}
        self.sharing = sharing
        self.verified = 0
        self.in_place = False
        self.gone: str | None = None
        """Why the lease ended without our doing."""
        self.grip: Grip | None = Grip()
        self._lock: asyncio.Lock | None = None
        self._waiting: asyncio.Lock | None = None
        self._complete = leased is None
        """Whether the daemon has said all that it will."""
        self._packed = b""
        self._places: Sequence[wire.Place] | None = None
        self._layers: list[asyncio.Event] = []
        self._end: _End | None = None
        if leased is not None and handle is not None:
            if leased.places is not None:
                self._keep(leased.places)
                self._complete = True
            if leased.lifting:
                self._layers = [asyncio.Event() for _ in range(spec.layers)]
            self._end = _End(handle.connection, leased.lease, house.pid)
            weakref.finalize(self.grip, self._end).atexit = False
            handle.connection.listen(leased.lease, self)

    # --- what the daemon says ---------------------------------------------------------------------------------------------

    def arrived(self, layer: int) -> None:
        """Let those go on who wait for a layer."""
        if layer < len(self._layers):
            self._layers[layer].set()

    def lost(self, reason: str) -> None:
        """Note that nothing protects the slots any more."""
        self.gone = reason
        for event in self._layers:
            event.set()

    # --- for hits ---------------------------------------------------------------------------------------------------------

    @property
    def arenas(self) -> Sequence[Arena | DeviceSlots]:
        """The tiers that can be read."""
        return self.handle.arenas if self.handle is not None else ()

    @property
    def places(self) -> Sequence[wire.Place]:
        """Where the blocks lie that are known to be readable."""
        if self._places is None:  # not before somebody reads: a long prompt has thousands
            self._places = wire.unpack_places(self._packed)
        return self._places

    @property
    def lock(self) -> asyncio.Lock:
        """Of who checks blocks."""
        if self._lock is None:
            self._lock = asyncio.Lock()
        return self._lock

    def place(self, block: int) -> wire.Place:
        """Return where one of them lies."""
        return wire.unpack_place(self._packed, block)

    @property
    def readable(self) -> int:
        """How many these are."""
        return len(self._packed) // wire.PLACE_BYTES

    async def settled(self, policy: PrefetchPolicy) -> None:
        """Wait, as long as the policy allows, until what can be in memory is there. Nothing is when the daemon does not say."""
        if policy.seconds is not None:
            await self._ask(policy.seconds)  # not behind those who wait longer
            return
        if self._complete:
            return
        if self._waiting is None:
            self._waiting = asyncio.Lock()
        async with self._waiting:
            await self._ask(None)

    async def _ask(self, within: float | None) -> None:
        if self._complete or self.handle is None or self.gone is not None:
            return
        answer = await self.handle.connection.call(wire.Places, wire.Ready, patience=within or 0.0, lease=self.lease, within=within)
        if not isinstance(answer, Miss) and not self._complete:
            self._keep(answer.places)
            self._complete = within is None or self.readable == self.blocks

    async def arrival(self, layer: int) -> None:
        """Wait until a layer has arrived. Raises LeaseLost when the lease is gone: layers of one hit have the same tokens.

        Where the promotion is not heard of within the deadline, the layer is read where it was: the lease protects that, too.
        """
        if self._layers and self.handle is not None:
            try:
                async with asyncio.timeout(self.handle.connection.deadline):
                    await self._layers[layer].wait()
            except TimeoutError:
                self.house.counts.missed("slow", f"layer {layer} was not announced within the deadline")
        if self.gone is not None and self.handle is not None and not self.handle.connection.ended.is_set():
            self.house.counts.missed(copies.LOST, self.gone)
            raise LeaseLost(f"the lease has ended: {self.gone}")

    def cut(self, good: int, reason: str) -> None:
        """Take only the first `good` blocks for readable, because the next one is not, and tell the daemon of a bad one."""
        self.house.counts.missed(reason, f"block {good} of a hit")
        self._packed, self._places = self._packed[: good * wire.PLACE_BYTES], None
        self.verified = min(self.verified, good)
        if reason == copies.ROTTEN and self.handle is not None:
            self.handle.connection.post(wire.Distrust, lease=self.lease, block=good)

    def shorten(self, blocks: int) -> None:
        """Give up what comes after the first `blocks` blocks."""
        if blocks < self.blocks and self.handle is not None:
            self.handle.connection.post(wire.Take, lease=self.lease, blocks=blocks)
            self.blocks = blocks

    def read_in_place(self) -> None:
        """Tell the daemon, before the first view. A lease that it may have taken for lost by then counts as lost."""
        if not self.in_place and self.handle is not None and self.lease is not None and self.gone is None:
            self.in_place = True
            if not self.handle.connection.read_in_place(self.lease):
                self.lost("it was not renewed in time")

    def leave(self) -> None:
        """End the claim of one hit."""
        self.sharing.users -= 1
        if self.sharing.users == 0:
            if self._end is not None:
                self._end.direct = threading.get_ident()
            self.grip = None
            if self._end is not None:
                self._end.direct = None

    def _keep(self, packed: bytes) -> None:
        try:
            copies.require_places(self.arenas, packed)
        except ValueError as error:
            self.house.counts.missed("malformed", str(error))
            return
        most = self.blocks * wire.PLACE_BYTES
        self._packed, self._places = packed if len(packed) <= most else packed[:most], None


def _tiers(found: Mapping[str, int], spec: KVSpec) -> Mapping[Tier, int]:
    known = {Tier[name]: blocks * spec.block_size for name, blocks in found.items() if name in _TIERS}
    return known if len(known) < 2 else dict(sorted(known.items(), reverse=True))


class _End:
    """Ends a lease when its grip is gone, from wherever that is noticed: any thread, or a forked child of the lease's owner.

    Only within `Claim.leave` the request is sent on the spot. Anywhere else the collector may have been called in the middle of
    sending another one.
    """

    def __init__(self, connection: Connection, lease: int, pid: int) -> None:
        self._connection = connection
        self._lease = lease
        self._pid = pid
        self._loop = asyncio.get_running_loop()
        self.direct: int | None = None
        """The thread that is in `Claim.leave` now."""

    def __call__(self) -> None:
        """End the lease."""
        if os.getpid() != self._pid:
            return
        if self.direct == threading.get_ident():
            self._connection.release(self._lease)
            return
        try:
            self._loop.call_soon_threadsafe(self._connection.release, self._lease)
        except RuntimeError:
            pass  # the loop is gone, and with it the session
