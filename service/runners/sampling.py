"""Choosing the next token from the model's logits."""

from __future__ import annotations

from collections.abc import Callable

import torch

Pick = Callable[[torch.Tensor], int]
"""From the logits `[vocabulary]` of one position to the next token."""


def greedy(logits: torch.Tensor) -> int:
    """Return the most likely token; of several, the one with the lowest id."""
    return int(logits.argmax())


def picker(temperature: float, seed: int | None) -> Pick:
    """Return a choice of tokens: the most likely at temperature 0, else drawn from softmax(logits / temperature).

    Each choice draws from a generator of its own, so that what one sequence gets depends on its seed alone and not on what
    is decoded beside it. Without a seed it is not repeatable.
    """
    if temperature == 0:
        return greedy
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)

    def draw(logits: torch.Tensor) -> int:
        chances = torch.softmax(logits.float().cpu() / temperature, dim=-1)
        return int(torch.multinomial(chances, 1, generator=generator))

    return draw
