"""Copies on a runner's stream: between slots and tensors of any spacing, through stages that streams share, none of it at once."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.oracle import oracle_block
from tiercache.errors import InvalidTensor
from tiercache.kernels.host import Bytes
from tiercache.kernels.lazy import LazyDevice, pool_array
from tiercache.service.device_tensors import DeviceTensors
from tiercache.spec import KVSpec
from tiercache.storage.arenas import DramArena
from tiercache.storage.checksum import checksum
from tiercache.storage.device_arena import DeviceArena
from tiercache.storage.device_passage import Passage, Runner
from tiercache.storage.layouts import block_first_slot_bytes
from tiercache.storage.memory import HostMemory
from tiercache.storage.reader import Place

SPEC = KVSpec(layers=3, kv_heads=1, head_dim=32, dtype="float16", block_size=16)
GEOMETRY = SPEC.geometry
SLOTS = 12
SIZE = SPEC.block_size


class House:
    """Two tiers whose slots hold blocks that differ in every plane, and a passage whose stages hold a block and a half."""

    def __init__(self, seed: int, *, stages: int = 2, together: int | None = None) -> None:
        self.device = LazyDevice(seed)
        self.arena = DeviceArena(self.device, GEOMETRY, self.device.allocate(SLOTS * GEOMETRY.block_bytes))
        self.memory = HostMemory(block_first_slot_bytes(GEOMETRY) * SLOTS)
        self.dram = DramArena(self.memory, GEOMETRY)
        self.content = {(position, slot): block(position * SLOTS + slot) for position in (0, 1) for slot in range(SLOTS)}
        for (position, slot), planes in self.content.items():
            if position == 0:
                pool_array(self.arena.pool)[:, slot] = planes
            else:
                self.dram.view(slot)[...] = planes
        self.passage = Passage(
            self.device,
            lambda: self.arena.pool,
            (self.arena, self.dram),
            [self.device.allocate(GEOMETRY.block_bytes * 3 // 2) for _ in range(stages)],
            together=together,
        )
        self.tensors = DeviceTensors(self.device)

    def runner(self, pointer: int) -> Runner:
        return Runner(pointer, self.device.adopt(pointer))

    def places(self, seed: int, count: int) -> list[Place]:
        """Return so many places of both tiers."""
        chosen = random.Random(seed).sample(sorted(self.content), count)
        return [Place(position, slot, checksum(self.content[position, slot])) for position, slot in chosen]

    def close(self) -> None:
        self.dram.close()
        self.memory.close()


def block(number: int) -> Bytes:
    return oracle_block(b"p" * 32, number.to_bytes(4, "little") * SIZE, GEOMETRY)


def tensor_of(seed: int, tokens: int) -> torch.Tensor:
    drawn = np.random.default_rng(seed).integers(0, 256, (GEOMETRY.planes, tokens * SPEC.token_bytes), np.uint8)
    return torch.from_numpy(drawn).view(torch.float16).view(SPEC.shape(tokens))


def planes_of(tensor: torch.Tensor) -> Bytes:
    whole = tensor.contiguous().view(torch.uint8).numpy()
    return whole.reshape(tensor.shape[0] * tensor.shape[1], -1)


SLICES = {
    "whole blocks": (0, 5 * SIZE, 5 * SIZE),
    "leading blocks of more": (0, 5 * SIZE, 9 * SIZE),
    "blocks in the middle": (2 * SIZE, 7 * SIZE, 9 * SIZE),
    "the last blocks": (4 * SIZE, 9 * SIZE, 9 * SIZE),
    "between blocks": (3, 3 + 5 * SIZE, 9 * SIZE),
    "the end, between blocks": (9, 9 + 5 * SIZE, 9 + 5 * SIZE),
    "planes of odd length": (0, 5 * SIZE, 5 * SIZE + 7),
}


@pytest.mark.parametrize("cut", SLICES.values(), ids=SLICES.keys())
@pytest.mark.parametrize("together", [None, 5])
def test_blocks_of_both_tiers_come_into_a_tensor(seed: int, cut: tuple[int, int, int], together: int | None) -> None:
    """Each block is its own, nothing else of the tensor changes, and none of it happens before the runner's stream comes to it."""
    begin, end, tokens = cut
    house = House(seed, together=together)
    whole = tensor_of(seed, tokens)
    before = planes_of(whole).copy()
    out = whole[:, :, begin:end]
    places = house.places(seed, 5)

    house.passage.fill(house.runner(0), places, house.tensors.sheet(out, SPEC, "out"))
    late = np.array_equal(planes_of(whole), before)
    house.device.run()

    assert late
    unit = GEOMETRY.unit_bytes
    for number, place in enumerate(places):
        found = planes_of(out)[:, number * unit : (number + 1) * unit]
        assert np.array_equal(found, house.content[place.position, place.slot])
    width = SPEC.token_bytes
    assert np.array_equal(planes_of(whole)[:, : begin * width], before[:, : begin * width])
    assert np.array_equal(planes_of(whole)[:, end * width :], before[:, end * width :])
    house.close()


@pytest.mark.parametrize("layer", range(SPEC.layers))
def test_a_layer_comes_alone(seed: int, layer: int) -> None:
    """Of every block the planes of that layer, and of no other one."""
    house = House(seed)
    out = tensor_of(seed, 6 * SIZE)
    before = planes_of(out).copy()
    places = house.places(seed, 6)

    sheet = house.tensors.sheet(out[layer : layer + 1], SPEC, "out")
    house.passage.fill(house.runner(0), places, sheet, first=layer * SPEC.parts)
    house.device.run()

    first, last = layer * SPEC.parts, (layer + 1) * SPEC.parts
    expected = np.concatenate([house.content[place.position, place.slot] for place in places], axis=1)
    assert np.array_equal(planes_of(out)[first:last], expected[first:last])
    rest = [plane for plane in range(GEOMETRY.planes) if not first <= plane < last]
    assert np.array_equal(planes_of(out)[rest], before[rest])
    house.close()


@pytest.mark.parametrize("cut", SLICES.values(), ids=SLICES.keys())
def test_blocks_of_a_tensor_go_into_slots(seed: int, cut: tuple[int, int, int]) -> None:
    """Blocks 1 to 4 of a tensor are in their slots, byte for byte, and the other slots are as they were."""
    begin, end, tokens = cut
    house = House(seed)
    source = tensor_of(seed, tokens)[:, :, begin:end]
    slots = random.Random(seed).sample(range(SLOTS), 4)

    house.passage.take(house.runner(0), house.tensors.sheet(source, SPEC, "tensor"), 1, slots)
    house.device.run()

    pool, unit = pool_array(house.arena.pool), GEOMETRY.unit_bytes
    for slot in range(SLOTS):
        if slot in slots:
            at = (1 + slots.index(slot)) * unit
            assert np.array_equal(pool[:, slot], planes_of(source)[:, at : at + unit])
        else:
            assert np.array_equal(pool[:, slot], house.content[0, slot])
    house.close()


@pytest.mark.parametrize("cut", SLICES.values(), ids=SLICES.keys())
@pytest.mark.parametrize("together", [None, 5])
def test_blocks_of_a_tensor_go_into_slots_of_the_host(seed: int, cut: tuple[int, int, int], together: int | None) -> None:
    """Blocks 1 to 4 of a tensor are in their slots in DRAM, byte for byte, and the other slots are as they were."""
    begin, end, tokens = cut
    house = House(seed, together=together)
    source = tensor_of(seed, tokens)[:, :, begin:end]
    slots = random.Random(seed).sample(range(SLOTS), 4)
    places = [Place(1, slot, 0) for slot in slots]

    house.passage.lower(house.passage.own, house.tensors.sheet(source, SPEC, "tensor"), 1, places)
    house.device.run()

    unit = GEOMETRY.unit_bytes
    for slot in range(SLOTS):
        if slot in slots:
            at = (1 + slots.index(slot)) * unit
            assert np.array_equal(house.dram.view(slot), planes_of(source)[:, at : at + unit])
        else:
            assert np.array_equal(house.dram.view(slot), house.content[1, slot])
    house.close()


def test_streams_that_share_a_stage_take_turns(seed: int) -> None:
    """Five streams and two stages, in an order that is drawn: every tensor is exact."""
    house = House(seed)
    outs = [tensor_of(seed + number, 5 * SIZE) for number in range(5)]
    wanted = [house.places(seed + number, 5) for number in range(5)]

    for number, (out, places) in enumerate(zip(outs, wanted, strict=True)):
        house.passage.fill(house.runner(number), places, house.tensors.sheet(out, SPEC, "out"))
    house.device.run()

    for out, places in zip(outs, wanted, strict=True):
        expected = np.concatenate([house.content[place.position, place.slot] for place in places], axis=1)
        assert np.array_equal(planes_of(out), expected)
    house.close()


def test_what_the_host_sees_is_checked(seed: int) -> None:
    """The first block in host memory that is not what it should be ends the good ones; the device's are not looked at."""
    house = House(seed)
    places = [Place(position, slot, checksum(house.content[position, slot])) for position in (0, 1) for slot in range(3)]
    good = house.passage.check(places)
    pool_array(house.arena.pool)[0, 1, 0] ^= 1
    device_rot = house.passage.check(places)
    house.dram.view(1)[3, 5] ^= 1

    assert (good, device_rot, house.passage.check(places)) == (6, 6, 4)
    house.close()


def test_a_tensor_of_scattered_tokens_is_refused(seed: int) -> None:
    """Tokens of a plane that are not contiguous are refused, by their strides; fewer than a block are no blocks."""
    house = House(seed)
    with pytest.raises(InvalidTensor, match="out has strides"):
        house.tensors.sheet(tensor_of(seed, 4 * SIZE)[:, :, ::2], SPEC, "out")

    sheet = house.tensors.sheet(tensor_of(seed, SIZE - 1), SPEC, "out")
    house.passage.fill(house.runner(0), [], sheet)

    assert not sheet
    house.close()
