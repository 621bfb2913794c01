"""Daemon and clients in processes of their own: what one computed another reads, and nobody's death hurts anybody else."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.service.caches import LARGE, SPACE, is_exact, prompt, read, small, store, tensor_of
from tests.service.client.child import BLOCKS
from tests.service.client.daemons import Child, own_process
from tests.service.client.fake import turn, until
from tiercache.config import Config
from tiercache.errors import StaleHandle
from tiercache.service.client.client import BackOff, Client, connect
from tiercache.service.client.remote_kv import RemoteKV

AT_ONCE = BackOff(first=0.01, most=0.05)
SIZE = LARGE.block_size


def roomy(directory: Path | None = None) -> Config:
    return small(hbm=16, dram=48, ssd=None if directory is None else 96, directory=directory, spec=LARGE, admit_ms=5000)


async def test_what_one_process_computed_another_reads(seed: int) -> None:
    """Three processes; the KV goes through shared memory, and less than a hundredth of its bytes over the sockets."""
    with own_process(roomy()) as daemon:
        async with connect(daemon.address, back_off=AT_ONCE) as client:
            await client.connected()
        writer = Child("write", daemon.address, seed)
        assert (await writer.says())["stored"] == [BLOCKS * SIZE, 0, 0] and writer.end() == 0
        reader = Child("read", daemon.address, seed)
        found = await reader.says()

        assert reader.end() == 0 and found["exact"] and found["tokens"] == BLOCKS * SIZE and found["misses"] == {}
        assert found["read"] == BLOCKS * LARGE.block_bytes
        assert found["sent"] + found["received"] < found["read"] / 100


class Runners:
    """Tasks that read and write without end; `steps` counts what they did, `kinds` how."""

    def __init__(self, kv: RemoteKV, seed: int) -> None:
        self.steps = 0
        self.stale = 0
        self.over = False
        self._kv = kv
        self._choose = random.Random(seed)
        self._tasks = [asyncio.create_task(self._run(work)) for work in (self._read, self._layers, self._write, self._rooms) * 2]

    async def stop(self) -> None:
        """Let all of them end; raises what one of them raised."""
        self.over = True
        await asyncio.gather(*self._tasks)

    async def until(self, steps: int) -> None:
        """Wait for so many more steps, or for one that broke."""
        goal = self.steps + steps
        await until(lambda: self.steps >= goal or any(task.done() for task in self._tasks))

    def _prompt(self) -> list[int]:
        return prompt(self._choose.randrange(6), self._choose.randrange(1, 9))

    async def _run(self, work: Callable[[list[int]], object]) -> None:
        while not self.over:
            try:
                await work(self._prompt())  # type: ignore[misc]
            except StaleHandle:
                self.stale += 1
            self.steps += 1
            await asyncio.sleep(0)

    async def _read(self, tokens: list[int]) -> None:
        async with self._kv.match(tokens) as hit:
            assert is_exact(await hit.gather(), tokens, spec=LARGE)

    async def _layers(self, tokens: list[int]) -> None:
        async with self._kv.match(tokens) as hit:
            ready = await hit.ready()
            layers = [torch.stack(await hit.layer(layer)) for layer in range(LARGE.layers)]
            assert is_exact(torch.stack(layers), tokens, spec=LARGE)
            for block in range(ready // SIZE):
                seen = torch.stack([torch.stack(hit.view(block, layer)) for layer in range(LARGE.layers)])
                expected = tensor_of(tokens[:ready], spec=LARGE)[:, :, block * SIZE : (block + 1) * SIZE]
                assert seen.view(torch.uint8).equal(expected.contiguous().view(torch.uint8))

    async def _write(self, tokens: list[int]) -> None:
        stored = await self._kv.insert(tokens, tensor_of(tokens, spec=LARGE))
        assert sum(stored) == len(tokens)

    async def _rooms(self, tokens: list[int]) -> None:
        data = tensor_of(tokens, spec=LARGE)
        async with self._kv.match(tokens) as hit, self._kv.reserve(tokens, after=hit) as room:
            first = room.present
            for number, block in enumerate(room.blocks):
                block.copy_(data[:, :, first + number * SIZE : first + (number + 1) * SIZE])
            await room.commit(room.tokens)


async def check_durable(kv: RemoteKV, kept: list[int]) -> None:
    assert await read(kv, kept) == len(kept)


async def kill_rounds(rounds: int, seed: int, tmp_path: Path) -> Client:
    choose = random.Random(seed)
    kept = prompt(1000, 6)
    with own_process(roomy(tmp_path / "ssd")) as daemon:
        async with connect(daemon.address, deadline=30.0, back_off=AT_ONCE) as client:
            await client.connected()
            kv = await client.open(SPACE, LARGE)
            await store(kv, kept)
            assert await kv.flush(kept) == len(kept)
            boots = {client.boot}
            for _ in range(rounds):
                runners = Runners(kv, choose.randrange(1 << 30))
                await runners.until(choose.randrange(8, 60))
                daemon.kill()
                await until(lambda: client.boot is None)
                await runners.until(16)
                daemon.start()
                await client.connected()
                await runners.until(8)
                await runners.stop()
                await check_durable(kv, kept)
                await client.check()
                boots.add(client.boot)

            assert len(boots) == rounds + 1
            assert client.stats().sessions == rounds + 1
            assert client.stats().misses.keys() <= {"away", "lost"}
    return client


async def test_a_daemon_that_is_killed_hurts_nobody(seed: int, tmp_path: Path) -> None:
    """Reads and writes become misses or StaleHandle, no byte is wrong, the next daemon is found, what was durable is there."""
    await kill_rounds(3, seed, tmp_path)


@pytest.mark.slow
async def test_a_daemon_that_is_killed_often_hurts_nobody(seed: int, tmp_path: Path) -> None:
    """Twenty rounds of it."""
    await kill_rounds(20, seed, tmp_path)


async def test_a_daemon_that_is_stopped_is_a_miss(seed: int) -> None:
    """Within the deadline once, at once afterwards; what is mapped is still read; it goes on where it was."""
    tokens = prompt(seed, 4)
    with own_process(roomy()) as daemon:
        async with connect(daemon.address, deadline=0.5, back_off=AT_ONCE) as client:
            await client.connected()
            kv = await client.open(SPACE, LARGE)
            await store(kv, tokens)
            async with kv.match(tokens) as hit:
                daemon.signal(signal.SIGSTOP)
                missed = [await kv.flush(tokens) for _ in range(50)]
                outcome = await kv.insert(tokens, tensor_of(tokens, spec=LARGE))
                exact = is_exact(await hit.gather(), tokens, spec=LARGE)
                daemon.signal(signal.SIGCONT)
                while await read(kv, tokens) == 0:
                    await turn()

            assert exact and missed == [0] * 50 and outcome == (0, 0, len(tokens))
            assert client.stats().misses.keys() == {"slow"} and client.stats().sessions == 1
