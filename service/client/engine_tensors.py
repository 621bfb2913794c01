"""An engine's tensors, as the memory behind them: one a layer, on the host or on one device."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.errors import DeviceRefused, InvalidTensor
from tiercache.kernels.device import Device, Memory
from tiercache.kernels.host import Bytes
from tiercache.service import tensors as plain
from tiercache.spec import ITEM_BYTES, KVSpec
from tiercache.storage.engine_memory import LayerRows, layer_rows, layout_of, places_of

if TYPE_CHECKING:
    import torch

Layer = tuple["torch.Tensor", LayerRows]


def layers_of(given: Any, spec: KVSpec, layout: str | None) -> tuple[list[Layer], str]:
    """Return each layer's tensor with its rows, and the layout they all have.

    Raises InvalidTensor, naming the layer, where one is no tensor of the KV's, or they differ in layout, blocks or device.
    """
    lib = importlib.import_module("torch")
    if not isinstance(given, Sequence) and not isinstance(given, lib.Tensor):
        raise InvalidTensor(f"an engine's memory is a list of tensors, not {type(given).__name__}", found=type(given).__name__)
    if isinstance(given, lib.Tensor) and given.ndim == 0:
        raise InvalidTensor("an engine's memory is a list of tensors, not one without axes", found=())
    if len(given) != spec.layers:
        raise InvalidTensor(f"{len(given)} tensors for {spec.layers} layers", found=len(given), expected=spec.layers)
    layers: list[Layer] = []
    names: set[str] = set()
    for number, tensor in enumerate(given):
        _require(tensor, lib, spec, number)
        name = layout_of(tuple(tensor.shape), spec, layout)
        strides = [stride * tensor.element_size() for stride in tensor.stride()]
        layers.append((tensor.detach(), layer_rows(tuple(tensor.shape), strides, spec, name)))
        names.add(name)
    for what, found in (
        ("layout", names),
        ("device", {str(tensor.device) for tensor, _ in layers}),
        ("number of blocks", {rows.blocks for _, rows in layers}),
    ):
        if len(found) != 1:
            raise InvalidTensor(f"layers differ in {what}: {', '.join(sorted(map(str, found)))}", found=sorted(map(str, found)))
    return layers, names.pop()


def _require(tensor: Any, lib: Any, spec: KVSpec, number: int) -> None:
    if not isinstance(tensor, lib.Tensor) or tensor.layout is not lib.strided:
        raise InvalidTensor(f"layer {number} must be a tensor with strides, not {type(tensor).__name__}", layer=number)
    # Engines keep numbers of one byte as bytes.
    if tensor.dtype is not getattr(lib, spec.dtype) and not (tensor.dtype is lib.uint8 and ITEM_BYTES[spec.dtype] == 1):
        raise InvalidTensor(
            f"layer {number} is {tensor.dtype}; expected torch.{spec.dtype}", found=str(tensor.dtype), expected=spec.dtype
        )


def require_apart(layers: Sequence[Layer]) -> None:
    """Raise InvalidTensor where two layers share bytes. Layers that lie among each other take a while to look at: for a thread."""
    ordered = sorted(((tensor.data_ptr(), rows) for tensor, rows in layers), key=lambda layer: layer[0])
    if all(address + rows.span <= following for (address, rows), (following, _) in pairwise(ordered)):
        return
    places = [places_of(rows, address) for address, rows in ordered]
    begins, ends = (np.concatenate(edges) for edges in zip(*places, strict=True))
    order = np.argsort(begins)
    if (begins[order[1:]] < ends[order[:-1]]).any():
        raise InvalidTensor("every layer must have memory of its own")


def on_host(layers: Sequence[Layer]) -> list[tuple[Bytes, LayerRows]]:
    """Return the bytes of each layer in place, from its first to its last. Raises DeviceRefused for a device's memory."""
    return [(_bytes(tensor, rows.span), rows) for tensor, rows in layers]


def _bytes(tensor: torch.Tensor, span: int) -> Bytes:
    if tensor.device.type != "cpu":
        raise DeviceRefused(f"the engine's memory is on {tensor.device}: use connect(device='{tensor.device}')")
    start = tensor.storage_offset() * tensor.element_size()
    return np.frombuffer(plain.memory_of(tensor.untyped_storage()), np.uint8)[start : start + span]


def on_device(device: Device, layers: Sequence[Layer]) -> list[tuple[Memory, LayerRows]]:
    """Return each layer as the device's memory; it holds the tensor."""
    return [(device.borrow(tensor.data_ptr(), rows.span, tensor), rows) for tensor, rows in layers]
