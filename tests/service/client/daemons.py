"""Daemons for tests of clients: in this process, or in one that can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web_app

from tests.seams import Rig
from tiercache.config import Config
from tiercache.service.daemon.daemon import Daemon


@asynccontextmanager
async def running(config: Config, rig: Rig | None = None) -> AsyncIterator[tuple[Daemon, str]]:
    """Run a daemon on this loop, with what `rig` holds; gives it and its address."""
    with tempfile.TemporaryDirectory(prefix="tc") as place:
        path = Path(place) / "s"
        try:
            async with Daemon(config, path, seams=None if rig is None else rig.seams()) as daemon:
                try:
                    yield daemon, f"unix://{path}"
                finally:
                    if rig is not None:
                        rig.release()
        finally:
            # A cache of aiohttp's keeps the handlers of the last applications, and with them daemons and their memory.
            web_app._cached_build_middleware.cache_clear()


class Process:
    """A daemon in a process of its own, which can be killed, stopped and started again on the same socket and directory."""

    def __init__(self, directory: Path, config: Config, *, on_device: bool = False) -> None:
        self.address = f"unix://{directory}/s"
        self._starts = 0
        self._on_device = on_device
        self._socket = directory / "s"
        self._file = directory / "config.toml"
        tiers = ", ".join(f'{{tier = "{tier.tier}", capacity = {tier.bytes}}}' for tier in config.tiers)
        self._file.write_text(
            f"tiers = [{tiers}]\ndirectory = '{config.directory or directory / 'data'}'\nadmit_ms = {config.admit_ms}\n"
            f"promote_ms = {config.promote_ms}\nlease_share = 1.0\ndrain_seconds = 0.0\n[limits]\n"
            + "".join(f"{name} = {value!r}\n" for name, value in msgspec.to_builtins(config.limits).items() if value is not None)
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, each time under another hash seed; it is there when a client is connected."""
        command = [sys.executable, "-m", "tiercache.service.daemon", "--config", str(self._file), "--socket", str(self._socket)]
        self._starts += 1
        environment = os.environ | {"PYTHONHASHSEED": str(self._starts)}
        if self._on_device:
            path = os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), *sys.path]))
            command = [sys.executable, str(Path(__file__).with_name("device_daemon.py")), str(self._file), str(self._socket)]
            self.process = subprocess.Popen(command, env=environment | {"PYTHONPATH": path})
            return
        self.process = subprocess.Popen([*command, "--log-level", "error"], env=environment)

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self._socket

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it without a word, and wait until it is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@contextmanager
def own_process(config: Config, *, on_device: bool = False) -> Iterator[Process]:
    """Run a daemon in a process of its own; `on_device` with its HBM tier on a lazy device."""
    with tempfile.TemporaryDirectory(prefix="tc") as place:
        daemon = Process(Path(place), config, on_device=on_device)
        daemon.start()
        try:
            yield daemon
        finally:
            daemon.kill()


class Child:
    """A client in a process of its own."""

    def __init__(self, role: str, address: str, seed: int) -> None:
        command = [sys.executable, str(Path(__file__).with_name("child.py")), role, address, str(seed)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)

    async def says(self) -> dict[str, Any]:
        """Return what it says next."""
        assert self._process.stdout is not None
        line = await asyncio.get_running_loop().run_in_executor(None, self._process.stdout.readline)
        assert line, f"the child ended with {self._process.wait()}"
        return dict(json.loads(line))

    def kill(self) -> None:
        """End it without a word."""
        self._process.kill()
        self.end()

    def end(self) -> int:
        """Wait for its end; return its exit code."""
        assert self._process.stdout is not None
        self._process.stdout.close()
        return self._process.wait()
