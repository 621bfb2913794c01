"""Reads that take longer than their lease (M5): fenced by the slots' generations, and told."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch

from tests.seams import FakeClock, Rig, ThreadHold
from tests.service.caches import LARGE, SPACE, is_exact, prompt, read, small, tensor_of
from tests.service.client.daemons import Child, running
from tests.service.client.fake import until
from tests.service.daemon.raw import daemon_of
from tiercache.config import Limits
from tiercache.errors import LeaseLost
from tiercache.kernels.host import Bytes, copy_run
from tiercache.service.client import copies
from tiercache.service.client.client import Client, connect
from tiercache.service.client.connection import Connection
from tiercache.service.client.remote_kv import RemoteKV
from tiercache.service.daemon.daemon import Daemon
from tiercache.storage import layouts

SIZE = LARGE.block_size
BLOCKS = 4
"""All the room that there is: who stores that much evicts everything that is not leased."""


class Slow:
    """Copies that stand in the middle of a slot: the first half is copied, the rest when the hold ends."""

    def __init__(self, first: int, times: int) -> None:
        self.hold = ThreadHold(times)
        self._plain = copy_run
        self._first = first
        self._calls = 0

    def __call__(self, blocks: Bytes, target: Bytes) -> None:
        number, self._calls = self._calls, self._calls + 1
        middle = len(target) // 2
        self._plain(blocks[:, :middle], target[:middle])
        if number >= self._first:
            self.hold.stand()
        self._plain(blocks[:, middle:], target[middle:])


@asynccontextmanager
async def shared(clock: FakeClock) -> AsyncIterator[tuple[Daemon, RemoteKV, Client, RemoteKV]]:
    """A daemon whose leases end after 200 ms of the test's clock; a slow reader's KV, another client and its KV."""
    config = small(hbm=None, dram=BLOCKS, ssd=None, spec=LARGE, limits=Limits(lease_seconds=0.2))
    with tempfile.TemporaryDirectory(prefix="tc") as name:
        async with daemon_of(Path(name), config, Rig(clock=clock)) as daemon:
            address = f"unix://{daemon.path}"
            async with connect(address, deadline=60.0) as slow, connect(address, deadline=60.0) as other:
                yield daemon, await slow.open(SPACE, LARGE), slow, await other.open(SPACE, LARGE)


Way = Callable[[RemoteKV, Sequence[Sequence[int]]], "asyncio.Future[list[torch.Tensor | None]]"]


async def single(kv: RemoteKV, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor | None]:
    """Read one prompt with one call."""
    async with kv.match(prompts[0]) as hit:
        return [await hit.gather()]


async def batch(kv: RemoteKV, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor | None]:
    """Read several prompts at once."""
    return [found for one in await asyncio.gather(*(single(kv, [tokens]) for tokens in prompts)) for found in one]


async def iterated(kv: RemoteKV, prompts: Sequence[Sequence[int]]) -> list[torch.Tensor | None]:
    """Read one prompt layer by layer; None when a layer was lost."""
    async with kv.match(prompts[0]) as hit:
        try:
            return [torch.stack([torch.stack(await hit.layer(layer)) for layer in range(LARGE.layers)])]
        except LeaseLost:
            return [None]


def same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both have the same bytes: as numbers, some are none."""
    return torch.equal(tensor.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


ONE, THREE = [BLOCKS], [1, 1, 2]
WAYS = {
    "single": (single, ONE, Slow, (2, 1), 2 * SIZE),
    "batch": (batch, THREE, Slow, (0, 2), 0),
    "iterator": (iterated, ONE, Slow, (BLOCKS + 2, 1), None),
}
"""How it is read, the blocks of each prompt, at which copies it stands and how many, and what is left when the lease is lost."""


@pytest.mark.parametrize("renewed", [False, True], ids=["lost", "renewed"])
@pytest.mark.parametrize("way", WAYS)
async def test_m5_a_reader_that_is_slower_than_its_lease(
    way: str, renewed: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a slot is copied; 300 ms later it is another prompt's. Nothing of it is handed out; renewed at 150 ms all is exact.

    A gather says it with a shorter answer, which ends before the block in question, and a count; a layer with LeaseLost.
    """
    reading, sizes, slow, (first, times), left = WAYS[way]
    prompts = [prompt(seed + 1 + number, blocks) for number, blocks in enumerate(sizes)]
    other = prompt(seed, BLOCKS)
    renew = Connection.renew
    monkeypatch.setattr(Connection, "renew", lambda connection: None)  # a client that hangs in everything but its copy
    copy = slow(first, times)
    monkeypatch.setattr(copies, "copy_run", copy)
    monkeypatch.setattr(layouts, "RUN_BYTES", 1)  # a call a block
    clock = FakeClock()
    async with shared(clock) as (daemon, kv, client, others):
        for tokens in prompts:
            await others.insert(tokens, tensor_of(tokens, spec=LARGE))
        task = asyncio.create_task(reading(kv, prompts))
        await copy.hold.reached()
        await until(lambda: daemon.house.counts.requests["Match"] == len(prompts))
        if renewed:
            clock.advance(0.15)
            renew(client._connection)  # type: ignore[arg-type]
            await client.check()
            clock.advance(0.15)
            daemon.house.terms.sweep()
        else:
            client._connection._channel._transport.pause_reading()  # type: ignore[union-attr]  # the notice is not read
            clock.advance(0.3)
            await until(lambda: daemon.house.counts.lost["lease"] == len(prompts))
        outcome = await others.insert(other, tensor_of(other, spec=LARGE))
        copy.hold.release()
        if not renewed:
            await asyncio.sleep(0)
        found = await task
        client._connection._channel._transport.resume_reading()  # type: ignore[union-attr]

        if renewed:
            assert outcome == (0, 0, BLOCKS * SIZE) and not client.stats().misses
            assert all(is_exact(one, tokens, spec=LARGE) for one, tokens in zip(found, prompts, strict=True) if one is not None)
            assert [one.shape[2] for one in found if one is not None] == [len(tokens) for tokens in prompts]
        else:
            assert outcome == (BLOCKS * SIZE, 0, 0)
            assert all(one is None or is_exact(one, tokens, spec=LARGE) for one, tokens in zip(found, prompts, strict=True))
            assert [None if one is None else one.shape[2] for one in found] == [left] * len(prompts)
            assert client.stats().misses["lost"] >= len(prompts)
            assert await read(others, other) == BLOCKS * SIZE


@pytest.mark.parametrize("when", ["before", "after"])
async def test_m5_a_notice_ends_the_reading_of_a_hit(when: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read before or after the notice: `ready` and `gather` say 0, `layer` and `view` LeaseLost, though the bytes are there yet."""
    monkeypatch.setattr(Connection, "renew", lambda connection: None)
    tokens = prompt(seed, 3)
    clock = FakeClock()
    async with shared(clock) as (daemon, kv, client, others):
        await others.insert(tokens, tensor_of(tokens, spec=LARGE))
        async with kv.match(tokens) as hit:
            first = torch.stack(await hit.layer(0)) if when == "after" else None
            clock.advance(0.3)
            await until(lambda: hit.claim.gone is not None)

            assert await hit.ready() == 0 and (await hit.gather()).shape[2] == 0
            with pytest.raises(LeaseLost):
                await hit.layer(1)
            with pytest.raises(LeaseLost):
                hit.view(0, 0)
        assert first is None or same(first, tensor_of(tokens, spec=LARGE)[0])
        assert client.stats().misses == {"lost": 3}
        assert daemon.house.counts.lost == {"lease": 1} and await read(kv, tokens) == 3 * SIZE


async def test_m5_what_is_read_in_place_is_never_lost(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that was handed out in place keeps its slot however long its client is silent, and whatever others store."""
    monkeypatch.setattr(Connection, "renew", lambda connection: None)
    tokens, other = prompt(seed, 2), prompt(seed + 1, BLOCKS)
    clock = FakeClock()
    config = small(hbm=None, dram=BLOCKS, ssd=None, spec=LARGE)
    with tempfile.TemporaryDirectory(prefix="tc") as name:
        async with daemon_of(Path(name), config, Rig(clock=clock)) as daemon, connect(f"unix://{daemon.path}") as client:
            kv = await client.open(SPACE, LARGE)
            await kv.insert(tokens, tensor_of(tokens, spec=LARGE))
            async with kv.match(tokens) as hit:
                seen = [hit.view(block, 1) for block in range(2)]
            await client.check()
            for _ in range(3):
                clock.advance(1000.0)
                daemon.house.terms.sweep()
            outcome = await kv.insert(other, tensor_of(other, spec=LARGE))

            expected = tensor_of(tokens, spec=LARGE)[1]
            assert same(torch.cat([torch.stack(parts) for parts in seen], 1), expected[:, : 2 * SIZE])
            assert outcome.refused == 2 * SIZE and not daemon.house.counts.lost
            del seen


async def test_m5_a_living_client_never_notices(seed: int) -> None:
    """It renews by itself, with one frame for all its leases, for as long as it holds any, and no longer."""
    prompts = [prompt(seed + number, 1) for number in range(3)]
    config = small(hbm=None, dram=BLOCKS, ssd=None, spec=LARGE, limits=Limits(lease_seconds=1.2))
    async with running(config) as (daemon, address), connect(address, deadline=60.0) as client:
        kv = await client.open(SPACE, LARGE)
        for tokens in prompts:
            await kv.insert(tokens, tensor_of(tokens, spec=LARGE))
        requests = daemon.house.counts.requests
        hits = [await kv.match(tokens) for tokens in prompts]
        began = requests["Renew"]
        await until(lambda: requests["Renew"] >= began + 4)
        found = [await hit.gather() for hit in hits]
        for hit in hits:
            await hit.release()
        renewed = requests["Renew"]
        await until(lambda: client._connection._renewal._timer is None)  # type: ignore[union-attr]
        await client.check()

        assert requests["Renew"] == renewed and not daemon.house.counts.lost and not client.stats().misses
        assert all(is_exact(one, tokens, spec=LARGE) for one, tokens in zip(found, prompts, strict=True))


@pytest.mark.parametrize("loop", ["", "-on-uvloop"], ids=["asyncio", "uvloop"])
async def test_m5_a_client_that_was_stopped_finds_out(loop: str, seed: int) -> None:
    """A process stopped for longer than its lease: what it copies is lost, what it reads in place is there, and it goes on.

    It finds out by the slots' generations, and by its own clock where the slot is not another's yet, before it reads a notice.
    """
    config = small(hbm=None, dram=BLOCKS, ssd=None, spec=LARGE, limits=Limits(lease_seconds=2.0))
    async with running(config) as (daemon, address), connect(address, deadline=60.0) as client:
        kv = await client.open(SPACE, LARGE)
        for number in range(3):
            tokens = prompt(seed + number, 1)
            await kv.insert(tokens, tensor_of(tokens, spec=LARGE))
        child = Child(f"stopped{loop}", address, seed)
        pid = (await child.says())["pid"]
        await until(lambda: daemon.house.counts.lost["lease"] == 2)
        other = prompt(seed + 9, 2)  # one slot is free, one is taken from the least recently used: the first prompt
        assert (await kv.insert(other, tensor_of(other, spec=LARGE))).refused == 0
        os.kill(pid, signal.SIGCONT)
        found = await child.says()

        assert child.end() == 0
        assert found == {"layer": "LeaseLost", "gathered": 0, "view": "LeaseLost", "in_place": True, "again": True}
        assert await read(kv, other) == 2 * SIZE
