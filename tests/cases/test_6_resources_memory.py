"""Q1, Q3, Q4: shared memory outlives no daemon and is deleted by no client; it is there when it is promised; one side may die."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tests.cases.brood import EARLY, brood
from tests.cases.served import Served, memfds, served, starting
from tests.service.caches import LARGE, SPACE, is_exact, prompt, read, small, store, tensor_of
from tests.service.client.fake import until
from tests.service.daemon.raw import names_in, session_at
from tiercache.config import Config
from tiercache.errors import StaleHandle
from tiercache.service import wire, wire_memory
from tiercache.service.client.blocking import BlockingClient
from tiercache.service.client.client import BackOff, connect
from tiercache.sizes import parse_size

ATTACH = Path(__file__).with_name("attach.py")
AT_ONCE = BackOff(first=0.01, most=0.05)
SIZE = LARGE.block_size


@pytest.fixture
def folder() -> Iterator[Path]:
    """A new folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="tc") as name:
        yield Path(name)


# --- Q1: a client's end ---------------------------------------------------------------------------------------------------


def interpreters() -> list[str]:
    """Return the Pythons of this machine from 3.11 on, one of each minor version; at least the one that runs this."""
    found = {sys.version_info.minor: sys.executable}
    homes = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for minor in range(11, 20):
        beside = sorted(homes.glob(f"3.{minor}.*/bin/python3.{minor}"))
        # The managers' own stand-ins (shims) may lead to nothing.
        on_path = [path for path in [shutil.which(f"python3.{minor}")] if path is not None and "shims" not in path]
        for path in [*on_path, *map(str, beside)]:
            found.setdefault(minor, path)
    return list(found.values())


PYTHONS = interpreters()
ENDS = {"return": 0, "exit": 3, "exception": 1, "terminated": -signal.SIGTERM, "killed": -signal.SIGKILL}


@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: re.sub(r"\W+", "-", path).strip("-"))
async def test_q1_clients_end_deletes_nothing(folder: Path, python: str, seed: int) -> None:
    """By return, sys.exit, exception, SIGTERM and SIGKILL, twice each: the memory is there, exact, and attached to again.

    The memory is a memfd that comes as a descriptor: it has no name that a tracker could unlink. Standard error holds nothing but
    the exception that was raised on purpose.
    """
    tokens = prompt(seed, 8)
    listed = set(os.listdir("/dev/shm"))
    async with served(folder, small(ssd=None, spec=LARGE, hbm=16, dram=16)) as daemon:
        async with connect(daemon.address, deadline=60.0) as client, session_at(daemon.path) as raw:
            kv = await client.open(SPACE, LARGE)
            await store(kv, tokens)
            before = {file.inode: file.size for file in memfds(daemon.pid)}
            fetch = wire.encoder.encode(wire_memory.Fetch(raw.welcome.token)).hex()
            sums = set()
            for end, code in [*ENDS.items()] * 2:
                process = await asyncio.create_subprocess_exec(
                    python,
                    "-I",
                    ATTACH,
                    raw.welcome.descriptors,
                    fetch,
                    end,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                )
                said, complained = (text.decode() for text in await process.communicate())

                assert process.returncode == code, complained
                assert "resource_tracker" not in complained and "leaked" not in complained
                assert complained == "" or (end == "exception" and complained.endswith("RuntimeError: on purpose\n"))
                sums.add(said)
            assert len(sums) == 1 and sums.pop().startswith("5 ")
            assert {file.inode: file.size for file in memfds(daemon.pid)} == before
            assert await read(kv, tokens) == 8 * SIZE
            await client.check()
        assert set(os.listdir("/dev/shm")) <= listed


CLIENT = """
import asyncio, json, os, signal, sys
from multiprocessing import resource_tracker
from tiercache.service.client.client import connect
from tiercache.spec import KVSpec, Namespace

async def main(address, space, spec, tokens, end):
    resource_tracker.ensure_running()
    async with connect(address, deadline=60.0) as client:
        kv = await client.open(Namespace(**space), KVSpec(**spec))
        async with kv.match(tokens) as hit:
            print(await hit.ready(), flush=True)
        if end == "exit":
            sys.exit(3)
        if end == "exception":
            raise RuntimeError("on purpose")
        if end == "terminated":
            os.kill(os.getpid(), signal.SIGTERM)
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(sys.argv[1], *map(json.loads, sys.argv[2:5]), sys.argv[5]))
"""


async def test_q1_end_of_the_client_itself(folder: Path, seed: int) -> None:
    """The product's client, which maps what it matched and ends in each way: data exact for the next one, nothing of a tracker."""
    tokens = prompt(seed, 8)

    async def end_by(address: str, end: str) -> None:
        told = (json.dumps(msgspec.to_builtins(each)) for each in (SPACE, LARGE, tokens))
        arguments = ("-c", CLIENT, address, *told, end)
        process = await asyncio.create_subprocess_exec(
            sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        said, complained = (text.decode() for text in await process.communicate())
        assert (process.returncode, said) == (ENDS[end], f"{8 * SIZE}\n"), complained
        assert "resource_tracker" not in complained and "leaked" not in complained

    async with (
        served(folder, small(ssd=None, spec=LARGE, hbm=16, dram=16)) as daemon,
        connect(daemon.address, deadline=60.0) as client,
    ):
        kv = await client.open(SPACE, LARGE)
        await store(kv, tokens)

        await asyncio.gather(*(end_by(daemon.address, end) for end in ENDS))

        assert await read(kv, tokens) == 8 * SIZE
        await daemon.until(lambda stats: len(stats["sessions"]) == 1)
        await client.check()


# --- Q3: memory that is there ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "size", "says"),
    [("ulimit -f 8192", "64 MiB", "64.0 MiB"), ("ulimit -v 1048576", "512 MiB", "512.0 MiB")],
    ids=["no more pages", "no more addresses"],
)
async def test_q3_memory_too_small(folder: Path, limit: str, size: str, says: str) -> None:
    """A host tier that does not fit: no start, a message with the size, exit status 1 and no signal, nothing left behind.

    A memfd is not bounded by the size of /dev/shm. What bounds it here is what a process may have of files (4 MiB) or of addresses
    (1 GiB); the kernel says so at allocation, where a size alone would be a bus error at a page's first use. The tier that was
    allocated before it goes, too.
    """
    config = Config.of(hbm="2 MiB", dram=size, ssd="64 MiB", directory=str(folder / "kv"))
    async with starting(folder, config, shell=limit) as daemon:
        code, said = await daemon.ended()

    assert code == 1, said
    assert says in said and "can't be had" in said and "Traceback" not in said
    assert set(names_in(folder)) <= {"kv", "s.toml"}
    async with served(folder, small(directory=folder / "kv")) as daemon:
        await daemon.stop()


async def test_q3_memory_above_the_machines(folder: Path) -> None:
    """More than the machine or its control group has is refused before the kernel is asked."""
    config = small(ssd=None, dram=1 << 40)
    async with starting(folder, config) as daemon:
        code, said = await daemon.ended()

    assert code == 1 and "limit is" in said and "Traceback" not in said
    assert names_in(folder) == ["s.toml"]


async def test_q3_all_of_it_is_there_when_the_daemon_serves(folder: Path, seed: int) -> None:
    """Every page is allocated before the first use, and every slot can be written and read: no bus error later."""
    config = small(hbm=64, dram=64, ssd=None, spec=LARGE, watermark_low=0.0, watermark_high=0.0)
    async with served(folder, config) as daemon, connect(daemon.address, deadline=60.0) as client:
        files = memfds(daemon.pid)
        assert sorted(file.size for file in files)[1:] == sorted(parse_size(tier.capacity) for tier in config.tiers)
        assert all(file.allocated >= file.size for file in files)
        kv = await client.open(SPACE, LARGE)
        for number in range(8):
            await store(kv, prompt(seed + number, 16))
        found = [await read(kv, prompt(seed + number, 16)) for number in range(8)]
        assert sum(found) >= 64 * SIZE
        assert {file.inode: file.allocated for file in memfds(daemon.pid)} == {file.inode: file.allocated for file in files}


# --- Q4: one side dies ----------------------------------------------------------------------------------------------------


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_q4a_daemon_restarts_under_a_client(folder: Path, how: str, seed: int) -> None:
    """Arrays on slots stay what they were; the next use of the hit raises StaleHandle, no signal comes, the next session works.

    Slots that were reserved for writing are written into memory that nobody reads any more.
    """
    config = small(hbm=8, dram=16, ssd=64, directory=folder / "kv", spec=LARGE, drain_seconds=0.0)
    tokens, new = prompt(seed, 4), prompt(seed + 1, 4)
    async with served(folder, config) as first, connect(first.address, deadline=60.0, back_off=AT_ONCE) as client:
        kv = await client.open(SPACE, LARGE)
        await store(kv, tokens)
        assert await kv.flush(tokens) == 4 * SIZE
        boot = client.boot
        async with kv.match(tokens) as hit, kv.reserve(new) as room:
            views = [hit.view(block, layer)[part] for block in range(4) for layer in range(LARGE.layers) for part in (0, 1)]
            kept = [raw_bytes(view) for view in views]
            expected = tensor_of(tokens, spec=LARGE)
            await (first.kill() if how == "killed" else first.stop())
            await until(lambda: client.boot is None)
            assert [raw_bytes(view) for view in views] == kept
            async with served(folder, config):
                await client.connected()
                for call in (hit.gather, lambda: hit.layer(0)):
                    with pytest.raises(StaleHandle):
                        await call()
                with pytest.raises(StaleHandle):
                    hit.view(0, 0)
                for block in room.blocks:
                    block.fill_(7)
                assert await room.commit(4 * SIZE) == 0
                assert [raw_bytes(view) for view in views] == kept
                assert kept[0] == raw_bytes(expected[0, 0, :SIZE])
                assert await read(kv, tokens) == 4 * SIZE and await read(kv, new) == 0
                await store(kv, new)
                assert await read(kv, new) == 4 * SIZE
                assert client.boot not in (None, boot)
                await client.check()


async def test_q4a_daemon_restarts_under_a_blocking_client(folder: Path, seed: int) -> None:
    """The same through the client without async."""
    config = small(hbm=8, dram=16, ssd=64, directory=folder / "kv", spec=LARGE, drain_seconds=0.0)
    tokens = prompt(seed, 4)
    loop = asyncio.get_running_loop()
    reading, started = asyncio.Event(), asyncio.Event()

    def use(address: str) -> None:
        with BlockingClient(address, deadline=60.0, back_off=AT_ONCE) as client:
            kv = client.open(SPACE, LARGE)
            kv.insert(tokens, tensor_of(tokens, spec=LARGE))
            assert kv.flush(tokens) == 4 * SIZE
            with kv.match(tokens) as hit:
                view = hit.view(0, 0)[0]
                kept = raw_bytes(view)
                loop.call_soon_threadsafe(reading.set)
                asyncio.run_coroutine_threadsafe(started.wait(), loop).result()
                client.connected()
                with pytest.raises(StaleHandle):
                    hit.gather()
                assert raw_bytes(view) == kept
            with kv.match(tokens) as hit:
                assert is_exact(hit.gather(), tokens, spec=LARGE) and hit.tokens == 4 * SIZE

    async with served(folder, config) as first:
        using = loop.run_in_executor(None, use, first.address)
        await until(lambda: reading.is_set() or using.done())
        await first.kill()
        async with served(folder, config):
            started.set()
            await using


async def settled(daemon: Served) -> None:
    """Wait until no session, and no connection but the one that asks, is left, and nothing is kept back for a dead process."""
    await daemon.until(lambda stats: (len(stats["sessions"]), stats["kept_back"], stats["connections"]) == (0, 0, 1))


async def free_slots(daemon: Served) -> int:
    """Return how many slots are free in all tiers together."""
    [stack] = (await daemon.stats())["stacks"]
    return sum(tier["free"] for tier in stack["tiers"])


async def found_by_another(daemon: Served, tokens: list[int]) -> int:
    """Register a new client and let it read; nothing of it is left in the caller's frame, which would hold its mappings."""
    async with connect(daemon.address, deadline=60.0) as client:
        found = await read(await client.open(SPACE, LARGE), tokens)
        await client.check()
    return found


async def test_q4b_client_dies_with_memory_mapped(folder: Path, seed: int) -> None:
    """Killed in each state of a client, before its first request too: slots, descriptors and threads come back to base.

    The host form: memory is the daemon's and comes as descriptors, a client exports none. The device's form is in `test_9_cuda`.
    """
    roles = [*EARLY, "hold-view", "hold-written"]
    config = small(hbm=8, dram=64, ssd=None, spec=LARGE, lease_share=1.0)
    async with served(folder, config) as daemon, brood(daemon.path) as children:
        async with connect(daemon.address, deadline=60.0) as client:
            await store(await client.open(SPACE, LARGE), prompt(seed, 24))
        await settled(daemon)
        base = daemon.held()
        free = await free_slots(daemon)
        for role in roles:
            pids = await children.hatch((role, seed if role == "hold-view" else seed + 1))
            await daemon.until(lambda stats: stats["connections"] > 1)

            children.kill(pids)
            await settled(daemon)

            await daemon.until_near(base)
            assert await free_slots(daemon) == free
            assert await found_by_another(daemon, prompt(seed, 24)) == 24 * SIZE
            await settled(daemon)
