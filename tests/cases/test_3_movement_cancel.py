"""M3: cancel or fail at every step of a move. A promotion of 8 blocks from SSD over DRAM to HBM, stopped at each of its steps.

In three ways: the task that waits is cancelled, the socket of the client that waits is dropped, the step fails. What other calls
do at such steps is in `tests/service/test_cancel.py`, and the steps of a promotion into a device, layer by layer, in
`test_3_movement_layers`.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.seams import PATIENCE, Rig
from tests.service.caches import (
    SIZE,
    SPACE,
    SPEC,
    Books,
    leases,
    opened_kv,
    placed,
    prompt,
    read,
    reservations,
    sink,
    small,
    stack_of,
    store,
    wind_down,
)
from tests.service.daemon.raw import Raw, are_exact, daemon_of, fetched, session_at, whole
from tests.service.daemon.raw import stored as stored_raw
from tiercache.config import Config
from tiercache.errors import StoreError
from tiercache.service import wire
from tiercache.service.daemon.daemon import Daemon
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV
from tiercache.types import Tier

BLOCKS = 8
NEIGHBOUR = 2


class Point(NamedTuple):
    """A step of the promotion: before or after the copy of a block to DRAM (`to` is 1), or from there to HBM (0)."""

    kind: str
    to: int
    number: int
    after: bool

    def __str__(self) -> str:
        return f"{'after' if self.after else 'before'} {self.kind} {self.number} to {self.to}"


POINTS = [
    Point(kind, to, number, after)
    for kind, to in (("blocks", 1), ("blocks", 0))
    for number in range(BLOCKS)
    for after in (False, True)
]
each_point = pytest.mark.parametrize("point", POINTS, ids=str)


def config_of(path: Path) -> Config:
    return small(hbm=BLOCKS, dram=16, ssd=96, directory=path / "ssd", admit_ms=60_000, promote_ms=60_000)


def arrived_by(point: Point) -> dict[Tier, int]:
    """Return where the blocks lie when the step at a point has failed: up to HBM go those before it, and no other one.

    What did not come from the disk to DRAM is brought to HBM, past it.
    """
    count = point.number if point.to == 0 else BLOCKS
    return {tier: blocks for tier, blocks in ((Tier.HBM, count), (Tier.DRAM, BLOCKS - count)) if blocks}


def source_of(point: Point) -> dict[Tier, int]:
    """Return where a match finds the blocks while the promotion stands at a point: where they came from, none half-way up."""
    return {Tier.SSD: BLOCKS} if point.to == 1 else {Tier.DRAM: BLOCKS}


async def require_clean(cache: TierCache) -> None:
    """Nothing moves, nobody claims anything, and the books are right."""
    await cache.settle()
    await cache.check()
    assert leases(cache) == reservations(cache) == 0 and not stack_of(cache).cache.pending


@asynccontextmanager
async def house(path: Path, seed: int, rig: Rig) -> AsyncIterator[tuple[TierCache, LocalKV, list[int], list[int], Books]]:
    """A cache with a neighbour and the prompt, both on disk alone; and its books."""
    rig.copies.chunk = 1
    neighbour, tokens = prompt(seed, NEIGHBOUR), prompt(seed + 1, BLOCKS)
    async with opened_kv(config_of(path), rig) as (cache, kv):
        await store(kv, neighbour)
        await store(kv, tokens)
        await sink(cache)
        yield cache, kv, neighbour, tokens, Books(cache, counters=False)


async def stop(point: Point, how: str, rig: Rig, cache: TierCache, kv: LocalKV, tokens: list[int]) -> None:
    """Promote the prompt, and stop that at the point: `cancel` whoever waits for it, or let the step `fail`."""
    if how == "fail":
        rig.copies.fail(point.kind, StoreError("injected"), to=point.to, number=point.number, after=point.after)
        assert await kv.prefetch(tokens) % SIZE == 0
        await cache.settle()
        assert placed(kv, tokens) == arrived_by(point)
    else:
        hold = rig.copies.hold(point.kind, to=point.to, number=point.number, after=point.after)
        waiter = asyncio.ensure_future(kv.prefetch(tokens))
        await hold.reached()
        assert isinstance(await wind_down(waiter), asyncio.CancelledError)
        await cache.check()
        assert leases(cache) == 0
        assert placed(kv, tokens) == source_of(point)
    rig.copies.release()
    await require_clean(cache)


async def test_m3_these_are_all_steps(tmp_path: Path, seed: int) -> None:
    """The points above are what an undisturbed promotion passes by, and nothing is missing from them."""
    rig = Rig()
    async with house(tmp_path, seed, rig) as (_, kv, _, tokens, _):
        rig.copies.seen.clear()
        assert await kv.prefetch(tokens) == BLOCKS * SIZE

        assert {Point(step.kind, step.to, step.number, step.after) for step in rig.copies.seen} == set(POINTS)


@pytest.mark.parametrize("how", ["cancel", "fail"])
@each_point
async def test_m3_cancel_or_fail_at_every_step(tmp_path: Path, seed: int, point: Point, how: str) -> None:
    """Stopped there: the audit is clean, as many slots are free and used as before, no lease is left, what is half brought is
    not found, the neighbour is as it was, and the same fetch then succeeds, exact."""
    rig = Rig()
    async with house(tmp_path, seed, rig) as (cache, kv, neighbour, tokens, before):
        await stop(point, how, rig, cache, kv, tokens)

        failed = sum(stack_of(cache).cache.stats.failures.values())
        assert failed == (how == "fail")
        assert await read(kv, neighbour) == NEIGHBOUR * SIZE
        assert await kv.prefetch(tokens) == BLOCKS * SIZE
        assert await read(kv, tokens) == BLOCKS * SIZE
        await require_clean(cache)
        await sink(cache)
        assert Books(cache, counters=False) == before
        await require_clean(cache)


async def test_m3_two_hundred_rounds_do_not_drift(tmp_path: Path, seed: int) -> None:
    """Cancelled or failed at a random step, round after round: as many slots are free as before, and the books are the same."""
    rig = Rig()
    choose = random.Random(seed)
    async with house(tmp_path, seed, rig) as (cache, kv, neighbour, tokens, before):
        for _ in range(200):
            await stop(choose.choice(POINTS), choose.choice(["cancel", "fail"]), rig, cache, kv, tokens)
            await sink(cache)

            assert Books(cache, counters=False) == before
        assert await read(kv, tokens) == BLOCKS * SIZE and await read(kv, neighbour) == NEIGHBOUR * SIZE
        await require_clean(cache)


# --- the socket -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder() -> Iterator[Path]:
    """A new folder whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory(prefix="tc") as name:
        yield Path(name)


@asynccontextmanager
async def served(path: Path, seed: int, rig: Rig) -> AsyncIterator[tuple[Daemon, list[int], list[int], Books]]:
    """A daemon with a neighbour and the prompt, both on disk alone; and its books."""
    rig.copies.chunk = 1
    neighbour, tokens = prompt(seed, NEIGHBOUR), prompt(seed + 1, BLOCKS)
    async with daemon_of(path, config_of(path), rig) as daemon:
        async with session_at(path / "d.sock") as raw:
            opened, handed = await raw.open(), await fetched(raw)
            for prompt_ in (neighbour, tokens):
                assert await stored_raw(raw, opened, handed, prompt_) == len(prompt_) // SIZE
        await gone(daemon)
        await sink(daemon.cache)
        yield daemon, neighbour, tokens, Books(daemon.cache, counters=False)


async def gone(daemon: Daemon) -> None:
    """Wait until no session is left, and nothing of one."""
    async with asyncio.timeout(PATIENCE):
        for session in daemon.house.sessions:
            await session.done.wait()
            await session.watch.over.wait()


async def drop_socket(point: Point, rig: Rig, daemon: Daemon, tokens: list[int]) -> None:
    """Promote the prompt for a client that goes away, without a word, when the promotion stands at the point."""
    hold = rig.copies.hold(point.kind, to=point.to, number=point.number, after=point.after)
    async with session_at(daemon.path) as raw:
        opened = await raw.open()
        await raw.send(wire.Match, kv=opened.kv, prompt=whole(tokens))
        await hold.reached()
        raw.ws._response.connection.transport.abort()  # type: ignore[union-attr]
    await gone(daemon)
    await daemon.cache.check()
    assert placed(await daemon.cache.open(SPACE, SPEC), tokens) == source_of(point)
    rig.copies.release()
    await require_clean(daemon.cache)


async def fetch(daemon: Daemon, tokens: list[int]) -> int:
    """Match and read a prompt as a client does, compare every byte, and return how many blocks came."""
    async with session_at(daemon.path) as raw:
        opened, handed = await raw.open(), await fetched(raw)
        lease = await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(tokens))
        places = await _ready(raw, lease.lease)
        count = are_exact(opened, handed, places, tokens)
        await raw.call(wire.Done, wire.Release, lease=lease.lease)
    await gone(daemon)
    return count


async def _ready(raw: Raw, lease: int) -> bytes:
    return (await raw.call(wire.Places, wire.Ready, lease=lease)).places


@each_point
async def test_m3_a_client_goes_away_at_every_step(folder: Path, seed: int, point: Point) -> None:
    """Its socket dropped there: the same is true, and the next client's fetch succeeds, exact."""
    rig = Rig()
    async with served(folder, seed, rig) as (daemon, neighbour, tokens, before):
        await drop_socket(point, rig, daemon, tokens)

        assert stack_of(daemon.cache).cache.stats.failures == {}
        assert await fetch(daemon, neighbour) == NEIGHBOUR
        assert await fetch(daemon, tokens) == BLOCKS
        await require_clean(daemon.cache)
        await sink(daemon.cache)
        assert Books(daemon.cache, counters=False) == before


async def test_m3_two_hundred_clients_that_go_away_leave_no_drift(folder: Path, seed: int) -> None:
    """A client after the other goes away at a random step: the books are the same after each."""
    rig = Rig()
    choose = random.Random(seed)
    async with served(folder, seed, rig) as (daemon, neighbour, tokens, before):
        for _ in range(200):
            await drop_socket(choose.choice(POINTS), rig, daemon, tokens)
            await sink(daemon.cache)

            assert Books(daemon.cache, counters=False) == before
        assert await fetch(daemon, tokens) == BLOCKS and await fetch(daemon, neighbour) == NEIGHBOUR
        await require_clean(daemon.cache)
