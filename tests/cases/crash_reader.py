"""A process that opens damaged copies of a directory, one after the other: `python -m tests.cases.crash_reader CODEC PROMPTS DIR…`.

For each it reads every prompt and compares every byte with the oracle, stores all of them anew, deletes one, audits the books,
and prints a line of JSON: how many tokens of each prompt were there at first, and whether files were set aside. A wrong byte and
wrong books end it with an error, and a signal ends it in the middle: the last line says after which copy. It needs no tensors.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import numpy as np

from tests.cases.crash_writer import BLOCKS, SPACE, SPEC, block_bytes, config_of, tokens_of, write
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV


async def read(kv: LocalKV, tokens: list[int], *, plain: bool) -> int:
    """Return how many tokens can be read; every byte of them must be the oracle's."""
    async with kv.match(tokens) as hit:
        count = await hit.ready()
        stack = kv._desk.stack
        for number, place in enumerate(stack.readable(hit.lease)[: count // SPEC.block_size]):
            assert np.array_equal(stack.reader.view(place), block_bytes(tokens, number, plain=plain)), "a wrong byte"
    return count


async def look(directory: Path, codec: str, prompts: int) -> dict[str, object]:
    """Open one copy, read it, and use it on."""
    plain = codec == "zstd"
    async with TierCache(config_of(directory, codec)) as cache:
        kv = await cache.open(SPACE, SPEC)
        found = [await read(kv, tokens_of(number), plain=plain) for number in range(prompts)]
        [stack] = cache.stacks
        assert stack._sweeping is not None
        await asyncio.wait([stack._sweeping])
        for number in range(prompts):
            await write(kv, tokens_of(number), plain=plain)
            flushed = await kv.flush(tokens_of(number))
            assert flushed == BLOCKS * SPEC.block_size, f"{flushed} tokens of prompt {number} are durable"
        await kv.delete(tokens_of(0))
        again = [await read(kv, tokens_of(number), plain=plain) for number in range(1, prompts)]
        assert again == [BLOCKS * SPEC.block_size] * (prompts - 1)
        await cache.settle()
        await cache.check()
        failures = dict(stack.cache.stats.failures)
    return {"found": found, "failures": failures}


def main() -> None:
    """Look at all of them."""
    codec, prompts, *directories = sys.argv[1:]
    for directory in directories:
        print(directory, flush=True)
        seen = asyncio.run(look(Path(directory), codec, int(prompts)))
        print(json.dumps({**seen, "aside": any(Path(directory).glob("set-aside-*"))}), flush=True)


if __name__ == "__main__":
    main()
