"""How long a model computes, so that what is around its passes can be told from them.

Passes of the same work differ among each other by several percent on a machine that is shared, more than a cache takes. What a
cache adds to them lies outside: matching and copying before the pass, inserting after the last one.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self


class Passes:
    """Counts the seconds that `model` spends in its forward passes, in whatever thread; a context manager."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._hooks: list[Any] = []
        self._began = 0.0
        self._seconds: list[float] = []

    def __enter__(self) -> Self:
        self._hooks = [self._model.register_forward_pre_hook(self._begin), self._model.register_forward_hook(self._end)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

    def take(self) -> list[float]:
        """Return the seconds of each pass since this was asked last."""
        taken, self._seconds = self._seconds, []
        return taken

    def _begin(self, *_: object) -> None:
        self._began = time.perf_counter()

    def _end(self, *_: object) -> None:
        self._seconds.append(time.perf_counter() - self._began)
