"""Threads and moves that die: who waits is answered, nothing is served wrong, and health says it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.seams import PATIENCE, FakeClock, Rig
from tests.service.ailing import ailments
from tests.service.caches import (
    LARGE,
    SIZE,
    free,
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
)
from tiercache.errors import StoreError
from tiercache.service.ailments import DEATH_SECONDS
from tiercache.service.health import Code
from tiercache.service.inprocess import TierCache
from tiercache.types import Tier


def moves() -> list[asyncio.Task[object]]:
    """Return the tasks of moves under way, the first planned first."""
    tasks = [task for task in asyncio.all_tasks() if task.get_name().startswith("tiercache-move-")]
    return sorted(tasks, key=lambda task: int(task.get_name().rsplit("-", 1)[1]))


def alive(cache: TierCache) -> bool:
    return all(lane.alive == lane.threads for lane in cache.lanes())


@pytest.mark.parametrize("where", ["before the call", "in the transaction"])
async def test_a_dead_writer_thread_is_told_and_replaced(tmp_path: Path, seed: int, where: str) -> None:
    """The flush says that nothing is durable, memory goes on, the next flush is done by the next thread; told for a minute."""
    clock = FakeClock()
    rig = Rig(clock=clock)
    tokens, config = prompt(seed, 4), small(hbm=16, directory=tmp_path / "ssd")
    async with opened_kv(config, rig) as (cache, kv):
        await store(kv, tokens)
        if where == "before the call":
            rig.threads.kill("_put")
        else:
            rig.disk.fail("commit", SystemExit("killed"), times=1)
        async with asyncio.timeout(PATIENCE):
            assert await kv.flush(tokens) == 0
        clock.advance(2.0)

        found = await ailments(cache)

        assert set(found) == {Code.WORKER_DIED} and alive(cache)
        assert "lane write died 2 s ago of SystemExit" in found[Code.WORKER_DIED].message
        assert await read(kv, tokens) == 4 * SIZE
        assert await kv.flush(tokens) == 4 * SIZE
        await cache.check()
        clock.advance(DEATH_SECONDS)
        assert await ailments(cache) == {}
        assert [lane.deaths for lane in cache.lanes()] == [0, 0, 1, 0]
    async with opened_kv(config) as (_, kv):
        assert await read(kv, tokens) == 4 * SIZE


async def test_a_writer_thread_that_dies_at_the_end_costs_its_own_blocks_alone(tmp_path: Path, seed: int) -> None:
    """Closing writes down the rest: of three prompts the one whose write died is missing, the others are there, exact."""
    config = small(hbm=16, directory=tmp_path / "ssd")
    rig, prompts = Rig(), [prompt(seed + number, 4) for number in range(3)]
    async with opened_kv(config, rig) as (cache, kv):
        for tokens in prompts:
            await store(kv, tokens)
        rig.threads.kill("_put")
        await cache.close()
    async with opened_kv(config) as (cache, kv):
        assert sorted([await read(kv, tokens) for tokens in prompts]) == [0, 4 * SIZE, 4 * SIZE]
        await cache.check()


async def test_a_dead_reader_thread_of_the_disk_is_a_miss(tmp_path: Path, seed: int) -> None:
    """What it was to bring up stays where it is, and is read the next time."""
    rig = Rig()
    tokens = prompt(seed, 4)
    async with opened_kv(small(directory=tmp_path / "ssd"), rig) as (cache, kv):
        await store(kv, tokens)
        await sink(cache)
        rig.threads.kill("_blocks", times=2)

        async with asyncio.timeout(PATIENCE):
            assert await read(kv, tokens) == 0

        assert set(await ailments(cache)) == {Code.WORKER_DIED} and alive(cache)
        assert await read(kv, tokens) == 4 * SIZE
        await cache.check()


async def test_a_dead_copier_thread_is_a_miss_for_its_reader(seed: int) -> None:
    """gather gives nothing rather than an exception, the hit says so from then on, and the next hit has all of it."""
    rig = Rig()
    tokens = prompt(seed, 4)
    async with opened_kv(small(ssd=None), rig) as (cache, kv):
        await store(kv, tokens)
        for name in ("_gather", "_layer", "_verify"):
            rig.threads.kill(name)
            async with asyncio.timeout(PATIENCE), kv.match(tokens) as hit:
                if name == "_gather":
                    assert (await hit.gather()).shape[2] == 0
                else:
                    assert [part.shape[0] for part in await hit.layer(0)] == [0, 0]
                assert (hit.tokens, await hit.ready(), (await hit.gather()).shape[2]) == (0, 0, 0)

            assert await read(kv, tokens) == 4 * SIZE
        assert set(await ailments(cache)) == {Code.WORKER_DIED} and alive(cache)
        assert stack_of(cache).cache.stats.failures["WorkerDied"] == 3
        assert leases(cache) == 0
        await cache.check()


async def test_a_dead_copier_thread_refuses_what_it_was_to_store(seed: int) -> None:
    """insert says refused and room.commit that nothing more is cached; slots come back, and the next try stores all."""
    rig = Rig()
    tokens, other = prompt(seed, 4), prompt(seed + 1, 2)
    async with opened_kv(small(ssd=None), rig) as (cache, kv):
        rig.threads.kill("_scatter")
        async with asyncio.timeout(PATIENCE):
            assert tuple(await kv.insert(tokens, tensor_of(tokens))) == (0, 0, 4 * SIZE)
        assert await read(kv, tokens) == 0 and reservations(cache) == 0 and free(cache)[Tier.HBM] == 8

        async with kv.reserve(other) as room:
            tensor = tensor_of(other)
            for number, block in enumerate(room.blocks):
                block.copy_(tensor[:, :, number * SIZE : (number + 1) * SIZE])
            rig.threads.kill("_seal")
            assert await room.commit(2 * SIZE) == 0
            assert await room.commit(2 * SIZE) == 2 * SIZE

        await store(kv, tokens)
        assert await read(kv, tokens) == 4 * SIZE and await read(kv, other) == 2 * SIZE
        assert set(await ailments(cache)) == {Code.WORKER_DIED}
        await cache.check()


async def test_a_dead_copier_thread_leaves_a_demotion_undone(seed: int) -> None:
    """The block stays above, exact; the next demotion is done."""
    rig = Rig()
    tokens = prompt(seed, 4)
    async with opened_kv(small(ssd=None), rig) as (cache, kv):
        await store(kv, tokens)
        rig.threads.kill("_blocks", times=1 << 30)
        [move] = stack_of(cache).cache.moves.make_room(0, 8)
        stack_of(cache).mover.start([move])
        await cache.settle()
        assert free(cache) == {Tier.HBM: 4, Tier.DRAM: 8}
        assert await read(kv, tokens) == 4 * SIZE

        rig.threads.release()
        await lower(cache, Tier.HBM)

        assert free(cache) == {Tier.HBM: 8, Tier.DRAM: 4}
        assert await read(kv, tokens) == 4 * SIZE
        await cache.check()


async def test_a_copy_that_hangs_is_told(seed: int) -> None:
    """A gather that stands for 20 s of the clock; others read on in the other thread; it ends with the copy."""
    clock = FakeClock()
    rig = Rig(clock=clock)
    tokens = prompt(seed, 4)
    async with opened_kv(small(ssd=None), rig) as (cache, kv):
        await store(kv, tokens)
        hold = rig.threads.hold("_gather", times=1)
        reading = asyncio.ensure_future(read(kv, tokens))
        await hold.reached()
        clock.advance(20.0)

        found = await ailments(cache)
        assert await read(kv, tokens) == 4 * SIZE

        assert set(found) == {Code.COPY_SLOW}
        assert "a copy between memories has been running for 20 s (limit 5 s)" in found[Code.COPY_SLOW].message
        hold.release()
        assert await reading == 4 * SIZE
        await cache.settle()
        assert await ailments(cache) == {}


@pytest.mark.parametrize("begun", [True, False], ids=["under way", "not begun"])
async def test_a_dead_write_keeps_its_slots_and_nobody_waits(tmp_path: Path, seed: int, begun: bool) -> None:
    """The flush is answered, the slots it had stay apart until the next start, other prompts flush, and nothing read is wrong."""
    clock = FakeClock()
    rig = Rig(clock=clock)
    tokens, other, config = prompt(seed, 4), prompt(seed + 1, 4), small(hbm=16, directory=tmp_path / "ssd")
    async with opened_kv(config, rig) as (cache, kv):
        await store(kv, tokens)
        await store(kv, other)
        slots = free(cache)[Tier.SSD]
        hold = rig.copies.hold("put", after=begun)
        flushing = asyncio.ensure_future(kv.flush(tokens))
        if begun:
            await hold.reached()
        else:
            while not moves():  # noqa: ASYNC110 - it is to be met before its first step
                await asyncio.sleep(0)
        moves()[0].cancel()
        async with asyncio.timeout(PATIENCE):
            assert await flushing == 0
        hold.release()
        clock.advance(5.0)

        found = await ailments(cache)

        assert set(found) == {Code.MOVE_DIED} and found[Code.MOVE_DIED].since_seconds == 5.0
        assert "4 slots of SSD are kept from use until the next start" in found[Code.MOVE_DIED].message
        assert free(cache)[Tier.SSD] == slots - 4
        await cache.check()
        async with asyncio.timeout(PATIENCE):
            assert await kv.flush(tokens) == 0
            assert await kv.flush(other) == 4 * SIZE
        assert await read(kv, tokens) == await read(kv, other) == 4 * SIZE
        assert free(cache)[Tier.SSD] == slots - 8
    async with opened_kv(config) as (cache, kv):
        assert await read(kv, other) == 4 * SIZE
        assert await read(kv, tokens) in (0, 4 * SIZE)
        assert await ailments(cache) == {}
        await cache.check()


async def test_a_dead_demotion_is_not_waited_for_by_who_wants_room(seed: int) -> None:
    """Slots that it was to free are counted on no more: an insert lets others go instead, and stores all."""
    rig = Rig()
    tokens, new = prompt(seed, 4), prompt(seed + 1, 4)
    async with opened_kv(small(hbm=8, dram=8, ssd=None, admit_ms=60_000), rig) as (cache, kv):
        await store(kv, tokens)
        await store(kv, prompt(seed + 2, 4))
        hold = rig.copies.hold("blocks", to=1)
        stack = stack_of(cache)
        stack.mover.start(stack.cache.moves.make_room(0, 4))
        await hold.reached()
        moves()[0].cancel()
        await asyncio.sleep(0)
        hold.release()

        async with asyncio.timeout(PATIENCE):
            await store(kv, new)

        assert stack.cache.inflight.leaving == [0, 0]
        assert "4 slots of DRAM" in (await ailments(cache))[Code.MOVE_DIED].message
        assert await read(kv, new) == await read(kv, tokens) == 4 * SIZE
        await cache.settle()
        await cache.check()


async def test_a_dead_discard_is_not_acknowledged(tmp_path: Path, seed: int) -> None:
    """A delete whose discard dies raises; the prompt is not found, and its slots stay apart."""
    rig = Rig()
    tokens = prompt(seed, 4)
    async with opened_kv(small(directory=tmp_path / "ssd"), rig) as (cache, kv):
        await store(kv, tokens)
        assert await kv.flush(tokens) == 4 * SIZE
        hold = rig.copies.hold("discard")
        deleting = asyncio.ensure_future(kv.delete(tokens))
        await hold.reached()
        moves()[0].cancel()

        async with asyncio.timeout(PATIENCE):
            with pytest.raises(StoreError, match="a restart may bring it back"):
                await deleting

        hold.release()
        assert await read(kv, tokens) == 0
        assert "4 slots of SSD" in (await ailments(cache))[Code.MOVE_DIED].message
        await cache.check()


async def test_books_that_do_not_fit_end_a_move_and_no_wait(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A commit that raises is told with its error; the flush is answered."""
    async with opened_kv(small(directory=tmp_path / "ssd", spec=LARGE), spec=LARGE) as (cache, kv):
        await store(kv, prompt(seed, 2))
        moved = stack_of(cache).cache.moves.inflight
        with monkeypatch.context() as patch:
            patch.setattr(moved, "complete", _broken)
            async with asyncio.timeout(PATIENCE):
                assert await kv.flush(prompt(seed, 2)) == 0
            await asyncio.sleep(0)

        found = await ailments(cache)

        assert set(found) == {Code.MOVE_DIED} and "the books are wrong" in found[Code.MOVE_DIED].message
        assert any("the books are wrong" in record.getMessage() for record in caplog.records)
        assert await read(kv, prompt(seed, 2), spec=LARGE) == 2 * SIZE


def _broken(*_: object) -> list[object]:
    raise AssertionError("the books are wrong")
