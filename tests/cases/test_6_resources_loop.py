"""Q5: what blocks runs off the event loop, one codec context a thread, and a store that hangs holds up nobody who does not ask."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.cases.served import served
from tests.seams import Rig, ThreadHold
from tests.service.caches import LARGE, SPACE, prompt, read, small, stack_of, store, tensor_of
from tests.service.client.fake import until
from tests.service.daemon.http import get
from tests.service.daemon.raw import daemon_of
from tiercache.service.client.client import BackOff, Client, connect
from tiercache.service.client.remote_kv import RemoteKV
from tiercache.service.daemon.daemon import Daemon
from tiercache.spec import Geometry, Namespace
from tiercache.storage.codec import Codec
from tiercache.types import Tier

SIZE = LARGE.block_size
CLIENTS, BLOCKS = 16, 4
AWAY = BackOff(first=600.0, most=600.0)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A new folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="tc") as name:
        yield Path(name)


class Ticker:
    """Counts the turns of the loop."""

    def __init__(self) -> None:
        self.turns = 0
        self._task = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            self.turns += 1
            await asyncio.sleep(0)

    async def more(self, turns: int) -> None:
        """Wait until the loop has turned so often since now."""
        goal = self.turns + turns
        await until(lambda: self.turns >= goal)

    async def stop(self) -> None:
        """Count no more."""
        self._task.cancel()
        await asyncio.wait([self._task])


@asynccontextmanager
async def house(folder: Path, rig: Rig, blocks: int) -> AsyncIterator[tuple[Daemon, list[tuple[Client, RemoteKV]], Ticker]]:
    """A daemon that compresses, sixteen clients on the same loop, and a ticker on it."""
    config = small(hbm=4, dram=4 * blocks, ssd=4 * blocks, directory=folder / "kv", spec=LARGE, codec="zstd", admit_ms=5000)
    async with daemon_of(folder, config, rig) as daemon, AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(connect(f"unix://{daemon.path}", deadline=120.0, back_off=AWAY)) for _ in range(CLIENTS)
        ]
        ticker = Ticker()
        try:
            yield daemon, [(client, await client.open(SPACE, LARGE)) for client in clients], ticker
        finally:
            rig.release()
            await ticker.stop()


async def put_while_held(
    hold: ThreadHold, house_: tuple[Daemon, list[tuple[Client, RemoteKV]], Ticker], seed: int, blocks: int
) -> None:
    """Let all put and flush; while the disk stands still the loop turns, health, matches and puts are answered."""
    daemon, clients, ticker = house_
    prompts = [prompt(seed + number, blocks) for number in range(len(clients))]

    async def put(kv: RemoteKV, tokens: list[int]) -> int:
        await store(kv, tokens, tier=Tier.DRAM)
        return await kv.flush(tokens)

    putting = [asyncio.create_task(put(kv, tokens)) for (_, kv), tokens in zip(clients, prompts, strict=True)]
    await hold.reached()
    for _ in range(5):
        await ticker.more(100)
        status, told = await get(daemon.path, "/health")
        # The clients make the oracle's bytes on this very loop, and the daemon says so where that takes it long.
        assert status == 200 and {reason["code"] for reason in told["reasons"]} <= {"loop_lag"}
    await until(lambda: daemon.house.counts.requests["Flush"] == len(clients))
    for (_, kv), tokens in zip(clients, prompts, strict=True):
        assert await read(kv, tokens) == blocks * SIZE
    assert not any(task.done() for task in putting), "a flush that was answered while the disk stands still is no flush"
    hold.release()
    assert await asyncio.gather(*putting) == [blocks * SIZE] * len(clients)
    assert all(not client.stats().misses for client, _ in clients)


@pytest.mark.parametrize("step", ["sync", "commit"])
async def test_q5_loop_turns_while_the_disk_stands_still(folder: Path, step: str, seed: int) -> None:
    """Sixteen clients put with compression, and the sync is held: what goes on meanwhile is counted in turns, not milliseconds."""
    rig = Rig()
    async with house(folder, rig, CLIENTS * BLOCKS) as all_of_it:
        await put_while_held(rig.disk.hold(step), all_of_it, seed, BLOCKS)


@pytest.mark.slow
async def test_q5_loop_turns_while_256_mib_are_put(folder: Path, seed: int) -> None:
    """The same with 16 MiB a client."""
    rig = Rig()
    blocks = (16 << 20) // LARGE.block_bytes
    async with house(folder, rig, CLIENTS * blocks) as all_of_it:
        await put_while_held(rig.disk.hold("sync"), all_of_it, seed, blocks)


async def test_q5_loop_turns_while_a_block_is_compressed(folder: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """With every call of the codec held in its thread the loop turns; none of them runs on the loop's thread."""
    rig = Rig()
    hold = ThreadHold()
    threads: set[int] = set()
    for name in ("compress", "decompress"):
        monkeypatch.setattr(Codec, name, _held(getattr(Codec, name), hold, threads))
    try:
        async with house(folder, rig, CLIENTS * BLOCKS) as all_of_it:
            daemon, clients, _ = all_of_it
            await put_while_held(hold, all_of_it, seed, BLOCKS)
            for number in range(CLIENTS):
                await store(clients[number][1], prompt(seed + 100 + number, BLOCKS), tier=Tier.DRAM)
            while stack_of(daemon.cache).cache.inflight.flying:
                await daemon.cache.settle()
            before = len(threads)
            assert [await read(kv, prompt(seed + number, BLOCKS)) for number, (_, kv) in enumerate(clients)] == [
                BLOCKS * SIZE
            ] * CLIENTS
            assert before > 0 and threading.get_ident() not in threads
    finally:
        hold.release()


def _held(plain: object, hold: ThreadHold, threads: set[int]) -> object:
    def call(*args: object) -> object:
        threads.add(threading.get_ident())
        hold.stand()
        return plain(*args)  # type: ignore[operator]

    return call


def test_q5_sixteen_threads_share_a_codec(seed: int) -> None:
    """Two thousand records each, compressed and decompressed by all of them at once: every one is exact."""
    geometry = Geometry(layers=1, parts=2, unit_bytes=1024, symbol_bytes=64)
    codec = Codec(geometry.block_bytes)
    words = np.random.default_rng(seed).standard_normal((16, geometry.block_bytes // 2), dtype=np.float32).view("<u4") >> 16
    blocks = [each.astype("<u2").view(np.uint8).reshape(geometry.planes, geometry.unit_bytes) for each in words]
    exact: list[int] = []
    together = threading.Barrier(16)

    def work(place: int) -> None:
        into = np.empty((geometry.planes, geometry.unit_bytes), np.uint8)
        together.wait()
        right = 0
        for turn in range(2000):
            block = blocks[(place + turn) % 16]
            codec.decompress(codec.compress(block, 2), 2, into)
            right += np.array_equal(into, block)
        exact.append(right)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert exact == [2000] * 16


@pytest.mark.parametrize(
    "step", ["read", pytest.param("commit", marks=pytest.mark.slow), pytest.param("sync", marks=pytest.mark.slow)]
)
async def test_q5_store_call_that_is_stuck(folder: Path, step: str, seed: int) -> None:
    """A call that never returns, in a daemon of its own: another namespace and health are answered, SIGTERM ends it with 0."""
    config = small(
        hbm=4, dram=64, ssd=64, directory=folder / "kv", spec=LARGE, codec="zstd", admit_ms=50, promote_ms=50, drain_seconds=0.2
    )
    tokens, other = prompt(seed, 4), Namespace(model="another", weights="sha256:2")
    program = (str(Path(__file__).with_name("stuck.py")), step)
    async with served(folder, config) as daemon, connect(daemon.address, deadline=60.0) as client:
        await store(await client.open(SPACE, LARGE), tokens)
        await daemon.stop()
    async with served(folder, config, program=program) as daemon, connect(daemon.address, deadline=60.0, back_off=AWAY) as client:
        kv, neighbour = await client.open(SPACE, LARGE), await client.open(other, LARGE)
        (folder / "stuck").touch()
        if step == "read":
            stuck = asyncio.ensure_future(kv.prefetch(tokens))
        else:
            new = prompt(seed + 1, 4)
            await kv.insert(new, tensor_of(new, spec=LARGE))
            stuck = asyncio.ensure_future(kv.flush(new))
        await until((folder / "standing").exists)

        for number in range(4):
            await store(neighbour, prompt(seed + 2 + number, 4), space=other)
            assert await read(neighbour, prompt(seed + 2 + number, 4), space=other) == 4 * SIZE
        assert (await get(daemon.path, "/health"))[0] == 200
        await client.check()
        await daemon.stop()
        await stuck
