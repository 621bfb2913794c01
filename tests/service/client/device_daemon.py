"""A daemon whose HBM tier lies on a lazy device, in a process of its own: `device_daemon.py CONFIG SOCKET`, until killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from tiercache.config import Config
from tiercache.kernels.lazy import LazyDevice
from tiercache.service.daemon.daemon import Daemon
from tiercache.service.stack import Seams


async def main(config: str, socket: str) -> None:
    """Serve."""
    device = LazyDevice(1)
    read = msgspec.structs.replace(Config.from_toml(Path(config)), device="cuda:0")
    async with Daemon(read, Path(socket), seams=Seams(device=lambda name: device)):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
