"""A demo that only starts its daemon: `python parent.py DIRECTORY`. It says the daemon's process and waits to be killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tiercache.service.client.client import connect
from tiercache.service.demo.places import Places
from tiercache.service.demo.sidecar import Sidecar


async def main(directory: Path, run: Path) -> None:
    """Start the daemon, wait until it serves, and say which process it is."""
    async with Sidecar(Places(directory, run)) as sidecar:
        await sidecar.start()
        async with connect(sidecar.address) as client:
            await sidecar.serves(client, after=None)
            print(sidecar.pid, flush=True)
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), Path(sys.argv[2])))
