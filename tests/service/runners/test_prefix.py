"""What the cache can't do is a miss for the runner: no failure of it gets out, a bug included."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.service.runners.conftest import BLOCK
from tests.service.runners.fake import FakeKV
from tiercache.errors import InvalidTensor, LeaseLost
from tiercache.service.runners.prefix import Prefix

TOKENS = [76_543, 76_544, 76_545, 76_546]
"""One block, of ids that would be seen in a log."""


class Broken(FakeKV):
    """A cache in which one call fails with any error at all."""

    def __init__(self, call: str, error: BaseException) -> None:
        super().__init__(BLOCK)
        self.call = call
        self.error: BaseException | None = None
        self.later = error

    def called(self, call: str) -> None:
        super().called(call)
        if self.error is not None and call == self.call:
            raise self.error


async def whole_request(kv: Broken, faults: Counter[str]) -> None:
    """Fill the cache, break it, and do what a runner does."""
    tensor = torch.zeros(1, 2, len(TOKENS), 1, 2)
    await kv.insert(TOKENS, tensor, start=0)
    kv.error = kv.later
    async with Prefix(kv, TOKENS, faults) as prefix:
        await prefix.match()
        await prefix.load(torch.empty_like(tensor))
        await prefix.insert(TOKENS, tensor)


@pytest.mark.parametrize("call", ["match", "ready", "gather", "insert", "release"])
@pytest.mark.parametrize(
    "error", [AssertionError, KeyError, RuntimeError, TypeError, OSError, TimeoutError, LeaseLost], ids=lambda error: error.__name__
)
async def test_every_failure_of_the_cache_is_a_miss(
    call: str, error: Callable[[str], Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """It is counted and logged with call, kind and place, and without what the message holds."""
    kv, faults = Broken(call, error(f"no such tokens: {TOKENS}")), Counter[str]()

    await whole_request(kv, faults)

    name = type(kv.later).__name__
    assert faults == {f"{call}: {name}": 1}
    assert f"{call} failed with {name} at " in caplog.text
    assert "76543" not in caplog.text
    assert kv.leases == 0


@pytest.mark.parametrize("call", ["match", "ready", "gather", "insert", "release"])
@pytest.mark.parametrize("error", [InvalidTensor("wrong"), asyncio.CancelledError(), KeyboardInterrupt()], ids=repr)
async def test_what_is_no_failure_of_the_cache_gets_out(call: str, error: BaseException) -> None:
    """A wrong argument, a cancellation and Ctrl-C are the caller's, and no fault is counted."""
    kv, faults = Broken(call, error), Counter[str]()
    caught: Any = None

    try:
        await whole_request(kv, faults)
    except (InvalidTensor, asyncio.CancelledError, KeyboardInterrupt) as found:
        caught = found

    assert caught is error
    assert faults == Counter()
    assert kv.leases == 0
