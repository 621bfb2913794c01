"""Taking time: samples of calls, in turns where two are compared, without the garbage collector's pauses."""

from __future__ import annotations

import gc
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


def seconds(call: Callable[[], object]) -> float:
    """Return how long one call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


async def awaited(call: Callable[[], Awaitable[object]]) -> float:
    """Return how long one call takes to its end."""
    began = time.perf_counter()
    await call()
    return time.perf_counter() - began


def each(call: Callable[[T], object], arguments: Sequence[T]) -> list[float]:
    """Return the seconds of each call."""
    times: list[float] = []
    with quiet():
        for argument in arguments:
            began = time.perf_counter()
            call(argument)
            times.append(time.perf_counter() - began)
    return times


def in_turns(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each call, made in turns, so that a change of the machine's speed meets all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    with quiet():
        for _ in range(rounds):
            for name, call in calls.items():
                times[name].append(seconds(call))
    return times


@contextmanager
def quiet() -> Iterator[None]:
    """Collect garbage now, and not before the end of the block."""
    gc.collect()
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
