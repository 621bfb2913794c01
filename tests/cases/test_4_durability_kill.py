"""S5: kill -9 in the middle of writing, and what a loss of power or a broken copy leaves of the files."""

from __future__ import annotations

import asyncio
import json
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

import lmdb
import pytest

from tests.cases.crash_writer import BLOCKS, SHARED, block_bytes, config_of, tokens_of, write
from tests.cases.crash_writer import SPACE as WRITERS
from tests.cases.crash_writer import SPEC as WRITTEN
from tests.cases.disks import swept
from tests.cases.test_4_durability import recomputed, used
from tests.seams import Rig
from tests.service.caches import LARGE, SIZE, lower, opened_kv, prompt, read, small, store, tensor_of
from tiercache.service.inprocess import TierCache
from tiercache.storage.lmdb_env import PAGE
from tiercache.types import Tier


@pytest.mark.parametrize(
    ("step", "found"),
    [("before the data", 0), ("before the sync", 0), ("before the answer", 4)],
)
async def test_s5_a_kill_between_two_steps_of_a_write(tmp_path: Path, seed: int, step: str, found: int) -> None:
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
async def test_s5_kill_nine_in_the_middle_of_demotions(tmp_path: Path, seed: int, rounds: int) -> None:
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
            [sys.executable, "-m", "tests.cases.crash_writer", str(directory), str(first), str(last)],
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
            usage = used(cache)

        assert usage == recomputed(directory, WRITTEN)  # no index without bytes, no bytes without index
        assert {number for number in durable if found[number] != BLOCKS * SIZE} == set()
        assert {number for number in gone if found[number] > SHARED * SIZE} == set()
        first = last


def test_s5_the_writer_writes_what_the_oracle_says() -> None:
    """Its bytes do not come from torch; they are the same."""
    tokens = tokens_of(3)
    whole = tensor_of(tokens, spec=WRITTEN)
    part = whole[:, :, SIZE : 2 * SIZE].contiguous()
    assert block_bytes(tokens, 1).tobytes() == part.numpy().tobytes()


# --- a delete -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["before the index", "before the data"])
async def test_s5_a_kill_between_two_steps_of_a_delete(tmp_path: Path, seed: int, step: str) -> None:
    """Until the index has forgotten it a prompt is there, exact; after that it never comes back, and its bytes are reclaimed."""
    rig = Rig()
    tokens, other = prompt(seed, 4), prompt(seed + 1, 3)
    async with opened_kv(small(spec=LARGE, directory=tmp_path / "ssd"), rig, spec=LARGE) as (cache, kv):
        for each in (tokens, other):
            await store(kv, each)
            await kv.flush(each)
        hold = rig.copies.hold("discard") if step == "before the index" else rig.disk.hold("commit")
        deleting = asyncio.ensure_future(kv.delete(tokens))
        await hold.reached()

        shutil.copytree(tmp_path / "ssd", tmp_path / "then")

        rig.release()
        assert await deleting == 4 * SIZE
    async with opened_kv(small(spec=LARGE, directory=tmp_path / "then"), spec=LARGE) as (cache, kv):
        assert await read(kv, tokens) == (4 * SIZE if step == "before the index" else 0)
        assert await read(kv, other) == 3 * SIZE
        await swept(cache)
        usage = used(cache)
    assert usage[0] == (7 if step == "before the index" else 3)
    assert usage == recomputed(tmp_path / "then", LARGE)


# --- broken copies --------------------------------------------------------------------------------------------------------

PROMPTS = 24


def written(directory: Path, codec: str) -> None:
    """Make a directory with prompts on it, some of them deleted and stored anew."""

    async def fill() -> None:
        plain = codec == "zstd"
        async with TierCache(config_of(directory, codec)) as cache:
            kv = await cache.open(WRITERS, WRITTEN)
            for number in (*range(PROMPTS), *range(0, PROMPTS, 5)):
                if number % 5 == 0:
                    await kv.delete(tokens_of(number))
                await write(kv, tokens_of(number), plain=plain)
                await kv.flush(tokens_of(number))

    asyncio.run(fill())


def compacted(directory: Path) -> None:
    """Write each file anew with nothing but the pages that are in use, as a copy by LMDB's own tool has it."""
    for file in directory.rglob("data.mdb"):
        new = file.parent / "new"
        new.mkdir()
        with lmdb.open(str(file.parent), readonly=True, lock=False, max_dbs=8) as environment:
            environment.copy(str(new), compact=True)
        (new / "data.mdb").rename(file)
        new.rmdir()


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a directory that is whole, by its codec, `compacted` where that is asked for; not to be changed."""
    folder = tmp_path_factory.mktemp("wholes")

    def make(codec: str, *, compact: bool = False) -> Path:
        place = folder / f"{codec}{'-compact' * compact}"
        if not place.exists():
            written(place, codec)
            if compact:
                compacted(place)
        return place

    return make


def pages_of(file: Path) -> list[int]:
    """Return the pages of a file that hold anything."""
    content = file.read_bytes()
    return [number for number in range(len(content) // PAGE) if any(content[number * PAGE : (number + 1) * PAGE])]


def looked_at(codec: str, copies: list[Path]) -> list[dict[str, object]]:
    """Have a process open all copies; it must end by itself. Return what it says of each."""
    command = [sys.executable, "-m", "tests.cases.crash_reader", codec, str(PROMPTS), *map(str, copies)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"it ended with {done.returncode} after {done.stdout[-600:]}\n{done.stderr[-3000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()[1::2]]


WHOLE = [BLOCKS * WRITTEN.block_size] * PROMPTS
FILES = [("raw", "metadata"), ("raw", "raw"), ("zstd", "packed")]
forms = pytest.mark.parametrize("count", [6, pytest.param(60, marks=pytest.mark.slow)])


@forms
@pytest.mark.parametrize(("codec", "name"), FILES)
def test_s5_a_file_that_was_cut_is_seen_at_the_start(
    tmp_path: Path, wholes: Callable[..., Path], seed: int, codec: str, name: str, count: int
) -> None:
    """Copies cut at random page boundaries, and within pages: all is exact, or the files are set aside; never a signal."""
    whole = wholes(codec)
    choose = random.Random(seed)
    [file] = [file.relative_to(whole) for file in whole.rglob(f"{name}/data.mdb")]
    used_pages = pages_of(whole / file)
    cuts = [0, PAGE // 2, PAGE, *(choose.choice(used_pages) * PAGE + choose.choice((0, 0, 1, 3000)) for _ in range(count - 3))]
    copies = [tmp_path / f"{number}-cut-to-{cut}" for number, cut in enumerate(cuts)]
    for copy, cut in zip(copies, cuts, strict=True):
        shutil.copytree(whole, copy)
        os.truncate(copy / file, cut)

    said = looked_at(codec, copies)

    assert len(said) == count
    for one, cut in zip(said, cuts, strict=True):
        assert one["aside"] or one["found"] == WHOLE, (cut, one)
    assert any(one["aside"] for one in said)


@forms
@pytest.mark.parametrize(("codec", "name"), FILES)
def test_s5_pages_of_zeros_are_seen(
    tmp_path: Path, wholes: Callable[..., Path], seed: int, codec: str, name: str, count: int
) -> None:
    """Copies with zeros from one random page to another: seen at the start or at the read, and used on without an error."""
    whole = wholes(codec, compact=True)  # so that each page counts
    choose = random.Random(seed)
    [file] = [file.relative_to(whole) for file in whole.rglob(f"{name}/data.mdb")]
    used_pages = pages_of(whole / file)
    runs = [(choose.choice(used_pages), choose.choice((1, 1, 1, 2, 9, 50))) for _ in range(count)]
    copies = [tmp_path / f"{number}-zeros-{first}-{length}" for number, (first, length) in enumerate(runs)]
    for copy, (first, length) in zip(copies, runs, strict=True):
        shutil.copytree(whole, copy)
        with (copy / file).open("r+b") as changed:
            changed.seek(first * PAGE)
            changed.write(bytes(min(length, used_pages[-1] + 1 - first) * PAGE))

    said = looked_at(codec, copies)

    assert len(said) == count
    for one, run in zip(said, runs, strict=True):
        assert one["aside"] or one["found"] == WHOLE or one["failures"], (run, one)
