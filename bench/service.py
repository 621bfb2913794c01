"""What the daemon adds to a bare round trip: matches, hits in place, many sessions at once, and what holds its loop.

The daemon runs in a process of its own, the client in this one; the reference is a server that does nothing but answer as many
bytes with as many (`tiercache.bench.echo`), asked in turns with the daemon.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tiercache.bench import echo, neighbour
from tiercache.bench.figures import Goal, Reference, Spread
from tiercache.bench.gaps import GAPS, gaps
from tiercache.bench.plot import Plot
from tiercache.bench.run import Run
from tiercache.bench.served import SPACE, SPEC, Served, kv_of, looped, prompt
from tiercache.bench.timing import quiet
from tiercache.service.client.client import Client, connect
from tiercache.service.client.remote_hit import RemoteHit
from tiercache.service.client.remote_kv import RemoteKV

PLOTS = (
    Plot(
        "service-match",
        "A match over the daemon, and the bare round trip of the same bytes",
        ("match", "bare round trip"),
        x="tokens",
        series=("name", "prompt"),
    ),
    Plot(
        "service-match-ratio",
        "A match, as a multiple of the bare round trip",
        ("match",),
        x="tokens",
        series=("prompt",),
        of="ratio",
        limit=2.5,
    ),
    Plot(
        "service-in-place",
        "From call to readable in place, as a multiple of the bare round trip",
        ("in place",),
        x="tokens",
        of="ratio",
        limit=2.0,
    ),
    Plot(
        "service-sessions",
        "Sessions at once, each matching 2,048 tokens",
        ("requests", "bare requests"),
        x="sessions",
        label="requests per second",
    ),
    Plot("service-waits", "One request among those of many sessions", ("request",), x="sessions"),
    GAPS,
)

TURN = 256
"""Tokens that a turn adds."""
ECHO = "bare asyncio echo, same bytes"


class Bytes(NamedTuple):
    """What one request and its reply take on the socket."""

    sent: int
    received: int


def measure(run: Run) -> None:
    """Measure the way to the daemon and back."""
    if importlib.util.find_spec("torch") is None:
        run.note("not measured: prompts are stored through tensors, and torch is not installed")
        return
    # Blocks smaller than a page, a page each: a million tokens take 250 MB.
    with Served(dram=run.pick(64 << 20, 640 << 20)) as served, echo.serving() as bare:
        looped(lambda: _measure(run, served, bare))


async def _measure(run: Run, served: Served, bare: Path) -> None:
    async with connect(served.address, deadline=60.0) as client:
        await _ready(client, served)
        kv = await client.open(SPACE, SPEC)
        await _store(kv, neighbour.NUMBER, neighbour.TOKENS)
        lengths = run.pick((96, 2048, 8192), (96, 2048, 32_768, 131_072))
        for number, length in enumerate(lengths):
            await _store(kv, number, length)
        async with echo.connected(bare) as other:
            for number, length in run.track(list(enumerate(lengths)), "matches"):
                await _whole(run, served, client, other, number, length)
                await _incremental(run, client, kv, other, number, length)
                if length <= 32_768:
                    await _in_place(run, client, kv, other, number, length)
        await _together(run, served, bare, lengths.index(2048))
        await _neighbours(run, served, kv)
        await gaps(run, served)


# --- one request at a time ------------------------------------------------------------------------------------------------


async def _whole(run: Run, served: Served, client: Client, other: echo.Echo, number: int, length: int) -> None:
    """A prompt of which the session knows nothing, so that all of it goes over the socket: each time in a new session."""
    tokens, mine, bare = prompt(number, length), [], []
    with quiet():  # around all of it: a collection just before would leave the caches colder than any request finds them
        for _ in range(run.pick(8, 100)):
            async with connect(served.address, deadline=60.0) as fresh:
                kv = await fresh.open(SPACE, SPEC)
                await (await kv.match(prompt(neighbour.NUMBER, neighbour.TOKENS))).release()
                await _settled()
                took, size = await _match(fresh, kv, tokens, length)
                mine.append(took)
                bare += await _bare(other, size, 2)
    _add(run, "match", "whole", length, mine, bare)


async def _incremental(run: Run, client: Client, kv: RemoteKV, other: echo.Echo, number: int, length: int) -> None:
    """A prompt of which the session knows all but the last turn, a new one each time."""
    tokens, mine, bare = prompt(number, length), [], []
    turn = min(TURN, length // 2)
    with quiet():
        for sample in range(run.pick(20, 300)):
            grown = np.concatenate((tokens[:-turn], tokens[-turn:])) if sample % 2 else tokens
            grown = np.concatenate((grown, prompt(1000 + sample, turn)))
            took, size = await _match(client, kv, grown, length)
            mine.append(took)
            bare += await _bare(other, size, 1)
    _add(run, "match", "a turn", length, mine, bare)


async def _in_place(run: Run, client: Client, kv: RemoteKV, other: echo.Echo, number: int, length: int) -> None:
    """A hit in DRAM, from the call to its first and its last block in place."""
    tokens, mine, bare = prompt(number, length), [], []
    known = kv_of(number, length)
    size = Bytes(0, 0)

    async def readable() -> tuple[RemoteHit, int]:
        hit = await kv.match(tokens)
        ready = await hit.ready()
        hit.view(0, 0)
        hit.view(length // SPEC.block_size - 1, SPEC.layers - 1)
        return hit, ready

    _, size = await _match(client, kv, tokens, length)
    hit, ready = await readable()
    assert ready == length
    for block in range(length // SPEC.block_size):
        low = block * SPEC.block_size
        for layer in range(SPEC.layers):
            for part, found in enumerate(hit.view(block, layer)):
                assert np.array_equal(found.numpy(), known[layer, part, low : low + SPEC.block_size])
    await hit.release()
    with quiet():
        for _ in range(run.pick(20, 300)):
            began = time.perf_counter()
            hit, ready = await readable()
            mine.append(time.perf_counter() - began)
            assert ready == length
            await hit.release()
            del hit
            await _settled()
            bare += await _bare(other, size, 1)
    reference = Reference(ECHO, Spread.of(bare))
    goal = Goal(key="in-place", at_most=2.0)
    run.add("in place", mine, "s", at={"tokens": length, "prompt": "known"}, reference=reference, goal=goal)


async def _match(client: Client, kv: RemoteKV, tokens: np.ndarray, length: int) -> tuple[float, Bytes]:
    """Return how long a match takes whose first `length` tokens hit, and how many bytes it needs."""
    before = client.stats()
    began = time.perf_counter()
    hit = await kv.match(tokens)
    took = time.perf_counter() - began
    after = client.stats()
    assert hit.tokens == length
    await hit.release()
    await _settled()
    return took, Bytes(after.sent - before.sent, after.received - before.received)


async def _bare(other: echo.Echo, size: Bytes, rounds: int) -> list[float]:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        await other.ask(*size)
        times.append(time.perf_counter() - began)
    return times


def _add(run: Run, name: str, how: str, length: int, mine: list[float], bare: list[float]) -> None:
    reference = Reference(ECHO, Spread.of(bare))
    goal = None
    if length == 2048:
        goal = Goal(key="match-2k", at_most=2.5)
    elif length == 131_072 and how == "a turn":
        goal = Goal(key="match-128k", of="value", at_most=2e-3)
    at: dict[str, str | int | float] = {"tokens": length, "prompt": how}
    run.add(name, mine, "s", at=at, reference=reference, goal=goal)
    run.add("bare round trip", bare, "s", at=at)


# --- many at once ---------------------------------------------------------------------------------------------------------


async def _together(run: Run, served: Served, bare: Path, number: int) -> None:
    """Sessions that all match the same 2,048 tokens, which each of them knows, one request after the other."""
    tokens = prompt(number, 2048)
    for count in run.track(run.pick((1, 4), (1, 2, 4, 8, 16, 32, 64)), "sessions"):
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(connect(served.address, deadline=60.0)) for _ in range(count)]
            kvs = [await client.open(SPACE, SPEC) for client in clients]
            for client, kv in zip(clients, kvs, strict=True):
                await _match(client, kv, tokens, 2048)
            _, size = await _match(clients[0], kvs[0], tokens, 2048)
            others = [await stack.enter_async_context(echo.connected(bare)) for _ in range(count)]

            async def ask(kv: RemoteKV) -> None:
                async with kv.match(tokens) as hit:
                    assert hit.tokens == 2048

            rates: list[float] = []
            plain: list[float] = []
            waits: list[float] = []
            for _ in range(run.pick(1, 5)):
                each = run.pick(40, 1200) // count or 1
                rate, times = await _crowd([lambda kv=kv: ask(kv) for kv in kvs], each)  # type: ignore[misc]
                rates.append(rate)
                waits += times
                rate, _ = await _crowd([lambda other=other, size=size: other.ask(*size) for other in others], each)  # type: ignore[misc]
                plain.append(rate)
        reference = Reference(ECHO, Spread.of(plain))
        run.add("requests", rates, "1/s", at={"sessions": count}, reference=reference)
        run.add("bare requests", plain, "1/s", at={"sessions": count})
        run.add("request", waits, "s", at={"sessions": count})


async def _crowd(calls: list[Callable[[], Awaitable[None]]], each: int) -> tuple[float, list[float]]:
    """Make each call `each` times, one after the other, all calls side by side; return calls per second, and what each took."""
    times: list[float] = []

    async def again(call: Callable[[], Awaitable[None]]) -> None:
        for _ in range(each):
            began = time.perf_counter()
            await call()
            times.append(time.perf_counter() - began)

    with quiet():
        began = time.perf_counter()
        await asyncio.gather(*(again(call) for call in calls))
        return len(times) / (time.perf_counter() - began), times


async def _neighbours(run: Run, served: Served, kv: RemoteKV) -> None:
    """What a match costs while another client of another process asks as fast as it can, beside what it costs alone."""
    tokens = prompt(neighbour.NUMBER, neighbour.TOKENS)

    async def times() -> list[float]:
        async def ask() -> None:
            async with kv.match(tokens):
                pass

        _, taken = await _crowd([ask], run.pick(50, 1000))
        return taken

    alone = await times()
    with neighbour.beside(served.address, pause=0.0):
        crowded = await times()
    alone += await times()
    run.add(
        "match beside another client", crowded, "s", at={"tokens": neighbour.TOKENS}, reference=Reference("alone", Spread.of(alone))
    )


async def _ready(client: Client, served: Served) -> None:
    """Wait until the client has a session."""
    while client.boot is None:
        served.require()
        await asyncio.sleep(0.005)


async def _store(kv: RemoteKV, number: int, length: int) -> None:
    stored = await kv.insert(prompt(number, length), kv_of(number, length))
    assert stored.stored == length


async def _settled() -> None:
    """Let what a release set off come to its end, on both sides."""
    await asyncio.sleep(0.001)
