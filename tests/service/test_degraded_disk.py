"""A disk that is full, slow or failing: what still works, what health says of it, and how it heals."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from tests.seams import PATIENCE, FakeClock, Rig
from tests.service.ailing import ailments, compared, eventually
from tests.service.caches import SIZE, SPEC, opened, opened_kv, prompt, read, sink, small, stack_of, store, tensor_of
from tiercache.errors import StoreFull
from tiercache.service.health import Code
from tiercache.service.inprocess import TierCache
from tiercache.spec import Namespace
from tiercache.storage.metadata import Metadata
from tiercache.types import Tier

# Made anew for each use: an error that was raised keeps, with its traceback, the memory of the cache that raised it.


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken() -> OSError:
    return OSError(errno.EIO, os.strerror(errno.EIO))


def full_map() -> Exception:
    return lmdb.MapFullError("mdb_put: MDB_MAP_FULL")


async def retried(cache: TierCache) -> None:
    """Wait until the SSD store may be asked again."""
    stack = stack_of(cache)
    async with asyncio.timeout(PATIENCE):
        while stack.cache.moves.refusing:
            await stack.mover.change()


@pytest.mark.parametrize(
    ("operation", "error", "code", "says"),
    [
        ("commit", full, Code.DISK_FULL, "StoreFull"),
        ("commit", full_map, Code.MAP_FULL, "MDB_MAP_FULL"),
        ("commit", broken, Code.DISK_FAILING, "Input/output error"),
        ("sync", broken, Code.DISK_FAILING, "Input/output error"),
    ],
    ids=["disk full", "map full", "write fails", "sync fails"],
)
async def test_a_disk_that_takes_no_blocks_is_told_until_one_is_stored(
    tmp_path: Path, seed: int, operation: str, error: Callable[[], Exception], code: Code, says: str
) -> None:
    """Memory is read and written meanwhile; flush says that nothing is durable; the next write that succeeds ends it."""
    clock = FakeClock()
    rig = Rig(clock=clock)
    tokens, new = prompt(seed, 4), prompt(seed + 1, 4)
    async with opened_kv(small(hbm=16, dram=16, directory=tmp_path / "ssd"), rig) as (cache, kv):
        await store(kv, tokens)
        rig.disk.fail(operation, error())

        assert await kv.flush(tokens) == 0
        clock.advance(3.0)
        found = await ailments(cache)
        await store(kv, new)

        assert set(found) == {code}
        assert says in found[code].message and "SSD" in found[code].message and found[code].since_seconds == 3.0
        assert await read(kv, tokens) == await read(kv, new) == 4 * SIZE
        await retried(cache)
        assert set(await ailments(cache)) == {code}, "that it may be asked again does not make it well"
        rig.disk.release()
        assert await kv.flush(tokens) == 4 * SIZE
        assert await ailments(cache) == {}
        await cache.check()
    async with opened_kv(small(hbm=16, dram=16, directory=tmp_path / "ssd")) as (_, kv):
        assert await read(kv, tokens) == 4 * SIZE


async def test_a_row_of_failures_is_counted_and_dated_from_the_first(tmp_path: Path, seed: int) -> None:
    """Of three flushes that fail, each half a minute later, the first says since when, the last what."""
    clock = FakeClock()
    rig = Rig(clock=clock)
    async with opened_kv(small(directory=tmp_path / "ssd"), rig) as (cache, kv):
        await store(kv, prompt(seed, 2))
        rig.disk.fail("commit", full(), times=2)
        rig.disk.fail("sync", broken(), times=4)
        for _ in range(3):
            await retried(cache)
            assert await kv.flush(prompt(seed, 2)) == 0
            clock.advance(30.0)

        found = await ailments(cache)

        assert [one.since_seconds for one in found.values()] == [90.0]
        [message] = [one.message for one in found.values()]
        assert "3 writes in a row failed, the last 30 s ago" in message


async def test_a_disk_that_can_not_be_read_is_told_until_it_can(tmp_path: Path, seed: int) -> None:
    """What lies on it is a miss and stays; memory is read and written; it is tried again, and the read that succeeds ends it."""
    rig = Rig()
    tokens, new = prompt(seed, 4), prompt(seed + 1, 4)
    async with opened_kv(small(directory=tmp_path / "ssd"), rig) as (cache, kv):
        await store(kv, tokens)
        await sink(cache)
        rig.disk.fail("read", broken())

        assert await read(kv, tokens) == 0
        await store(kv, new)

        found = await ailments(cache)
        assert set(found) == {Code.DISK_FAILING} and "SSD: 2 reads in a row failed" in found[Code.DISK_FAILING].message
        assert await read(kv, new) == 4 * SIZE
        rig.disk.release()
        async with asyncio.timeout(PATIENCE):
            while await read(kv, tokens) < 4 * SIZE:  # until its time to be tried again nothing is promised of it
                await stack_of(cache).mover.change(0.05)
        assert await ailments(cache) == {}
        await cache.check()


async def test_a_write_that_hangs_is_told_with_its_time_and_holds_up_nobody_else(tmp_path: Path, seed: int) -> None:
    """For 31 seconds of the clock: memory is read and written, what waits behind is counted; it ends with the write."""
    clock = FakeClock()
    rig = Rig(clock=clock)
    tokens, new = prompt(seed, 4), prompt(seed + 1, 4)
    async with opened_kv(small(hbm=16, dram=16, directory=tmp_path / "ssd"), rig) as (cache, kv):
        await store(kv, tokens)
        await compared(cache)
        hold = rig.disk.hold("commit")
        flushing = asyncio.ensure_future(kv.flush(tokens))
        await hold.reached()
        assert await ailments(cache) == {}, "a write takes its time"
        clock.advance(31.0)

        found = await ailments(cache)
        await store(kv, new)
        assert await read(kv, tokens) == await read(kv, new) == 4 * SIZE

        assert set(found) == {Code.DISK_SLOW}
        assert "a write to SSD has been running for 31 s (limit 5 s)" in found[Code.DISK_SLOW].message
        assert found[Code.DISK_SLOW].since_seconds == 31.0
        hold.release()
        assert await flushing == 4 * SIZE
        await cache.settle()
        assert await ailments(cache) == {}
        await cache.check()


async def test_a_read_that_hangs_is_told(tmp_path: Path, seed: int) -> None:
    """Readers get what is in memory, and all of it once the disk goes on."""
    clock = FakeClock()
    rig = Rig(clock=clock, patience=0.05)
    tokens = prompt(seed, 4)
    async with opened_kv(small(directory=tmp_path / "ssd", promote_ms=10), rig) as (cache, kv):
        await store(kv, tokens)
        await sink(cache)
        hold = rig.disk.hold("read")
        assert await read(kv, tokens) == 0
        await hold.reached()
        clock.advance(8.0)

        found = await ailments(cache)

        assert set(found) == {Code.DISK_SLOW} and "a read from SSD has been running for 8 s" in found[Code.DISK_SLOW].message
        hold.release()
        await cache.settle()
        assert await read(kv, tokens) == 4 * SIZE
        assert await ailments(cache) == {}


async def test_little_room_is_told_before_a_write_fails(tmp_path: Path, seed: int) -> None:
    """The message names what is free and what the next writes may want; it ends when there is room again."""
    clock = FakeClock()
    rig = Rig(clock=clock)
    async with opened_kv(small(ssd=4000, directory=tmp_path / "ssd"), rig) as (cache, kv):
        await store(kv, prompt(seed, 2))
        rig.disk.free = 3 * 1024
        assert set(found := await ailments(cache)) == {Code.DISK_LOW}
        assert "3.0 KiB are free" in found[Code.DISK_LOW].message and str(tmp_path / "ssd") in found[Code.DISK_LOW].message

        rig.disk.free = None
        clock.advance(3.0)

        assert await ailments(cache) == {}


async def test_room_for_less_than_one_move_is_little(tmp_path: Path, seed: int) -> None:
    """A move takes several batches; what the tier will not grow by is not asked for."""
    rig = Rig(clock=FakeClock())
    async with opened_kv(small(ssd=4000, directory=tmp_path / "ssd", batch_bytes=1 << 20), rig) as (cache, kv):
        await store(kv, prompt(seed, 2))
        rig.disk.free = 5 << 20
        assert set(await ailments(cache)) == {Code.DISK_LOW}
    rig = Rig(clock=FakeClock())
    async with opened_kv(small(ssd=64, directory=tmp_path / "less", batch_bytes=1 << 20), rig) as (cache, kv):
        await store(kv, prompt(seed, 2))
        rig.disk.free = 5 << 20
        assert await ailments(cache) == {}


async def test_a_file_system_that_does_not_answer_holds_up_no_answer(tmp_path: Path, seed: int) -> None:
    """Health says what was seen last and how old it is; memory is read; it ends when the file system answers."""
    clock = FakeClock()
    rig = Rig(clock=clock)
    async with opened_kv(small(directory=tmp_path / "ssd"), rig) as (cache, kv):
        await store(kv, prompt(seed, 2))
        assert await ailments(cache) == {}
        clock.advance(10.0)
        hold = rig.disk.hold("room")
        async with asyncio.timeout(PATIENCE):
            assert await ailments(cache) == {}
            await hold.reached()
            clock.advance(40.0)

            found = await ailments(cache)

        assert set(found) == {Code.DISK_SLOW}
        assert "not said for 40 s" in found[Code.DISK_SLOW].message and "50 s old" in found[Code.DISK_SLOW].message
        assert await read(kv, prompt(seed, 2)) == 2 * SIZE
        hold.release()
        await eventually(cache, set())


async def test_a_file_system_that_fails_to_answer_is_told(tmp_path: Path) -> None:
    """An I/O error of the look itself, until a look succeeds."""
    clock = FakeClock()
    rig = Rig(clock=clock)
    async with opened_kv(small(directory=tmp_path / "ssd"), rig) as (cache, _):
        rig.disk.fail("room", broken())
        assert set(await ailments(cache)) == {Code.DISK_FAILING}

        rig.disk.release()
        clock.advance(3.0)

        assert await ailments(cache) == {}


async def test_a_namespace_opens_on_a_full_disk(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only its name is not written down; it is with the next opening, and its blocks are found again in any case."""
    other, tokens = Namespace(model="other", weights="sha256:2"), prompt(seed, 2)
    config = small(hbm=16, dram=16, directory=tmp_path / "ssd")
    async with opened(config) as cache:
        await cache.open(Namespace(model="m", weights="sha256:1"), SPEC)
        with monkeypatch.context() as patch:
            patch.setattr(Metadata, "remember", _no_room)
            kv = await cache.open(other, SPEC)
        await store(kv, tokens, space=other)

        assert await read(kv, tokens, space=other) == 2 * SIZE
        assert stack_of(cache).cache.stats.failures["StoreFull"] == 1
        assert await kv.flush(tokens) == 2 * SIZE
    async with opened(config) as cache:
        kv = await cache.open(other, SPEC)
        assert await read(kv, tokens, space=other) == 2 * SIZE
        assert other.digest(SPEC) in await cache.known_spaces()


def _no_room(*_: object) -> bytes:
    raise StoreFull("the disk is full", kind="disk")


async def test_a_comparison_that_the_disk_fails_is_tried_again(tmp_path: Path, seed: int) -> None:
    """Reads of what is on disk go on meanwhile; it ends when the comparison does, and what is absent is dropped then."""
    rig, tokens = Rig(), prompt(seed, 4)
    config = small(directory=tmp_path / "ssd")
    async with opened_kv(config) as (cache, kv):
        await store(kv, tokens)
        assert await kv.flush(tokens) == 4 * SIZE
    rig.disk.fail("keys", broken())
    async with opened_kv(config, rig) as (cache, kv):
        await eventually(cache, {Code.RECONCILE_FAILED})
        found = await ailments(cache)
        assert "Input/output error" in found[Code.RECONCILE_FAILED].message
        assert await read(kv, tokens) == 4 * SIZE

        rig.disk.release()

        await eventually(cache, set())
        await cache.check()


async def test_without_ssd_nothing_is_looked_at(seed: int) -> None:
    """A cache in memory alone is well, and has no disk to ask."""
    async with opened_kv(small(ssd=None)) as (cache, kv):
        await kv.insert(prompt(seed, 2), tensor_of(prompt(seed, 2)), tier=Tier.DRAM)

        assert await ailments(cache) == {} and cache.disk_watch is None
        assert (await cache.health()).status == "ok"
