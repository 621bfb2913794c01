"""What a block's bytes are: the KV layout (KVSpec), and whose they are (Namespace)."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, Final, NamedTuple

from tiercache.checks import integer
from tiercache.errors import InvalidSpec, UnsupportedSpec

ITEM_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
DIGEST_BYTES = 32
MAX_BLOCK_SIZE = 65_536
MAX_DIMENSION = 1 << 20
MAX_TEXT_BYTES = 64 * 1024
MAX_WORLD = 4096
_ENCODING = b"tiercache-namespace-1"
_TEXTS = ("model", "weights", "adapter", "salt")
_MAY_BE_NONE = frozenset(["adapter", "salt"])


class Geometry(NamedTuple):
    """The shape of one block as rows of bytes; blocks of one geometry share slots.

    A block is `layers * parts` planes of `unit_bytes` each. In block-first memory the planes follow one another; in
    layer-first memory each plane lies in the plane's own array of slots. `symbol_bytes` is the room that the block's key
    symbol needs in a record.
    """

    layers: int
    parts: int
    unit_bytes: int
    symbol_bytes: int

    @property
    def planes(self) -> int:
        """Rows of bytes in one block."""
        return self.layers * self.parts

    @property
    def block_bytes(self) -> int:
        """Bytes of KV in one block."""
        return self.planes * self.unit_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """The layout of the KV of one model: `layers` times K and V of `[tokens, kv_heads, head_dim]` in `dtype`.

    `latent=True` is multi-head latent attention: one tensor instead of K and V, with `kv_heads` 1 and `head_dim` the length
    of the compressed vector and its rotary part. `block_size` is in tokens. A layout is a tuple of groups; this version
    stores one group of full attention. Raises InvalidSpec for a value that cannot be.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_size: int = 16
    latent: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_size"):
            integer(getattr(self, name), 1, MAX_BLOCK_SIZE if name == "block_size" else MAX_DIMENSION, name, InvalidSpec)
        if self.dtype not in ITEM_BYTES:
            raise InvalidSpec(f"dtype must be one of {', '.join(ITEM_BYTES)}, not {self.dtype!r}", field="dtype", value=self.dtype)
        if not isinstance(self.latent, bool):
            raise InvalidSpec(f"latent must be True or False, not {self.latent!r}", field="latent", value=self.latent)
        if self.latent and self.kv_heads != 1:
            raise InvalidSpec(f"latent attention has kv_heads=1, not {self.kv_heads}", field="kv_heads", value=self.kv_heads)

    @property
    def parts(self) -> int:
        """Tensors a layer: 2 (K and V), or 1 for latent attention."""
        return 1 if self.latent else 2

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one tensor of one layer."""
        return self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def geometry(self) -> Geometry:
        """The shape of one block as rows of bytes."""
        return Geometry(self.layers, self.parts, self.block_size * self.token_bytes, max(4 * self.block_size, DIGEST_BYTES))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all layers, K and V, `block_size` tokens."""
        return self.geometry.block_bytes

    def shape(self, tokens: int) -> tuple[int, int, int, int, int]:
        """Return the shape of the KV of `tokens` tokens: `[layers, parts, tokens, kv_heads, head_dim]`."""
        return (self.layers, self.parts, tokens, self.kv_heads, self.head_dim)

    @classmethod
    def from_config(cls, config: Any, *, dtype: str | None = None, block_size: int = 16) -> KVSpec:
        """Return the layout that a Hugging Face `config` describes.

        `dtype` overrides the configuration's own. Raises UnsupportedSpec, with the kind by name, for attention that this
        version does not store (windows, chunks, state-space layers, cross attention, attention in both directions) and for
        layers of several shapes, InvalidSpec when a number is missing.
        """
        _refuse_other_attention(config)
        text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        _refuse_other_attention(text)
        # One after the other: a configuration that has `dtype` warns when it is asked for the older name.
        named = (_field(owner, name) for owner in (text, config) for name in ("dtype", "torch_dtype"))
        name = str(next((kind for kind in chain([dtype], named) if kind is not None), "float32")).removeprefix("torch.")
        layers = _number(text, "num_hidden_layers")
        rank = _field(text, "kv_lora_rank")
        if rank is not None:
            width = _number(text, "kv_lora_rank") + _number(text, "qk_rope_head_dim")
            return cls(layers=layers, kv_heads=1, head_dim=width, dtype=name, block_size=block_size, latent=True)
        heads = _number(text, "num_attention_heads")
        head_dim = _number(text, "head_dim") if _field(text, "head_dim") else _number(text, "hidden_size") // heads
        if _field(text, "v_head_dim") not in (None, head_dim):
            raise UnsupportedSpec(
                f"K of head_dim={head_dim} with V of v_head_dim={text.v_head_dim} is not stored", kinds=["v_head_dim"]
            )
        return cls(layers=layers, kv_heads=_kv_heads(text, heads), head_dim=head_dim, dtype=name, block_size=block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """The identity of the bytes: two prompts share blocks only within one namespace.

    `model` is the served name and `weights` a digest of the weights themselves; `adapter` names an adapter *and* its version;
    `salt` separates tenants, and is shown by no representation; `world` is the number of tensor-parallel ranks that each hold
    a shard. Text may hold any characters: it never becomes a path or a key, only part of a digest, and is compared as its UTF-8
    bytes.
    """

    model: str
    weights: str
    adapter: str | None = None
    salt: str | None = field(default=None, repr=False)
    world: int = 1

    def __post_init__(self) -> None:
        for name in _TEXTS:
            _require_text(name, getattr(self, name))
        integer(self.world, 1, MAX_WORLD, "world", InvalidSpec)

    def digest(self, spec: KVSpec) -> bytes:
        """Return the 32-byte digest of this namespace with the layout `spec`.

        The encoding is versioned and length-prefixed, and None differs from empty text, so that it is injective: two
        namespaces have one digest only if SHA-256 collides.
        """
        parts: list[bytes] = [_ENCODING]
        for owner in (self, spec):
            for name, value in asdict(owner).items():
                parts.append(name.encode())
                parts.append(b"\x00" if value is None else type(value).__name__.encode() + b"\x01" + str(value).encode())
        return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


class Unsaid(enum.Enum):
    """The type of ANY, which stands for a field that a selection does not name: None is a value of some fields."""

    ANY = "any"


ANY: Final = Unsaid.ANY


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which namespaces are meant: those in which every field that is named has exactly the value given.

    `adapter=None` means the model without an adapter, `salt=None` what belongs to no tenant. Raises InvalidSpec for a value that
    no namespace can have, and when no field is named.
    """

    model: str | Unsaid = ANY
    weights: str | Unsaid = ANY
    adapter: str | Unsaid | None = ANY
    salt: str | Unsaid | None = field(default=ANY, repr=False)

    def __post_init__(self) -> None:
        if not self.named:
            raise InvalidSpec(f"nothing is selected: name at least one of {', '.join(_TEXTS)}", field="selection")
        for name, value in self.named.items():
            _require_text(name, value)

    @property
    def named(self) -> Mapping[str, str | None]:
        """The fields that are named, with their values."""
        values = {name: getattr(self, name) for name in _TEXTS}
        return {name: value for name, value in values.items() if value is not ANY}

    def covers(self, namespace: Namespace) -> bool:
        """Return whether `namespace` is meant."""
        return all(getattr(namespace, name) == value for name, value in self.named.items())


def _require_text(name: str, value: object) -> None:
    """Raise InvalidSpec if a namespace's field can't have the value. A salt is a tenant's secret: no message shows one."""
    if value is None and name in _MAY_BE_NONE:
        return
    shown = type(value).__name__ if name == "salt" else repr(value)
    kept = None if name == "salt" else value
    if not isinstance(value, str):
        raise InvalidSpec(f"{name} must be text, not {shown}", field=name, value=kept)
    try:
        size = len(value.encode())
    except UnicodeEncodeError as error:
        message = f"{name} holds a lone surrogate at character {error.start} of a {shown}"
        raise InvalidSpec(message, field=name, value=kept) from (None if name == "salt" else error)
    if size > MAX_TEXT_BYTES:
        raise InvalidSpec(f"{name} is {size} bytes long; the limit is {MAX_TEXT_BYTES}", field=name, value=size)


def _field(config: Any, name: str, otherwise: Any = None) -> Any:
    try:
        return getattr(config, name, otherwise)
    except RuntimeError as error:  # transformers: a field of which each layer has a value of its own
        raise UnsupportedSpec(f"{name} differs from layer to layer; layers of one shape are stored", kinds=[name]) from error


def _number(config: Any, name: str) -> int:
    value = _field(config, name)
    if value is None:
        raise InvalidSpec(f"the model's configuration has no {name}", field=name)
    if isinstance(value, list | tuple | dict):
        raise UnsupportedSpec(f"{name} differs from layer to layer; layers of one shape are stored", kinds=[name])
    return integer(value, 1, MAX_DIMENSION, name, InvalidSpec)


def _kv_heads(config: Any, heads: int) -> int:
    """Return how many heads of K and V `config` names; without a word of its own, as many as there are heads."""
    # Falcon: `multi_query` is one head, unless the newer architecture makes it groups, which num_kv_heads counts. The number
    # stands there in any case, and means nothing for the older one.
    if _field(config, "multi_query") and not _field(config, "new_decoder_architecture"):
        return 1
    names = ("num_kv_heads", "num_key_value_heads")
    return next((_number(config, name) for name in names if _field(config, name) is not None), heads)


_FULL = frozenset({"full_attention", "attention", "global"})

_OTHER_FIELDS = {
    "attention_chunk_size": "chunked_attention",
    "attention_window_size": "sliding_attention",
    "attn_layers": "local_and_lsh_attention",
    "index_head_dim": "indexed_attention",
    "index_topk": "indexed_attention",
    "num_kv_shared_layers": "shared_kv",
    "use_bidirectional_attention": "bidirectional_attention",
    "add_cross_attention": "cross_attention",
    "cross_attention_layers": "cross_attention",
    "cross_layer_interval": "cross_attention",
    "is_encoder_decoder": "cross_attention",
    "attn_layer_period": "linear_attention",
    "conv_L_cache": "convolution",
    "mamba_d_state": "state_space",
    "rwkv_hidden_size": "state_space",
    "ssm_cfg": "state_space",
    "ssm_state_size": "state_space",
    "state_size": "state_space",
}
"""Fields that, when they are set, say that some layers keep something else than the KV of all tokens before."""

_OTHER_MODELS = {"rwkv": "state_space", "xlstm": "state_space", "trocr": "cross_attention"} | dict.fromkeys(
    ("cpmant", "xlm", "xlnet"), "bidirectional_attention"
)
"""Models of which no field says it."""

_ENCODERS = frozenset(
    [
        "bert",
        "bert-generation",
        "big_bird",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "megatron-bert",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    ]
)
"""Models that look both ways unless `is_decoder` is set: there the KV of a prefix depends on what follows it."""


def _refuse_other_attention(config: Any) -> None:
    """Raise UnsupportedSpec, with the kind by name, if `config` says that a layer is anything but full attention."""
    said = {str(kind): owner for owner in ("layer_types", "attention_layers") for kind in _field(config, owner) or ()}
    found = {kind: where for kind, where in said.items() if kind not in _FULL}
    window = _field(config, "sliding_window")
    if not found and window and _field(config, "use_sliding_window", True):
        found = {"sliding_attention": f"sliding_window={window}"}
    model = _field(config, "model_type")
    if not found:
        found = {kind: field for field, kind in _OTHER_FIELDS.items() if _field(config, field)}
    if not found and model in _OTHER_MODELS:
        found = {_OTHER_MODELS[model]: f"model_type {model}"}
    if not found and model in _ENCODERS and not _field(config, "is_decoder"):
        found = {"bidirectional_attention": f"model_type {model}"}
    if found:
        kinds = sorted(found)
        names, places = ", ".join(kinds), ", ".join(sorted({*found.values()}))
        words = names.replace("_", " ")
        raise UnsupportedSpec(f"{names} (by {places}): {words} is not stored; only full_attention is", kinds=kinds)
