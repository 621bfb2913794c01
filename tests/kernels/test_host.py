"""The host movers against byte loops: every byte of what they write, and every byte around it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tiercache.errors import InvalidTensor
from tiercache.kernels.host import (
    ALIGNMENT,
    copy_block,
    copy_run,
    empty_bytes,
    gather,
    gather_tokens,
    scatter,
    scatter_tokens,
)

Bytes = NDArray[np.uint8]
POISON = 0xA5
seeds = st.integers(0, 2**32 - 1)
small = st.integers(1, 5)


def random_bytes(seed: int, *shape: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def poisoned(*shape: int) -> Bytes:
    return np.full(shape, POISON, np.uint8)


def inside(outer: Bytes, planes: int, unit: int, *, margin: int) -> Bytes:
    """A block within `outer`, with bytes of others before, after and between its planes."""
    return outer[margin : margin + planes, margin : margin + unit]


@given(planes=small, unit=st.integers(1, 70), margin=st.integers(0, 3), seed=seeds)
def test_copy_block_copies_the_block_and_nothing_beside_it(planes: int, unit: int, margin: int, seed: int) -> None:
    """A block arrives whole between strided memories, and the bytes around it keep their poison."""
    outer = random_bytes(seed, planes + 2 * margin, unit + 2 * margin)
    target = poisoned(planes + 2 * margin + 1, unit + 2 * margin + 5)
    wanted = target.copy()
    for plane in range(planes):
        for byte in range(unit):
            wanted[margin + plane, margin + byte] = outer[margin + plane, margin + byte]

    copy_block(inside(outer, planes, unit, margin=margin), inside(target, planes, unit, margin=margin))

    assert target.tobytes() == wanted.tobytes()


@given(count=small, planes=small, unit=st.integers(1, 70), margin=st.integers(0, 3), first=st.booleans(), seed=seeds)
def test_copy_run_puts_neighbours_one_after_the_other(
    count: int, planes: int, unit: int, margin: int, first: bool, seed: int
) -> None:
    """Out of block-first memory with padding or layer-first memory, and the bytes around the target keep their poison."""
    outer = random_bytes(seed, count, planes, unit + margin) if first else random_bytes(seed, planes, count, unit + margin)
    blocks = (outer if first else outer.transpose(1, 0, 2))[:, :, :unit]
    target = poisoned(planes + 2 * margin, count * unit + 2 * margin)
    wanted = target.copy()
    for number in range(count):
        for plane in range(planes):
            start = margin + number * unit
            wanted[margin + plane, start : start + unit] = blocks[number, plane]

    copy_run(blocks, inside(target, planes, count * unit, margin=margin))

    assert target.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("blocks", "into"),
    [((3, 4, 8), (4, 32)), ((3, 4, 8), (1, 24)), ((1, 1, 1), (4, 8)), ((4, 8), (4, 8)), ((3, 4, 8), (4, 3, 8))],
    ids=["more room", "one plane", "one byte", "one block", "room by blocks"],
)
def test_a_run_that_does_not_fill_its_room_is_refused(blocks: tuple[int, ...], into: tuple[int, ...]) -> None:
    """numpy would stretch some of them; nothing is copied."""
    target = poisoned(*into)
    wanted = target.copy()

    with pytest.raises(InvalidTensor):
        copy_run(random_bytes(1, *blocks), target)
    with pytest.raises(InvalidTensor):
        copy_run(random_bytes(1, 3, 4, 8), np.zeros((4, 24), np.uint16))
    assert target.tobytes() == wanted.tobytes()


@given(planes=small, slots=st.integers(1, 6), unit=st.integers(1, 40), data=st.data(), seed=seeds)
def test_gather_brings_blocks_together_in_the_order_asked(
    planes: int, slots: int, unit: int, data: st.DataObject, seed: int
) -> None:
    """Block i of the result is the block in slots[i], plane by plane."""
    chosen = data.draw(st.lists(st.integers(0, slots - 1), max_size=8))
    arena = random_bytes(seed, planes, slots, unit)
    into = poisoned(len(chosen), planes, unit)
    wanted = b"".join(arena[plane, slot].tobytes() for slot in chosen for plane in range(planes))

    gather(arena, chosen, into)

    assert into.tobytes() == wanted


@given(planes=small, slots=st.integers(1, 6), unit=st.integers(1, 40), data=st.data(), seed=seeds)
def test_scatter_writes_the_named_slots_alone(planes: int, slots: int, unit: int, data: st.DataObject, seed: int) -> None:
    """The block in slots[i] becomes block i; all other slots keep their poison, and a gather gives the source back."""
    chosen = data.draw(st.lists(st.integers(0, slots - 1), unique=True))
    source = random_bytes(seed, len(chosen), planes, unit)
    arena = poisoned(planes, slots, unit)
    wanted = arena.copy()
    for place, slot in enumerate(chosen):
        for plane in range(planes):
            wanted[plane, slot] = source[place, plane]

    scatter(source, arena, chosen)
    back = poisoned(len(chosen), planes, unit)
    gather(arena, chosen, back)

    assert arena.tobytes() == wanted.tobytes()
    assert back.tobytes() == source.tobytes()


@given(planes=small, block_size=st.integers(1, 8), token_bytes=st.integers(1, 12), data=st.data(), seed=seeds)
def test_tokens_of_a_block_land_at_their_place_in_a_tensor(
    planes: int, block_size: int, token_bytes: int, data: st.DataObject, seed: int
) -> None:
    """The first tokens of a block arrive at token `at` of each plane; the rest of the tensor keeps its poison."""
    total = data.draw(st.integers(block_size, 3 * block_size))
    tokens = data.draw(st.none() | st.integers(0, block_size))
    count = block_size if tokens is None else tokens
    at = data.draw(st.integers(0, total - count))
    block, tensor = random_bytes(seed, planes, block_size * token_bytes), poisoned(planes, total * token_bytes)
    wanted = tensor.copy()
    for plane in range(planes):
        for byte in range(count * token_bytes):
            wanted[plane, at * token_bytes + byte] = block[plane, byte]

    gather_tokens(block, tensor, at, token_bytes=token_bytes, tokens=tokens)

    assert tensor.tobytes() == wanted.tobytes()


@given(planes=small, block_size=st.integers(1, 8), token_bytes=st.integers(1, 12), data=st.data(), seed=seeds)
def test_tokens_of_a_tensor_land_at_the_head_of_a_block(
    planes: int, block_size: int, token_bytes: int, data: st.DataObject, seed: int
) -> None:
    """Token `at` and on of each plane arrive at the block's head; what lies behind them keeps its poison."""
    total = data.draw(st.integers(block_size, 3 * block_size))
    tokens = data.draw(st.none() | st.integers(0, block_size))
    count = block_size if tokens is None else tokens
    at = data.draw(st.integers(0, total - count))
    tensor, block = random_bytes(seed, planes, total * token_bytes), poisoned(planes, block_size * token_bytes)
    wanted = block.copy()
    for plane in range(planes):
        for byte in range(count * token_bytes):
            wanted[plane, byte] = tensor[plane, at * token_bytes + byte]

    scatter_tokens(tensor, at, block, token_bytes=token_bytes, tokens=tokens)

    assert block.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("move", "source", "target"),
    [
        pytest.param(copy_block, (1, 8), (4, 8), id="one plane is not stretched over four"),
        pytest.param(copy_block, (4, 1), (4, 8), id="one byte is not stretched over a plane"),
        pytest.param(copy_block, (8,), (4, 8), id="a plane is not a block"),
        pytest.param(lambda a, b: gather(a, [0, 3], b), (4, 3, 8), (2, 4, 8), id="gather of a slot behind the last"),
        pytest.param(lambda a, b: gather(a, [0, -1], b), (4, 3, 8), (2, 4, 8), id="gather of a slot before the first"),
        pytest.param(lambda a, b: gather(a, [0], b), (4, 3, 8), (2, 4, 8), id="gather of fewer slots than room"),
        pytest.param(lambda a, b: scatter(a, b, [0, 3]), (2, 4, 8), (4, 3, 8), id="scatter to a slot behind the last"),
        pytest.param(lambda a, b: scatter(a, b, [0]), (2, 4, 8), (4, 3, 8), id="scatter of more blocks than slots"),
        pytest.param(lambda a, b: gather_tokens(a, b, 3, token_bytes=4), (4, 8), (4, 16), id="a block over the tensor's end"),
        pytest.param(lambda a, b: gather_tokens(a, b, -1, token_bytes=4), (4, 8), (4, 16), id="a token before the first"),
        pytest.param(lambda a, b: gather_tokens(a, b, 0, token_bytes=4, tokens=3), (4, 8), (4, 16), id="more tokens than a block"),
        pytest.param(lambda a, b: gather_tokens(a, b, 0, token_bytes=4, tokens=-1), (4, 8), (4, 16), id="a negative count"),
        pytest.param(lambda a, b: gather_tokens(a, b, 0, token_bytes=4), (1, 8), (4, 16), id="a block of fewer planes"),
        pytest.param(lambda a, b: scatter_tokens(a, 3, b, token_bytes=4), (4, 16), (4, 8), id="tokens over the tensor's end"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_copied(
    move: Callable[[Bytes, Bytes], None], source: tuple[int, ...], target: tuple[int, ...]
) -> None:
    """Where numpy would stretch, wrap or cut in silence, a mover refuses and leaves the target's poison."""
    into = poisoned(*target)

    with pytest.raises(InvalidTensor):
        move(random_bytes(2, *source), into)

    assert into.tobytes() == poisoned(*target).tobytes()


def test_other_types_than_bytes_are_refused() -> None:
    """A copy that would convert values is refused: blocks are bytes."""
    wide = np.zeros((2, 8), np.int32)

    with pytest.raises(InvalidTensor, match="int32"):
        copy_block(random_bytes(3, 2, 8), wide)  # type: ignore[arg-type]
    with pytest.raises(InvalidTensor, match="int32"):
        gather_tokens(random_bytes(3, 2, 8), wide, 0, token_bytes=1)  # type: ignore[arg-type]

    assert not wide.any()


@given(shape=st.lists(st.integers(1, 50), min_size=1, max_size=3))
def test_empty_bytes_start_on_a_page(shape: list[int]) -> None:
    """Memory for tensors is contiguous, of the shape asked for, and aligned."""
    memory = empty_bytes(*shape)

    assert memory.shape == tuple(shape)
    assert memory.dtype == np.uint8
    assert memory.flags.c_contiguous
    assert memory.flags.writeable
    assert memory.ctypes.data % ALIGNMENT == 0


def test_movers_run_at_once_on_different_blocks(seed: int) -> None:
    """Four threads that copy different blocks of one arena leave each block exact."""
    source = random_bytes(seed, 16, 6, 4096)  # block-first: blocks, planes, bytes
    arena = poisoned(6, 16, 4096)

    def copy(first: int) -> None:
        for slot in range(first, 16, 4):
            scatter(source[slot : slot + 1], arena, [slot])

    threads = [threading.Thread(target=copy, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert arena.transpose(1, 0, 2).tobytes() == source.tobytes()
