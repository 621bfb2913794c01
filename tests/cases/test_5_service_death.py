"""R1: a client dies at any point; what it held ends, and nothing else does."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from aiohttp import web

from tests.cases.brood import Brood, brood
from tests.seams import Rig
from tests.service.caches import LARGE, SPACE, leases, prompt, read, small, stack_of, store, wind_down
from tests.service.client.child import BLOCKS
from tests.service.client.daemons import running
from tests.service.client.fake import until
from tests.service.daemon.raw import daemon_of
from tiercache.config import Config
from tiercache.service.client.client import Client, connect
from tiercache.service.client.remote_kv import RemoteKV
from tiercache.service.daemon.daemon import Daemon

SIZE = LARGE.block_size
READERS = ("hold-lease", "hold-view", "hold-reading")
"""After a lookup with its lease, with a slot in place, in the middle of a fetch."""
WRITERS = {"hold-reserved": 0, "hold-written": 0, "hold-writing": 0, "hold-committed": 4}
"""After the begin of a put, with its blocks written, in the middle of an upload, after a part was committed: blocks that stay."""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A new folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="tc") as name:
        yield Path(name)


@pytest.fixture(params=[False, True], ids=["handlers run on", "handlers are cancelled"])
def cancelling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the web server cancels a handler when its connection is lost."""
    on = bool(request.param)
    monkeypatch.setattr(web, "AppRunner", functools.partial(web.AppRunner, handler_cancellation=on))
    return on


def roomy(clients: int, spare: int = 64) -> Config:
    return small(hbm=16, dram=BLOCKS * clients + spare, ssd=None, spec=LARGE, admit_ms=5000)


async def kill_in(
    brood: Brood, roles: Sequence[str], each: int, seed: int, daemon: Daemon, client: Client
) -> list[tuple[str, int]]:
    """Bring `each` clients to each of the points, kill all of them, and return who wrote, once nothing is theirs any more."""
    clients = [(role, seed + (100 + number if role in WRITERS else 0)) for number, role in enumerate(list(roles) * each)]
    pids = await brood.hatch(*clients)
    assert len(daemon.house.sessions) == len(pids) + 1
    held = await client.check()
    assert held["leases"] >= sum(role in READERS for role in roles) * each

    brood.kill(pids)

    pools = stack_of(daemon.cache).cache.residency.slots
    await until(lambda: len(daemon.house.sessions) == 1 and daemon.house.kept_back == leases(daemon.cache) == 0)
    await until(lambda: all(pool.census().held == pool.census().quarantined == 0 for pool in pools))
    assert (await client.check())["leases"] == 0
    return [(role, number) for role, number in clients if role in WRITERS]


async def take_all(kv: RemoteKV, seed: int, config: Config) -> None:
    """Fill every slot of the cache with new prompts: nothing may be left that can't be evicted."""
    slots = config.tiers[0].bytes // LARGE.block_bytes + config.tiers[1].bytes // LARGE.block_bytes
    for number in range(0, slots, BLOCKS):
        await store(kv, prompt(seed + 5000 + number, min(BLOCKS, slots - number)))


async def test_r1_client_killed_at_any_point(cancelling: bool, seed: int) -> None:
    """All points at once: leases end, partial puts are gone, the keys can be put again, neighbours are exact, all is evictable.

    There is no time to live that has to pass: the end of the process ends its session. The session's end is its own work and not
    the handler's, so that it makes no difference whether the web server cancels handlers.
    """
    roles, each = [*READERS, *WRITERS], 2
    config = roomy(len(WRITERS) * each)
    tokens, neighbour = prompt(seed, BLOCKS), prompt(seed + 1, 8)
    async with running(config) as (daemon, address), connect(address, deadline=60.0) as client, brood(daemon.path) as children:
        assert [runner.server.handler_cancellation for runner in daemon._runners if runner.server] == [cancelling]
        kv = await client.open(SPACE, LARGE)
        await store(kv, tokens)
        await store(kv, neighbour)

        wrote = await kill_in(children, roles, each, seed, daemon, client)

        assert await read(kv, neighbour) == 8 * SIZE and await read(kv, tokens) == BLOCKS * SIZE
        for role, number in wrote:
            again = prompt(number, BLOCKS)
            assert await read(kv, again) == WRITERS[role] * SIZE
            await store(kv, again)
            assert await read(kv, again) == BLOCKS * SIZE
        await take_all(kv, seed, config)
        assert await read(kv, tokens) == await read(kv, neighbour) == 0


@pytest.mark.slow
@pytest.mark.parametrize("role", [*READERS, *WRITERS])
async def test_r1_fifty_clients_killed_at_one_point(role: str, cancelling: bool, seed: int) -> None:
    """Fifty at each point in turn."""
    config = roomy(50)
    tokens, neighbour = prompt(seed, BLOCKS), prompt(seed + 1, 8)
    async with running(config) as (daemon, address), connect(address, deadline=60.0) as client, brood(daemon.path) as children:
        assert [runner.server.handler_cancellation for runner in daemon._runners if runner.server] == [cancelling]
        kv = await client.open(SPACE, LARGE)
        await store(kv, tokens)
        await store(kv, neighbour)

        wrote = await kill_in(children, [role], 50, seed, daemon, client)

        assert await read(kv, neighbour) == 8 * SIZE and await read(kv, tokens) == BLOCKS * SIZE
        for _, number in wrote:
            assert await read(kv, prompt(number, BLOCKS)) == WRITERS[role] * SIZE
            await store(kv, prompt(number, BLOCKS))
        for _, number in wrote:
            assert await read(kv, prompt(number, BLOCKS)) == BLOCKS * SIZE
        await take_all(kv, seed, config)
        assert await read(kv, tokens) == await read(kv, neighbour) == 0


async def test_r1_client_killed_while_its_blocks_come_from_ssd(folder: Path, seed: int) -> None:
    """The lease ends with the process although the copy goes on; the copy owns its slots to its end, and then others read it."""
    rig = Rig()
    tokens = prompt(seed, BLOCKS)
    config = small(hbm=4, dram=32, ssd=96, directory=folder / "kv", spec=LARGE, admit_ms=5000, promote_ms=5000)
    async with (
        daemon_of(folder, config, rig) as daemon,
        brood(daemon.path) as children,
        connect(f"unix://{daemon.path}", deadline=60.0) as client,
    ):
        kv = await client.open(SPACE, LARGE)
        await store(kv, tokens)
        assert await kv.flush(tokens) == BLOCKS * SIZE
        for number in range(2):
            await store(kv, prompt(seed + 1 + number, 18))
        hold = rig.copies.hold("blocks")
        pids = await children.hatch(("hold-lease", seed), ("hold-lease", seed))
        await hold.reached()
        assert leases(daemon.cache) == 2

        children.kill(pids)
        await until(lambda: len(daemon.house.sessions) == 1 and leases(daemon.cache) == 0)

        assert hold.standing, "the copies are still held"
        await daemon.cache.check()
        rig.release()
        await daemon.cache.settle()
        assert await read(kv, tokens) == BLOCKS * SIZE


async def test_r1_lookup_whose_hit_is_not_used_ends(seed: int) -> None:
    """Left unread, shortened to nothing, called off while it is answered or while it is waited for: no lease outlives it."""
    tokens = prompt(seed, 8)
    async with running(roomy(1)) as (daemon, address), connect(address, deadline=60.0) as client:
        kv = await client.open(SPACE, LARGE)
        await store(kv, tokens)
        async with kv.match(tokens) as hit:
            assert hit.tokens == 8 * SIZE and leases(daemon.cache) == 1
        async with kv.match(tokens) as hit:
            assert hit.take(0) == 0
        with pytest.raises(RuntimeError, match="not today"):
            async with kv.match(tokens):
                raise RuntimeError("not today")
        await wind_down(asyncio.ensure_future(kv.match(tokens).__aenter__()))
        begun = asyncio.ensure_future(kv.match(tokens).__aenter__())
        await asyncio.sleep(0)
        await wind_down(begun)

        await client.check()
        assert leases(daemon.cache) == 0 and len(daemon.house.sessions) == 1


async def test_r1_end_of_a_session_that_is_cancelled_is_whole(folder: Path, cancelling: bool, seed: int) -> None:
    """A handler that is cancelled while its session ends, which is what a web server may do: the end is waited for all the same."""
    rig = Rig()
    tokens = prompt(seed, 8)
    async with daemon_of(folder, roomy(2), rig) as daemon:
        async with connect(f"unix://{daemon.path}", deadline=60.0) as client:
            kv = await client.open(SPACE, LARGE)
            await store(kv, tokens)
            [session] = daemon.house.sessions
            async with kv.match(tokens):
                going, go, plain = asyncio.Event(), asyncio.Event(), session.end

                async def slowly() -> None:
                    going.set()
                    await go.wait()
                    await plain()

                session.end = slowly  # type: ignore[method-assign]
                [runner] = daemon._runners
                assert runner.server is not None
                [handler] = runner.server.connections
                assert client._connection is not None
                client._connection.end("good-bye")
                await going.wait()
                if handler._task_handler is not None:
                    handler._task_handler.cancel()
                await asyncio.sleep(0)
                go.set()
                await until(session.done.is_set)
        await until(lambda: leases(daemon.cache) == 0)
        await daemon.cache.check()
