"""What holds the daemon's loop: the longest that another client waits for a short match while something large is done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

from tiercache.bench import neighbour
from tiercache.bench.figures import Reference, Spread
from tiercache.bench.plot import Plot
from tiercache.bench.run import Run
from tiercache.bench.served import SPACE, SPEC, Served, kv_of, prompt
from tiercache.service.client.client import connect
from tiercache.service.client.remote_kv import RemoteKV

GAPS = Plot(
    "service-gaps",
    "The longest wait of another client while something large is done",
    ("gap",),
    x="while",
    label="longest match of 96 tokens",
)

_NUMBER, _FIRST = 20_000, 10_000
"""Numbers of prompts: of the long one, and of the first of many."""
_WIDTH = 16
_NODE_TOKENS = 2 * SPEC.block_size
_PAUSE = 0.001


async def gaps(run: Run, served: Served) -> None:
    """Add a gap for each large thing. The neighbour's prompt is there, and prompt 1, of 2,048 tokens."""
    many, nodes, sessions = run.pick((65_536, 200, 8), (1_000_000, 5_000, 64))
    tokens, stored = prompt(_NUMBER, many), kv_of(_NUMBER, many)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(connect(served.address, deadline=60.0))
        long = await client.open(replace(SPACE, weights="one long prompt"), SPEC)
        wide = await client.open(replace(SPACE, weights="many nodes"), SPEC)
        crowd = [await stack.enter_async_context(connect(served.address, deadline=60.0)) for _ in range(sessions)]
        kvs = [await each.open(SPACE, SPEC) for each in crowd]

        async def rest() -> None:
            await asyncio.sleep(0.3)

        async def insert() -> None:
            done = await long.insert(tokens, stored)
            assert done.stored == many, done

        async def match() -> None:
            async with long.match(tokens) as hit:
                assert await hit.ready() == many

        async def fill() -> None:
            for low in range(0, nodes, _WIDTH):
                await asyncio.gather(*(_put(wide, number) for number in range(low, min(low + _WIDTH, nodes))))

        async def together() -> None:
            await asyncio.gather(*(_again(kv, run.pick(5, 50)) for kv in kvs))

        async def check() -> None:
            assert (await client.check())["nodes"] >= nodes

        async def clear() -> None:
            assert await wide.clear() == nodes * _NODE_TOKENS

        steps: dict[str, Callable[[], Awaitable[None]]] = {
            "nothing": rest,
            f"insert of {many:,} tokens": insert,
            "match of it": match,
            f"{sessions} sessions": together,
            f"insert of {nodes:,} nodes": fill,
            "check": check,
            f"clear of {nodes:,} nodes": clear,
        }
        found: dict[str, list[float]] = {name: [] for name in steps}
        with neighbour.beside(served.address, pause=_PAUSE) as other:
            for _ in run.track(range(run.pick(1, 5)), "gaps"):
                for name, step in steps.items():
                    other.period()
                    await step()
                    await asyncio.sleep(0.02)  # what waited has its answer
                    found[name].append(other.period().longest)
                await long.clear()
    alone = Reference("nothing else done", Spread.of(found["nothing"]))
    for name, longest in found.items():
        run.add("gap", longest, "s", at={"while": name}, reference=None if name == "nothing" else alone)


async def _put(kv: RemoteKV, number: int) -> None:
    stored = await kv.insert(prompt(_FIRST + number, _NODE_TOKENS), kv_of(number, _NODE_TOKENS))
    assert stored.stored == _NODE_TOKENS


async def _again(kv: RemoteKV, count: int) -> None:
    tokens = prompt(1, 2048)
    for _ in range(count):
        async with kv.match(tokens) as hit:
            assert hit.tokens == 2048
