"""The identity of bytes: layout and namespace."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import transformers as hf

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


class Newer(SimpleNamespace):
    """A configuration as libraries make them that have renamed a field: the older name still works, with a warning."""

    @property
    def torch_dtype(self) -> str:
        raise AssertionError("who knows `dtype` is not asked for the older name")


def test_the_older_name_of_a_dtype_is_not_asked_for_without_need() -> None:
    """It is, where there is no other."""
    newer, older = Newer(**vars(config(dtype="float16"))), config(dtype=None, torch_dtype="bfloat16")

    assert (KVSpec.from_config(newer).dtype, KVSpec.from_config(older).dtype) == ("float16", "bfloat16")


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


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (hf.BloomConfig(n_layer=3, n_head=4, hidden_size=64), (3, 4, 16)),
        (hf.CohereConfig(), (40, 64, 128)),
        (hf.DbrxConfig(attn_config={"kv_n_heads": 8}), (24, 8, 128)),
        (hf.DeepseekV2Config(), (32, 1, 576)),
        (hf.DeepseekV3Config(), (61, 1, 576)),
        (hf.FalconConfig(), (32, 1, 64)),
        (hf.FalconConfig(multi_query=False), (32, 71, 64)),
        (hf.FalconConfig(new_decoder_architecture=True, num_kv_heads=8, num_attention_heads=128, hidden_size=8192), (32, 8, 64)),
        (hf.GPT2Config(n_layer=6, n_head=8, n_embd=512), (6, 8, 64)),
        (hf.GPTBigCodeConfig(), (12, 1, 64)),
        (hf.GPTBigCodeConfig(multi_query=False), (12, 12, 64)),
        (hf.GPTJConfig(), (28, 16, 256)),
        (hf.GPTNeoXConfig(), (44, 64, 96)),
        (hf.GemmaConfig(), (28, 16, 256)),
        (hf.Glm4Config(), (40, 2, 128)),
        (hf.GraniteConfig(), (32, 32, 128)),
        (hf.LlamaConfig(num_key_value_heads=8), (32, 8, 128)),
        (hf.MistralConfig(sliding_window=None), (32, 8, 128)),
        (hf.MixtralConfig(), (32, 8, 128)),
        (hf.MptConfig(), (24, 16, 128)),
        (hf.OPTConfig(), (12, 12, 64)),
        (hf.Olmo2Config(), (32, 32, 128)),
        (hf.Phi3Config(), (32, 32, 96)),
        (hf.PhiConfig(), (24, 32, 64)),
        (hf.Qwen2Config(), (32, 32, 128)),
        (hf.Qwen3Config(num_key_value_heads=8), (32, 8, 128)),
        (hf.Qwen3MoeConfig(), (24, 4, 64)),
        (hf.SmolLM3Config(), (36, 4, 128)),
        (hf.StableLmConfig(), (32, 32, 80)),
        (hf.Starcoder2Config(), (30, 2, 128)),
        (hf.BertConfig(is_decoder=True), (12, 12, 64)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, hf.PreTrainedConfig) else str(value),
)
def test_real_configurations_are_read_right(model: Any, expected: tuple[int, int, int]) -> None:
    """Layers, heads of K and V, and their width, whatever the fields are called."""
    found = KVSpec.from_config(model, dtype="bfloat16")

    assert (found.layers, found.kv_heads, found.head_dim) == expected
    assert found.latent == hasattr(model, "kv_lora_rank")


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (hf.BambaConfig(), "linear_attention"),
        (hf.BartConfig(), "cross_attention"),
        (hf.BertConfig(), "bidirectional_attention"),
        (hf.Cohere2Config(), "sliding_attention"),
        (hf.DeepseekV32Config(), "indexed_attention"),
        (hf.DeepseekV4Config(), "compressed_sparse_attention"),
        (hf.FalconH1Config(), "hybrid"),
        (hf.FalconMambaConfig(), "linear_attention"),
        (hf.GPT2Config(add_cross_attention=True), "cross_attention"),
        (hf.GPTNeoConfig(), "local"),
        (hf.Gemma2Config(), "sliding_attention"),
        (hf.Gemma3Config(), "sliding_attention"),
        (hf.Gemma3TextConfig(), "sliding_attention"),
        (hf.Gemma3nConfig(), "sliding_attention"),
        (hf.Gemma4Config(), "sliding_attention"),
        (hf.GemmaConfig(use_bidirectional_attention=True), "bidirectional_attention"),
        (hf.GptOssConfig(), "sliding_attention"),
        (hf.GraniteMoeHybridConfig(), "linear_attention"),
        (hf.IdeficsConfig(), "cross_attention"),
        (hf.JambaConfig(), "linear_attention"),
        (hf.Lfm2Config(), "convolution"),
        (hf.Lfm2MoeConfig(), "convolution"),
        (hf.Llama4Config(), "chunked_attention"),
        (hf.Llama4TextConfig(), "chunked_attention"),
        (hf.Mamba2Config(), "linear_attention"),
        (hf.MambaConfig(), "linear_attention"),
        (hf.MiniMaxConfig(), "linear_attention"),
        (hf.MistralConfig(sliding_window=4096), "sliding_attention"),
        (hf.MllamaConfig(), "cross_attention"),
        (hf.MusicgenConfig(), "cross_attention"),
        (hf.NemotronHConfig(), "linear_attention"),
        (hf.Phi3Config(sliding_window=2047), "sliding_attention"),
        (hf.Qwen2Config(use_sliding_window=True, sliding_window=4096), "sliding_attention"),
        (hf.Qwen3NextConfig(), "linear_attention"),
        (hf.RecurrentGemmaConfig(), "linear_attention"),
        (hf.ReformerConfig(), "local_and_lsh_attention"),
        (hf.RwkvConfig(), "state_space"),
        (hf.T5Config(), "cross_attention"),
        (hf.TrOCRConfig(), "cross_attention"),
        (hf.XLNetConfig(), "bidirectional_attention"),
        (hf.Zamba2Config(), "linear_attention"),
        (hf.ZambaConfig(), "linear_attention"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, hf.PreTrainedConfig) else value,
)
def test_real_configurations_of_another_kind_are_refused_by_name(model: Any, kind: str) -> None:
    """What is no full attention in every layer, is told by its kind."""
    with pytest.raises(UnsupportedSpec) as caught:
        KVSpec.from_config(model, dtype="bfloat16")

    assert kind in caught.value.fields["kinds"]
    assert kind in str(caught.value)


@pytest.mark.parametrize("changes", [{"num_kv_heads": [3, 9]}, {"num_attention_heads": [9, 9]}, {"v_head_dim": 32}], ids=repr)
def test_layers_of_several_shapes_are_refused(changes: dict[str, Any]) -> None:
    """One geometry a model; K and V of one width."""
    with pytest.raises(UnsupportedSpec):
        KVSpec.from_config(config(**changes))


def test_a_number_that_each_layer_has_for_itself_is_refused() -> None:
    """transformers raises a RuntimeError of its own for such a field, and no AttributeError."""

    class Uneven(SimpleNamespace):
        @property
        def num_attention_heads(self) -> int:
            raise RuntimeError("'num_attention_heads' is a per-layer attribute")

    with pytest.raises(UnsupportedSpec) as caught:
        KVSpec.from_config(Uneven(num_hidden_layers=2, hidden_size=64))

    assert caught.value.fields["kinds"] == ["num_attention_heads"]


@pytest.mark.parametrize("changes", [{"num_attention_heads": 0}, {"head_dim": "64"}, {"num_hidden_layers": 2.5}], ids=repr)
def test_a_number_that_is_none_is_refused(changes: dict[str, Any]) -> None:
    """And not with a ZeroDivisionError or a rounded value."""
    with pytest.raises(InvalidSpec):
        KVSpec.from_config(config(**changes))
