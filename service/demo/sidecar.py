"""The demo's own daemon: a child process that ends with the demo, whatever ends that."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, STDOUT, Process
from types import TracebackType
from typing import BinaryIO, Self

from tiercache.errors import DirectoryRefused, Refused
from tiercache.service.client.client import Client
from tiercache.service.daemon.peers import peer_of
from tiercache.service.demo.places import Places

_STOP = 20.0
"""Seconds that a stop may take: the daemon gives requests five, and writes for at most ten."""
_KILL = 5.0
_START = 60.0
_LOOK = 0.005
_LINES = 8


class Sidecar:
    """Runs `tiercache serve` in `places`, where a configuration lies, as often as it is started.

    An async context manager for the main thread. Leaving it ends the process: by SIGTERM, and by SIGKILL when that takes more
    than `patience` seconds. The process leads a session of its own, so that a terminal's Ctrl-C reaches the demo alone, and the
    kernel ends it should the demo be killed.
    """

    def __init__(self, places: Places, *, patience: float = _STOP) -> None:
        self.places = places
        self.began = 0.0
        """When the present process was started, on the clock of `time.perf_counter`."""
        self._patience = patience
        self._process: Process | None = None
        self._log: BinaryIO | None = None

    async def __aenter__(self) -> Self:
        try:
            self._log = self.places.log.open("wb")
        except OSError as error:
            raise DirectoryRefused(f"{self.places.log}: {error.strerror}", path=str(self.places.log)) from error
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            await self._end()
        finally:
            if self._log is not None:
                self._log.close()

    @property
    def address(self) -> str:
        """What a client connects to."""
        return f"unix://{self.places.socket}"

    @property
    def pid(self) -> int:
        """The process that was started last; 0 before the first one."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Start the process; `serves` waits until it answers."""
        command = ["serve", "--config", os.fspath(self.places.config), "--socket", os.fspath(self.places.socket)]
        self.began = time.perf_counter()
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "tiercache.service.demo.tether", str(os.getpid()), *command),
            # Not from the present folder, which may hold anything, but from where this process has its modules from.
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=DEVNULL,
            stdout=self._log,
            stderr=STDOUT,
            start_new_session=True,
        )

    async def serves(self, client: Client, *, after: bytes | None) -> bytes:
        """Wait until `client` has a session with a daemon of another boot than `after`; return its boot.

        Raises Refused when the process ends instead, or takes too long.
        """
        while (boot := client.boot) is None or boot == after:
            await self.require_running()
            if time.perf_counter() - self.began > _START:
                raise Refused(f"daemon {self.pid} does not serve {_START:.0f} s after its start", log=self.last_lines())
            await asyncio.sleep(_LOOK)
        return boot

    def listener(self) -> int:
        """Return which process listens at the socket, as the kernel says. Raises Refused when none does."""
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(os.fspath(self.places.socket))
                return peer_of(probe).pid
            except OSError as error:
                raise Refused(f"{self.places.socket}: {error.strerror}", log=self.last_lines()) from error

    async def stop(self) -> float:
        """End the process by SIGTERM; return how many seconds that took.

        Raises Refused when it had ended before, did not end in time, or ended with another status than 0.
        """
        await self.require_running()
        began = time.perf_counter()
        in_time = await self._end()
        if not in_time:
            raise Refused(f"daemon {self.pid} did not stop within {self._patience:g} s", log=self.last_lines())
        if self._process is not None and self._process.returncode != 0:
            raise Refused(self._fate(), log=self.last_lines())
        return time.perf_counter() - began

    async def require_running(self) -> None:
        """Raise Refused, saying how it ended, when the process has ended."""
        if self._process is None:
            raise Refused("the daemon was not started")
        if self._has_ended():
            await self._process.wait()
            raise Refused(self._fate(), log=self.last_lines())

    async def fate(self, patience: float = 1.0) -> str | None:
        """Return how the process ended, if it has, or does within `patience` seconds: a connection's end is seen first."""
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), patience)
                return self._fate()
        return None

    def last_lines(self) -> list[str]:
        """Return the end of the log."""
        try:
            return self.places.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES:]
        except OSError:
            return []

    async def _end(self) -> bool:
        """End the process if there is one; return whether it did so in time."""
        process = self._process
        if process is None or process.returncode is not None:
            return True
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), self._patience)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _KILL)
            return False
        return True

    def _has_ended(self) -> bool:
        """Return whether the process has ended, also where the loop, which hears of it from a thread, does not know it yet."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # the thread has taken its status
            return True

    def _fate(self) -> str:
        code = self._process.returncode if self._process is not None else None
        if code is None:
            return f"daemon {self.pid} runs"
        if code < 0:
            return f"daemon {self.pid} was ended by signal {-code} ({signal.strsignal(-code)})"
        return f"daemon {self.pid} ended by itself, with status {code}"
