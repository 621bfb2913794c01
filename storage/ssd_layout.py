"""The sizes of the SSD tier for blocks of one geometry: records, values, slots, maps, batches."""

from __future__ import annotations

from typing import NamedTuple, Self

from tiercache.errors import TierTooSmall
from tiercache.sizes import format_size
from tiercache.spec import Geometry
from tiercache.storage.contract import FULL_CHARGE
from tiercache.storage.lmdb_env import PAGE, PAGE_HEAD, whole_pages
from tiercache.storage.records import RecordFormat

PACKED_CHARGE = 3
"""Units of a record that fits three quarters of a raw value's pages."""
SMALL_BLOCK = 16 * 1024
"""Bytes. Below it a value of its own would waste up to a page beside every few, and cost the tree an entry each …"""
GROUP_BYTES = 32 * 1024
"""… so as many records as fit here share one value."""
_OWN_PAGES = 64
"""Room for the tree's own pages where the 15 % of a small tier have none."""


class SsdLayout(NamedTuple):
    """What one geometry's records, values and files measure, in bytes unless the name says otherwise.

    All values of one environment have one size, `raw_value` and `packed_value`, each 16 bytes short of whole pages: the free
    list then never fragments. `packs` says whether records are compressed; those of an earlier start can be read anyway.
    Grouped records are always raw, `packed_value` 0: a value that several slots share has no size of its own to save.
    """

    record: int
    group: int
    raw_value: int
    raw_pages: int
    packed_value: int
    packed_pages: int
    packs: bool
    budget_units: int
    capacity: int
    keys: int
    batch: int
    limit: int

    @classmethod
    def of(cls, geometry: Geometry, *, capacity_bytes: int, batch_bytes: int, packed: bool) -> Self:
        """Return the layout of a tier of `capacity_bytes`. Raises TierTooSmall if it does not hold one value.

        `limit` is what the files may occupy together: the capacity, 15 % for the tree and for pages freed but not reusable
        yet, and three batches, because LMDB reuses a page two transactions after the one that freed it. A batch is at most
        1/16 of that.
        """
        record = RecordFormat(geometry).header_bytes + geometry.block_bytes
        group = max(1, GROUP_BYTES // record) if geometry.block_bytes < SMALL_BLOCK else 1
        pages = -(-(record * group + PAGE_HEAD) // PAGE)
        values = capacity_bytes // (pages * PAGE)
        if values < 1:
            raise TierTooSmall(
                f"SSD has {format_size(capacity_bytes)} ({capacity_bytes} bytes) for blocks of "
                f"{format_size(geometry.block_bytes)}; the least is {pages * PAGE} bytes",
                length=capacity_bytes,
                need=pages * PAGE,
            )
        packs = packed and group == 1
        packed_pages = pages * PACKED_CHARGE // FULL_CHARGE if group == 1 else 0
        budget = capacity_bytes * FULL_CHARGE // (pages * PAGE) if packs else values * group * FULL_CHARGE
        capacity = budget // PACKED_CHARGE if packs else values * group
        batch = max(pages * PAGE, min(batch_bytes, capacity_bytes // 16))
        return cls(
            record=record,
            group=group,
            raw_value=pages * PAGE - PAGE_HEAD if group == 1 else record * group,
            raw_pages=pages,
            packed_value=packed_pages * PAGE - PAGE_HEAD if packed_pages else 0,
            packed_pages=packed_pages,
            packs=packs,
            budget_units=budget,
            capacity=capacity,
            keys=-(-capacity // group),
            batch=batch,
            limit=whole_pages(capacity_bytes + capacity_bytes * 15 // 100 + 3 * batch + _OWN_PAGES * PAGE),
        )

    @property
    def shape(self) -> dict[str, int]:
        """What must not change while files of this layout are kept."""
        return {
            "record": self.record,
            "group": self.group,
            "raw_value": self.raw_value,
            "packed_value": self.packed_value,
            "page": PAGE,
        }
