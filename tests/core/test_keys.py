"""Packed keys and durable block keys: validated before narrowed, chained, injective."""

from __future__ import annotations

from array import array
from collections import Counter, UserList, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiercache.errors import InvalidTokens
from tiercache.keys import MAX_TOKEN, block_keys, pack_tokens, sha256, unpack_tokens

TOKENS = [0, 1, 5, 151_643, MAX_TOKEN]
PACKED = np.array(TOKENS, dtype="<i4").tobytes()


@pytest.mark.parametrize(
    "tokens",
    [
        TOKENS,
        tuple(TOKENS),
        [np.int64(token) for token in TOKENS],
        (token for token in TOKENS),
        np.array(TOKENS),
        np.array(TOKENS, dtype=np.uint32),
        np.array(TOKENS, dtype=">i8"),
        np.repeat(np.array(TOKENS), 2)[::2],
        array("i", TOKENS),
        array("q", TOKENS),
        torch.tensor(TOKENS),
        torch.tensor(TOKENS, dtype=torch.int32),
    ],
    ids=[
        "list",
        "tuple",
        "numpy integers",
        "iterator",
        "int64",
        "uint32",
        "big-endian",
        "strided",
        "array i",
        "array q",
        "torch",
        "int32",
    ],
)
def test_the_same_tokens_are_the_same_key(tokens: Any) -> None:
    """Whatever they come in, a list and an array of the same ids match."""
    assert pack_tokens(tokens, limit=5) == PACKED


@pytest.mark.parametrize("empty", [[], (), np.array([], dtype=np.int64), array("i"), torch.tensor([], dtype=torch.int64)])
def test_no_tokens_are_an_empty_key(empty: Any) -> None:
    """An empty prompt is a prompt."""
    assert pack_tokens(empty, limit=0) == b""


@pytest.mark.parametrize(
    "wrong", [-1, 2**31, 2**32 + 5, 2**63, 2**70, 1.0, True, "5", None, [5], float("nan"), np.float32(1), np.bool_(True)], ids=repr
)
def test_what_is_no_token_is_refused_with_its_place(wrong: Any) -> None:
    """2**32 + 5 never acts as 5, True never as 1; the error names position and value."""
    with pytest.raises(InvalidTokens) as caught:
        pack_tokens([7, 7, wrong, 7], limit=10)

    assert caught.value.fields["position"] == 2
    assert "position 2" in str(caught.value)


@pytest.mark.parametrize(
    ("array_", "position"),
    [(np.array([1, -1]), 1), (np.array([2**32 + 5]), 0), (np.array([3, 2**63], dtype=np.uint64), 1), (torch.tensor([0, -7]), 1)],
)
def test_arrays_are_checked_before_they_are_narrowed(array_: Any, position: int) -> None:
    """The check is on the values, not on what is left of them."""
    with pytest.raises(InvalidTokens) as caught:
        pack_tokens(array_, limit=10)

    assert caught.value.fields["position"] == position


@pytest.mark.parametrize(
    "wrong",
    [None, "abc", b"abc", bytearray(4), 5, np.array([[1]]), np.array(1), np.array([1.5]), np.array([True]), np.array(["1"])],
)
def test_what_is_no_sequence_of_integers_is_refused(wrong: Any) -> None:
    """Text is a sequence, but not of tokens; two dimensions are a batch, not a prompt."""
    with pytest.raises(InvalidTokens):
        pack_tokens(wrong, limit=10)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (torch.empty(3, dtype=torch.int64, device="meta"), "meta"),
        (torch.zeros(3, dtype=torch.bfloat16), "bfloat16"),
        (torch.tensor([1, 0, 2]).to_sparse(), "sparse"),
        (torch.tensor([1.5]), "float32"),
        ({1: 2}, "dict"),
        ({1: 2}.keys(), "dict_keys"),
        ({1, 2}, "set"),
        (frozenset({1, 2}), "frozenset"),
        (Counter([1, 2]), "Counter"),
        (object(), "object"),
    ],
    ids=repr,
)
def test_what_has_no_order_or_no_values_is_refused_by_name(wrong: Any, named: str) -> None:
    """A set's order is no prompt's; a tensor that numpy can't read is told with its dtype, layout and device."""
    with pytest.raises(InvalidTokens) as caught:
        pack_tokens(wrong, limit=10)

    assert named in str(caught.value)


@pytest.mark.parametrize("kind", [range, lambda count: deque(range(count)), lambda count: UserList(range(count))])
def test_every_sequence_of_integers_is_taken(kind: Any) -> None:
    """Whatever is a `collections.abc.Sequence`, but for text and bytes."""
    assert unpack_tokens(pack_tokens(kind(5), limit=5)) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", [list, tuple, np.array, iter])
def test_more_tokens_than_the_limit_are_refused(kind: Any) -> None:
    """The limit is counted before anything is converted."""
    with pytest.raises(InvalidTokens) as caught:
        pack_tokens(kind([1, 2, 3]), limit=2)

    assert caught.value.fields == {"value": 3, "limit": 2}


@given(tokens=st.lists(st.integers(0, MAX_TOKEN), max_size=50))
def test_a_key_gives_its_tokens_back(tokens: list[int]) -> None:
    """Packing loses nothing."""
    assert unpack_tokens(pack_tokens(tokens, limit=50)) == tokens


def test_a_durable_key_names_the_whole_prefix() -> None:
    """Same block, other beginning, other namespace or other width of symbols: another key."""
    one = block_keys(b"n" * 32, bytes(32), b"aaaabbbbaaaabbbb", 4)
    cases = [
        one[1],
        one[3],
        block_keys(b"m" * 32, bytes(32), b"aaaabbbb", 4)[1],
        block_keys(b"n" * 32, bytes(32), b"aaaabbbb", 8)[0],
        block_keys(b"n" * 32, b"p" * 32, b"aaaabbbb", 4)[1],
    ]

    assert len(one) == 4
    assert len({*cases}) == len(cases)
    assert block_keys(b"n" * 32, one[1], b"aaaabbbb", 4) == one[2:], "a chain may be continued from any key"
    assert all(len(key) == 32 for key in one)


def test_the_digest_can_be_replaced() -> None:
    """Tests force collisions with it; production hashes with SHA-256."""
    assert block_keys(b"n", bytes(32), b"aaaabbbb", 4, lambda data: b"x" * 32) == [b"x" * 32] * 2
    assert sha256(b"").hex().startswith("e3b0c442")
