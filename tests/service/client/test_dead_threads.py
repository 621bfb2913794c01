"""A client's own thread that dies is a miss for its engine, and nothing is written to its tensors afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.seams import PATIENCE
from tests.service.caches import small
from tests.service.client.daemons import running
from tests.service.client.fake import SIZE, SPACE, SPEC, FakeDaemon
from tests.service.client.test_failures import TOKENS, is_exact, kv_of
from tiercache.service.client import copies, copying
from tiercache.service.client.client import connect


def dying(call: Callable[..., Any], *, times: int = 1) -> Callable[..., Any]:
    """Return `call`, whose first `times` calls end their thread instead."""
    left = [times]

    def die(*args: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise SystemExit("killed by the test")
        return call(*args)

    return die


@pytest.mark.parametrize("name", ["gather", "verify", "layer"])
async def test_a_read_whose_thread_dies_has_no_tokens(fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """No exception: nothing was read, it is counted, nobody is blamed for it; the next hit has all of it."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    monkeypatch.setattr(copies, name, dying(getattr(copies, name)))
    async with asyncio.timeout(PATIENCE), connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        async with kv.match(TOKENS) as hit:
            if name == "gather":
                assert (await hit.gather()).shape[2] == 0
            else:
                assert [len(part) for part in await hit.layer(0)] == [0, 0]
            assert (hit.tokens, await hit.ready()) == (0, 0)
        async with kv.match(TOKENS) as hit:
            assert is_exact(await hit.gather(), TOKENS) and hit.tokens == 4 * SIZE

        await client.check()
        assert client.stats().misses == {"died": 1}


async def test_a_gather_ends_when_all_of_its_threads_have(fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of several dies while another still writes: the caller gets its tensor back only when that one has ended, too."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    monkeypatch.setattr(copying, "SHARE", 1)
    plain, dead, go = copies.gather, threading.Event(), threading.Event()
    first = threading.Lock()

    def gather(*args: Any) -> Any:
        if first.acquire(blocking=False):
            dead.set()
            raise SystemExit("killed by the test")
        assert go.wait(PATIENCE)
        return plain(*args)

    monkeypatch.setattr(copies, "gather", gather)
    async with asyncio.timeout(PATIENCE), connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        async with kv.match(TOKENS) as hit:
            out = torch.full(SPEC.shape(4 * SIZE), 7.5, dtype=torch.float16)
            gathering = asyncio.ensure_future(hit.gather(out=out))
            while not dead.is_set():  # noqa: ASYNC110 - it is set in a thread
                await asyncio.sleep(0.001)
            done, _ = await asyncio.wait([gathering], timeout=0.05)
            assert not done, "a thread still writes"
            go.set()
            given = await gathering

        assert given.shape[2] in (0, 2 * SIZE) and is_exact(given, TOKENS)
        assert client.stats().misses == {"died": 1}


@pytest.mark.parametrize("name", ["scatter", "seal"])
async def test_a_write_whose_thread_dies_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """insert says refused, room.commit that nothing more is cached; the next try stores."""
    monkeypatch.setattr(copies, name, dying(getattr(copies, name)))
    tensor = kv_of(TOKENS)
    async with asyncio.timeout(PATIENCE), running(small(ssd=None)) as (daemon, address), connect(address) as client:
        await client.connected()
        kv = await client.open(SPACE, SPEC)
        if name == "scatter":
            assert (await kv.insert(TOKENS, tensor)).refused == 4 * SIZE
            assert (await kv.insert(TOKENS, tensor)).stored == 4 * SIZE
        else:
            async with kv.reserve(TOKENS) as room:
                for number, block in enumerate(room.blocks):
                    block.copy_(tensor[:, :, number * SIZE : (number + 1) * SIZE])
                assert await room.commit(4 * SIZE) == 0
                assert await room.commit(4 * SIZE) == 4 * SIZE
        async with kv.match(TOKENS) as hit:
            assert is_exact(await hit.gather(), TOKENS) and hit.tokens == 4 * SIZE
        await daemon.cache.check()

        assert client.stats().misses == {"died": 1}
