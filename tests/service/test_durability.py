"""What a later life of the cache finds: after a clean end, after kill -9 at any moment, and with records that were damaged.

S2, S3 and S5 of CASES, at the face.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from tests.seams import Rig
from tests.service.caches import (
    LARGE,
    SIZE,
    SPEC,
    disk_of,
    durable_slots,
    lower,
    opened_kv,
    prompt,
    read,
    sink,
    small,
    stack_of,
    store,
    tensor_of,
)
from tests.service.crash_writer import BLOCKS, SHARED, block_bytes, config_of, tokens_of
from tests.service.crash_writer import SPEC as WRITTEN
from tiercache.changes import Reason
from tiercache.service.inprocess import TierCache
from tiercache.spec import KVSpec
from tiercache.storage.ssd_values import LmdbValues, Write
from tiercache.types import Tier

ROOT = Path(__file__).resolve().parents[2]


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


# --- damaged records ------------------------------------------------------------------------------------------------------


def overwrite(values: LmdbValues, key: int, value: bytes) -> None:
    values.value_bytes = len(value)
    values.commit([Write(key, 0, value)])


def value_of(values: LmdbValues, key: int) -> bytes:
    seen: list[bytes] = []
    assert values.read(key, lambda view: seen.append(bytes(view)))
    return seen[0]


Damage = Callable[[LmdbValues, int, int], None]


def _patched(at: int, part: bytes) -> Damage:
    def change(values: LmdbValues, key: int, other: int) -> None:
        value = value_of(values, key)
        overwrite(values, key, value[:at] + part + value[at + len(part) :])

    return change


def _cut(length: int) -> Damage:
    return lambda values, key, other: overwrite(values, key, value_of(values, key)[:length])


def _turn_a_bit(values: LmdbValues, key: int, other: int) -> None:
    value = bytearray(value_of(values, key))
    value[20_000] ^= 1
    overwrite(values, key, bytes(value))


def _swap(values: LmdbValues, key: int, other: int) -> None:
    one, two = value_of(values, key), value_of(values, other)
    overwrite(values, key, two)
    overwrite(values, other, one)


DAMAGES: dict[str, Damage] = {
    "removed": lambda values, key, other: values.commit((), [key]),
    "cut by one": _cut(-1),
    "cut by half": _cut(18_000),
    "cut to nothing": _cut(0),
    "zeros": lambda values, key, other: overwrite(values, key, bytes(len(value_of(values, key)))),
    "a bit": _turn_a_bit,
    "older": _patched(8, b"\x00\x00"),
    "newer": _patched(8, b"\x02\x00"),
    "a terabyte": _patched(120, (1 << 40).to_bytes(8, "little")),
    "swapped": _swap,
}


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
async def test_a_damaged_record_is_a_miss(tmp_path: Path, seed: int, damage: str) -> None:
    """The blocks before it come, exact; it is counted, dropped with what follows it, and a good one can be stored again."""
    tokens, other = prompt(seed, 6), prompt(seed + 1, 3)
    config = small(spec=LARGE, directory=tmp_path / "ssd")
    async with opened_kv(config, spec=LARGE) as (cache, kv):
        for each in (tokens, other):
            await store(kv, each)
            await kv.flush(each)
        slots = durable_slots(kv, tokens)
        folder = disk_of(cache)._values[4].folder
    values = LmdbValues(folder, value_bytes=1, map_bytes=1 << 26, sync=True)
    DAMAGES[damage](values, slots[3], slots[4])
    values.close()

    async with opened_kv(config, spec=LARGE) as (cache, kv):
        assert await read(kv, tokens) == 3 * SIZE

        assert await read(kv, tokens) == 3 * SIZE and await read(kv, other) == 3 * SIZE
        counted = sum(stack_of(cache).cache.stats.failures.values())
        assert counted == 1 or (damage == "removed" and counted == 2)  # the sweep and the reader may both come upon it
        await store(kv, tokens)
        await swept(cache)
        assert await kv.flush(tokens) == 6 * SIZE
        await sink(cache)
        assert await read(kv, tokens) == 6 * SIZE
    async with opened_kv(config, spec=LARGE) as (cache, kv):
        assert await read(kv, tokens) == 6 * SIZE and await read(kv, other) == 3 * SIZE
        await swept(cache)


@pytest.mark.parametrize("name", ["format.json", "metadata", "blocks"])
async def test_files_that_can_not_be_used_start_an_empty_tier(tmp_path: Path, seed: int, name: str) -> None:
    """Another format, and environments that are no databases, are set aside: misses, no exception, and storing goes on."""
    tokens = prompt(seed, 3)
    config = small(spec=LARGE, directory=tmp_path / "ssd")
    async with opened_kv(config, spec=LARGE) as (_, kv):
        await store(kv, tokens)
        await kv.flush(tokens)
    for path in sorted((tmp_path / "ssd").rglob("*")):
        if name in path.relative_to(tmp_path).parts and path.name in ("data.mdb", name) and path.is_file():
            path.write_bytes(b'{"format": 999}' if name == "format.json" else b"\xee" * path.stat().st_size)

    async with opened_kv(config, spec=LARGE) as (cache, kv):
        assert await read(kv, tokens) == 0
        await store(kv, tokens)
        assert await kv.flush(tokens) == 3 * SIZE
        await swept(cache)
    async with opened_kv(config, spec=LARGE) as (_, kv):
        assert await read(kv, tokens) == 3 * SIZE


# --- a clean end ----------------------------------------------------------------------------------------------------------


READER = """
import asyncio, sys
from pathlib import Path
from tests.service.caches import SPEC, opened_kv, prompt, read, small

async def main():
    async with opened_kv(small(directory=Path(sys.argv[1]), ssd=128)) as (cache, kv):
        print([await read(kv, prompt(int(sys.argv[2]) + number, 3, number)) for number in range(20)])
        await cache.check()

asyncio.run(main())
"""


async def _twenty(path: Path, seed: int, spec: KVSpec = SPEC) -> None:
    """Store 20 prompts of 3 blocks, of which number 7 is deleted; all go to SSD, some when the cache is closed."""
    async with opened_kv(small(directory=path, ssd=128, spec=spec), spec=spec) as (cache, kv):
        for number in range(20):
            await store(kv, prompt(seed + number, 3, number))
        assert await kv.delete(prompt(seed + 7, 3)) == 3 * SIZE
        await cache.settle()
        await cache.check()


def test_another_process_finds_what_was_stored(tmp_path: Path, seed: int) -> None:
    """Under another hash seed: the same hits, the same bytes, and what was deleted stays deleted."""
    seed %= 1 << 24
    asyncio.run(_twenty(tmp_path / "ssd", seed))
    environment = os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)}

    done = subprocess.run(
        [sys.executable, "-c", READER, tmp_path / "ssd", str(seed)], env=environment, capture_output=True, text=True, check=False
    )

    assert done.stdout.strip() == str([(3 + number // SIZE) * SIZE if number != 7 else 0 for number in range(20)]), done.stderr


@pytest.mark.parametrize("spec", [SPEC, LARGE], ids=["grouped", "alone"])
async def test_a_restart_counts_what_is_there(tmp_path: Path, seed: int, spec: KVSpec) -> None:
    """Usage is that of the records; filling on evicts from the limit on, and never goes above it."""
    config = small(hbm=4, dram=4, ssd=66, directory=tmp_path / "ssd", spec=spec, admit_ms=60_000)
    async with opened_kv(config, spec=spec) as (_, kv):
        for number in range(20):
            await store(kv, prompt(seed + number, 3))

    async with opened_kv(config, spec=spec) as (cache, kv):
        await swept(cache)
        pool = stack_of(cache).cache.residency.slots[2]
        assert disk_of(cache).stats().blocks == pool.capacity - pool.free == 60
        core = stack_of(cache).cache
        spare = pool.free
        evicted: list[int] = []
        for number in range(20, 60):
            await store(kv, prompt(seed + number, 3))
            await kv.flush(prompt(seed + number, 3))
            stats = disk_of(cache).stats()
            assert stats.blocks <= pool.capacity and stats.raw_file_bytes <= stats.limit_bytes
            evicted.append(core.stats.total(Reason.EVICT))

        assert evicted[spare // 3 - 1] == 0 and evicted[-1] > 0
        await swept(cache)
        assert await read(kv, prompt(seed + 59, 3)) == 3 * SIZE


async def test_closing_writes_down_what_was_used_last(tmp_path: Path, seed: int) -> None:
    """What is only in memory is on SSD after a clean end; with too little room the last used prompts are."""
    config = small(hbm=8, dram=16, ssd=12, directory=tmp_path / "ssd", spec=LARGE)
    async with opened_kv(config, spec=LARGE) as (_, kv):
        for number in range(6):
            await store(kv, prompt(seed + number, 4))
        assert await read(kv, prompt(seed, 4)) == 4 * SIZE

    async with opened_kv(config, spec=LARGE) as (cache, kv):
        await swept(cache)
        found = [await read(kv, prompt(seed + number, 4)) for number in range(6)]
        assert found[0] == found[5] == 4 * SIZE and sum(found) == 12 * SIZE


async def test_closing_with_a_disk_that_refuses_ends(tmp_path: Path, seed: int) -> None:
    """What could not be written is lost, what had been is found."""
    rig = Rig()
    config = small(directory=tmp_path / "ssd", spec=LARGE)
    async with opened_kv(config, rig, spec=LARGE) as (cache, kv):
        await store(kv, prompt(seed, 2))
        await kv.flush(prompt(seed, 2))
        await store(kv, prompt(seed + 1, 2))
        rig.disk.fail("commit", OSError(errno.EIO, "injected"))
        await cache.close()

    async with opened_kv(config, spec=LARGE) as (cache, kv):
        assert [await read(kv, prompt(seed + number, 2)) for number in (0, 1)] == [2 * SIZE, 0]
        await swept(cache)


# --- kill -9 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "found"),
    [("before the data", 0), ("before the sync", 0), ("before the answer", 4)],
)
async def test_a_kill_between_two_steps_of_a_write(tmp_path: Path, seed: int, step: str, found: int) -> None:
    """As the files are at that moment: not named is not found and its bytes are reclaimed; named is found, exact."""
    rig = Rig()
    tokens, more = prompt(seed, 3), prompt(seed, 7)
    async with opened_kv(small(spec=LARGE, directory=tmp_path / "ssd"), rig, spec=LARGE) as (cache, kv):
        await store(kv, tokens)
        assert await kv.flush(tokens) == 3 * SIZE
        await store(kv, more)
        if step == "before the answer":
            after = rig.copies.hold("put", after=True)
            flushing = asyncio.ensure_future(kv.flush(more))
            await after.reached()
        else:
            hold = rig.disk.hold("commit" if step == "before the data" else "sync")
            flushing = asyncio.ensure_future(kv.flush(more))
            await hold.reached()

        shutil.copytree(tmp_path / "ssd", tmp_path / "then")

        rig.release()
        assert await flushing == 7 * SIZE
    async with opened_kv(small(spec=LARGE, directory=tmp_path / "then"), spec=LARGE) as (cache, kv):
        assert await read(kv, more) == (3 + found) * SIZE
        await swept(cache)
        await store(kv, more)
        await lower(cache, Tier.HBM)
        assert await kv.flush(more) == 7 * SIZE
        await swept(cache)


def _acknowledged(lines: IO[str], count: int) -> tuple[set[int], set[int], set[int]]:
    """Read `count` lines; return the prompts that are durable, those that are deleted, and those whose deletion had begun."""
    durable: set[int] = set()
    deleted: set[int] = set()
    begun: set[int] = set()
    for _ in range(count):
        word, _, number = lines.readline().strip().partition(" ")
        assert word in ("durable", "deleting", "deleted"), f"the writer said {word!r}"
        {"durable": durable, "deleting": begun, "deleted": deleted}[word].add(int(number))
    return durable, deleted, begun


@pytest.mark.parametrize("rounds", [4, pytest.param(20, marks=pytest.mark.slow)])
async def test_kill_nine_in_the_middle_of_demotions(tmp_path: Path, seed: int, rounds: int) -> None:
    """A writer is killed at random moments, life after life: what it was told is durable is there and exact, what it was told
    is deleted is not, nothing on disk is out of reach, and no byte is wrong."""
    choose = random.Random(seed)
    directory = tmp_path / "ssd"
    durable: set[int] = set()
    gone: set[int] = set()
    first = 0
    for _ in range(rounds):
        last = first + 40
        writer = subprocess.Popen(  # noqa: ASYNC220 - nothing else runs on this loop
            [sys.executable, "-m", "tests.service.crash_writer", str(directory), str(first), str(last)],
            env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        with writer, writer.stdout as lines:
            said = _acknowledged(lines, choose.randrange(1, 40))
            time.sleep(choose.random() * 0.02)  # noqa: ASYNC251 - a random moment is what is wanted
            writer.send_signal(signal.SIGKILL)
            rest = lines.read().splitlines(keepends=True)
        whole = [line for line in rest if line.endswith("\n")]
        for word, number in (line.split() for line in whole):
            said[("durable", "deleted", "deleting").index(word)].add(int(number))
        durable |= said[0]
        gone |= said[1]
        unsure = said[2] - said[1]
        durable -= gone | unsure

        async with opened_kv(config_of(directory), spec=WRITTEN) as (cache, kv):
            found = {number: await read(kv, tokens_of(number)) for number in range(last)}
            await swept(cache)

        assert {number for number in durable if found[number] != BLOCKS * SIZE} == set()
        assert {number for number in gone if found[number] > SHARED * SIZE} == set()
        first = last


def test_the_writer_writes_what_the_oracle_says() -> None:
    """Its bytes do not come from torch; they are the same."""
    tokens = tokens_of(3)
    whole = tensor_of(tokens, spec=WRITTEN)
    part = whole[:, :, SIZE : 2 * SIZE].contiguous()
    assert block_bytes(tokens, 1).tobytes() == part.numpy().tobytes()
