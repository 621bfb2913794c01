"""Our daemon in a process of its own, beside a peer: `python -m tiercache.bench.peer_daemon CONFIG SOCKET [unsynced]`.

With `unsynced` it syncs nothing, which no configuration allows: it is how the peer writes, and for no other use.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from tiercache.bench.peer_link import end
from tiercache.config import Config
from tiercache.service.cli_serve import run, until_told
from tiercache.service.client.client import BackOff, connect
from tiercache.service.client.remote_kv import RemoteKV
from tiercache.service.daemon.daemon import Daemon
from tiercache.service.demo.tether import tie_to
from tiercache.service.stack import Seams
from tiercache.spec import KVSpec, Namespace

SPACE = Namespace(model="bench", weights="none")
EXACT: dict[str, Any] = {"lease_share": 1.0, "admit_ms": 600_000, "watermark_low": 0.0, "watermark_high": 0.0}
"""Nothing moves but what is measured."""
_DEADLINE = 60.0


@asynccontextmanager
async def daemon(config: Config, spec: KVSpec, *, sync: bool = True) -> AsyncIterator[RemoteKV]:
    """Run a daemon of `config` and a client of it, and give the namespace that is measured; both end with the block."""
    with _process(config, sync=sync) as (process, socket):
        async with connect(f"unix://{socket}", deadline=_DEADLINE, back_off=BackOff(first=0.01, most=0.05)) as client:
            await client.connected()
            await _rests(process)
            yield await client.open(SPACE, spec)


@contextmanager
def _process(config: Config, *, sync: bool) -> Iterator[tuple[int, Path]]:
    with tempfile.TemporaryDirectory(prefix="tiercache-") as place:  # by the default: a socket's path is short
        file, socket = Path(place) / "config.json", Path(place) / "s"
        file.write_bytes(msgspec.json.encode(config))
        command = [sys.executable, "-m", "tiercache.bench.peer_daemon", str(os.getpid()), str(file), str(socket)]
        command += ["unsynced"] * (not sync)
        process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            yield process.pid, socket
        finally:
            end(process)


async def _rests(process: int) -> None:
    """Wait until a process does nothing more: behind its start our daemon makes its pages larger."""
    before = -1.0
    while (spent := _processor_seconds(process)) > before + 0.02:
        before = spent
        await asyncio.sleep(0.3)


def _processor_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(parent: str, file: str, socket: str, *words: str) -> None:
    """Run the daemon until it is told to stop, or process `parent` has ended."""
    tie_to(int(parent))
    config = msgspec.json.decode(Path(file).read_bytes(), type=Config)
    seams = Seams(sync="unsynced" not in words)
    run(lambda: until_told(Daemon(config, socket, seams=seams)))


if __name__ == "__main__":
    main(*sys.argv[1:])
