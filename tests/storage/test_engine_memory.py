"""Which bytes of an engine's tensors are which of a block, in every layout."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from tests.engines import Engine, layouts
from tiercache.errors import InvalidTensor
from tiercache.kernels.host import Bytes
from tiercache.spec import KVSpec
from tiercache.storage.engine_memory import LAYOUTS, LayerRows, layer_rows, layout_of, put, take

SPEC = KVSpec(layers=2, kv_heads=3, head_dim=8, dtype="float16", block_size=4)
ONE_HEAD = KVSpec(layers=2, kv_heads=1, head_dim=8, dtype="float32", block_size=4)
ONE_TOKEN = KVSpec(layers=2, kv_heads=3, head_dim=8, dtype="float16", block_size=1)
LATENT = KVSpec(layers=2, kv_heads=1, head_dim=36, dtype="bfloat16", block_size=4, latent=True)
BLOCKS = 7
CASES = [(spec, layout) for spec in (SPEC, ONE_HEAD, ONE_TOKEN, LATENT) for layout in layouts(spec)]


def rows_of(engine: Engine, layer: int) -> tuple[Bytes, LayerRows]:
    """Return a layer's memory and its rows."""
    tensor = engine.tensors[layer]
    item = tensor.element_size()
    rows = layer_rows(tuple(tensor.shape), [item * stride for stride in tensor.stride()], engine.spec, engine.layout)
    whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    start = tensor.storage_offset() * item
    return whole[start : start + rows.span], rows


@pytest.mark.parametrize(("spec", "layout"), CASES)
@pytest.mark.parametrize("together", [False, True])
def test_blocks_go_in_and_come_out(spec: KVSpec, layout: str, together: bool, seed: int) -> None:
    """Whatever order the axes have, and whatever order they lie in, torch finds the same bytes where they belong, and no others."""
    draw = np.random.default_rng(seed)
    names = layout.replace("(kv dim)", "packed").split()
    last = names[-1:]
    for order in itertools.permutations(names[:-1]):
        engine = Engine(spec, BLOCKS, layout, order=[*order, *last], together=together)
        blocks = draw.permutation(BLOCKS)[:4].astype(np.int64)
        planes = draw.integers(0, 256, (4, spec.geometry.planes, spec.geometry.unit_bytes)).astype(np.uint8)
        for layer in range(spec.layers):
            put(*rows_of(engine, layer), blocks, planes[:, layer * spec.parts : (layer + 1) * spec.parts])

        for number, block in zip(blocks.tolist(), planes, strict=True):
            assert np.array_equal(engine.block(number), block)
        assert engine.untouched(blocks.tolist())
        back = np.zeros_like(planes)
        for layer in range(spec.layers):
            into = np.zeros((4, spec.parts, spec.geometry.unit_bytes), np.uint8)
            take(*rows_of(engine, layer), blocks, into)
            back[:, layer * spec.parts : (layer + 1) * spec.parts] = into
        assert np.array_equal(back, planes)


@pytest.mark.parametrize(
    ("layout", "row"),
    [
        ("kv block token head dim", SPEC.geometry.unit_bytes),
        ("block kv token head dim", 2 * SPEC.geometry.unit_bytes),
        ("block token head (kv dim)", 16),
        ("block head token (kv dim)", 16),
        ("kv block head token dim", 16),
    ],
)
def test_a_row_is_as_long_as_it_can_be(layout: str, row: int) -> None:
    """K of a block in one piece is one row, K and V side by side are one together: that is how few copies there are."""
    _, rows = rows_of(Engine(SPEC, BLOCKS, layout), 0)

    assert rows.row_bytes == row and len(rows.block) == 2 * SPEC.geometry.unit_bytes // row


def test_the_layout_is_found_by_its_shape() -> None:
    assert layout_of((2, 9, 4, 3, 8), SPEC, None) == "kv block token head dim"
    assert layout_of((9, 2, 4, 3, 8), SPEC, None) == "block kv token head dim"
    assert layout_of((9, 3, 4, 16), SPEC, None) == "block head token (kv dim)"
    assert layout_of((9, 4, 3, 16), SPEC, None) == "block token head (kv dim)"
    assert layout_of((9, 4, 36), LATENT, None) == "block token dim"


def test_what_may_be_two_layouts_is_asked_for() -> None:
    """Two blocks, or as many heads as tokens: a guess would be wrong bytes."""
    square = KVSpec(layers=2, kv_heads=4, head_dim=8, dtype="float16", block_size=4)
    with pytest.raises(InvalidTensor, match="kv block token head dim or block kv token head dim: say which"):
        layout_of((2, 2, 4, 3, 8), SPEC, None)
    with pytest.raises(InvalidTensor, match="say which"):
        layout_of((9, 4, 4, 16), square, None)

    assert layout_of((9, 4, 4, 16), square, "block head token (kv dim)") == "block head token (kv dim)"


@pytest.mark.parametrize("shape", [(9, 4, 3, 8), (9, 2, 4, 3, 9), (0, 2, 4, 3, 8), (), (9, 2, 3, 8, 4)])
def test_a_shape_that_holds_no_such_blocks_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidTensor, match=r"expected kv block token head dim: \[2, blocks, 4, 3, 8\]"):
        layout_of(shape, SPEC, None)
    with pytest.raises(InvalidTensor, match="expected block kv token head dim"):
        layout_of((2, 9, 4, 3, 8), SPEC, "block kv token head dim")
    with pytest.raises(InvalidTensor, match="is none of"):
        layout_of((2, 9, 4, 3, 8), SPEC, "pages")


@pytest.mark.parametrize(
    ("strides", "why"),
    [
        ((1728, 192, 48, 2, 6), "contiguous"),
        ((0, 192, 48, 16, 2), "two places is one"),
        ((96, 192, 48, 16, 2), "two places is one"),
        ((1728, 192, 48, 8, 2), "two places is one"),
    ],
    ids=["a head's numbers apart", "one V for K", "V over K", "heads overlap"],
)
def test_strides_that_hold_no_blocks_are_named(strides: tuple[int, ...], why: str) -> None:
    with pytest.raises(InvalidTensor, match=why) as error:
        layer_rows((2, 9, 4, 3, 8), strides, SPEC, LAYOUTS[0])

    assert str(strides) in str(error.value)


def test_padding_between_blocks_makes_rows_short() -> None:
    """A row is no longer than what divides every distance: one that were would begin in the middle of another."""
    rows = layer_rows((9, 2, 4, 3, 8), (400, 200, 48, 16, 2), SPEC, "block kv token head dim")

    assert rows.row_bytes == 8 and rows.block.tolist() == [*range(24), *range(25, 49)] and rows.stride == 50
