"""R3: a hostile local peer. Names become digests and nothing else, nothing is unpickled, nothing of ours is open to others."""

from __future__ import annotations

import asyncio
import os
import pickle  # noqa: TID251 - what is attacked with is made here; nothing of ours imports it
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import lmdb
import msgspec
import pytest

from tests.cases.served import PATIENCE, memfds, served, starting
from tests.service.caches import SPACE, SPEC, opened_kv, prompt, read, small, store
from tests.service.daemon.http import get, post
from tests.service.daemon.raw import session_at, whole
from tests.storage.ssd_fixture import capacity_for
from tiercache.config import Config
from tiercache.service import wire
from tiercache.service.client.client import connect
from tiercache.service.daemon.sockets import Sockets
from tiercache.spec import KVSpec, Namespace
from tiercache.storage.directory import DataDirectory
from tiercache.storage.memory import HostMemory

TINY = KVSpec(layers=1, kv_heads=1, head_dim=16, dtype="int8", block_size=16)
BLOCKS = 2


@pytest.fixture
def folder() -> Iterator[Path]:
    """A new folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="tc") as name:
        yield Path(name)


def everything(folder: Path) -> set[str]:
    """Return all names in a folder and below, but not what is in the data directory."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if (folder / "a" / "data") not in path.parents}


NAMES = {
    "path upwards": "../../../tmp/x",
    "absolute path": "/etc/passwd",
    "path inside": "a/../b",
    "path inside, resolved": "b",
    "zero": "\0",
    "zero inside": "a\0b",
    "10,000 characters": "x" * 10_000,
    "10,001 characters": "x" * 10_001,
    "512 bytes": "k" * 512,
    "511 bytes": "k" * 511,
    "emoji": "🦊",
    "composed": "\u00e9",
    "decomposed": "e\u0301",
    "empty": "",
    "the word None": "None",
}
FIELDS = ("model", "weights", "adapter", "salt")


def spaces() -> list[Namespace]:
    """Each name in each field, and the neighbours with nothing in the optional ones."""
    plain = Namespace(model="m", weights="w")
    return [plain, *(replace(plain, **{field: name}) for field in FIELDS for name in NAMES.values())]  # type: ignore[arg-type]


async def test_r3_hostile_names(folder: Path) -> None:
    """In each field: stored exactly, told exactly, apart from its neighbours, over a restart; no file outside the data directory.

    None is refused: a name never becomes a path or a key of the store, so that none can be too long or wrongly made for one.
    """
    data = folder / "a" / "data"
    count = len(spaces()) * BLOCKS
    config = Config.of(dram=count * 4096, ssd=capacity_for(TINY.geometry, 2 * count), directory=str(data), drain_seconds=20.0)
    tokens = prompt(3, BLOCKS)
    assert len({space.digest(TINY) for space in spaces()}) == len(spaces())
    async with served(folder, config) as daemon:
        before = everything(folder)
        async with connect(daemon.address, deadline=60.0) as client:
            for space in spaces():
                kv = await client.open(space, TINY)
                assert await read(kv, tokens, space=space) == 0
                await store(kv, tokens, space=space)
            for space in spaces():
                kv = await client.open(space, TINY)
                assert await read(kv, tokens, space=space) == len(tokens)
            await client.check()
        _, told = await get(daemon.path, "/v1/namespaces")
        found = {one["digest"]: one["namespace"] for one in told["namespaces"]}
        assert found == {
            space.digest(TINY).hex(): {
                "model": space.model,
                "weights": space.weights,
                "adapter": space.adapter,
                "world": 1,
                "salted": space.salt is not None,
            }
            for space in spaces()
        }
        assert everything(folder) == before
        await daemon.stop()
    async with served(folder, config) as daemon, connect(daemon.address, deadline=60.0) as client:
        for space in spaces():
            kv = await client.open(space, TINY)
            assert await read(kv, tokens, space=space) == len(tokens), space
        _, told = await get(daemon.path, "/v1/namespaces")
        assert {one["digest"]: one["namespace"] for one in told["namespaces"]} == found
        assert everything(folder) == before


async def test_r3_names_that_are_refused(folder: Path) -> None:
    """No text, half a character, too much of it: an error that names the field, and nothing is made."""
    async with served(folder, small(ssd=None)) as daemon, session_at(daemon.path) as raw:
        before = everything(folder)
        named = msgspec.to_builtins(SPACE)
        for field in FIELDS:
            for value in (b"../x", 5, True, ["a"], {"a": "b"}, "x" * (64 * 1024 + 1)):
                answer = await raw.call(
                    wire.Failed, wire.Open, namespace={**named, field: value}, spec=msgspec.to_builtins(SPEC), shard=0
                )
                assert answer.kind == "InvalidSpec" and field in answer.message
            surrogate = wire.encoder.encode(wire.Open(id=9, namespace={**named, field: "@@@"}, spec=msgspec.to_builtins(SPEC)))
            assert (await raw.garbage(surrogate.replace(b"@@@", b"\xed\xa0\x80"))).kind == "InvalidFrame"
        assert (await get(daemon.path, "/v1/namespaces"))[1] == {"namespaces": []}
        assert everything(folder) == before


class Bomb:
    """What makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.file), "w")


async def test_r3_pickle_in_a_body_or_a_frame(folder: Path) -> None:
    """Wherever bytes are taken from a peer: refused or kept as bytes, and no file appears."""
    target = folder / "made"
    bomb = pickle.dumps(Bomb(target))
    pickle.loads(bomb).close()
    target.unlink()
    async with served(folder, small(ssd=None)) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        assert (await raw.garbage(bomb)).kind == "InvalidFrame"
        padded = bomb + bytes(-len(bomb) % 4)
        for tail in (bomb[: len(bomb) // 4 * 4], padded):
            answer = await raw.reply(await raw.send(wire.Covered, kv=opened.kv, prompt=wire.Prompt(1, None, 0, tail)))
            assert answer in (wire.Count(id=answer.id, count=0),) or isinstance(answer, wire.Failed)
        assert await raw.refused(wire.Hello, version=wire.VERSION, join=bomb) == "InvalidFrame"
        assert (await post(daemon.path, "/v1/clear", bomb))[0] == 400
        reader, writer = await asyncio.open_unix_connection(str(daemon.path))
        writer.write(bomb + b"\r\n\r\n")
        assert b" 400 " in await reader.read()
        writer.close()
        assert (await raw.call(wire.Audited, wire.Check)).faults == [] and not target.exists()


async def test_r3_pickle_in_a_stored_record(folder: Path) -> None:
    """Data, metadata and the directory's own record replaced by pickles while nobody looks: misses, and no file appears."""
    target, data, tokens = folder / "made", folder / "a" / "data", prompt(1, BLOCKS)
    bomb = pickle.dumps(Bomb(target))
    config = small(directory=data)
    for where in ("blocks", "metadata", "format.json"):
        async with opened_kv(config) as (_, kv):
            await store(kv, tokens)
            assert await kv.flush(tokens) == len(tokens)
        assert poison(data / where, bomb) > 0
        async with opened_kv(config) as (cache, kv):
            assert await read(kv, tokens) in (0, len(tokens))
            await cache.check()
            await store(kv, tokens)
            assert await read(kv, tokens) == len(tokens)
        assert not target.exists()


def poison(place: Path, bomb: bytes) -> int:
    """Replace every value of every database below `place` by the pickle, padded to its length; return how many."""
    if place.is_file():
        place.write_bytes(bomb)
        return 1
    changed = 0
    for file in list(place.rglob("data.mdb")):
        with lmdb.open(str(file.parent), max_dbs=16, map_size=1 << 30) as environment:
            with environment.begin() as reading:
                names = [bytes(key) for key, _ in reading.cursor()]
            for name in [None, *names]:
                try:
                    database = environment.open_db(name, create=False)
                except lmdb.Error:
                    continue  # a key of the main database that is no other one's name
                with environment.begin(write=True, db=database) as writing:
                    for key, value in list(writing.cursor(db=database)):
                        if name is None and bytes(key) in names and len(value) == 48:
                            continue  # what a database is found by
                        writing.put(bytes(key), bomb.ljust(len(value), b"\0")[: max(len(value), len(bomb))], db=database)
                        changed += 1
    return changed


# --- modes ----------------------------------------------------------------------------------------------------------------

OTHERS = stat.S_IRWXG | stat.S_IRWXO


async def test_r3_modes_while_a_daemon_starts_under_umask_000(folder: Path) -> None:
    """Looked at over and over from before there is anything: sockets, lock, folders, data files and memory are this user's alone.

    Memory is a memfd, that is, no file of a file system; it is looked at through the process's descriptors, where it begins with
    no byte in it.
    """
    home = folder / "home"
    home.mkdir(mode=0o700)
    place = home / "run" / "of" / "it"
    config = small(hbm=4096, dram=4096, directory=home / "data" / "of" / "it")
    loose: set[str] = set()
    seen: set[str] = set()

    def look(pid: int) -> None:
        for path in home.rglob("*"):
            try:
                mode = stat.S_IMODE(path.lstat().st_mode)
            except FileNotFoundError:  # a draft that was renamed
                continue
            seen.add(path.name)
            if mode & OTHERS:
                loose.add(f"{path.relative_to(home)} {mode:04o}")
        for file in memfds(pid):
            seen.add(file.name)
            if file.size and file.mode & OTHERS:
                loose.add(f"{file.name} {file.mode:04o}")

    async with starting(folder, config, shell="umask 000", name="home/run/of/it/s") as daemon:
        ready = asyncio.ensure_future(daemon.ready())
        async with asyncio.timeout(PATIENCE):
            while not ready.done():
                look(daemon.pid)
                await asyncio.sleep(0)
        await ready
        async with connect(f"unix://{place / 's'}", deadline=60.0) as client:
            kv = await client.open(SPACE, SPEC)
            await store(kv, prompt(1, 4))
            await kv.flush(prompt(1, 4))
            look(daemon.pid)
        await daemon.stop()

    assert loose == set()
    assert {"s", "s.fd", "s.lock", "run", "of", "it", "data", "lock", "metadata", "blocks", "data.mdb", "format.json"} <= seen
    assert {"tiercache-hbm", "tiercache-dram", "tiercache-generations"} <= seen


@pytest.fixture
def open_umask() -> Iterator[None]:
    """Let files be made with every bit that is asked for."""
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
def test_r3_folders_above_are_private_too(folder: Path) -> None:
    """What is made on the way to the socket and to the data directory: in one that others may change they could replace it."""
    Sockets.open(folder / "run" / "of" / "s").close()
    DataDirectory(folder / "data" / "of").close()

    for name in ("run", "run/of", "data", "data/of"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o700


@pytest.mark.usefixtures("open_umask")
def test_r3_memory_is_private_before_there_is_a_byte_in_it() -> None:
    """A memfd begins with every bit set; allocating it takes long."""
    modes: list[int] = []

    def allocate(descriptor: int, offset: int, length: int) -> None:
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        os.posix_fallocate(descriptor, offset, length)

    HostMemory(8192, allocate=allocate).close()

    assert modes == [0o400]


async def test_r3_prompt_of_another_namespace_is_no_base(folder: Path) -> None:
    """What a session has said in one namespace is no key in another: the same ids there are another prompt's blocks."""
    async with served(folder, small(ssd=None)) as daemon, session_at(daemon.path) as raw:
        one = await raw.open()
        other = await raw.open(Namespace(model="m", weights="sha256:1", salt=""))
        tokens = prompt(1, 2)
        async with connect(daemon.address, deadline=60.0) as client:
            await store(await client.open(SPACE, SPEC), tokens)

        assert (await raw.call(wire.Count, wire.Covered, kv=one.kv, prompt=whole(tokens))).count == 2
        kept = wire.Prompt(2, 1, 4 * len(tokens), b"")
        assert (await raw.call(wire.Count, wire.Covered, kv=other.kv, prompt=kept)).count == 0
