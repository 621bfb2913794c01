"""Models that the runner's tests run: a tiny one with random weights, and the packaged real one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from tests.service.runners.fake import FakeKV
from tests.service.runners.tiny import tiny_llama
from tiercache.service.runners.hf import Runner
from tiercache.service.runners.model import Loaded, load_model

BLOCK = 4


class Letters:
    """A tokenizer of sorts: each token is a letter."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(ord("A") + token % 26) for token in tokens)


@pytest.fixture(scope="session")
def tiny_model() -> Any:
    """A Llama with random weights, 3 layers and grouped heads."""
    return tiny_llama(layers=3)


@pytest.fixture(scope="session")
def real_model() -> Loaded:
    """The packaged SmolLM2-135M-Instruct; the first session on a machine downloads and converts it."""
    return load_model(threads=1)


@pytest.fixture
def kv() -> FakeKV:
    return FakeKV(BLOCK)


@pytest.fixture
async def runner_of(tiny_model: Any) -> AsyncIterator[Callable[..., Runner]]:
    """A function that makes a runner of the tiny model on a cache; the runners are closed after the test."""
    made: list[Runner] = []

    def make(kv: FakeKV | None, **options: Any) -> Runner:
        made.append(Runner(tiny_model, Letters(), kv, block_size=BLOCK, **options))
        return made[-1]

    yield make
    await asyncio.gather(*(runner.close() for runner in made))
    made.clear()  # with a client's KV goes the memory that it maps
