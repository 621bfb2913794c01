"""An engine's own KV memory beside a real daemon: through DRAM and SSD, evicted, restarted, and into engines of other layouts."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.engines import Engine
from tests.service.caches import LARGE, SPACE, leases, lower, prompt, read, reservations, small, store
from tests.service.client.attached import beside
from tests.service.client.daemons import own_process, running
from tiercache.config import Config
from tiercache.kernels.lazy import LazyDevice
from tiercache.service.client.blocking import BlockingClient
from tiercache.service.client.client import BackOff, connect
from tiercache.storage.engine_memory import LAYOUTS
from tiercache.types import Tier

SIZE = LARGE.block_size
AT_ONCE = BackOff(first=0.01, most=0.05)
LAYOUT = "block head token (kv dim)"


def house(directory: Path, *, dram: int = 24) -> Config:
    """DRAM and SSD, as where the engine owns its GPU's memory."""
    return small(hbm=None, dram=dram, ssd=96, directory=directory, spec=LARGE, admit_ms=5000)


async def test_an_engines_blocks_come_back_after_eviction_and_restart(tmp_path: Path, device: LazyDevice | None, seed: int) -> None:
    """Stored from one engine's blocks, demoted to SSD, the daemon started anew, loaded into an engine of another layout."""
    tokens = prompt(seed, 9, 5)
    choose = random.Random(seed)
    writer, reader = (Engine(LARGE, 16, layout) for layout in choose.sample(LAYOUTS, 2))
    ids, others = choose.sample(range(16), 9), choose.sample(range(16), 9)
    writer.compute(tokens, ids, space=SPACE)
    async with running(house(tmp_path)) as (daemon, address), beside(address, device, back_off=AT_ONCE) as client:
        kv = await client.open(SPACE, LARGE)
        paged = await kv.attach(writer.tensors, layout=writer.layout)
        assert (await paged.store(tokens, ids)).stored == 9 * SIZE
        await client.check()  # the daemon has heard by then that the slots are not written any more
        await lower(daemon.cache, Tier.DRAM)
        async with kv.match(tokens) as hit:
            assert hit.tiers == {Tier.SSD: 9 * SIZE}
            loaded = await paged.load(hit, others, by_layer=True)
        assert loaded.blocks == 9 and writer.holds(tokens, others, space=SPACE)
        await client.check()
    async with running(house(tmp_path)) as (daemon, address), beside(address, device, back_off=AT_ONCE) as client:
        kv = await client.open(SPACE, LARGE)
        paged = await kv.attach(reader.tensors, layout=reader.layout)
        async with kv.match(tokens) as hit:
            loaded = await paged.load(hit, others)
        await client.check()

        assert (loaded.tokens, loaded.bad) == (9 * SIZE, ()) and leases(daemon.cache) == reservations(daemon.cache) == 0
    assert reader.holds(tokens, others, space=SPACE) and reader.untouched(others)


async def test_engines_and_runners_share_blocks(tmp_path: Path, device: LazyDevice | None, seed: int) -> None:
    """What a runner inserted an engine loads, and what it stores after that a runner gathers: a block's bytes are one thing."""
    tokens = prompt(seed, 7)
    engine = Engine(LARGE, 16, LAYOUT, order=("block", "token", "head", "packed"), together=True)
    async with running(house(tmp_path)) as (_, address), beside(address, device) as client:
        kv = await client.open(SPACE, LARGE)
        await store(kv, tokens[: 3 * SIZE])
        paged = await kv.attach(engine.tensors, layout=LAYOUT)
        async with kv.match(tokens) as hit:
            loaded = await paged.load(hit, [4, 9, 2])
            engine.compute(tokens, [0, 1, 8, 3], space=SPACE, start=loaded.tokens)
            stored = await paged.store(tokens, [0, 1, 8, 3], start=loaded.tokens)

        assert engine.holds(tokens, [4, 9, 2], space=SPACE) and stored.stored == 4 * SIZE
        assert await read(kv, tokens) == 7 * SIZE


@pytest.mark.parametrize("seconds", [None, 0])
async def test_prompts_that_do_not_fit_come_and_go(
    tmp_path: Path, device: LazyDevice | None, seed: int, seconds: int | None
) -> None:
    """DRAM holds a third of what several requests load and store at once: never a wrong byte, and the books are true at the end."""
    choose = random.Random(seed)
    engine = Engine(LARGE, 40, "kv block token head dim")
    async with running(house(tmp_path, dram=10)) as (daemon, address), beside(address, device, deadline=60) as client:
        kv = await client.open(SPACE, LARGE)
        paged = await kv.attach(engine.tensors)

        async def request(low: int) -> None:
            ids = list(range(low, low + 8))
            for _ in range(6):
                tokens = prompt(choose.randrange(5), 8)
                choose.shuffle(ids)
                async with kv.match(tokens) as hit:
                    await hit.ready(seconds)
                    loaded = await paged.load(hit, ids)
                    done = loaded.blocks
                    assert engine.holds(tokens, ids[:done], space=SPACE)
                    engine.compute(tokens, ids[done:], space=SPACE, start=done * SIZE)
                    stored = await paged.store(tokens, ids[done:], start=done * SIZE)
                    assert sum(stored[:3]) == (8 - done) * SIZE

        await asyncio.gather(*(request(8 * number) for number in range(5)))
        for number in range(5):
            await read(kv, prompt(number, 8))
        await client.check()
        assert set(client.stats().misses) <= {"lost"}
        await daemon.cache.check()


async def test_a_daemon_that_dies_under_a_load_hurts_nobody(tmp_path: Path, seed: int) -> None:
    """The memory stays mapped: what was verified is right, and afterwards all is a miss until there is a daemon again."""
    tokens = prompt(seed, 6)
    lazy = LazyDevice(seed)
    engine = Engine(LARGE, 8, LAYOUT)
    with own_process(house(tmp_path)) as process:
        async with beside(process.address, lazy, back_off=AT_ONCE, deadline=60) as client:
            await client.connected()
            kv = await client.open(SPACE, LARGE)
            await store(kv, tokens)
            assert await kv.flush(tokens) == 6 * SIZE
            paged = await kv.attach(engine.tensors, layout=LAYOUT)
            lazy.held = True
            async with kv.match(tokens) as hit:
                await hit.ready()
                loading = paged.load(hit, [0, 1, 2, 3, 4, 5])
                await loading.begun()
                process.kill()
                lazy.held = False
                lazy.run()
                loaded = await loading
            assert engine.holds(tokens, [0, 1, 2, 3, 4, 5][: loaded.blocks], space=SPACE)

            process.start()
            await client.connected()
            async with asyncio.timeout(60):
                blocks = 0
                while blocks < 6:
                    async with kv.match(tokens) as hit:
                        blocks = (await paged.load(hit, [7, 6, 5, 4, 3, 2])).blocks
                    await asyncio.sleep(0)
            assert engine.holds(tokens, [7, 6, 5, 4, 3, 2], space=SPACE)
    assert lazy.registered == []


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_worker_loads_what_its_scheduler_has_matched(tmp_path: Path, blocking: bool, seed: int) -> None:
    """Another process of the engine takes part in the lease by its number; the engine's memory is that process's."""
    tokens = prompt(seed, 5)
    engine = Engine(LARGE, 8, LAYOUT)
    ids = [4, 1, 7, 0, 2]
    async with running(house(tmp_path)) as (_, address), connect(address) as scheduler:
        kv = await scheduler.open(SPACE, LARGE)
        await store(kv, tokens)
        async with kv.match(tokens) as hit:
            token, number = scheduler.token, hit.number
            assert token is not None and number is not None

            def work(token: bytes = token, number: int = number) -> int:
                with BlockingClient(address, join=token) as worker:
                    own = worker.open(SPACE, LARGE)
                    paged = own.attach(engine.tensors, layout=LAYOUT)
                    with own.shared_hit(number) as shared:
                        assert shared.number == number
                        return paged.load(shared, ids).result().blocks

            if blocking:
                blocks = await asyncio.get_running_loop().run_in_executor(None, work)
            else:
                async with connect(address, join=token) as worker:
                    own = await worker.open(SPACE, LARGE)
                    paged = await own.attach(engine.tensors, layout=LAYOUT)
                    async with own.shared_hit(number) as shared:
                        blocks = (await paged.load(shared, ids)).blocks

        assert blocks == 5 and engine.holds(tokens, ids, space=SPACE)
