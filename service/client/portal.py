"""A thread with an event loop, and calls into it from other threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tiercache.errors import Closed

R = TypeVar("R")

_LOOK = 1.0
"""Seconds between looks whether the thread that is to answer still lives."""


class Portal:
    """Runs coroutines in a thread of its own and hands their results to whichever thread asked.

    `closing` is run in the thread as its last act. Nobody waits for ever: when the thread ends, however it ends, who waits and
    who comes later gets Closed.
    """

    def __init__(self, name: str, closing: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._closing = closing
        self._loop: asyncio.AbstractEventLoop | None = None
        self._began = threading.Event()
        self._lock = threading.Lock()
        self._waiting: set[concurrent.futures.Future[Any]] = set()
        self._over = False
        # A daemon thread: a program that ends without closing its client is not kept from ending.
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread, and return when its loop runs."""
        self._thread.start()
        self._began.wait()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run `work` in the thread and return its result, or raise what it raised.

        An exception in the thread that waits (a KeyboardInterrupt) cancels the work. Raises Closed when the thread has ended.
        """
        if threading.current_thread() is self._thread:
            work.close()
            raise Closed("a blocking call in the client's own thread would wait for itself")
        with self._lock:
            if self._over or self._loop is None:
                work.close()
                raise Closed("the client's thread has ended")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
            self._waiting.add(future)
        try:
            return self._wait(future, work)
        except BaseException:
            future.cancel()
            raise
        finally:
            with self._lock:
                self._waiting.discard(future)
            # Its error's traceback holds this frame: a cycle that would keep what the callers' frames hold until a collection.
            del future

    def stop(self) -> None:
        """End the thread and wait for it."""
        with self._lock:
            loop, over = self._loop, self._over
            if loop is not None and not over:
                loop.call_soon_threadsafe(loop.stop)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _wait(self, future: concurrent.futures.Future[R], work: Coroutine[Any, Any, R]) -> R:
        while not concurrent.futures.wait([future], timeout=_LOOK).done:
            if not self._thread.is_alive():
                work.close()
                raise Closed("the client's thread has died")
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise Closed("the client was closed meanwhile") from error
        finally:
            del future  # as above

    def _serve(self) -> None:
        loop = asyncio.new_event_loop()
        try:
            asyncio.set_event_loop(loop)
            self._loop = loop
            loop.call_soon(self._began.set)
            loop.run_forever()
        finally:
            with self._lock:
                self._over = True
                waiting = list(self._waiting)
            self._began.set()
            _cancel_all(loop)
            loop.run_until_complete(self._closing())
            loop.close()
            for future in waiting:
                future.cancel()


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
