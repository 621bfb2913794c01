"""S3: a restart finds what was stored, and counts it. S4: a data directory has one owner."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import lmdb
import pytest

from tests.cases.disks import swept
from tests.service.caches import LARGE, SIZE, SPACE, SPEC, disk_of, opened_kv, prompt, read, sink, small, stack_of, store
from tests.service.client.daemons import Process, own_process
from tiercache.changes import Reason
from tiercache.errors import DirectoryLocked
from tiercache.service.client.client import connect
from tiercache.service.inprocess import TierCache
from tiercache.service.report import reports
from tiercache.spec import KVSpec, Namespace
from tiercache.storage.contract import FULL_CHARGE

PROMPTS = 20
DELETED = 7
"""The number of the prompt that is deleted before the stop."""
HASHED = "a word whose hash depends on the process"
each_spec = pytest.mark.parametrize("spec", [SPEC, LARGE], ids=["grouped", "alone"])


# --- S3 -------------------------------------------------------------------------------------------------------------------

READER = """
import asyncio, json, sys
from pathlib import Path
from tests.cases.test_4_durability import HASHED, config_of, found, used
from tests.cases.disks import swept
from tests.service.caches import LARGE, SPEC, opened_kv

async def main():
    spec = {"grouped": SPEC, "alone": LARGE}[sys.argv[3]]
    async with opened_kv(config_of(Path(sys.argv[1]), spec), spec=spec) as (cache, kv):
        await swept(cache)
        before = used(cache)
        print(json.dumps([await found(kv, int(sys.argv[2])), before, hash(HASHED)]))

asyncio.run(main())
"""


def config_of(directory: Path, spec: KVSpec) -> Any:
    """Return a cache that is large enough for all prompts on SSD, and for a few of them above."""
    return small(directory=directory, ssd=128, spec=spec)


async def found(kv: Any, seed: int) -> list[int]:
    """Return how many tokens of each prompt come, exact."""
    return [await read(kv, prompt(seed + number, 3, number)) for number in range(PROMPTS)]


def used(cache: TierCache) -> list[int]:
    """Return what the cache says is in use on SSD: slots, units, blocks by the store's own count, bytes of KV it reports."""
    pool = stack_of(cache).cache.residency.slots[2]
    [report] = reports(cache)
    return [pool.capacity - pool.free, pool.used, disk_of(cache).stats().blocks, report.tiers[2].used_bytes]


def recomputed(directory: Path, spec: KVSpec) -> list[int]:
    """Return the same from the files alone: values, and in them how many records there are, counted one by one."""
    records = 0
    for file in (directory / "blocks").rglob("data.mdb"):
        with lmdb.open(str(file.parent), readonly=True, lock=False) as environment, environment.begin(buffers=True) as transaction:
            for key, value in transaction.cursor():
                whole = bytes(value)
                step = 208 + 64 + 8 + spec.block_bytes
                if key != b"\xff" * 8:
                    records += sum(whole[at : at + 8] == b"TCRECORD" for at in range(0, len(whole) - step + 1, step))
    return [records, records * FULL_CHARGE, records, records * spec.block_bytes]


@each_spec
def test_s3_another_process_finds_what_was_stored(tmp_path: Path, seed: int, spec: KVSpec) -> None:
    """20 prompts, demoted, stopped; under another hash seed the same hits, exact; one deleted stays so; usage is the files'."""
    seed %= 1 << 24

    async def fill() -> None:
        async with opened_kv(config_of(tmp_path / "ssd", spec), spec=spec) as (cache, kv):
            for number in range(PROMPTS):
                await store(kv, prompt(seed + number, 3, number))
            await sink(cache)
            assert await kv.delete(prompt(seed + DELETED, 3)) == 3 * SIZE

    asyncio.run(fill())
    # 2**32 seeds at most: two processes hash the word alike once in 4 thousand million runs.
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    command = [sys.executable, "-c", READER, str(tmp_path / "ssd"), str(seed), "alone" if spec is LARGE else "grouped"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    hits, usage, hashed = json.loads(done.stdout)

    assert hashed != hash(HASHED)
    assert hits == [(3 + number // SIZE) * SIZE if number != DELETED else 0 for number in range(PROMPTS)]
    assert usage[0] == usage[2] == sum(hits) // SIZE
    if spec is LARGE:  # small blocks share values, in which a deleted one's bytes may lie on
        assert usage == recomputed(tmp_path / "ssd", spec)


@pytest.mark.parametrize(("spec", "ended"), [(SPEC, "stopped"), (LARGE, "stopped"), (LARGE, "killed")])
async def test_s3_eviction_starts_at_the_limit(tmp_path: Path, seed: int, spec: KVSpec, ended: str) -> None:
    """Filling on after a stop or a kill evicts from the first block on that has no room, not from twice the limit; files end."""
    config = small(hbm=4, dram=4, ssd=66, directory=tmp_path / "ssd", spec=spec, admit_ms=60_000)
    async with opened_kv(config, spec=spec) as (cache, kv):
        for number in range(PROMPTS):
            await store(kv, prompt(seed + number, 3))
        if ended == "killed":
            await sink(cache)
            shutil.copytree(tmp_path / "ssd", tmp_path / "then")  # the files as a kill leaves them
    if ended == "killed":
        shutil.rmtree(tmp_path / "ssd")
        (tmp_path / "then").rename(tmp_path / "ssd")

    async with opened_kv(config, spec=spec) as (cache, kv):
        await swept(cache)
        pool = stack_of(cache).cache.residency.slots[2]
        assert used(cache) == [60, 60 * FULL_CHARGE, 60, 60 * spec.block_bytes]
        core = stack_of(cache).cache
        spare = pool.free
        evicted: list[int] = []
        for number in range(PROMPTS, 60):
            await store(kv, prompt(seed + number, 3))
            await kv.flush(prompt(seed + number, 3))
            stats = disk_of(cache).stats()
            assert stats.blocks <= pool.capacity and stats.raw_file_bytes <= stats.limit_bytes
            evicted.append(core.stats.total(Reason.EVICT))

        assert evicted[spare // 3 - 1] == 0 and evicted[spare // 3] > 0
        await swept(cache)
        assert await read(kv, prompt(seed + 59, 3)) == 3 * SIZE


async def test_s3_what_was_cleared_stays_cleared(tmp_path: Path, seed: int) -> None:
    """A namespace that was cleared before the stop is empty after it, and its neighbour is whole."""
    other = Namespace(model="m", weights="sha256:1", salt="other")
    config = config_of(tmp_path / "ssd", LARGE)
    async with opened_kv(config, spec=LARGE) as (cache, kv):
        beside = await cache.open(other, LARGE)
        await store(kv, prompt(seed, 3))
        await store(beside, prompt(seed, 3), space=other)
        await sink(cache)
        assert await kv.clear() == 3 * SIZE

    async with opened_kv(config, spec=LARGE) as (cache, kv):
        assert await read(kv, prompt(seed, 3)) == 0
        assert await read(await cache.open(other, LARGE), prompt(seed, 3), space=other) == 3 * SIZE
        await swept(cache)


async def test_s3_metadata_does_not_grow_with_tenants_that_are_gone(tmp_path: Path, seed: int) -> None:
    """A hundred tenants come, store and are cleared, life after life: only those with blocks are still known; files stay small."""
    config = config_of(tmp_path / "ssd", LARGE)
    sizes: list[int] = []
    kept = Namespace(model="m", weights="sha256:1", salt="kept")
    for life in range(4):
        tenants = [Namespace(model="m", weights="sha256:1", salt=f"{life}-{number}" + "x" * 400) for number in range(100)]
        async with opened_kv(config, space=kept, spec=LARGE) as (cache, kv):
            if life == 0:
                await store(kv, prompt(seed, 2), space=kept)
            assert await read(kv, prompt(seed, 2), space=kept) == 2 * SIZE
            assert set(await cache.known_spaces()) == {kept.digest(LARGE)}
            for tenant in tenants:
                await cache.open(tenant, LARGE)
            one = await cache.open(tenants[0], LARGE)
            await store(one, prompt(seed + 1, 2), space=tenants[0])
            assert await one.flush(prompt(seed + 1, 2)) == 2 * SIZE
            assert len(await cache.known_spaces()) == 101
            assert await one.clear() == 2 * SIZE
        with lmdb.open(str(tmp_path / "ssd" / "metadata"), readonly=True, lock=False, max_dbs=8) as environment:
            sizes.append(environment.info()["last_pgno"])

    assert sizes[-1] <= sizes[1], sizes


async def test_s3_the_space_of_a_block_size_can_be_given_back(tmp_path: Path, seed: int) -> None:
    """Files never shrink; once the cache is closed a geometry's folder may be removed, and the next start finds it empty."""
    config = config_of(tmp_path / "ssd", LARGE)
    async with opened_kv(config, spec=LARGE) as (_, kv):
        await store(kv, prompt(seed, 4))
    [folder] = (tmp_path / "ssd" / "blocks").iterdir()
    folder.rename(tmp_path / "elsewhere")

    async with opened_kv(config, spec=LARGE) as (cache, kv):
        assert await read(kv, prompt(seed, 4)) == 0
        await swept(cache)
        assert disk_of(cache).stats().blocks == 0
        await store(kv, prompt(seed, 4))
        assert await kv.flush(prompt(seed, 4)) == 4 * SIZE


# --- S4 -------------------------------------------------------------------------------------------------------------------


def _second(folder: Path, directory: Path) -> tuple[list[str], Path]:
    """Return the command of a daemon on `directory` with a socket of its own, and that socket's path."""
    folder.mkdir()
    other = Process(folder, small(directory=directory, spec=LARGE))
    command = [sys.executable, "-m", "tiercache.service.daemon", "--config", str(folder / "config.toml"), "--socket"]
    return [*command, str(folder / "s")], Path(other.address.removeprefix("unix://"))


async def test_s4_a_second_daemon_is_refused_and_the_first_one_unharmed(tmp_path: Path, seed: int) -> None:
    """Through a link to the directory B exits non-zero naming A's process; A's clients see no error; A dead, B starts at once."""
    directory, link = tmp_path / "d", tmp_path / "link"
    directory.mkdir()
    link.symlink_to(directory)
    with own_process(small(directory=directory, spec=LARGE, admit_ms=20_000)) as daemon:
        async with connect(daemon.address, deadline=60.0) as client:
            await client.connected()
            assert daemon.process is not None
            kv = await client.open(SPACE, LARGE)
            turns, more_than = 0, 1 << 30
            ended, after = asyncio.Event(), asyncio.Event()

            async def loop() -> None:
                nonlocal turns
                while not ended.is_set():
                    tokens = prompt(seed + turns % 8, 3)
                    await store(kv, tokens)
                    assert await kv.flush(tokens) == await read(kv, tokens) == 3 * SIZE
                    turns += 1
                    if turns > more_than:
                        after.set()

            using = asyncio.ensure_future(loop())
            command, _ = _second(tmp_path / "b", link)
            second = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
            try:
                async with asyncio.timeout(60.0):
                    _, said = await second.communicate()
            finally:
                with suppress(ProcessLookupError):
                    second.kill()
            during = turns

            assert second.returncode == 1
            assert f"is in use by process {daemon.process.pid}" in said.decode()
            more_than = during + 4
            waiting = asyncio.ensure_future(after.wait())
            await asyncio.wait([using, waiting], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            assert during > 0 and not using.done()
            ended.set()
            await using
            assert client.stats().misses == {}
        # A's books were never disturbed: what it stored is whole.
        daemon.signal(signal.SIGKILL)
        daemon.process.wait()
        command, socket = _second(tmp_path / "c", link)
        third = subprocess.Popen(command)  # noqa: ASYNC220 - as soon as A is gone, not later
        try:
            async with connect(f"unix://{socket}", deadline=60.0) as client:
                await client.connected()
                assert third.poll() is None
                kv = await client.open(SPACE, LARGE)
                assert [await read(kv, prompt(seed + number, 3)) for number in range(min(turns, 8))] == [3 * SIZE] * min(turns, 8)
                await client.check()
        finally:
            third.kill()
            third.wait()
    assert int((directory / "lock").read_text()) == third.pid


async def test_s4_the_same_directory_twice_in_one_process_is_refused(tmp_path: Path, seed: int) -> None:
    """A second cache of this process is refused by the same error, and the first goes on."""
    config = config_of(tmp_path / "ssd", LARGE)
    (tmp_path / "link").symlink_to(tmp_path / "ssd")
    async with opened_kv(config, spec=LARGE) as (_, kv):
        with pytest.raises(DirectoryLocked, match=f"process {os.getpid()}"):
            async with TierCache(config_of(tmp_path / "link", LARGE)):
                pass

        await store(kv, prompt(seed, 3))
        assert await kv.flush(prompt(seed, 3)) == 3 * SIZE
