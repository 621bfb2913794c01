"""The client's tensors as bytes and back.

torch is the client's: it is loaded with the first tensor that is asked for, not with the cache.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.errors import InvalidTensor
from tiercache.kernels.host import Bytes, empty_bytes
from tiercache.spec import ITEM_BYTES, KVSpec

if TYPE_CHECKING:
    import torch


_PLAIN = {name: np.dtype(name) for name in ITEM_BYTES if hasattr(np, name)}
"""The types that numpy has, too."""


@functools.cache
def _torch() -> Any:
    return importlib.import_module("torch")


CPU = "cpu"
"""Where tensors of the host lie, in torch's words."""


def require(tensor: Any, spec: KVSpec, tokens: int, name: str, *, place: str = CPU) -> torch.Tensor:
    """Return `tensor` if it is the KV of `tokens` tokens, `[layers, parts, tokens, kv_heads, head_dim]`, and lies at `place`.

    A numpy array of the right type is taken, too. Raises InvalidTensor, naming what was found and expected.
    """
    if isinstance(tensor, np.ndarray) and (not tensor.flags.writeable or min(tensor.strides, default=0) < 0):
        tensor = tensor.copy()  # torch has neither
    return _checked(_as_torch(tensor, name), spec, tokens, name, place)


def require_out(out: Any, spec: KVSpec, tokens: int, *, place: str = CPU) -> torch.Tensor:
    """Return the leading part of `out` that the KV of `tokens` tokens fills; `out` itself may have room for more tokens.

    Raises InvalidTensor, as `require` does, and for a read-only array.
    """
    if isinstance(out, np.ndarray) and not out.flags.writeable:
        raise InvalidTensor("out is read-only")
    tensor = _as_torch(out, "out")
    if tensor.ndim == 5 and tensor.shape[2] > tokens:
        tensor = tensor[:, :, :tokens]
    return _checked(tensor, spec, tokens, "out", place)


def one_layer(spec: KVSpec) -> KVSpec:
    """Return the layout of one layer of a KV."""
    return dataclasses.replace(spec, layers=1)


def layer_out(out: Any, one: KVSpec, tokens: int, *, place: str = CPU) -> torch.Tensor:
    """Return where one layer of `tokens` tokens goes, `[1, parts, tokens, kv_heads, head_dim]`: into `out`, or a new tensor.

    `out` has no first dimension. Raises InvalidTensor, as `require_out` does.
    """
    if out is None:
        return empty(one, tokens)
    shape = getattr(out, "shape", ())
    if len(shape) != 4:
        raise InvalidTensor(
            f"out has shape {tuple(shape)}; expected {one.shape(tokens)[1:]}: parts, tokens, kv_heads, head_dim",
            found=tuple(shape),
            expected=one.shape(tokens)[1:],
        )
    return require_out(out[None], one, tokens, place=place)


def _as_torch(tensor: Any, name: str) -> torch.Tensor:
    lib = _torch()
    if isinstance(tensor, np.ndarray):
        try:
            tensor = lib.from_numpy(tensor)
        except (TypeError, ValueError) as error:
            raise InvalidTensor(f"{name}: {error}", found=str(tensor.dtype)) from error
    if not isinstance(tensor, lib.Tensor):
        raise InvalidTensor(f"{name} must be a tensor, not {type(tensor).__name__}", found=type(tensor).__name__)
    if tensor.layout is not lib.strided:
        raise InvalidTensor(
            f"{name} is {tensor.layout}; expected torch.strided", found=str(tensor.layout), expected="torch.strided"
        )
    return tensor.detach()  # type: ignore[no-any-return]


def _checked(tensor: torch.Tensor, spec: KVSpec, tokens: int, name: str, place: str) -> torch.Tensor:
    shape = spec.shape(tokens)
    if tuple(tensor.shape) != shape:
        raise InvalidTensor(
            f"{name} has shape {tuple(tensor.shape)}; expected {shape}: layers, parts, tokens, kv_heads, head_dim",
            found=tuple(tensor.shape),
            expected=shape,
        )
    if tensor.dtype is not getattr(_torch(), spec.dtype):
        raise InvalidTensor(f"{name} is {tensor.dtype}; expected torch.{spec.dtype}", found=str(tensor.dtype), expected=spec.dtype)
    if (tensor.device.type if place == CPU else str(tensor.device)) != place:
        raise InvalidTensor(f"{name} is on {tensor.device}; expected {place}", found=str(tensor.device), expected=place)
    return tensor


def empty(spec: KVSpec, tokens: int) -> torch.Tensor:
    """Return a new tensor for the KV of `tokens` tokens, its content undefined."""
    return new(spec.shape(tokens), spec.dtype)


def new(shape: Sequence[int], dtype: str) -> torch.Tensor:
    """Return a new tensor on the host, its content undefined.

    numpy asks the system for huge pages where the tensor is large: to touch fresh memory then costs a quarter of what it costs
    page by page, as torch's own allocator has it.
    """
    lib = _torch()
    size = ITEM_BYTES[dtype] * math.prod(shape)
    return lib.from_numpy(empty_bytes(size)).view(getattr(lib, dtype)).view(tuple(shape))  # type: ignore[no-any-return]


def planes_for_reading(tensor: torch.Tensor, spec: KVSpec) -> Bytes:
    """Return the tensor's bytes as `[planes, tokens * token_bytes]`, of a contiguous copy where that is needed."""
    return _planes(tensor if is_regular(tensor) else tensor.contiguous(), spec)


def planes_for_writing(tensor: torch.Tensor, spec: KVSpec) -> Bytes:
    """Return the tensor's bytes in place as `[planes, tokens * token_bytes]`.

    Tokens of a plane must be contiguous and planes evenly spaced (a slice of a longer tensor along tokens is), each with memory
    of its own. Raises InvalidTensor, naming the strides, where they are not.
    """
    if not is_regular(tensor):
        raise InvalidTensor(f"out has strides {tensor.stride()}; each layer's tokens must be contiguous", found=tensor.stride())
    return _planes(tensor, spec)


def as_tensor(planes: Any, spec: KVSpec, tokens: int) -> torch.Tensor:
    """Return bytes `[n * parts, tokens * token_bytes]` in place as a tensor `[n, parts, tokens, kv_heads, head_dim]`.

    They are numpy's, or an array of another library on a device, which torch takes by DLPack.
    """
    lib = _torch()
    taken = lib.from_numpy(planes) if isinstance(planes, np.ndarray) else lib.from_dlpack(planes)
    typed = taken.view(getattr(lib, spec.dtype))
    return typed.unflatten(0, (-1, spec.parts)).unflatten(2, (tokens, spec.kv_heads, spec.head_dim))  # type: ignore[no-any-return]


def parts_of(planes: Bytes, spec: KVSpec) -> tuple[torch.Tensor, ...]:
    """Return one layer's bytes `[parts, tokens * token_bytes]` in place, a tensor `[tokens, kv_heads, head_dim]` for each part."""
    lib, plain = _torch(), _PLAIN.get(spec.dtype)
    # Shaped by numpy, whose views cost a fraction of torch's.
    typed = planes.view(plain if plain is not None else f"i{ITEM_BYTES[spec.dtype]}")
    parts = map(lib.from_numpy, typed.reshape(len(planes), -1, spec.kv_heads, spec.head_dim))
    return tuple(parts if plain is not None else (part.view(getattr(lib, spec.dtype)) for part in parts))


def is_regular(tensor: torch.Tensor) -> bool:
    """Return whether tokens of a plane are contiguous and planes evenly spaced, each with memory of its own."""
    layer, part, token, head, item = tensor.stride()
    _, parts, tokens, heads, dim = tensor.shape
    inside = (item == 1 or dim == 1) and (head == dim or heads == 1) and (token == heads * dim or tokens == 1)
    apart = (part if parts > 1 else layer) >= tokens * heads * dim or tensor.shape[0] * parts == 1
    return inside and apart and (layer == parts * part or tensor.shape[0] == 1 or parts == 1)


def _planes(tensor: torch.Tensor, spec: KVSpec) -> Bytes:
    layers, parts, tokens = tensor.shape[:3]
    width = tokens * spec.token_bytes
    step = (tensor.stride(1) if parts > 1 else tensor.stride(0)) * tensor.element_size()
    raw = tensor.untyped_storage()
    whole = np.frombuffer(memory_of(raw), dtype=np.uint8) if raw.nbytes() else np.empty(0, np.uint8)
    start = tensor.storage_offset() * tensor.element_size()
    if layers * parts == 1:
        step = width
    return np.lib.stride_tricks.as_strided(whole[start:], shape=(layers * parts, width), strides=(step, 1))


def memory_of(storage: torch.UntypedStorage) -> Any:
    """Return a storage's bytes in place, as an array that keeps it."""
    lib = _torch()
    return lib.empty(0, dtype=lib.uint8).set_(storage).numpy()
