"""Starts on a disk that is damaged, fails or is full: what is refused, what is done without, and what health says until when."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from tests.seams import FakeClock, Rig
from tests.service.ailing import ailments, eventually
from tests.service.caches import LARGE, SIZE, SPEC, opened, opened_kv, prompt, read, small, stack_of, store
from tiercache.config import Config, Share
from tiercache.errors import DirectoryRefused, StoreError
from tiercache.service.health import Code
from tiercache.spec import Namespace
from tiercache.storage.directory import DataDirectory
from tiercache.storage.metadata import Metadata
from tiercache.types import Tier

OTHER = Namespace(model="large", weights="sha256:1")


async def filled(config: Config, seed: int) -> list[int]:
    """Leave a prompt on SSD and return its tokens."""
    tokens = prompt(seed, 4)
    async with opened_kv(config) as (_, kv):
        await store(kv, tokens)
        assert await kv.flush(tokens) == 4 * SIZE
    return tokens


@pytest.mark.parametrize("part", ["metadata", "blocks"])
@pytest.mark.parametrize("end", ["restart", "moved away"])
async def test_what_can_not_be_read_is_set_aside_and_told(tmp_path: Path, seed: int, part: str, end: str) -> None:
    """The tier begins empty and works; the files lie in the folder that is named, until they are moved away or the next start."""
    clock = FakeClock()
    config = small(hbm=16, directory=tmp_path / "ssd")
    tokens = await filled(config, seed)
    [file] = (tmp_path / "ssd" / part).rglob("data.mdb")
    damaged = b"\xa5" * file.stat().st_size
    file.write_bytes(damaged)
    async with opened_kv(config, Rig(clock=clock)) as (cache, kv):
        found = await ailments(cache)
        [folder] = (tmp_path / "ssd").glob("set-aside-*")

        assert set(found) == {Code.DATA_SET_ASIDE} and str(folder) in found[Code.DATA_SET_ASIDE].message
        assert [kept.read_bytes() for kept in (folder / part).rglob("data.mdb")] == [damaged]
        assert await read(kv, tokens) == 0
        await store(kv, tokens)
        assert await kv.flush(tokens) == await read(kv, tokens) == 4 * SIZE
        await cache.check()
        if end == "moved away":
            shutil.move(folder, tmp_path / "elsewhere")
            clock.advance(3.0)
            await eventually(cache, set())
    async with opened_kv(config) as (cache, kv):
        assert await ailments(cache) == {}
        assert await read(kv, tokens) == 4 * SIZE


async def _works_in_memory(config: Config, rig: Rig, seed: int, says: str) -> None:
    """Open a cache that must do without SSD, and use it."""
    tokens = prompt(seed, 4)
    async with opened_kv(config, rig) as (cache, kv):
        found = await ailments(cache)
        assert set(found) == {Code.SSD_UNAVAILABLE}
        assert says in found[Code.SSD_UNAVAILABLE].message and "until the next start" in found[Code.SSD_UNAVAILABLE].message
        assert Tier.SSD not in stack_of(cache).cache.tiers
        await store(kv, tokens)
        assert await read(kv, tokens) == 4 * SIZE
        assert await kv.flush(tokens) == 0
        with pytest.raises(StoreError, match="a restart may bring it back"):
            await kv.delete(tokens)
        assert await read(kv, tokens) == 0
        await cache.check()


async def test_data_that_can_not_be_opened_is_done_without(tmp_path: Path, seed: int) -> None:
    """An I/O error at the opening of a model's files: memory works, a delete says what it can't do, the next start has it all."""
    rig, config = Rig(), small(hbm=16, directory=tmp_path / "ssd")
    tokens = await filled(config, seed)
    rig.disk.fail("open", OSError(errno.EIO, os.strerror(errno.EIO)))

    await _works_in_memory(config, rig, seed, "blocks of 8192 bytes")

    async with opened_kv(config) as (cache, kv):
        assert await ailments(cache) == {}
        assert await read(kv, tokens) == 4 * SIZE


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("part", [Metadata, DataDirectory])
async def test_a_directory_on_a_disk_that_fails_is_done_without(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, part: type, number: int
) -> None:
    """An I/O error or a full disk at the start: memory works, and the next start has what was stored."""
    config = small(hbm=16, directory=tmp_path / "ssd")
    tokens = await filled(config, seed)
    kind = StoreError if part is Metadata else DirectoryRefused
    with monkeypatch.context() as patch:
        patch.setattr(part, "__init__", _refusing(kind, number))

        await _works_in_memory(config, Rig(), seed, os.strerror(number))

    async with opened_kv(config) as (cache, kv):
        assert await ailments(cache) == {}
        assert await read(kv, tokens) == 4 * SIZE


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOTDIR, errno.EROFS, None])
async def test_a_directory_that_is_a_mistake_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    """A path that can't be written, is no directory or lies on a network is said at once, and nothing is left behind."""
    monkeypatch.setattr(DataDirectory, "__init__", _refusing(DirectoryRefused, number))

    with pytest.raises(DirectoryRefused):
        async with opened(small(directory=tmp_path / "ssd")):
            pass


async def test_without_any_other_tier_there_is_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SSD is all there is, a disk that fails is an error."""
    monkeypatch.setattr(Metadata, "__init__", _refusing(StoreError, errno.EIO))

    with pytest.raises(StoreError, match="Input/output error"):
        async with opened(small(hbm=None, dram=None, directory=tmp_path / "ssd")):
            pass


async def test_one_model_without_ssd_leaves_the_others_theirs(tmp_path: Path, seed: int) -> None:
    """Only the block size whose files can't be opened does without; the other one is durable."""
    shares = (Share(block_bytes=SPEC.block_bytes, fraction=0.5), Share(block_bytes=LARGE.block_bytes, fraction=0.5))
    rig = Rig()
    config = Config.of(hbm="1 MiB", ssd="16 MiB", directory=str(tmp_path / "ssd"), shares=shares)
    async with opened_kv(config, rig) as (cache, kv):
        rig.disk.fail("open", OSError(errno.EIO, os.strerror(errno.EIO)))
        large = await cache.open(OTHER, LARGE)
        await store(large, prompt(seed, 2), space=OTHER)
        await store(kv, prompt(seed, 2))

        assert (await large.flush(prompt(seed, 2)), await kv.flush(prompt(seed, 2))) == (0, 2 * SIZE)
        assert "blocks of 32768 bytes" in (await ailments(cache))[Code.SSD_UNAVAILABLE].message
        await cache.check()


def _refusing(kind: type[StoreError] | type[DirectoryRefused], number: int | None) -> object:
    def refuse(self: object, path: Path, **_: object) -> None:
        raise kind(f"{path}: {'nfs' if number is None else os.strerror(number)}", path=str(path), errno=number)

    return refuse
