"""What the cases of storage durability share: comparing disk and tree, and damaging records of a cache that is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from tests.service.caches import disk_of, stack_of
from tiercache.service.inprocess import TierCache
from tiercache.storage.ssd_values import LmdbValues, Write


async def swept(cache: TierCache) -> None:
    """Wait until metadata and data have been compared, and require that they agree with each other and with the tree."""
    sweeping = stack_of(cache)._sweeping
    assert sweeping is not None
    await asyncio.wait([sweeping])
    await cache.settle()
    await cache.check()
    core = stack_of(cache).cache
    position = len(core.tiers) - 1
    in_tree = sum(len(node.blocks) for node in core.residency.nodes if node is not None and node.copies >> position & 1)
    stats = disk_of(cache).stats()
    assert (stats.blocks, stats.unnamed_known) == (in_tree, 0)
    if disk_of(cache).geometry.block_bytes >= 16 * 1024:
        assert stats.raw_records + stats.packed_records == in_tree


def folder_of(cache: TierCache, charge: int = 4) -> Path:
    """Return where the raw (4) or the packed (3) records of a cache lie."""
    return disk_of(cache)._values[charge].folder


Damage = Callable[[LmdbValues, int, int], None]
"""Spoils the record under the first key; the second is another record's."""


def damage(folder: Path, change: Damage, key: int, other: int) -> None:
    """Let `change` spoil the records of a cache that is closed."""
    values = LmdbValues(folder, value_bytes=1, map_bytes=1 << 26, sync=True)
    try:
        change(values, key, other)
    finally:
        values.close()


def value_of(values: LmdbValues, key: int) -> bytes:
    """Return a whole value."""
    seen: list[bytes] = []
    assert values.read(key, lambda view: seen.append(bytes(view)))
    return seen[0]


def overwrite(values: LmdbValues, key: int, value: bytes) -> None:
    """Put a value of any length."""
    values.value_bytes = len(value)
    values.commit([Write(key, 0, value)])


def removed(values: LmdbValues, key: int, other: int) -> None:
    """Take the record away under the index."""
    values.commit((), [key])


def swapped(values: LmdbValues, key: int, other: int) -> None:
    """Exchange two records."""
    one, two = value_of(values, key), value_of(values, other)
    overwrite(values, key, two)
    overwrite(values, other, one)


def zeros(values: LmdbValues, key: int, other: int) -> None:
    """Put zeros in a record's place."""
    overwrite(values, key, bytes(len(value_of(values, key))))


def one_bit(values: LmdbValues, key: int, other: int) -> None:
    """Turn one bit of the payload."""
    value = bytearray(value_of(values, key))
    value[20_000] ^= 1
    overwrite(values, key, bytes(value))


def cut_to(length: Callable[[int], int]) -> Damage:
    """Return what cuts a record to `length` of its length."""

    def change(values: LmdbValues, key: int, other: int) -> None:
        value = value_of(values, key)
        overwrite(values, key, value[: length(len(value))])

    return change


def patched(at: int, part: bytes, *, sealed: bool = False) -> Damage:
    """Return what writes `part` at offset `at` of a record; `sealed` makes the checksum of its header fit again."""

    def change(values: LmdbValues, key: int, other: int) -> None:
        value = value_of(values, key)
        value = value[:at] + part + value[at + len(part) :]
        if sealed:
            value = resealed(value)
        overwrite(values, key, value)

    return change


def resealed(value: bytes, symbol_bytes: int = 64) -> bytes:
    """Return a record whose header's own checksum fits."""
    import xxhash

    end = 208 + symbol_bytes
    return value[:end] + xxhash.xxh3_64_intdigest(value[:end]).to_bytes(8, "little") + value[end + 8 :]
