"""A Llama small enough to run anywhere, with random weights that are the same each time."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 97


def tiny_llama(*, layers: int) -> Any:
    """Return a model with grouped heads; its logits lie apart, so that the likeliest token is one whatever adds up first."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.5,  # the default leaves all logits close together
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model: Any = LlamaForCausalLM(config)
    return model.eval()
