"""The oracle that other tests lean on tells apart what must be told apart."""

from __future__ import annotations

import numpy as np
import pytest

from tests.oracle import oracle_block, oracle_kv
from tiercache.keys import TOKEN_BYTES, pack_tokens
from tiercache.spec import KVSpec, Namespace

SPEC = KVSpec(layers=3, kv_heads=2, head_dim=8, dtype="bfloat16", block_size=4)
SPACE = Namespace(model="m", weights="w")
TOKENS = list(range(10))


def test_kv_is_made_of_blocks() -> None:
    """Block i of the whole equals the block asked for alone."""
    key = pack_tokens(TOKENS, limit=100)
    unit = SPEC.geometry.unit_bytes

    whole = oracle_kv(SPACE, SPEC, TOKENS)

    assert whole.shape == (SPEC.geometry.planes, len(TOKENS) * SPEC.token_bytes)
    assert whole.nbytes == np.prod(SPEC.shape(len(TOKENS))) * 2
    for block in range(2):
        alone = oracle_block(SPACE.digest(SPEC), key[: (block + 1) * SPEC.block_size * TOKEN_BYTES], SPEC.geometry)
        np.testing.assert_array_equal(whole[:, block * unit : (block + 1) * unit], alone)


def test_a_longer_prompt_keeps_the_bytes_of_its_whole_blocks() -> None:
    whole = 2 * SPEC.geometry.unit_bytes

    longer = oracle_kv(SPACE, SPEC, [*TOKENS, 99])

    np.testing.assert_array_equal(longer[:, :whole], oracle_kv(SPACE, SPEC, TOKENS)[:, :whole])


@pytest.mark.parametrize(
    "other",
    [
        oracle_kv(Namespace(model="m", weights="v"), SPEC, TOKENS),
        oracle_kv(SPACE, SPEC, [9, *TOKENS[1:]]),
        oracle_kv(SPACE, SPEC, TOKENS, shard=1),
    ],
    ids=["namespace", "first token", "shard"],
)
def test_whatever_differs_before_makes_every_block_differ(other: np.ndarray) -> None:
    ours = oracle_kv(SPACE, SPEC, TOKENS)
    unit = SPEC.geometry.unit_bytes

    for block in range(2):
        place = slice(block * unit, (block + 1) * unit)
        assert not (ours[:, place] == other[:, place]).all(axis=1).any()


def test_planes_and_repeated_blocks_differ() -> None:
    kv = oracle_kv(SPACE, SPEC, [7] * 12)
    units = kv.reshape(SPEC.geometry.planes * 3, SPEC.geometry.unit_bytes)

    assert len({unit.tobytes() for unit in units}) == len(units)
