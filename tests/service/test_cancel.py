"""Whoever waits may go away at any step, and any step may fail: the copy ends, the books are right, and the same call then works.

Each test names the step at which the movement is stopped. Tier positions: 0 is HBM, 1 DRAM, 2 SSD.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.seams import Rig
from tests.service.caches import (
    SIZE,
    Books,
    is_exact,
    leases,
    lower,
    opened_kv,
    prompt,
    read,
    reservations,
    sink,
    small,
    stack_of,
    store,
    tensor_of,
    wind_down,
)
from tiercache.errors import StoreError
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV
from tiercache.types import Tier

BLOCKS = 6
NEIGHBOUR = 2


async def on_disk(cache: TierCache, kv: LocalKV, tokens: list[int]) -> None:
    """The prompt lies on SSD alone."""
    await store(kv, tokens)
    await sink(cache)


async def in_dram(cache: TierCache, kv: LocalKV, tokens: list[int]) -> None:
    """The prompt lies in DRAM alone."""
    await store(kv, tokens)
    await cache.settle()
    await lower(cache, Tier.HBM)


async def in_memory(cache: TierCache, kv: LocalKV, tokens: list[int]) -> None:
    """The prompt lies in memory and is not durable."""
    await store(kv, tokens)


async def durable(cache: TierCache, kv: LocalKV, tokens: list[int]) -> None:
    """The prompt lies in memory and on SSD."""
    await store(kv, tokens)
    assert await kv.flush(tokens) == len(tokens)


async def crowded(cache: TierCache, kv: LocalKV, tokens: list[int]) -> None:
    """HBM and DRAM are full of other prompts, so that whoever writes must wait for room."""
    for number in range(6):
        await store(kv, prompt(tokens[0] + 1 + number, 4))
    await cache.settle()
    core = stack_of(cache).cache
    assert core.residency.slots[0].free < BLOCKS and core.residency.slots[1].free < BLOCKS


async def ready(kv: LocalKV, tokens: list[int]) -> int:
    async with kv.match(tokens) as hit:
        return await hit.ready()


async def gather(kv: LocalKV, tokens: list[int]) -> int:
    return await read(kv, tokens)


async def last_layer(kv: LocalKV, tokens: list[int]) -> int:
    async with kv.match(tokens) as hit:
        k, _ = await hit.layer(3)
        return int(k.shape[0])


async def prefetch(kv: LocalKV, tokens: list[int]) -> int:
    return await kv.prefetch(tokens)


async def insert(kv: LocalKV, tokens: list[int]) -> int:
    stored, present, _ = await kv.insert(tokens, tensor_of(tokens))
    return stored + present


async def write_in_place(kv: LocalKV, tokens: list[int]) -> int:
    data = tensor_of(tokens)
    async with kv.reserve(tokens) as room:
        if not room.blocks:
            return room.present
        for number, block in enumerate(room.blocks, room.present // SIZE):
            block.copy_(data[:, :, number * SIZE : (number + 1) * SIZE])
        return await room.commit(len(tokens))


async def flush(kv: LocalKV, tokens: list[int]) -> int:
    return await kv.flush(tokens)


async def delete(kv: LocalKV, tokens: list[int]) -> int:
    await kv.delete(tokens)
    return await read(kv, tokens)


async def clear(kv: LocalKV, tokens: list[int]) -> int:
    await kv.clear()
    return await read(kv, tokens)


Prepare = Callable[[TierCache, LocalKV, list[int]], Awaitable[None]]
Call = Callable[[LocalKV, list[int]], Awaitable[int]]


@dataclass(frozen=True)
class Case:
    """A call, what it works on, the step of the copier that it waits for, and how many blocks it says at the end."""

    call: Call
    prepare: Prepare
    kind: str
    to: int
    number: int = 0
    result: int = BLOCKS

    def __str__(self) -> str:
        return f"{self.call.__name__}-{self.prepare.__name__}-{self.kind}{self.number} to {self.to}"


CASES = [
    *(Case(call, on_disk, "blocks", 1, number) for call in (ready, gather, last_layer, prefetch) for number in (0, 3, 5)),
    *(Case(prefetch, prepare, "blocks", 0, number) for prepare in (on_disk, in_dram) for number in (0, 3, 5)),
    *(Case(call, crowded, kind, to) for call in (insert, write_in_place) for kind, to in (("blocks", 1), ("put", 2))),
    *(Case(call, durable, "discard", 2, 0, 0) for call in (delete, clear)),
    *(Case(call, in_memory, "put", 2) for call in (flush,)),
]
both_sides = pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
each_case = pytest.mark.parametrize("case", CASES, ids=str)


def config_of(path: Path, **fields: Any) -> Any:
    return small(hbm=8, dram=16, ssd=96, directory=path / "ssd", **{"admit_ms": 60_000, "promote_ms": 60_000, **fields})


async def require_clean(cache: TierCache) -> None:
    """Nothing moves, nobody claims anything, and the books are right."""
    await cache.settle()
    await cache.check()
    assert leases(cache) == reservations(cache) == 0 and not stack_of(cache).cache.pending


@each_case
@both_sides
async def test_a_waiter_goes_away(tmp_path: Path, seed: int, case: Case, after: bool) -> None:
    """Cancelled at the step, three times over: no claim is left, what is found is exact, and the call then succeeds."""
    rig = Rig()
    rig.copies.chunk = 1
    neighbour, tokens = prompt(seed, NEIGHBOUR), prompt(seed + 1, BLOCKS)
    async with opened_kv(config_of(tmp_path), rig) as (cache, kv):
        await store(kv, neighbour)
        seen: list[Books] = []
        for _ in range(3):
            await case.prepare(cache, kv, tokens)
            hold = rig.copies.hold(case.kind, to=case.to, number=case.number, after=after)
            waiter = asyncio.ensure_future(case.call(kv, tokens))
            await hold.reached()

            error = await wind_down(waiter)

            assert isinstance(error, asyncio.CancelledError)
            await cache.check()
            hold.release()
            await require_clean(cache)
            assert await read(kv, tokens) in range(0, BLOCKS * SIZE + 1, SIZE)
            if case.call is not clear:
                assert await read(kv, neighbour) == NEIGHBOUR * SIZE
            assert await case.call(kv, tokens) == case.result * SIZE
            await require_clean(cache)
            await kv.clear()
            await store(kv, neighbour)
            await require_clean(cache)
            seen.append(Books(cache, counters=False))

        assert seen[0] == seen[1] == seen[2]


@each_case
async def test_a_step_fails(tmp_path: Path, seed: int, case: Case) -> None:
    """An error at the step is no exception to the caller and no wrong byte; the books are right, and the call then succeeds."""
    rig = Rig()
    rig.copies.chunk = 1
    neighbour, tokens = prompt(seed, NEIGHBOUR), prompt(seed + 1, BLOCKS)
    async with opened_kv(config_of(tmp_path), rig) as (cache, kv):
        await store(kv, neighbour)
        await case.prepare(cache, kv, tokens)
        rig.copies.fail(case.kind, StoreError("injected"), to=case.to, number=case.number)

        first = await case.call(kv, tokens)

        await require_clean(cache)
        assert first % SIZE == 0 and first <= BLOCKS * SIZE
        assert stack_of(cache).cache.stats.failures["StoreError"] == 1
        assert await read(kv, tokens) in range(0, BLOCKS * SIZE + 1, SIZE)
        await recovered(cache)
        if case.call in (ready, gather, last_layer, prefetch, flush):
            assert await case.call(kv, tokens) == case.result * SIZE
        elif case.result:
            await store(kv, tokens)
            assert await read(kv, tokens) == case.result * SIZE
        if case.call is not clear:
            assert await read(kv, neighbour) in (0, NEIGHBOUR * SIZE)
        await require_clean(cache)


async def recovered(cache: TierCache) -> None:
    """Wait until no store is left alone any more after a refusal."""
    stack = stack_of(cache)
    while stack.cache.moves.refusing:
        await stack.mover.change()


@pytest.mark.parametrize("operation", ["read", "copy"])
@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.parametrize("times", [1, 2])
async def test_a_disk_fails_at_each_block(tmp_path: Path, seed: int, block: int, operation: str, times: int) -> None:
    """With EIO at block k, once, it is read again and all of it comes; twice, the leading k blocks come, exact, and the rest is a
    counted miss and is given up: stored anew, all of it is there, and no slot is lost."""
    rig = Rig()
    neighbour, tokens = prompt(seed, NEIGHBOUR), prompt(seed + 1, BLOCKS)
    expected = BLOCKS if times == 1 else block
    async with opened_kv(config_of(tmp_path), rig) as (cache, kv):
        await store(kv, neighbour)
        await on_disk(cache, kv, tokens)
        before = Books(cache, counters=False)
        turns = itertools.count()
        rig.disk.fail_when(operation, OSError(errno.EIO, "injected"), lambda: next(turns) in range(block, block + times))

        found = [await read(kv, tokens), await read(kv, tokens)]

        assert found == [expected * SIZE] * 2
        await require_clean(cache)
        assert sum(stack_of(cache).cache.stats.failures.values()) == times - 1
        assert await read(kv, neighbour) == NEIGHBOUR * SIZE
        await store(kv, tokens)
        assert await read(kv, tokens) == BLOCKS * SIZE
        await sink(cache)
        await require_clean(cache)
        assert Books(cache, counters=False) == before


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC], ids=["EIO", "ENOSPC"])
@pytest.mark.parametrize("operation", ["commit", "sync"])
async def test_a_disk_that_refuses_leaves_all_in_memory(tmp_path: Path, seed: int, operation: str, number: int) -> None:
    """With an error at a write nothing is durable, nothing is lost, and the flush after it succeeds."""
    rig = Rig()
    tokens = prompt(seed, BLOCKS)
    async with opened_kv(config_of(tmp_path), rig) as (cache, kv):
        await store(kv, tokens)
        rig.disk.fail(operation, OSError(number, "injected"), times=1)

        assert await kv.flush(tokens) == 0

        await require_clean(cache)
        assert await read(kv, tokens) == BLOCKS * SIZE
        await recovered(cache)
        assert await kv.flush(tokens) == BLOCKS * SIZE
        await sink(cache)
        assert await read(kv, tokens) == BLOCKS * SIZE
        await require_clean(cache)


async def test_an_insert_that_waits_for_another_writer_goes_away(seed: int) -> None:
    """It leaves no trace; the writer goes on, and a second insert gets what it left."""
    tokens = prompt(seed, 3)
    async with opened_kv(small(ssd=None)) as (cache, kv):
        async with kv.reserve(tokens):
            waiter = asyncio.ensure_future(insert(kv, tokens))
            await asyncio.sleep(0)
            assert isinstance(await wind_down(waiter), asyncio.CancelledError)
            assert reservations(cache) == 1

        assert await insert(kv, tokens) == 3 * SIZE
        assert is_exact(await (await kv.match(tokens)).gather(), tokens)
