"""SSD tiers and stores to test with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tiercache.spec import Geometry
from tiercache.storage.contract import Outcome, Planes, Put, Store
from tiercache.storage.lmdb_env import PAGE
from tiercache.storage.ssd import SsdTier
from tiercache.storage.ssd_layout import SsdLayout
from tiercache.types import Identity, Tier


def capacity_for(geometry: Geometry, slots: int) -> int:
    """Return the bytes of a tier that holds `slots` raw blocks of `geometry`; small blocks come in groups, so a few more."""
    layout = SsdLayout.of(geometry, capacity_bytes=1 << 40, batch_bytes=1, packed=False)
    return -(-slots // layout.group) * layout.raw_pages * PAGE


def make_ssd(tmp_path: Path, geometry: Geometry, slots: int, *, codec: str = "raw", item_bytes: int = 2) -> Store:
    """Return a store in a new tier below `tmp_path` with room for `slots` raw blocks; closing it closes the tier."""
    tier = SsdTier(tmp_path / "ssd", codec=codec, batch_bytes=1 << 20)
    return _Alone(tier, tier.open(geometry, capacity_bytes=capacity_for(geometry, slots), item_bytes=item_bytes))


class _Alone:
    """A store that is all of its tier."""

    def __init__(self, tier: SsdTier, store: Store) -> None:
        self._tier = tier
        self._store = store

    @property
    def tier(self) -> Tier:
        return self._store.tier

    @property
    def geometry(self) -> Geometry:
        return self._store.geometry

    @property
    def capacity(self) -> int:
        return self._store.capacity

    @property
    def durable(self) -> bool:
        return self._store.durable

    def view(self, slot: int) -> Planes | None:
        return self._store.view(slot)

    def views(self, first: int, count: int) -> None:
        self._store.views(first, count)

    def fetch(self, slot: int, identity: Identity, into: Planes) -> None:
        self._store.fetch(slot, identity, into)

    def put(self, items: Sequence[Put]) -> list[Outcome]:
        return self._store.put(items)

    def discard(self, slots: Sequence[int]) -> None:
        self._store.discard(slots)

    def sync(self) -> None:
        self._store.sync()

    def close(self) -> None:
        self._tier.close()
