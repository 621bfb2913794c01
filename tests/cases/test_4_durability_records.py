"""S2: records, and directories, that can't be trusted are misses."""

from __future__ import annotations

import json
import logging
import shutil
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.cases.disks import (
    Damage,
    cut_to,
    damage,
    folder_of,
    one_bit,
    overwrite,
    patched,
    removed,
    swapped,
    swept,
    value_of,
    zeros,
)
from tests.seams import Rig, ThreadHold, Threads
from tests.service.caches import (
    LARGE,
    SIZE,
    SPACE,
    disk_of,
    durable_slots,
    opened_kv,
    prompt,
    read,
    sink,
    small,
    stack_of,
    store,
)
from tests.service.client.daemons import own_process, running
from tests.service.daemon.http import get
from tiercache.errors import DISTRUST, FAILURES
from tiercache.service.client.client import connect
from tiercache.storage.directory import ASIDE_KEPT, FORMAT
from tiercache.storage.records import VERSION
from tiercache.storage.ssd_values import LmdbValues

MOST = 64 << 20
"""Bytes that a forged record may make a process allocate."""


@pytest.fixture
def allocations() -> Iterator[Callable[[], int]]:
    """Return the most bytes that were allocated at once since the test began. What fails to be had counts as an exception."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


def number(value: int, width: int) -> bytes:
    return value.to_bytes(width, "little")


DAMAGES: dict[str, tuple[Damage, set[str]]] = {
    "removed": (removed, {"absent"}),
    "cut by one": (cut_to(lambda length: length - 1), {"length"}),
    "cut by half": (cut_to(lambda length: length // 2), {"length"}),
    "cut to nothing": (cut_to(lambda length: 0), {"length"}),
    "length 2^40": (patched(120, number(1 << 40, 8)), {"header"}),
    "length 2^40, sealed": (patched(120, number(1 << 40, 8), sealed=True), {"length"}),
    "block length 2^40, sealed": (patched(128, number(1 << 40, 8), sealed=True), {"length"}),
    "version + 1": (patched(8, number(VERSION + 1, 2)), {"version"}),
    "version + 1, sealed": (patched(8, number(VERSION + 1, 2), sealed=True), {"version"}),
    "version - 1": (patched(8, number(VERSION - 1, 2)), {"version"}),
    "version - 1, sealed": (patched(8, number(VERSION - 1, 2), sealed=True), {"version"}),
    "swapped": (swapped, {"key"}),
    "zeros": (zeros, {"magic"}),
    "one bit": (one_bit, {"checksum"}),
}


@pytest.mark.parametrize("name", DAMAGES, ids=str)
async def test_s2_a_damaged_record_is_a_miss(tmp_path: Path, seed: int, name: str, allocations: Callable[[], int]) -> None:
    """The blocks before it come, exact; it is counted by its reason, dropped with what follows it, and can be stored again."""
    change, words = DAMAGES[name]
    tokens, other = prompt(seed, 6), prompt(seed + 1, 3)
    config = small(spec=LARGE, directory=tmp_path / "ssd")
    async with opened_kv(config, spec=LARGE) as (cache, kv):
        for each in (tokens, other):
            await store(kv, each)
            await kv.flush(each)
        slots, folder = durable_slots(kv, tokens), folder_of(cache)
    damage(folder, change, slots[3], slots[4])

    async with opened_kv(config, spec=LARGE) as (cache, kv):
        assert await read(kv, tokens) == 3 * SIZE

        assert await read(kv, tokens) == 3 * SIZE and await read(kv, other) == 3 * SIZE
        counted = stack_of(cache).cache.stats.failures
        assert set(counted) == words
        assert counted.total() == 1 or (name == "removed" and counted.total() == 2)  # the sweep and the reader may both see it
        await store(kv, tokens)
        await swept(cache)
        assert await kv.flush(tokens) == 6 * SIZE
        await sink(cache)
        assert await read(kv, tokens) == 6 * SIZE
    async with opened_kv(config, spec=LARGE) as (cache, kv):
        assert await read(kv, tokens) == 6 * SIZE and await read(kv, other) == 3 * SIZE
        await swept(cache)
    assert allocations() < MOST


# --- compressed records ---------------------------------------------------------------------------------------------------


def claiming(size: int) -> bytes:
    """Return the beginning of a zstd frame that says it holds `size` bytes, and of its one block, raw and empty."""
    return b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", size) + b"\x01\x00\x00"


def _frame(values: LmdbValues, key: int, other: int) -> None:
    start = 208 + 64 + 8
    value = value_of(values, key)
    assert value[start : start + 4] == claiming(0)[:4], "a zstd frame is what is spoilt here"
    frame = claiming(1 << 40)
    overwrite(values, key, value[:start] + frame + value[start + len(frame) :])


def _garbage(values: LmdbValues, key: int, other: int) -> None:
    value = value_of(values, key)
    overwrite(values, key, value[:280] + b"\xff" * 40 + value[320:])


FORGED: dict[str, tuple[Damage, str]] = {
    "a frame that claims 1 TiB": (_frame, "codec"),
    "no frame": (_garbage, "codec"),
    "as if raw": (patched(10, b"\x00", sealed=True), "length"),
    "another codec": (patched(10, b"\x02", sealed=True), "codec"),
    "another width": (patched(11, b"\x09", sealed=True), "codec"),
}


@pytest.mark.parametrize("name", FORGED, ids=str)
async def test_s2_a_forged_frame_is_a_miss(tmp_path: Path, seed: int, name: str, allocations: Callable[[], int]) -> None:
    """Whatever a compressed record claims to be: a miss, counted by its reason, and next to nothing is allocated for it."""
    change, word = FORGED[name]
    torch.manual_seed(seed)
    tokens = prompt(seed, 6)
    tensor = torch.randn(LARGE.shape(len(tokens))).bfloat16().float()  # zeros in half of the bytes: zstd packs it
    config = small(spec=LARGE, directory=tmp_path / "ssd", codec="zstd")

    async def found() -> int:
        async with kv.match(tokens) as hit:
            came = await hit.gather()
        assert torch.equal(came, tensor[:, :, : came.shape[2]])
        return int(came.shape[2])

    async with opened_kv(config, spec=LARGE) as (cache, kv):
        await kv.insert(tokens, tensor)
        assert await kv.flush(tokens) == 6 * SIZE and disk_of(cache).stats().packed_records == 6
        slots, folder = durable_slots(kv, tokens), folder_of(cache, 3)
    damage(folder, change, slots[3], slots[4])

    async with opened_kv(config, spec=LARGE) as (cache, kv):
        assert await found() == 3 * SIZE

        assert stack_of(cache).cache.stats.failures == {word: 1}
        await kv.insert(tokens, tensor)
        await sink(cache)
        assert await found() == 6 * SIZE
        await swept(cache)
    assert allocations() < MOST


# --- what is put meanwhile ------------------------------------------------------------------------------------------------


async def test_s2_a_good_record_put_meanwhile_outlives_the_clean_up(tmp_path: Path, seed: int) -> None:
    """While the bad record waits to be deleted its block is stored anew: the deletion takes the bad one, now and for a restart."""
    rig = Rig()
    tokens = prompt(seed, 6)
    config = small(spec=LARGE, directory=tmp_path / "ssd")
    async with opened_kv(config, spec=LARGE) as (cache, kv):
        await store(kv, tokens)
        await kv.flush(tokens)
        slots, folder = durable_slots(kv, tokens), folder_of(cache)
    damage(folder, zeros, slots[3], slots[4])

    async with opened_kv(config, rig, spec=LARGE) as (cache, kv):
        clean_up = rig.copies.hold("discard")
        assert await read(kv, tokens) == 3 * SIZE
        await clean_up.reached()
        await store(kv, tokens)
        assert await kv.flush(tokens) == 6 * SIZE

        clean_up.release()
        await swept(cache)

        await sink(cache)
        assert await read(kv, tokens) == 6 * SIZE
    async with opened_kv(config, spec=LARGE) as (cache, kv):
        assert await read(kv, tokens) == 6 * SIZE
        await swept(cache)


class Late(Threads):
    """Workers that can be held after a call, before its result is known."""

    after: ThreadHold | None = None

    def run(self, call, args):  # type: ignore[no-untyped-def]
        result = super().run(call, args)
        if self.after is not None and call.__name__ == "reconcile":
            self.after.stand()
        return result


async def test_s2_a_late_finding_takes_no_good_record(tmp_path: Path, seed: int) -> None:
    """The comparison finds a record absent; until that is known a reader missed it, and its slot holds a good block again."""
    late = Late()
    tokens = prompt(seed, 3)
    config = small(spec=LARGE, directory=tmp_path / "ssd")
    async with opened_kv(config, spec=LARGE) as (cache, kv):
        await store(kv, tokens)
        await kv.flush(tokens)
        slots, folder = durable_slots(kv, tokens), folder_of(cache)
    damage(folder, removed, slots[2], slots[1])

    late.after = ThreadHold()
    async with opened_kv(config, Rig(threads=late), spec=LARGE) as (cache, kv):
        await late.after.reached()
        assert await read(kv, tokens) == 2 * SIZE
        await cache.settle()
        await store(kv, tokens)
        assert await kv.flush(tokens) == 3 * SIZE and durable_slots(kv, tokens) == slots

        late.after.release()
        await swept(cache)

        assert durable_slots(kv, tokens) == slots
        await sink(cache)
        assert await read(kv, tokens) == 3 * SIZE


# --- a daemon -------------------------------------------------------------------------------------------------------------


async def test_s2_a_daemon_lives_and_its_client_sees_no_error(tmp_path: Path, seed: int) -> None:
    """Over the wire: damaged records are shorter hits, exact, and the daemon serves on; its counters name closed reasons."""
    tokens, other = prompt(seed, 6), prompt(seed + 1, 3)
    config = small(spec=LARGE, directory=tmp_path / "ssd")
    async with opened_kv(config, spec=LARGE) as (cache, kv):
        for each in (tokens, other):
            await store(kv, each)
            await kv.flush(each)
        slots, folder = durable_slots(kv, tokens), folder_of(cache)
    damage(folder, cut_to(lambda length: 0), slots[1], slots[0])
    damage(folder, swapped, slots[4], slots[5])

    async with running(config) as (daemon, address), connect(address) as client:
        remote = await client.open(SPACE, LARGE)

        assert await read(remote, tokens) == SIZE and await read(remote, other) == 3 * SIZE

        await store(remote, tokens)
        assert await read(remote, tokens) == 6 * SIZE and await remote.flush(tokens) == 6 * SIZE
        _, metrics = await get(daemon.path, "/metrics")
        counted = [line for line in metrics.splitlines() if line.startswith("tiercache_failures_total")]
        reasons = {line.split('reason="')[1].split('"')[0] for line in counted}
        assert reasons == {"length"} and reasons <= FAILURES
        assert client.stats().misses == {}


def test_s2_reasons_are_a_closed_set() -> None:
    """Every word that a record can be distrusted for is listed, and what is counted for a cache is one of a few words more."""
    assert {word for _, words in DAMAGES.values() for word in words} | {"codec", "namespace", "parent", "symbol", "order"} == (
        DISTRUST - {"archive"}
    )
    assert {"StoreError", "StoreFull", "WorkerDied", "write-through"} == FAILURES - DISTRUST


# --- directories ----------------------------------------------------------------------------------------------------------


def _format(other: int) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        (path / "format.json").write_text(json.dumps({"format": other, "boot": None}))

    return change


def _no_format(path: Path) -> None:
    (path / "format.json").write_bytes(b"\xff\x00{")


def _metadata(path: Path) -> None:
    file = path / "metadata" / "data.mdb"
    file.write_bytes(b"\xee" * file.stat().st_size)


def _blocks(path: Path) -> None:
    for file in (path / "blocks").rglob("data.mdb"):
        file.write_bytes(b"\xee" * file.stat().st_size)


SPOILT = {
    "a newer format": (_format(FORMAT + 1), f"format {FORMAT + 1}"),
    "an older format": (_format(FORMAT - 1), f"format {FORMAT - 1}"),
    "no format": (_no_format, "format.json can't be read"),
    "metadata": (_metadata, "no whole LMDB file"),
    "blocks": (_blocks, "no whole LMDB file"),
}


def _files(folder: Path) -> dict[Path, bytes]:
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("data.mdb")}


@pytest.mark.parametrize("name", SPOILT, ids=str)
async def test_s2_a_directory_that_can_not_be_used_is_set_aside(
    tmp_path: Path, seed: int, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The tier starts empty, the log says why and where to, every byte is kept, and storing goes on; put back it is found again."""
    spoil, why = SPOILT[name]
    tokens = prompt(seed, 3)
    config = small(spec=LARGE, directory=tmp_path / "ssd")
    async with opened_kv(config, spec=LARGE) as (_, kv):
        await store(kv, tokens)
        await kv.flush(tokens)
    shutil.copytree(tmp_path / "ssd", tmp_path / "whole")
    spoil(tmp_path / "ssd")
    before = _files(tmp_path / "ssd")

    with caplog.at_level(logging.WARNING):
        async with opened_kv(config, spec=LARGE) as (cache, kv):
            assert await read(kv, tokens) == 0
            await store(kv, tokens)
            assert await kv.flush(tokens) == 3 * SIZE
            await swept(cache)

    [line] = [record.getMessage() for record in caplog.records if "set-aside-1" in record.getMessage()]
    assert why in line and str(tmp_path / "ssd") in line
    kept = _files(tmp_path / "ssd" / "set-aside-1")
    assert kept and kept == {file: content for file, content in before.items() if file in kept}
    if name != "blocks":
        assert kept == before
    async with opened_kv(config, spec=LARGE) as (_, kv):
        assert await read(kv, tokens) == 3 * SIZE
    async with opened_kv(small(spec=LARGE, directory=tmp_path / "whole"), spec=LARGE) as (_, kv):
        assert await read(kv, tokens) == 3 * SIZE


async def test_s2_what_was_set_aside_can_be_put_back(tmp_path: Path, seed: int) -> None:
    """After an upgrade that was taken back the old files are renamed into their place, and everything is found in them."""
    tokens = prompt(seed, 3)
    ssd = tmp_path / "ssd"
    config = small(spec=LARGE, directory=ssd)
    async with opened_kv(config, spec=LARGE) as (_, kv):
        await store(kv, tokens)
    _format(FORMAT + 1)(ssd)
    async with opened_kv(config, spec=LARGE) as (_, kv):
        assert await read(kv, tokens) == 0
    for entry in ("metadata", "blocks"):
        shutil.rmtree(ssd / entry)
        (ssd / "set-aside-1" / entry).rename(ssd / entry)

    async with opened_kv(config, spec=LARGE) as (cache, kv):
        assert await read(kv, tokens) == 3 * SIZE
        await swept(cache)


async def test_s2_only_the_last_files_set_aside_are_kept(tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """A directory that changes hands between two versions again and again does not fill the disk; what goes is logged.

    There is no setting that wipes at once: a bound on what is kept does for the disk, and a wrong number loses nothing at first.
    """
    ssd = tmp_path / "ssd"
    config = small(spec=LARGE, directory=ssd)
    (ssd / "set-aside-notes").mkdir(parents=True)
    for turn in range(ASIDE_KEPT + 2):
        async with opened_kv(config, spec=LARGE) as (_, kv):
            await store(kv, prompt(seed + turn, 2))
        _format(FORMAT + 1)(ssd)

    with caplog.at_level(logging.WARNING):
        async with opened_kv(config, spec=LARGE):
            pass

    kept = sorted(path.name for path in ssd.glob("set-aside-*"))
    assert kept == [*(f"set-aside-{turn}" for turn in range(3, ASIDE_KEPT + 3)), "set-aside-notes"]
    assert any("set-aside-2 is deleted" in record.getMessage() for record in caplog.records)


async def test_s2_a_daemon_starts_on_another_format(tmp_path: Path, seed: int) -> None:
    """A daemon's process on a directory of a newer version serves, with misses at first, and stores."""
    tokens = prompt(seed, 3)
    config = small(spec=LARGE, directory=tmp_path / "ssd", admit_ms=20_000)
    async with opened_kv(config, spec=LARGE) as (_, kv):
        await store(kv, tokens)
    _format(FORMAT + 1)(tmp_path / "ssd")

    with own_process(config) as daemon:
        async with connect(daemon.address, deadline=60.0) as client:
            await client.connected()
            remote = await client.open(SPACE, LARGE)
            assert await read(remote, tokens) == 0
            await store(remote, tokens)
            assert await remote.flush(tokens) == 3 * SIZE and await read(remote, tokens) == 3 * SIZE

    assert (tmp_path / "ssd/set-aside-1/metadata/data.mdb").exists()
