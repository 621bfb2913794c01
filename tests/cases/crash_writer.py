"""A process that stores, demotes, flushes and deletes until it is killed: `python -m tests.cases.crash_writer DIR FIRST LAST`.

It prints a line when a prompt is `durable N`, when it begins to delete one (`deleting N`) and when that is `deleted N`. It
needs no tensors, and so no seconds to start.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.oracle import oracle_block
from tests.storage.ssd_fixture import capacity_for
from tiercache.config import Config
from tiercache.keys import pack_tokens
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV
from tiercache.spec import KVSpec, Namespace

SPEC = KVSpec(layers=4, kv_heads=2, head_dim=32, dtype="float32", block_size=16)
SPACE = Namespace(model="m", weights="sha256:1")
BLOCKS = 3
SHARED = 1
"""The first block is every prompt's: the part that is hot, and must go down all the same."""


def config_of(directory: Path, codec: str = "raw") -> Config:
    """Return tiers so small that every prompt pushes another one down."""
    size = SPEC.block_bytes
    return Config.of(
        hbm=4 * size,
        dram=6 * size,
        ssd=capacity_for(SPEC.geometry, 4096),
        directory=str(directory),
        codec=codec,
        admit_ms=60_000,
        lease_share=1.0,
    )


def tokens_of(number: int) -> list[int]:
    """Return prompt `number`."""
    shared, own = random.Random(0), random.Random(number + 1)
    return [(shared if at < SHARED * SPEC.block_size else own).randrange(2**31) for at in range(BLOCKS * SPEC.block_size)]


def block_bytes(tokens: list[int], block: int, *, plain: bool = False) -> NDArray[np.uint8]:
    """Return the oracle's bytes of a block of a prompt, `[planes, unit_bytes]`; `plain` ones have few values and can be packed."""
    packed = pack_tokens(tokens[: (block + 1) * SPEC.block_size], limit=1 << 20)
    whole = oracle_block(SPACE.digest(SPEC), packed, SPEC.geometry)
    return whole & np.uint8(7) if plain else whole


async def write(kv: LocalKV, tokens: list[int], *, plain: bool = False) -> None:
    """Store a prompt in place."""
    async with kv.reserve(tokens) as room:
        first = room.present // SPEC.block_size
        for number, place in enumerate(room._places(room._live()), first):
            np.copyto(kv._desk.stack.reader.view(place), block_bytes(tokens, number, plain=plain))
        await room.commit(room.tokens)


async def main(directory: Path, first: int, last: int) -> None:
    """Write prompts `first` to `last`, over and over."""
    choose = random.Random(first)
    async with TierCache(config_of(directory)) as cache:
        kv = await cache.open(SPACE, SPEC)
        deleted: set[int] = set()
        for number in range(first, last):
            await write(kv, tokens_of(number))
            if choose.random() < 0.6 and await kv.flush(tokens_of(number)) == BLOCKS * SPEC.block_size:
                print("durable", number, flush=True)
            if number - first > 4 and choose.random() < 0.3:
                old = choose.choice([other for other in range(first, number) if other not in deleted])
                deleted.add(old)
                print("deleting", old, flush=True)
                await kv.delete(tokens_of(old))
                print("deleted", old, flush=True)
        while True:  # until it is killed
            for number in range(first, last):
                if number not in deleted:
                    await write(kv, tokens_of(number))
                    if await kv.flush(tokens_of(number)) == BLOCKS * SPEC.block_size:
                        print("durable", number, flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
