"""The identity of bytes: layout and namespace."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tiercache.errors import InvalidSpec, UnsupportedSpec
from tiercache.spec import Geometry, KVSpec, Namespace

SPEC = KVSpec(layers=4, kv_heads=8, head_dim=16, dtype="bfloat16", block_size=16)
SPACE = Namespace(model="m", weights="f1")


def test_a_spec_says_what_a_block_measures() -> None:
    """Bytes, planes and shapes follow from the layout."""
    latent = KVSpec(layers=2, kv_heads=1, head_dim=576, dtype="float16", block_size=1, latent=True)

    assert SPEC.geometry == Geometry(layers=4, parts=2, unit_bytes=16 * 8 * 16 * 2, symbol_bytes=64)
    assert SPEC.block_bytes == SPEC.geometry.block_bytes == 4 * 2 * 16 * 8 * 16 * 2
    assert SPEC.shape(5) == (4, 2, 5, 8, 16)
    assert latent.geometry == Geometry(layers=2, parts=1, unit_bytes=1152, symbol_bytes=32)
    assert latent.shape(3) == (2, 1, 3, 1, 576)


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 0},
        {"layers": True},
        {"layers": 2.0},
        {"kv_heads": -1},
        {"head_dim": 1 << 21},
        {"block_size": 0},
        {"block_size": 1 << 17},
        {"dtype": "float64"},
        {"dtype": ""},
        {"latent": 1},
        {"latent": True},
    ],
    ids=repr,
)
def test_a_layout_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    """Bounds and types are checked where the value is made."""
    with pytest.raises(InvalidSpec):
        replace(SPEC, **changes)


def test_every_field_is_part_of_the_identity() -> None:
    """Another dtype, head count, width, block size, weight file, adapter, tenant or rank count: another namespace."""
    digests = [
        SPACE.digest(SPEC),
        SPACE.digest(replace(SPEC, dtype="float16")),
        SPACE.digest(replace(SPEC, layers=5)),
        SPACE.digest(replace(SPEC, kv_heads=4)),
        SPACE.digest(replace(SPEC, head_dim=8)),
        SPACE.digest(replace(SPEC, block_size=32)),
        SPACE.digest(replace(SPEC, kv_heads=1, latent=True)),
        *(
            replace(SPACE, **changes).digest(SPEC)
            for changes in (
                {"model": "n"},
                {"weights": "f2"},
                {"adapter": "a:d1"},
                {"adapter": "a:d2"},
                {"adapter": ""},
                {"adapter": "None"},
                {"salt": "t"},
                {"salt": ""},
                {"world": 2},
                {"model": "mweights", "weights": "f1"},
                {"model": "m\x00", "weights": "f1"},
                {"model": "\u00e9"},
                {"model": "e\u0301"},
            )
        ),
    ]

    assert len({*digests}) == len(digests)
    assert SPACE.digest(SPEC) == Namespace(model="m", weights="f1").digest(replace(SPEC)), "and nothing else is"


@pytest.mark.parametrize(
    "changes",
    [
        {"model": None},
        {"weights": 5},
        {"adapter": b"a"},
        {"salt": "\ud800"},
        {"model": "x" * 70_000},
        {"world": 0},
        {"world": True},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_namespace_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    """Text of any characters, within bounds; a lone surrogate is no text."""
    with pytest.raises(InvalidSpec):
        replace(SPACE, **changes)


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a\x00b", "😀", "x" * 10_000, ""])
def test_any_text_is_a_name(name: str) -> None:
    """It never becomes a path; it is only part of a digest."""
    assert len(replace(SPACE, model=name, adapter=name, salt=name).digest(SPEC)) == 32


def config(**changes: Any) -> SimpleNamespace:
    fields = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "dtype": "float32"}
    return SimpleNamespace(**(fields | changes))


def test_a_model_s_configuration_says_its_layout() -> None:
    """Grouped heads, a head size of its own, a text model inside another, and latent attention."""
    found = KVSpec.from_config(config(), block_size=8)
    wide = KVSpec.from_config(config(head_dim=128, num_key_value_heads=None), dtype="torch.bfloat16")
    inner = KVSpec.from_config(SimpleNamespace(get_text_config=config))
    latent = KVSpec.from_config(config(kv_lora_rank=512, qk_rope_head_dim=64))

    assert found == KVSpec(layers=30, kv_heads=3, head_dim=64, dtype="float32", block_size=8)
    assert (wide.kv_heads, wide.head_dim, wide.dtype) == (9, 128, "bfloat16")
    assert inner == replace(found, block_size=16)
    assert latent == KVSpec(layers=30, kv_heads=1, head_dim=576, dtype="float32", latent=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"sliding_window": 4096},
        {"sliding_window": 4096, "use_sliding_window": True},
        {"state_size": 16},
        {"is_encoder_decoder": True},
    ],
    ids="+".join,
)
def test_attention_of_another_kind_is_refused_by_name(changes: dict[str, Any]) -> None:
    """Whoever stores a sliding window as if it were whole serves wrong bytes."""
    with pytest.raises(UnsupportedSpec) as caught:
        KVSpec.from_config(config(**changes))

    assert caught.value.fields["kinds"]


def test_a_window_that_is_switched_off_is_none() -> None:
    """Some configurations name a window and don't use it."""
    assert KVSpec.from_config(config(sliding_window=4096, use_sliding_window=False)).layers == 30


def test_a_configuration_without_a_number_is_refused() -> None:
    """The missing name is told."""
    with pytest.raises(InvalidSpec) as caught:
        KVSpec.from_config(SimpleNamespace(num_attention_heads=2))

    assert caught.value.fields["field"] == "num_hidden_layers"
