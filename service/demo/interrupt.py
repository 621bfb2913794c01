"""An orderly end: the first Ctrl-C unwinds the program, further ones wait until it has cleaned up."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import shutil
import signal
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")
_PATIENCE = 60.0
"""Seconds that what a cancelled coroutine left under way gets to end."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _On(enum.Enum):
    """What a first signal does."""

    RAISE = enum.auto()
    """Unwinds whatever runs, by KeyboardInterrupt."""
    WAIT = enum.auto()
    """Is noted: something runs that must not be cut short."""


class Interrupts:
    """A context in which SIGINT, SIGTERM and SIGHUP end the program once, and in order; entered in the main thread.

    Plain code is left by KeyboardInterrupt; in `run` the main coroutine is cancelled. A second signal can't cut the first one's
    cleaning up short. `caught` is the first signal, or None. Leaving the context puts the old handlers back if there was none;
    else the process is on its way out, and further signals stay ignored.
    """

    def __init__(self) -> None:
        self.caught: signal.Signals | None = None
        self._mode = _On.WAIT
        self._cancel: Any = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def status(self) -> int:
        """The exit status that says which signal ended the program: 130 for Ctrl-C."""
        return 128 + (self.caught or signal.SIGINT)

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        self._mode = _On.RAISE
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._mode = _On.WAIT
        for number, handler in self._before.items():
            signal.signal(number, handler if self.caught is None else signal.SIG_IGN)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` in an event loop; a signal cancels it, and it is waited for. Raises KeyboardInterrupt then."""
        with self.held():
            try:
                return asyncio.run(self._supervised(main))
            except asyncio.CancelledError as error:
                raise KeyboardInterrupt from error

    async def _supervised(self, main: Coroutine[Any, Any, T]) -> T:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(main)
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)  # it wakes the loop, too
        try:
            if self.caught is not None:
                task.cancel()
            return await task
        finally:
            self._cancel = None
            # Whoever is cancelled while a cache opens or closes leaves that to a task of its own: it must not end with the loop.
            if rest := asyncio.all_tasks() - {asyncio.current_task()}:
                await asyncio.wait(rest, timeout=_PATIENCE)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let no signal cut this block short; one that came meanwhile counts at its end, unless an error leaves the block."""
        before, self._mode = self._mode, _On.WAIT
        noticed = self.caught
        try:
            yield
        finally:
            self._mode = before
        if self.caught is not noticed and before is _On.RAISE:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def temporary(self, path: Path, *, keep: bool) -> Iterator[Path]:
        """Remove the directory `path`, which need not exist yet, at the end, unless it is to be kept."""
        try:
            yield path
        finally:
            with self.held():
                if not keep:
                    shutil.rmtree(path, ignore_errors=True)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.caught is not None:
            return
        self.caught = signal.Signals(number)
        if self._cancel is not None:
            self._cancel()
        elif self._mode is _On.RAISE:
            raise KeyboardInterrupt
