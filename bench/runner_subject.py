"""What the runner's bench runs: a real model, or a small one with random weights, and passes that no cache has a part in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tiercache.service.runners.hf import spec_of
from tiercache.service.runners.model import load_model
from tiercache.service.runners.room import Room, cache_argument
from tiercache.spec import KVSpec, Namespace

NEW = 32
"""Tokens that follow a prefix: the pass that a hit adds its time to."""
VOCABULARY = 97
"""Of a model with random weights."""


class Numbers:
    """A tokenizer of sorts, for a model that has none."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the ids as words."""
        return " ".join(map(str, tokens))


@dataclass(frozen=True, slots=True)
class Subject:
    """A model, its tokenizer, and whose KV it computes in which layout."""

    name: str
    model: Any
    tokenizer: Any
    space: Namespace
    spec: KVSpec

    def prompt(self, seed: int, tokens: int) -> list[int]:
        """Return token ids that share no block with those of another seed."""
        vocabulary = int(self.model.get_input_embeddings().weight.shape[0])
        return [int(token) for token in np.random.default_rng(seed).integers(0, vocabulary, tokens)]

    def room(self, tokens: int) -> Room:
        """Return attention memory for so many tokens, all of it touched."""
        room = Room(self.spec, tokens)
        room.memory.zero_()
        return room

    def first_logits(self, tokens: Sequence[int], room: Room) -> torch.Tensor:
        """Compute `tokens` behind what is in the room; return the logits after the last, `[vocabulary]`."""
        with torch.inference_mode():
            inputs = torch.tensor([tokens])
            output = self.model(input_ids=inputs, use_cache=True, logits_to_keep=1, **{cache_argument(self.model): room.cache})
            logits: torch.Tensor = output.logits[0, -1]
            logits.argmax().item()
            return logits

    def computed(self, tokens: int) -> torch.Tensor:
        """Return KV of so many tokens: what the model computes for the first of them, again and again. What counts is its size."""
        some = min(tokens, 512)
        room = self.room(some)
        self.first_logits(self.prompt(0, some), room)
        return room.kv(0, some).repeat(1, 1, -(-tokens // some), 1, 1)[:, :, :tokens].contiguous()


@contextmanager
def subject(*, real: bool) -> Iterator[Subject]:
    """Load the packaged model, which is there, or make the small one; torch computes in one thread until the end."""
    threads = torch.get_num_threads()
    try:
        yield _real() if real else _small()
    finally:
        torch.set_num_threads(threads)


def _real() -> Subject:
    loaded = load_model(threads=1)
    return Subject(loaded.namespace.model, loaded.model, loaded.tokenizer, loaded.namespace, spec_of(loaded.model))


def _small() -> Subject:
    torch.set_num_threads(1)
    model = random_llama(layers=4, hidden=256, intermediate=128, positions=1024)
    return Subject("a model with random weights", model, Numbers(), Namespace(model="small", weights="seed 7"), spec_of(model))


def random_llama(*, layers: int, hidden: int, intermediate: int, positions: int) -> Any:
    """Return a Llama with random weights that are the same each time, and grouped heads.

    Its logits lie apart, so that the likeliest token is one whatever adds up first.
    """
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.5,  # the default leaves all logits close together
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model: Any = LlamaForCausalLM(config)
    return model.eval()
