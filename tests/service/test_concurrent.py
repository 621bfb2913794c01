"""Many callers at once, on tiers so small that everything moves all the time: every byte is right, and the books are at the end."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.seams import Rig
from tests.service.caches import (
    SIZE,
    SPEC,
    is_exact,
    leases,
    opened,
    prompt,
    read,
    reservations,
    sink,
    small,
    stack_of,
    tensor_of,
)
from tiercache.errors import StoreError
from tiercache.service.kv import LocalKV
from tiercache.spec import Namespace

SPACES = [Namespace(model="m", weights="w", salt=salt) for salt in (None, "a")]


class Caller:
    """One of them: what it does next is chance, and each of its calls may be cancelled at any await."""

    def __init__(self, kvs: list[LocalKV], seed: int) -> None:
        self._kvs = kvs
        self._choose = random.Random(seed)
        self._family = seed % 3

    def _prompt(self) -> list[int]:
        shared = prompt(self._choose.randrange(3), self._choose.randrange(1, 4))
        return shared + prompt(100 + self._choose.randrange(4), self._choose.randrange(4), self._choose.randrange(SIZE))

    async def run(self, count: int) -> None:
        """Do `count` things, one after the other."""
        calls = [self.read] * 5 + [self.insert] * 5 + [self.write, self.layers, self.flush, self.prefetch, self.delete, self.share]
        for _ in range(count):
            number = self._choose.randrange(len(SPACES))
            work = self._choose.choice(calls)(self._kvs[number], SPACES[number], self._prompt())
            task = asyncio.ensure_future(work)
            if self._choose.random() < 0.25:
                for _ in range(self._choose.randrange(30)):
                    await asyncio.sleep(0)
                task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()

    async def read(self, kv: LocalKV, space: Namespace, tokens: list[int]) -> None:
        async with kv.match(tokens) as hit:
            hit.take(self._choose.randrange(len(tokens) + 1))
            promised = hit.tokens
            tensor = await hit.gather()
            assert tensor.shape[2] <= promised and is_exact(tensor, tokens, space=space)

    async def layers(self, kv: LocalKV, space: Namespace, tokens: list[int]) -> None:
        async with kv.match(tokens) as hit:
            for layer in range(SPEC.layers):
                k, v = await hit.layer(layer)
                expected = tensor_of(tokens[: len(k)], space=space)
                assert k.numpy().tobytes() == expected[layer, 0].numpy().tobytes()
                assert v.numpy().tobytes() == expected[layer, 1].numpy().tobytes()

    async def insert(self, kv: LocalKV, space: Namespace, tokens: list[int]) -> None:
        async with kv.match(tokens) as hit:
            start = hit.tokens if self._choose.random() < 0.5 else 0
            outcome = await kv.insert(tokens, tensor_of(tokens, space=space, start=start), start=start)
            assert sum(outcome) == len(tokens) // SIZE * SIZE - start and min(outcome) >= 0

    async def write(self, kv: LocalKV, space: Namespace, tokens: list[int]) -> None:
        data = tensor_of(tokens, space=space)
        async with kv.match(tokens) as hit, kv.reserve(tokens, after=hit) as room:
            first = room.present // SIZE
            for number, block in enumerate(room.blocks, first):
                block.copy_(data[:, :, number * SIZE : (number + 1) * SIZE])
                if self._choose.random() < 0.7:
                    await room.commit((number + 1) * SIZE)

    async def flush(self, kv: LocalKV, space: Namespace, tokens: list[int]) -> None:
        await kv.flush(tokens)

    async def prefetch(self, kv: LocalKV, space: Namespace, tokens: list[int]) -> None:
        await kv.prefetch(tokens)

    async def delete(self, kv: LocalKV, space: Namespace, tokens: list[int]) -> None:
        if self._choose.random() < 0.1:
            await kv.clear()
        else:
            await kv.delete(tokens)

    async def share(self, kv: LocalKV, space: Namespace, tokens: list[int]) -> None:
        name = self._choose.randrange(2)
        async with kv.match(tokens, request=name) as one, kv.match(tokens, request=name) as two:
            await one.ready()
            one.take(self._choose.randrange(len(tokens) + 1))
            assert is_exact(await two.gather(), tokens, space=space)


@pytest.mark.parametrize("count", [80, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tiers", [(6, 8, 16), (None, 10, 16), (6, 8, None), (8, None, 16)], ids=str)
@pytest.mark.parametrize("failing", [False, True], ids=["", "failing"])
async def test_many_callers_at_once(tmp_path: Path, seed: int, tiers: tuple[int | None, ...], count: int, failing: bool) -> None:
    """Six callers read, write, delete and go away; with `failing`, copies fail now and then, too."""
    rig = Rig(retry=0.001)
    rig.copies.chunk = 1
    chance = random.Random(seed)
    if failing:
        for kind in ("blocks", "put", "discard"):
            for after in (False, True):
                rig.copies.fail(kind, StoreError("injected"), after=after, times=1 << 30, where=lambda step: chance.random() < 0.03)
    hbm, dram, ssd = tiers
    config = small(
        hbm=hbm, dram=dram, ssd=ssd, directory=tmp_path / "ssd", admit_ms=5, promote_ms=5, watermark_low=0.1, watermark_high=0.2
    )
    async with opened(config, rig) as cache:
        kvs = [await cache.open(space, SPEC) for space in SPACES]
        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(Caller(kvs, seed + number).run(count))
        rig.copies.release()
        await cache.settle()
        await cache.check()
        assert leases(cache) == reservations(cache) == 0
        await sink(cache)
        for kv, space in zip(kvs, SPACES, strict=True):
            for number in range(3):
                await read(kv, prompt(number, 3), space=space)
            await kv.clear()
        await cache.settle()
        await cache.check()
        assert all(pool.free == pool.capacity for pool in stack_of(cache).cache.residency.slots)
