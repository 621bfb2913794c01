"""A cache over a lazy device, and a runner with tensors and streams there: for tests of the face with tensors on the device.

Nothing happens before its stream comes to it, in an order drawn from the seed. A tensor is the device's where its memory is; the
stream that is current is one of the house's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import torch

from tests.seams import PATIENCE, Rig
from tests.service.caches import (
    SPACE,
    SPEC,
    lower,
    small,
    stack_of,
    store,
)
from tiercache.kernels.device import Device
from tiercache.kernels.lazy import LazyDevice, LazyStream, pool_array
from tiercache.service.device_tensors import DeviceTensors
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV
from tiercache.types import Tier

BLOCKS = 4
ALL = [(block, layer) for block in range(BLOCKS) for layer in range(SPEC.layers)]


class House:
    """A cache over a lazy device, tensors in that device's memory, and a runner's streams, of which one is current."""

    def __init__(self, seed: int) -> None:
        self.device = LazyDevice(seed)
        self.rig = Rig()
        self.rig.device = lambda name: self.device
        self.rig.tensors = self._tensors
        self.current = 1
        self.cache: TierCache
        self.kv: LocalKV
        self._memory: list[tuple[int, int]] = []

    def _tensors(self, device: Device) -> DeviceTensors:
        house = self

        class Tensors(DeviceTensors):
            def holds(self, tensor: Any) -> bool:
                if not isinstance(tensor, torch.Tensor):
                    return False
                begin = tensor.untyped_storage().data_ptr()
                return any(at <= begin < at + size for at, size in house._memory)

            def pointer(self) -> int:
                return house.current

        return Tensors(device)

    def tensor(self, tokens: int) -> torch.Tensor:
        """Return a tensor on the device, with room for so many tokens, filled with 7.5."""
        size = SPEC.token_bytes * SPEC.layers * SPEC.parts * tokens
        array = self.device.array(self.device.allocate(size), size)
        found = torch.from_numpy(array).view(torch.float16).view(SPEC.shape(tokens)).fill_(7.5)
        self._memory.append((found.data_ptr(), size))
        return found

    @property
    def stream(self) -> LazyStream:
        """The runner's current stream."""
        return self.device.adopt(self.current)

    def computes(self, into: torch.Tensor, what: torch.Tensor) -> None:
        """Enqueue a kernel of the runner's that writes `what` to `into`."""

        def kernel() -> None:
            into.copy_(what)

        self.stream.call(kernel)

    def reads(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Enqueue a kernel of the runner's that reads `tensor`; what it saw is in the list when it has run."""
        seen: list[torch.Tensor] = []
        self.stream.call(lambda: seen.append(tensor.clone()))
        return seen

    async def settle(self) -> None:
        """Let the device do all its work, and everything end."""
        self.device.held = False
        self.device.run()
        await self.cache.settle()

    def free(self) -> int:
        """Return how many slots of the device are free."""
        return stack_of(self.cache).cache.residency.slots[0].free

    def poison(self) -> None:
        """Overwrite every free slot of the device."""
        stack = stack_of(self.cache)
        assert stack.bus is not None
        pool = pool_array(stack.bus.arena.pool)
        residency = stack.cache.residency
        used = {
            slot
            for node in residency.nodes
            if node is not None and node.copies & 1
            for slot in residency.table.slots(node.blocks, 0)
        }
        for slot in set(range(pool.shape[1])) - used:
            pool[:, slot] = 0xEE


@asynccontextmanager
async def opened(seed: int, *, hbm: int = 8, dram: int | None = 8) -> AsyncIterator[House]:
    house = House(seed)
    config = small(hbm=hbm, dram=dram, ssd=None, device="cuda:0")
    async with TierCache(config, seams=house.rig.seams()) as house.cache:
        try:
            house.kv = await house.cache.open(SPACE, SPEC)
            yield house
        finally:
            house.rig.release()
            house.device.held = False
            house.device.run()


async def until(true: Callable[[], bool]) -> None:
    """Wait until `true()`; threads make it so."""
    async with asyncio.timeout(PATIENCE):
        while not true():  # noqa: ASYNC110 - threads of the device's side know no event loop
            await asyncio.sleep(0)


async def turns(count: int = 50) -> None:
    """Let everything run that can run without a thread's answer."""
    for _ in range(count):
        await asyncio.sleep(0)


async def lowered(house: House, tokens: list[int]) -> None:
    """Put a prompt into DRAM alone."""
    await store(house.kv, tokens)
    await lower(house.cache, Tier.HBM)
    house.poison()


def others_have_work(house: House, still: LazyStream) -> bool:
    """Return whether a stream that does not stand still can go on."""
    return any(
        stream.work and (stream.work[0].after is None or stream.work[0].after.happened)
        for stream in house.device.streams
        if stream is not still
    )
