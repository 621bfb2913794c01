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
from tests.service.client.daemons import Child, Process, own_process, running
from tests.service.client.fake import turn, until
from tests.service.daemon.http import get
from tiercache.config import Config
from tiercache.errors import StaleHandle
from tiercache.service.client.client import BackOff, connect
from tiercache.service.client.remote_kv import RemoteKV

AT_ONCE = BackOff(first=0.01, most=0.05)
SIZE = LARGE.block_size


def roomy(directory: Path | None = None) -> Config:
    return small(hbm=16, dram=48, ssd=None if directory is None else 96, directory=directory, spec=LARGE, admit_ms=5000)


@pytest.mark.parametrize("way", ["", "-in-place"], ids=["copied", "in place"])
async def test_what_one_process_computed_another_reads(way: str, seed: int) -> None:
    """Three processes; the KV goes through shared memory, and less than a hundredth of its bytes over the sockets."""
    with own_process(roomy()) as daemon:
        async with connect(daemon.address, back_off=AT_ONCE) as client:
            await client.connected()
        writer = Child(f"write{way}", daemon.address, seed)
        assert (await writer.says())["stored"] == [BLOCKS * SIZE, 0, 0] and writer.end() == 0
        reader = Child(f"read{way}", daemon.address, seed)
        found = await reader.says()

        assert reader.end() == 0 and found["exact"] and found["tokens"] == BLOCKS * SIZE and found["misses"] == {}
        assert found["read"] == (0 if way else BLOCKS * LARGE.block_bytes)
        assert found["sent"] + found["received"] < BLOCKS * LARGE.block_bytes / 100


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


def crowded(directory: Path) -> Config:
    """Memory for a third of what the runners use: blocks go down to SSD and come up again all the time."""
    return small(hbm=8, dram=12, ssd=96, directory=directory, spec=LARGE, admit_ms=5000)


async def moving(daemon: Process) -> set[tuple[str, str]]:
    """Wait until transfers are under way; return between which tiers there were any up to now."""
    while True:
        _, stats = await get(daemon.socket, "/v1/stats")
        if stats["stacks"][0]["in_flight"]:
            return {(one["from"], one["to"]) for one in stats["stacks"][0]["copied"]}
        await turn()


async def kill_rounds(rounds: int, seed: int, config: Config) -> set[tuple[str, str]]:
    """Kill a daemon so many times while its clients work; return between which tiers it copied."""
    choose = random.Random(seed)
    kept = prompt(1000, 6)
    copied: set[tuple[str, str]] = set()
    with own_process(config) as daemon:
        async with connect(daemon.address, deadline=30.0, back_off=AT_ONCE) as client:
            await client.connected()
            kv = await client.open(SPACE, LARGE)
            await store(kv, kept)
            assert await kv.flush(kept) == len(kept)
            boots = {client.boot}
            for _ in range(rounds):
                runners = Runners(kv, choose.randrange(1 << 30))
                await runners.until(choose.randrange(8, 60))
                copied |= await moving(daemon) if config.tiers[0].bytes < 16 * LARGE.block_bytes else set()
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
    return copied


async def test_a_daemon_that_is_killed_hurts_nobody(seed: int, tmp_path: Path) -> None:
    """Reads and writes become misses or StaleHandle, no byte is wrong, the next daemon is found, what was durable is there."""
    await kill_rounds(3, seed, roomy(tmp_path / "ssd"))


EVERYWHERE = {("HBM", "DRAM"), ("DRAM", "SSD"), ("SSD", "DRAM"), ("DRAM", "HBM")}


async def test_a_daemon_that_is_killed_while_it_moves_blocks_hurts_nobody(seed: int, tmp_path: Path) -> None:
    """It dies with demotes, promotes and reads under way, and starts again under another hash seed."""
    assert await kill_rounds(2, seed, crowded(tmp_path / "ssd"))


@pytest.mark.slow
@pytest.mark.parametrize("tiers", [roomy, crowded])
async def test_a_daemon_that_is_killed_often_hurts_nobody(tiers: Callable[[Path], Config], seed: int, tmp_path: Path) -> None:
    """Twenty rounds of it, with room for all, and with blocks on their way down and up all the time."""
    copied = await kill_rounds(20, seed, tiers(tmp_path / "ssd"))

    assert tiers is roomy or copied >= EVERYWHERE


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


async def test_a_client_on_another_loop(seed: int) -> None:
    """Engines run uvloop: everything a client does goes there, too."""
    async with running(roomy()) as (_, address), connect(address, deadline=60.0) as client:
        child = Child("read-on-uvloop", address, seed)
        await store(await client.open(SPACE, LARGE), prompt(seed, BLOCKS))
        found = await child.says()

        assert child.end() == 0 and found["exact"] and found["tokens"] == BLOCKS * SIZE and found["misses"] == {}


async def test_a_million_tokens_in_one_match(seed: int) -> None:
    """Found whole, with what is new alone on the wire when the prompt grows."""
    spec = type(LARGE)(layers=1, kv_heads=1, head_dim=8, dtype="int8", block_size=256)
    tokens = list(range(seed % 1000, seed % 1000 + 1_000_000))
    config = small(hbm=None, dram=4096, ssd=None, spec=spec)
    async with running(config) as (_, address), connect(address, deadline=60.0) as client:
        kv = await client.open(SPACE, spec)
        whole = len(tokens) // 256 * 256
        data = torch.zeros(spec.shape(len(tokens)), dtype=torch.int8)
        outcome = await kv.insert(tokens, data)
        before = client.stats()
        async with kv.match([*tokens, *range(256)]) as hit:
            found = hit.tokens
        after = client.stats()

        assert outcome == (whole, 0, 0) and found == whole
        assert before.sent < 4 * len(tokens) + 100_000  # the prompt once, whatever asks about it
        assert after.sent - before.sent < 4096 and not after.misses
