"""A daemon in a process of its own, as programs measure it: started by the command that users start it with."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from tiercache.spec import KVSpec, Namespace

T = TypeVar("T")

SPACE = Namespace(model="bench", weights="none")
SPEC = KVSpec(layers=2, kv_heads=1, head_dim=8, dtype="float16")
"""Blocks of 1 KiB and 16 tokens: what is measured is the way, not the bytes."""
_STOP = 60.0


def looped(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `work` to its end on the loop that the daemon runs on: uvloop's where there is one."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work())


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes a loop as the daemon's; None for asyncio's own."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return factory


def python(*arguments: str) -> list[str]:
    """Return the command of another interpreter, which is this one and looks for modules where this one does."""
    return [sys.executable, "-P", *arguments]


def environment(bytecode: Path | None = None) -> dict[str, str]:
    """Return the environment of another interpreter: nothing of the present folder, but all that this one has.

    Compiled modules are kept in the folder `bytecode`: an installed package has them, a checkout that nothing may be written to
    has not, and compiles them anew at every start.
    """
    found = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if bytecode is not None:
        found.pop("PYTHONDONTWRITEBYTECODE", None)
        found["PYTHONPYCACHEPREFIX"] = str(bytecode)
    return found


class Served:
    """`tiercache serve` with the sizes `sizes`, on a socket in a folder of its own; a context manager that ends it.

    `start` and `stop` may be repeated. With `directory` there is an SSD tier. `bytecode` is as `environment` says.
    """

    def __init__(self, *, dram: int, ssd: int = 0, directory: Path | None = None, bytecode: Path | None = None) -> None:
        self._environment = environment(bytecode)
        self._place = tempfile.TemporaryDirectory(prefix="tcb")
        self.socket = Path(self._place.name) / "s"
        self._log = Path(self._place.name) / "log"
        tiers = [f'{{tier = "DRAM", capacity = {dram}}}'] + [f'{{tier = "SSD", capacity = {ssd}}}'] * bool(ssd)
        # Nothing moves but what is measured.
        self._config = Path(self._place.name) / "config.toml"
        self._config.write_text(
            f"tiers = [{', '.join(tiers)}]\nlease_share = 1.0\nadmit_ms = 600000\nwatermark_low = 0.0\nwatermark_high = 0.0\n"
            + (f"directory = '{directory}'\ndrain_seconds = 600.0\n" if directory is not None else ""),
            encoding="utf-8",
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.began = 0.0
        """When the present process was started, on the clock of `time.perf_counter`."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process is not None:
            self._process.kill() if kind is not None else self._process.terminate()
            self._process.wait(_STOP)
        self._place.cleanup()

    @property
    def address(self) -> str:
        """What a client connects to."""
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        """The process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start the process; whoever connects waits for it."""
        command = python(
            "-m",
            "tiercache.service.demo.tether",
            str(os.getpid()),
            "serve",
            "--config",
            str(self._config),
            "--socket",
            str(self.socket),
        )
        with self._log.open("ab") as log:
            self.began = time.perf_counter()
            self._process = subprocess.Popen([*command, "--log-level", "error"], env=self._environment, stdout=log, stderr=log)

    def require(self) -> None:
        """Raise RuntimeError with the end of its log when the process has ended."""
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"the daemon has ended: {self._log.read_text(errors='replace')[-2000:]}")

    def stop(self) -> float:
        """End the process in order; return how many seconds that took."""
        self.require()
        assert self._process is not None
        began = time.perf_counter()
        self._process.terminate()
        status = self._process.wait(600)
        if status:
            raise RuntimeError(f"the daemon ended with {status}: {self._log.read_text(errors='replace')[-2000:]}")
        self._process = None
        return time.perf_counter() - began


def prompt(number: int, tokens: int) -> NDArray[np.int32]:
    """Return prompt `number`, which shares no block with another one of another number."""
    ids = np.arange(tokens, dtype=np.int32) & 0xFFFF
    return ids | np.int32(number << 16)


def kv_of(number: int, tokens: int, spec: KVSpec = SPEC) -> NDArray[np.float16]:
    """Return the KV of prompt `number`, the same each time, and each block's its own."""
    items = int(np.prod(spec.shape(tokens)))
    drawn = np.random.default_rng(number).integers(0, 30_000, items, dtype=np.uint16)
    return drawn.view(np.float16).reshape(spec.shape(tokens))
