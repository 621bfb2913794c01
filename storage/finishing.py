"""Work that is not cut short because who waits for it goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Finishing:
    """Tasks that run to their end. Who owns them waits for all of them, with `wait`, before it ends itself."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: set[asyncio.Task[Any]] = set()

    async def abandon(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns. A caller that is cancelled leaves at once, and the work goes on."""
        return await asyncio.shield(self.start(work))

    async def outlast(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns. A caller that is cancelled leaves when the work has ended.

        For work on the caller's own memory: once the caller has left, that memory is used for something else.
        """
        return await outlast(self.start(work))

    async def wait(self) -> None:
        """Wait until everything has ended."""
        while self._tasks:
            await asyncio.wait(list(self._tasks))

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin `work` and return its task."""
        task = asyncio.get_running_loop().create_task(work, name=self._name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # who waited has it; if nobody does, nobody is to be told


async def outlast(task: asyncio.Task[T]) -> T:
    """Return what a task returns. A caller that is cancelled leaves when the task has ended."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await ended(task)
        raise


async def ended(task: asyncio.Task[Any]) -> None:
    """Wait until a task has ended, however often the caller is cancelled meanwhile."""
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            continue  # once more: the caller has something to raise
