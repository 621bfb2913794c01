"""A Llama small enough to run anywhere, with random weights that are the same each time."""

from __future__ import annotations

from typing import Any

from tiercache.bench.runner_subject import random_llama


def tiny_llama(*, layers: int) -> Any:
    """Return the bench's model, smaller."""
    return random_llama(layers=layers, hidden=32, intermediate=48, positions=512)
