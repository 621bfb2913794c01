"""Another client of the same daemon, in a process of its own: what it feels of the others, and what they feel of it.

`python -m tiercache.bench.neighbour ADDRESS PAUSE_US` matches a short prompt again and again. A line on its input begins a new
period; it answers with a line: requests, median, slowest hundredth and slowest, in seconds, of the period before.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from tiercache.bench.figures import Spread
from tiercache.bench.served import SPACE, SPEC, environment, looped, prompt, python
from tiercache.service.client.client import connect

NUMBER, TOKENS = 30_000, 96
"""The prompt that it matches."""


class Period(NamedTuple):
    """What was felt."""

    requests: int
    median: float
    p99: float
    longest: float


class Neighbour:
    """The process, from outside."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def period(self) -> Period:
        """Begin a new period; return what was felt in the one before."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the neighbour has ended")
        return Period(*json.loads(line))


@contextmanager
def beside(address: str, *, pause: float) -> Iterator[Neighbour]:
    """Run one for as long as the block lasts; `pause` is between its requests, in seconds."""
    command = python("-m", "tiercache.bench.neighbour", address, str(round(pause * 1e6)))
    process = subprocess.Popen(command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        neighbour = Neighbour(process)
        neighbour.period()  # it is there
        yield neighbour
    finally:
        process.terminate()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
        process.wait()


async def _live(address: str, pause: float) -> None:
    times: list[float] = []
    loop = asyncio.get_running_loop()

    def told() -> None:
        if not sys.stdin.readline():
            raise SystemExit
        spread = Spread.of(times or [0.0])
        print(json.dumps([len(times), spread.median, spread.p99, max(times, default=0.0)]), flush=True)
        times.clear()

    async with connect(address, deadline=60.0) as client:
        await client.connected()
        kv = await client.open(SPACE, SPEC)
        tokens = prompt(NUMBER, TOKENS)
        loop.add_reader(sys.stdin.fileno(), told)
        while True:
            began = time.perf_counter()
            async with kv.match(tokens):
                times.append(time.perf_counter() - began)
            await asyncio.sleep(pause)


if __name__ == "__main__":
    looped(lambda: _live(sys.argv[1], int(sys.argv[2]) / 1e6))
