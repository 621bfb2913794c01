"""The SSD tier: one data directory, its metadata, and a store for each geometry."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path

from tiercache.errors import Closed, InvalidConfig, StoreError
from tiercache.spec import Geometry, KVSpec, Namespace
from tiercache.storage.contract import FULL_CHARGE
from tiercache.storage.directory import BLOCKS, METADATA, DataDirectory
from tiercache.storage.lmdb_env import DATA_FILE, PAGE, file_bytes, translated
from tiercache.storage.metadata import Loaded, Metadata, name
from tiercache.storage.ssd_layout import PACKED_CHARGE, SsdLayout
from tiercache.storage.ssd_records import Records
from tiercache.storage.ssd_store import CLOSE_SECONDS, SsdStats, SsdStore
from tiercache.storage.ssd_values import LmdbValues
from tiercache.storage.ssd_writer import Reconciled, SsdWriter

__all__ = ["Loaded", "Reconciled", "SsdStats", "SsdStore", "SsdTier"]

CODECS = ("raw", "zstd")
_FOLDERS = {FULL_CHARGE: "raw", PACKED_CHARGE: "packed"}
_FIRST_PAGES = 16


class SsdTier:
    """The data directory `path`, owned until `close`: its lock, its metadata, and one `SsdStore` for each geometry.

    `codec` is `raw`, or `zstd` for blocks of 16 KiB and more (smaller ones share values and stay raw). `batch_bytes` bounds a
    write transaction. With `sync=False` an acknowledged put is safe from kill -9 but not from a loss of power: after one, the
    whole directory is set aside. Whatever can't be used (another format, broken files) is moved to a sub-folder, `aside`, and
    the tier starts empty; the last two such folders are kept.

    `values` and `metadata` are the classes that touch the disk; a test puts its own there. Raises DirectoryLocked,
    DirectoryRefused, InvalidConfig for an unknown codec, StoreError if the metadata can't be opened even afresh.
    """

    def __init__(
        self,
        path: Path,
        *,
        codec: str = "raw",
        batch_bytes: int = 16 * 1024 * 1024,
        sync: bool = True,
        values: type[LmdbValues] = LmdbValues,
        metadata: type[Metadata] = Metadata,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if codec not in CODECS:
            raise InvalidConfig(f"codec must be one of {', '.join(CODECS)}, not {codec!r}", field="codec", value=codec)
        self._codec = codec
        self._batch_bytes = batch_bytes
        self._sync = sync
        self._values = values
        self._clock = clock
        self._stores: dict[Geometry, SsdStore] = {}
        self._closed = False
        self._ended = False
        self._directory = DataDirectory(path, sync=sync)
        try:
            try:
                self._metadata = metadata(self._directory.metadata, sync=sync)
            except StoreError as error:
                if not error.fields.get("broken"):
                    raise
                # Without metadata no block can be found again: all of it goes aside, for whoever wants to look.
                self._directory.set_aside(METADATA, BLOCKS, why=str(error))
                self._metadata = metadata(self._directory.metadata, sync=sync)
        except BaseException:
            self._directory.close()
            raise

    @property
    def path(self) -> Path:
        """The data directory."""
        return self._directory.path

    @property
    def aside(self) -> Path | None:
        """The folder that unusable files were moved to since the opening; None if there were none."""
        return self._directory.aside

    def remember(self, namespace: Namespace, spec: KVSpec) -> bytes:
        """Write down what the namespace's digest stands for, and return the digest."""
        return self._metadata.remember(namespace, spec)

    def namespaces(self) -> dict[bytes, tuple[Namespace, KVSpec]]:
        """Return what was remembered, by digest."""
        return self._metadata.namespaces()

    def census(self, geometry: Geometry) -> dict[bytes, int]:
        """Return how many blocks of `geometry` metadata names, by the digest of their namespace."""
        return self._metadata.census(geometry)

    def forget(self, geometry: Geometry, digests: Collection[bytes]) -> int:
        """Forget the blocks of whole namespaces whose store is not open, for good when the call returns; return how many.

        Raises InvalidConfig if the store is open: its slots are somebody's. Raises StoreError; nothing is forgotten then.
        """
        if geometry in self._stores:
            raise InvalidConfig(f"the SSD store for {name(geometry)} is open", field="geometry", value=name(geometry))
        return self._metadata.forget(geometry, digests)

    def open(self, geometry: Geometry, *, capacity_bytes: int, item_bytes: int) -> SsdStore:
        """Return the store for blocks of `geometry`, with what it held before.

        `capacity_bytes` is its share of the disk and may differ from the last time: slots beyond it are forgotten. (LMDB never
        shrinks a file: what a larger share left behind is used again, not given back.) `item_bytes` is the width of the
        elements. Files that can't be used are set aside. Raises TierTooSmall, StoreError, and InvalidConfig if it is open.
        """
        if self._closed:
            raise Closed("the SSD tier is closed")
        if geometry in self._stores:
            raise InvalidConfig(f"the SSD store for {name(geometry)} is open", field="geometry", value=name(geometry))
        layout = SsdLayout.of(geometry, capacity_bytes=capacity_bytes, batch_bytes=self._batch_bytes, packed=self._codec == "zstd")
        rows = self._metadata.rows(geometry)
        folder = self._directory.blocks / name(geometry)
        try:
            known = self._metadata.layout(geometry)
            if known not in (None, layout.shape):
                raise StoreError(f"{folder} has values of another size", broken=True)
            loaded = rows.load(layout.capacity)
            values = self._environments(folder, layout, loaded)
        except StoreError as error:
            if not error.fields.get("broken"):
                raise
            self._directory.set_aside(f"{BLOCKS}/{name(geometry)}", why=str(error))
            rows.clear()
            known = None
            loaded = rows.load(layout.capacity)
            values = self._environments(folder, layout, loaded)
        if known is None:
            self._metadata.set_layout(geometry, layout.shape)
        writer = SsdWriter(layout, rows, values, loaded, sync=self._sync, clock=self._clock)
        store = SsdStore(geometry, layout, Records(geometry, layout, item_bytes), rows, values, writer, loaded)
        self._stores[geometry] = store
        return store

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Close every store and let the next owner in. May be called again, also to wait once more.

        Waits for what runs, but not longer than `seconds` a store: while a call hangs in the disk, the directory stays locked
        until the process ends.
        """
        self._closed = True
        if self._ended:
            return
        ended = [store.finish(seconds) for store in self._stores.values()]  # each, whatever the others do
        if all(ended):
            self._ended = True
            self._metadata.close()
            self._directory.close()

    def _environments(self, folder: Path, layout: SsdLayout, loaded: Loaded) -> dict[int, LmdbValues]:
        """Open the data environments, by the charge of their records."""
        sizes = {FULL_CHARGE: layout.raw_value}
        if layout.packs or (loaded.charges == PACKED_CHARGE).any():
            sizes[PACKED_CHARGE] = layout.packed_value
        opened: dict[int, LmdbValues] = {}
        try:
            for charge, inside in _FOLDERS.items():
                here = folder / inside
                with translated(here):
                    if not (loaded.charges == charge).any():
                        # All that may be in it is unnamed, and a file never shrinks: start afresh.
                        (here / DATA_FILE).unlink(missing_ok=True)
                    if charge in sizes:
                        # Two maps start with little of the rest and grow on demand: their sum never passes the limit, and a
                        # map that is never used takes little of the 15 % that the other needs.
                        rest = layout.limit - sum(file_bytes(folder / other) for other in _FOLDERS.values())
                        map_bytes = layout.limit if len(sizes) == 1 else file_bytes(here) + max(rest // 16, _FIRST_PAGES * PAGE)
                        opened[charge] = self._values(here, value_bytes=sizes[charge], map_bytes=map_bytes, sync=self._sync)
        except BaseException:
            for values in opened.values():
                values.close()
            raise
        return opened
