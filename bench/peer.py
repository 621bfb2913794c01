"""Beside LMCache 0.5.6, the same bytes in the same run: its server and our daemon, its storage manager and our cache in process.

Prompts are eight chunks of 256 tokens; each side copies with one thread, and they take turns. Before anything is timed, every side
gives back what was stored, and the digests are compared. Bytes move in two ways, which are the same on both sides: from and to a
tensor of the whole prompt, and `paged`, from and to an engine's memory of 16-token pages (LMCache by its own transfer for engines,
ours in place). Rates of memory are those after every slot was used once; the first use is a figure of its own. Without LMCache our
own figures are measured alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path

import torch

from tiercache.bench.figures import Goal, Reference, Spread
from tiercache.bench.peer_daemon import EXACT, SPACE, daemon
from tiercache.bench.peer_disk import disk
from tiercache.bench.peer_figures import add_rates, add_ratio, add_times, rates
from tiercache.bench.peer_link import CHUNKS, INTERPRETER, in_process, interpreter, served
from tiercache.bench.peer_sides import Ours, Paged, Prompt, Side, Theirs, memcpy, same
from tiercache.bench.plot import Plot
from tiercache.bench.run import Run
from tiercache.bench.timing import quiet
from tiercache.config import Config
from tiercache.service.inprocess import TierCache
from tiercache.spec import KVSpec

TOKENS = 256
SPECS = (
    KVSpec(layers=8, kv_heads=2, head_dim=64, dtype="float16", block_size=TOKENS),  # 1 MiB
    KVSpec(layers=16, kv_heads=4, head_dim=64, dtype="float16", block_size=TOKENS),  # 4 MiB
    KVSpec(layers=32, kv_heads=4, head_dim=128, dtype="float16", block_size=TOKENS),  # 16 MiB
)
FIRST = 5
"""Prompts that are stored where nothing was stored before."""
PROMPTS = FIRST + 4
"""Prompts that fit the memory of each side: LMCache begins to throw away at 0.8 of it."""
PAIRS = (
    ("tiercache, daemon", "LMCache, server"),
    ("tiercache, daemon, paged", "LMCache, server, paged"),
    ("tiercache, in process", "LMCache, in process"),
)
_CALLS = ("store", "retrieve", "in place", "lookup")

PLOTS = (
    *(
        Plot(f"peer-{call}", f"{title}, {TOKENS} tokens a chunk, {CHUNKS} chunks", (call,), x="chunk bytes", series=("by",))
        for call, title in (("store", "Store in DRAM"), ("retrieve", "Retrieve from DRAM"))
    ),
    Plot(
        "peer-found",
        "Until a prompt in DRAM is found, and until it can be read there",
        ("lookup", "in place"),
        x="chunk bytes",
        series=("name", "by"),
    ),
    Plot("peer-disk-store", "Store until it is on disk", ("store on disk",), x="chunk bytes", series=("by",)),
    Plot(
        "peer-disk-retrieve",
        "Retrieve from disk",
        ("retrieve from disk, cold", "retrieve from disk, warm"),
        x="chunk bytes",
        series=("name", "by"),
    ),
)


def measure(run: Run) -> None:
    """Measure memory for every size of a chunk, then the disk."""
    python = interpreter()
    if python is None:
        run.note(f"LMCache is not installed (`make peer-lmcache`, or {INTERPRETER}): our own figures alone")
    torch.set_num_threads(1)
    specs = run.pick(SPECS[:1], SPECS)
    for spec in run.track(specs, "in memory"):
        prompt = Prompt(spec)
        for sides in (_over_daemon, _in_process):
            asyncio.run(_memory(run, prompt, sides(run.folder, python, prompt)))
    for spec in run.track(run.pick(SPECS[:1], SPECS[::2]), "on disk"):
        asyncio.run(disk(run, Prompt(spec), python))


@asynccontextmanager
async def _over_daemon(folder: Path, python: Path | None, prompt: Prompt) -> AsyncIterator[dict[str, Side]]:
    memory = PROMPTS * prompt.bytes
    async with AsyncExitStack() as stack:
        kv = await stack.enter_async_context(daemon(Config.of(dram=memory, **EXACT), prompt.spec))
        sides: dict[str, Side] = {"tiercache, daemon": Ours(kv, prompt), "tiercache, daemon, paged": Paged(kv, prompt)}
        if python is not None:
            peer = stack.enter_context(served(python, prompt.spec, folder, memory=memory))
            sides |= {"LMCache, server": Theirs(peer, "slots"), "LMCache, server, paged": Theirs(peer, "paged")}
        yield sides


@asynccontextmanager
async def _in_process(folder: Path, python: Path | None, prompt: Prompt) -> AsyncIterator[dict[str, Side]]:
    memory = PROMPTS * prompt.bytes
    async with AsyncExitStack() as stack:
        cache = await stack.enter_async_context(TierCache(Config.of(dram=memory, **EXACT)))
        sides: dict[str, Side] = {"tiercache, in process": Ours(await cache.open(SPACE, prompt.spec), prompt)}
        if python is not None:
            peer = stack.enter_context(in_process(python, prompt.spec, folder, memory=memory))
            sides["LMCache, in process"] = Theirs(peer, "slots")
        yield sides


async def _memory(run: Run, prompt: Prompt, opened: AbstractAsyncContextManager[dict[str, Side]]) -> None:
    async with opened as sides:
        numbers = count(1)
        await same(sides.values(), prompt, numbers)
        first: dict[str, list[float]] = {name: [] for name in sides if "paged" not in name}
        times: dict[str, dict[str, list[float]]] = {call: {name: [] for name in sides} for call in _CALLS}
        copies: list[float] = []
        with quiet():
            for _ in range(FIRST):
                for name, samples in first.items():
                    samples.append(await sides[name].store(next(numbers)))
            for _ in range(1 + run.pick(2, 9)):  # the first round warms both
                copies.append(memcpy(prompt))
                for name, side in sides.items():
                    await side.clear()
                    number = next(numbers)
                    times["store"][name].append(await side.store(number))
                    times["retrieve"][name] += [await side.retrieve(number) for _ in range(2)]
                    if "paged" not in name:
                        times["lookup"][name] += [await side.lookup(number) for _ in range(run.pick(5, 50))]
                    if name in PAIRS[0]:
                        times["in place"][name] += [await side.readable(number) for _ in range(run.pick(3, 10))]
    limit = Reference("memcpy", Spread.of(rates(prompt, copies[1:])))
    add_rates(run, "first store", prompt, first, limit)
    warm = {
        call: {name: samples[len(samples) // len(copies) :] for name, samples in sides.items() if samples}
        for call, sides in times.items()
    }
    for call in ("store", "retrieve"):
        add_rates(run, call, prompt, warm[call], limit)
    for call in ("lookup", "in place"):
        add_times(run, call, prompt, warm[call])
    for pair in PAIRS:
        goal = Goal(key="peer-dram", at_least=2) if "daemon" in pair[0] else None
        for call in ("store", "retrieve"):
            add_ratio(run, f"{call} beside LMCache", prompt, warm[call], pair, goal)
        add_ratio(run, "first store beside LMCache", prompt, first, pair)
