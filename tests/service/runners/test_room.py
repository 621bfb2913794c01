"""The model's attention memory keeps what transformers' own cache keeps."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from tiercache.service.runners.hf import spec_of
from tiercache.service.runners.room import Room, cache_argument


def forward(model: Any, tokens: list[list[int]], cache: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor(tokens), use_cache=True, **{cache_argument(model): cache}).logits
        return logits


def test_room_holds_what_transformers_cache_holds(tiny_model: Any) -> None:
    """After a prefill and two further pieces, K, V and logits are those with the library's growing cache."""
    room, theirs = Room(spec_of(tiny_model), 32), DynamicCache(config=tiny_model.config)

    for piece in ([5, 6, 7, 8, 9], [10], [11, 12]):
        found, expected = forward(tiny_model, [piece], room.cache), forward(tiny_model, [piece], theirs)

        assert torch.allclose(found, expected, atol=1e-5)
    assert room.length == 8
    for layer, (keys, values, *_) in enumerate(theirs):
        kv = room.kv(0, 8)[layer]  # [2, tokens, kv_heads, head_dim]
        assert torch.allclose(kv[0].transpose(0, 1), keys[0], atol=1e-5)
        assert torch.allclose(kv[1].transpose(0, 1), values[0], atol=1e-5)


def test_memory_on_the_host_begins_on_a_page(tiny_model: Any) -> None:
    """Rows that are copied into it begin where a copy is fastest."""
    assert Room(spec_of(tiny_model), 32).memory.data_ptr() % 4096 == 0


def test_inner_rows_are_contiguous(tiny_model: Any) -> None:
    """What is gathered into and inserted from is contiguous in `[tokens, kv_heads, head_dim]`, and is no copy."""
    room = Room(spec_of(tiny_model), 32)

    view = room.kv(4, 12)

    assert view.shape == (3, 2, 8, 2, 8)
    assert view[1, 1].is_contiguous()
    assert view.untyped_storage().data_ptr() == room.memory.untyped_storage().data_ptr()


def test_resized_room_computes_anew(tiny_model: Any) -> None:
    """A room that is used again holds nothing of before."""
    used, fresh = Room(spec_of(tiny_model), 32), Room(spec_of(tiny_model), 32)
    forward(tiny_model, [[1, 2, 3, 4]], used.cache)
    used.resize(0)

    found, expected = forward(tiny_model, [[9, 8]], used.cache), forward(tiny_model, [[9, 8]], fresh.cache)

    assert torch.equal(found, expected)
    assert torch.equal(used.kv(0, 2), fresh.kv(0, 2))


def test_repeated_room_continues_each_row_alone(tiny_model: Any) -> None:
    """Rows begin with the same tokens and part with what each is fed."""
    one = Room(spec_of(tiny_model), 8)
    forward(tiny_model, [[1, 2, 3]], one.cache)

    rows = one.repeat(2, 16)
    together = forward(tiny_model, [[4], [5]], rows.cache)
    alone = forward(tiny_model, [[5]], one.cache)

    assert torch.allclose(together[1], alone[0], atol=1e-5)
    assert torch.allclose(rows.kv(0, 4, row=1), one.kv(0, 4), atol=1e-5)
    assert torch.equal(rows.kv(0, 3, row=0), rows.kv(0, 3, row=1))
