"""Tensors on a device as pools of it, in place, and the stream that their owner works on.

Only shapes, addresses and streams are looked at here. Nothing is copied, and nothing waits.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tiercache.errors import InvalidTensor
from tiercache.kernels.device import Device, Memory, Pool
from tiercache.service.tensors import CPU, is_regular
from tiercache.spec import KVSpec
from tiercache.storage.device_passage import Runner, Sheet

if TYPE_CHECKING:
    import torch


class DeviceTensors:
    """What torch and a device know of each other.

    For a device in memory of the host no tensor is one of its own, and there is one stream, as torch knows nothing of it: a test
    that has tensors and streams there says which by `holds` and `pointer`.
    """

    def __init__(self, device: Device) -> None:
        self.device = device

    @property
    def enqueues(self) -> bool:
        """Whether torch enqueues what it does in the device's memory; in the host's it is done when a call returns."""
        return self.device.tensors != CPU

    def holds(self, tensor: Any) -> bool:
        """Return whether `tensor` is one of torch's, and lies in the device's memory."""
        place = self.device.tensors
        return place != CPU and isinstance(tensor, _torch().Tensor) and str(tensor.device) == place

    def pointer(self) -> int:
        """Return the driver's pointer to the stream that is torch's current one on the device, for the calling thread.

        That is the default stream, 0, where torch has done nothing on a card in this process, or can't.
        """
        place, cuda = self.device.tensors, _torch().cuda
        return int(cuda.current_stream(place).cuda_stream) if place != CPU and cuda.is_initialized() else 0

    def runner(self) -> Runner:
        """Return the stream that is torch's current one on the device, for the calling thread."""
        pointer = self.pointer()
        return Runner(pointer, self.device.adopt(pointer))

    def sheet(self, tensor: torch.Tensor, spec: KVSpec, name: str) -> Sheet:
        """Return the whole blocks of a tensor `[layers, parts, tokens, kv_heads, head_dim]` in place.

        They are one pool where the planes lie whole blocks apart, as in a tensor of whole blocks or a slice along tokens of one;
        else one a plane, which takes launches for each. The sheet holds the tensor. Raises InvalidTensor, naming the strides, where
        the tokens of a plane are not contiguous.
        """
        if not is_regular(tensor):
            raise InvalidTensor(
                f"{name} has strides {tensor.stride()}; each layer's tokens must be contiguous", found=tensor.stride()
            )
        layers, parts, tokens = tensor.shape[:3]
        planes, blocks, unit = layers * parts, tokens // spec.block_size, spec.block_size * spec.token_bytes
        if not blocks:
            return []
        distance = (tensor.stride(1) if parts > 1 else tensor.stride(0)) * tensor.element_size()
        if planes == 1:
            distance = blocks * unit
        if distance % unit == 0:
            # In a slice the last plane may end before its pool does: of the blocks that are missing there nobody copies any.
            memory = self.device.borrow(tensor.data_ptr(), planes * distance, tensor)
            return [Pool(memory, planes, distance // unit, unit)]
        memory = self.device.borrow(tensor.data_ptr(), (planes - 1) * distance + blocks * unit, tensor)
        part = self.device.part
        return [Pool(part(memory, plane * distance, blocks * unit), 1, blocks, unit) for plane in range(planes)]

    def address(self, memory: Memory) -> int:
        """Return where the device's memory begins, in the device's addresses."""
        return int(_torch().from_dlpack(self.device.array(memory, 1)).data_ptr())

    def block(self, pool: Pool, slot: int, spec: KVSpec) -> torch.Tensor:
        """Return a slot of the device in place as a tensor `[layers, parts, block_size, kv_heads, head_dim]`."""
        lib = _torch()
        whole = lib.from_dlpack(self.device.array(pool.memory, pool.planes, pool.slots, pool.unit_bytes))
        typed = whole[:, slot].view(getattr(lib, spec.dtype))
        return typed.unflatten(0, (-1, spec.parts)).unflatten(2, (spec.block_size, spec.kv_heads, spec.head_dim))  # type: ignore[no-any-return]


def _torch() -> Any:
    return importlib.import_module("torch")
