"""A client in a process of its own: `python child.py ROLE ADDRESS SEED`. It says one line for each step, as JSON.

A role with `-on-device` has a lazy device, which is held while it holds a copy. `hold-…` roles go to one point of a lease's or a
reservation's life, say so, and stay there until they are killed.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[3]))

import torch

from tests.service.caches import LARGE, SPACE, is_exact, prompt, tensor_of
from tiercache.errors import LeaseLost
from tiercache.kernels.lazy import LazyDevice
from tiercache.service.client import copies
from tiercache.service.client.client import Client, connect
from tiercache.service.client.remote_kv import RemoteKV

BLOCKS = 24
ON_UVLOOP = "-on-uvloop"
ON_DEVICE = "-on-device"


def say(**what: object) -> None:
    """Tell the parent."""
    print(json.dumps(what), flush=True)


async def stay() -> None:
    """Stay until killed."""
    say(there=True)
    await asyncio.Event().wait()


def stick(name: str) -> None:
    """Let the first copy of a kind say that it has begun, and never end."""
    plain = getattr(copies, name)

    def stuck(*args: Any) -> Any:
        if name == "scatter":
            plain(args[0], args[1], args[2][:1])
        say(there=True)
        threading.Event().wait()

    setattr(copies, name, stuck)


async def stopped(kv: RemoteKV, seed: int) -> None:
    """Hold three hits, one in place; stop, and say what became of them."""
    prompts = [prompt(seed + number, 1) for number in range(3)]
    async with kv.match(prompts[0]) as evicted, kv.match(prompts[1]) as kept, kv.match(prompts[2]) as placed:
        await evicted.layer(0)
        seen = placed.view(0, 1)[0]
        await kept.ready()
        say(pid=os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)
        found = {"layer": "", "gathered": -1, "view": "", "in_place": False, "again": False}
        try:
            kept.view(0, 0)
        except LeaseLost as error:
            found["view"] = type(error).__name__
        try:
            await evicted.layer(1)
        except LeaseLost as error:
            found["layer"] = type(error).__name__
        found["gathered"] = (await evicted.gather()).shape[2]
        found["in_place"] = torch.equal(seen.view(torch.uint8), tensor_of(prompts[2], spec=LARGE)[1, 0].view(torch.uint8))
    async with kv.match(prompts[1]) as hit:
        found["again"] = hit.tokens == 16 and is_exact(await hit.gather(), prompts[1], spec=LARGE)
    say(**found)


async def held(device: LazyDevice, copy: Coroutine[Any, Any, object]) -> None:
    """Let a copy be enqueued and not happen, say so, and stay."""
    device.held = True
    copying = asyncio.ensure_future(copy)
    while not any(len(stream.work) > 1 for stream in device.streams):  # noqa: ASYNC110 - enqueueing sets no event
        await asyncio.sleep(0.001)
    await stay()
    await copying


async def run(role: str, client: Client, seed: int, device: LazyDevice | None = None) -> None:
    """Play a role."""
    kv = await client.open(SPACE, LARGE)
    if role == "stopped":
        await stopped(kv, seed)
        return
    tokens = prompt(seed, BLOCKS)
    data = tensor_of(tokens, spec=LARGE)
    if role == "write":
        say(stored=list(await kv.insert(tokens, data)))
        return
    if role == "write-in-place":
        async with kv.reserve(tokens) as room:
            for number, block in enumerate(room.blocks):
                block.copy_(data[:, :, number * 16 : (number + 1) * 16])
            say(stored=[await room.commit(len(tokens)), 0, 0])
        return
    if role == "read-in-place":
        async with kv.match(tokens) as hit:
            layers = [[torch.stack(hit.view(block, layer)) for block in range(BLOCKS)] for layer in range(LARGE.layers)]
            whole = torch.stack([torch.cat(blocks, 1) for blocks in layers])
            say(tokens=hit.tokens, exact=hit.is_in_place and is_exact(whole, tokens, spec=LARGE), **asdict(client.stats()))
        return
    if role == "read":
        async with kv.match(tokens) as hit:
            exact = is_exact(await hit.gather(), tokens, spec=LARGE)
            seen, expected = hit.view(3, 2)[1], data[2, 1, 48:64]
            in_place = seen.contiguous().view(torch.uint8).equal(expected.contiguous().view(torch.uint8))
            say(tokens=hit.tokens, exact=exact and in_place, **asdict(client.stats()))
        return
    if role == "hold-writing":
        if device is not None:
            await held(device, kv.insert(tokens, data))
        stick("scatter")
        await kv.insert(tokens, data)
    if role == "hold-reading":
        stick("gather")
    if role in ("hold-lease", "hold-view", "hold-reading"):
        async with kv.match(tokens) as hit:
            if role == "hold-reading":
                await (hit.gather() if device is None else held(device, hit.gather()))
            kept = hit.view(0, 0) if role == "hold-view" else None
            await client.check()
            await stay()
            del kept
    async with kv.reserve(tokens) as room:
        if role != "hold-reserved":
            for number, block in enumerate(room.blocks):
                block.copy_(data[:, :, number * 16 : (number + 1) * 16])
        if role == "hold-committed":
            await room.commit(4 * 16)
        await stay()


async def main() -> None:
    """Connect, and play."""
    role, address, seed = sys.argv[1:]
    device = LazyDevice(int(seed)) if role.endswith(ON_DEVICE) else None
    async with connect(address, deadline=60.0, device=device) as client:
        await run(role.removesuffix(ON_UVLOOP).removesuffix(ON_DEVICE), client, int(seed), device)


if __name__ == "__main__":
    factory = importlib.import_module("uvloop").new_event_loop if sys.argv[1].endswith(ON_UVLOOP) else None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
