"""What a restart costs: from exec to the first correct hit, as the store grows, beside the start of an interpreter.

The daemon is stopped in order, so that all that it holds is on SSD, and started again; the files are in the page cache. A client
that knows nothing of it tries to connect every ten milliseconds or sooner, and reads a prompt whose bytes are compared.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import numpy as np

from tiercache.bench.figures import Goal, Reference, Spread
from tiercache.bench.plot import Plot
from tiercache.bench.run import Run
from tiercache.bench.served import SPACE, SPEC, Served, environment, kv_of, looped, prompt, python
from tiercache.service.client.client import BackOff, connect

PLOTS = (
    Plot(
        "restart",
        "From exec to the first correct hit, as the store grows",
        ("first hit", "whole tree", "interpreter", "imports"),
        x="tokens",
        log=False,
    ),
)

_IMPORTS = "import os, tiercache.service.cli_serve; os._exit(0)"
_CHAT = 4096
"""Tokens of one prompt."""
_EVERY = BackOff(first=0.01, most=0.01)
"""Between attempts to connect: each is answered by the daemon that is starting, and takes of its time."""


def measure(run: Run) -> None:
    """Measure starts of a daemon on stores of growing size."""
    bytecode = run.folder / "bytecode"
    _interpreter(_IMPORTS, bytecode)
    for tokens in run.track(run.pick((8_192, 16_384), (65_536, 262_144, 1_048_576)), "restarts"):
        folder = run.folder / str(tokens)
        looped(lambda folder=folder, tokens=tokens: _restart(run, folder, bytecode, tokens))  # type: ignore[misc]
        shutil.rmtree(folder)
    shutil.rmtree(bytecode)


async def _restart(run: Run, folder: Path, bytecode: Path, tokens: int) -> None:
    chats = tokens // _CHAT
    blocks = tokens // SPEC.block_size
    # An arena of at most 256 MiB; what has no slot there goes to SSD while the store is filled.
    with Served(dram=blocks * 4096, ssd=blocks * SPEC.block_bytes * 2 + (64 << 20), directory=folder, bytecode=bytecode) as served:
        async with connect(served.address, deadline=60.0, back_off=_EVERY) as client:
            await client.connected()
            kv = await client.open(SPACE, SPEC)
            for number in range(chats):
                assert (await kv.insert(prompt(number, _CHAT), kv_of(number, _CHAT))).stored == _CHAT
        stops, hits, whole, plain, imports = [], [], [], [], []
        for number in range(run.pick(2, 5)):
            stops.append(served.stop())
            plain.append(_interpreter("pass", bytecode))
            imports.append(_interpreter(_IMPORTS, bytecode))
            served.start()
            first, all_of_it = await _first_hit(served, number * 7 % chats, blocks)
            hits.append(first)
            whole.append(all_of_it)
    at: dict[str, str | int | float] = {"tokens": tokens}
    allowed = Reference("interpreter start + 1 s", Spread.of([one + 1.0 for one in plain]))
    goal = Goal(key="restart", at_most=1.0) if tokens == 1_048_576 else None
    run.add("first hit", hits, "s", at=at, reference=allowed, goal=goal)
    run.add("whole tree", whole, "s", at=at, reference=allowed)
    run.add("interpreter", plain, "s", at=at)
    run.add("imports", imports, "s", at=at)
    run.add("stop", stops, "s", at=at)
    run.add("files", [_size(folder)], "B", at=at)


async def _first_hit(served: Served, number: int, blocks: int) -> tuple[float, float]:
    """Return how long after the start a prompt was read and found right, and all blocks were there and compared with the disk."""
    known = kv_of(number, _CHAT)
    async with connect(served.address, deadline=60.0, back_off=_EVERY) as client:
        await client.connected()
        kv = await client.open(SPACE, SPEC)
        async with kv.match(prompt(number, _CHAT)) as hit:
            found = await hit.gather()
        first = time.perf_counter() - served.began
        assert np.array_equal(found.numpy(), known)
        counts = await client.check()
        all_of_it = time.perf_counter() - served.began
        assert counts["blocks"] == blocks
    return first, all_of_it


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _interpreter(code: str, bytecode: Path) -> float:
    """Return how long another interpreter takes to run `code`."""
    began = time.perf_counter()
    subprocess.run(python("-c", code), env=environment(bytecode), check=True)
    return time.perf_counter() - began
