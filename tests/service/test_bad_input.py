"""Wrong values at the face: an error that names the value and what was expected, nothing changed, and the cache lives on."""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.service.caches import SIZE, SPEC, Books, is_exact, opened_kv, prompt, read, small, store, tensor_of
from tiercache.errors import InvalidConfig, InvalidInput, InvalidStart, InvalidTensor, InvalidTokens, LeaseReleased
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV
from tiercache.types import Tier

LIMIT = 1000
KNOWN = prompt(1, 4)


@asynccontextmanager
async def unchanged() -> AsyncIterator[tuple[TierCache, LocalKV]]:
    """A cache with one prompt, whose books and bytes must be the same at the end."""
    async with opened_kv(small(ssd=None, max_tokens=LIMIT)) as (cache, kv):
        await store(kv, KNOWN)
        before = Books(cache)
        yield cache, kv
        await cache.settle()
        await cache.check()
        assert Books(cache) == before
        assert await read(kv, KNOWN) == 4 * SIZE
        await store(kv, prompt(2, 2))
        assert await read(kv, prompt(2, 2)) == 2 * SIZE


TOKENS: list[tuple[Any, str]] = [
    ([1, -1, 2], "position 1 is -1"),
    ([2**31], "position 0 is 2147483648"),
    ([0, 2**32 + 5], "position 1 is 4294967301"),
    ([2**63], "position 0 is 9223372036854775808"),
    ([10**30], "position 0 is 1000000000"),
    ([5, 1.0], "position 1 is 1.0"),
    ([True], "position 0 is True"),
    ([[1, 2], [3, 4]], r"position 0 is \[1, 2\]"),
    ([math.nan], "position 0 is nan"),
    (["5"], "position 0 is '5'"),
    ([None], "position 0 is None"),
    ((1, b"x"), "position 1 is b'x'"),
    ("hello", "not str"),
    (b"\1\2\3\4", "not bytes"),
    (None, "not NoneType"),
    (17, "not int"),
    (1.5, "not float"),
    (object(), "not object"),
    (np.array([1.0, 2.0]), "float64"),
    (np.array([True, False]), "bool"),
    (np.array([[1, 2], [3, 4]]), r"shape \(2, 2\)"),
    (np.array(5), r"shape \(\)"),
    (np.array([1, -7]), "position 1 is -7"),
    (np.array([2**63], dtype=np.uint64), "position 0 is 9223372036854775808"),
    (np.array(["a"]), "<U1"),
    (np.array([object()]), "object"),
    (array("d", [1.0]), "float64"),
    (torch.tensor([1.0]), "float32"),
    (torch.tensor([[1, 2]]), r"shape \(1, 2\)"),
    (torch.tensor([2**40]), "position 0 is 1099511627776"),
    (list(range(LIMIT + 1)), "1001 token ids; the limit is 1000"),
    (np.arange(LIMIT + 1), "1001 token ids; the limit is 1000"),
    (range(LIMIT + 1), "1001 token ids; the limit is 1000"),
]


@pytest.mark.parametrize(("tokens", "message"), TOKENS, ids=[message for _, message in TOKENS])
async def test_token_ids_that_are_none(tokens: Any, message: str) -> None:
    """Every call that takes token ids refuses them by name, before anything else."""
    async with unchanged() as (_, kv):
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: kv.match(tokens).__aenter__(),
            lambda: kv.reserve(tokens).__aenter__(),
            lambda: kv.insert(tokens, tensor_of([])),
            lambda: kv.flush(tokens),
            lambda: kv.prefetch(tokens),
            lambda: kv.pin(tokens, ttl=1.0),
            lambda: kv.delete(tokens),
        ]
        for call in calls:
            with pytest.raises(InvalidTokens, match=message):
                await call()


async def test_token_ids_in_every_form(seed: int) -> None:
    """Lists, tuples, ranges, iterators, arrays and tensors of any integer type name the same prompt; the ends of the range too."""
    tokens = [0, 2**31 - 1, *prompt(seed, 2)[2:]]
    forms: list[Any] = [tokens, tuple(tokens), array("q", tokens), [np.int64(token) for token in tokens]]
    forms += [np.array(tokens, dtype=kind) for kind in (np.int32, np.int64, np.uint32, np.uint64, ">i4")]
    forms += [torch.tensor(tokens), torch.tensor(tokens, dtype=torch.int32), np.array(tokens * 2)[: len(tokens)]]
    async with opened_kv(small(ssd=None)) as (_, kv):
        await store(kv, tokens)
        for form in forms:
            async with kv.match(form) as hit:
                assert hit.tokens == 2 * SIZE
        async with kv.match(iter(tokens)) as hit:
            assert hit.tokens == 2 * SIZE
        async with kv.match(np.array(tokens * 2)[::2]) as hit:
            assert hit.tokens == 0


async def test_nothing_is_a_prompt_too() -> None:
    """No tokens are a miss of 0 tokens for every call, and an insert of nothing stores nothing."""
    async with unchanged() as (_, kv):
        async with kv.reserve([]) as room:
            assert (room.present, room.pending, list(room.blocks), await room.commit(0)) == (0, 0, [], 0)
        assert [await kv.flush([]), await kv.prefetch([]), await kv.delete([])] == [0, 0, 0]
        assert await kv.insert([], tensor_of([])) == (0, 0, 0)
        assert await kv.insert(KNOWN, tensor_of([]), start=4 * SIZE) == (0, 0, 0)
    async with opened_kv(small(ssd=None)) as (_, kv), kv.match([]) as hit:
        assert (hit.tokens, dict(hit.tiers), await hit.ready(), hit.take(0)) == (0, {}, 0, 0)
        assert tuple((await hit.gather()).shape) == SPEC.shape(0)
        assert [tuple(part.shape) for part in await hit.layer(0)] == [(0, 1, 32)] * 2


GOOD = tensor_of(prompt(3, 2))
TENSORS: list[tuple[Any, str]] = [
    (GOOD[:, :, :-1], r"shape \(4, 2, 31, 1, 32\); expected \(4, 2, 32, 1, 32\)"),
    (GOOD[:3], r"shape \(3, 2, 32, 1, 32\)"),
    (GOOD[:, :1], r"shape \(4, 1, 32, 1, 32\)"),
    (GOOD[0], r"shape \(2, 32, 1, 32\)"),
    (GOOD.reshape(4, 2, 32, 32, 1), r"shape \(4, 2, 32, 32, 1\)"),
    (torch.empty(0), r"shape \(0,\)"),
    (GOOD.float(), "float32; expected torch.float16"),
    (GOOD.view(torch.bfloat16), "bfloat16; expected torch.float16"),
    (GOOD.view(torch.int16), "int16; expected torch.float16"),
    (torch.empty(SPEC.shape(32), dtype=torch.float16, device="meta"), "on meta; expected cpu"),
    (GOOD.to_sparse(), "sparse"),
    (GOOD.numpy().astype(">f2"), "byte order|not supported|native"),
    (GOOD.numpy().astype(object), "object"),
    (GOOD.tolist(), "not list"),
    (None, "not NoneType"),
    ("kv", "not str"),
]


@pytest.mark.parametrize(("tensor", "message"), TENSORS, ids=[message for _, message in TENSORS])
async def test_tensors_that_are_not_the_kv(tensor: Any, message: str) -> None:
    """Shape, type, device and layout are named, for what is inserted and for what is to be filled."""
    async with unchanged() as (_, kv):
        with pytest.raises(InvalidTensor, match=message):
            await kv.insert(prompt(3, 2), tensor)
    async with opened_kv(small(ssd=None)) as (cache, kv):
        await store(kv, prompt(3, 2))
        if tensor is None:
            return
        async with kv.match(prompt(3, 2)) as hit:
            with pytest.raises(InvalidTensor, match=message.replace("tensor", "out")):
                await hit.gather(out=tensor)
            assert is_exact(await hit.gather(), prompt(3, 2))
        await cache.check()


async def test_tensors_of_any_stride_are_inserted(seed: int) -> None:
    """Slices, transposed, reversed, read-only, strided and expanded ones, tensors that need a gradient, numpy arrays."""
    tokens = prompt(seed, 2)
    wide = torch.zeros(4, 2, 64, 1, 32, dtype=torch.float16)
    data = tensor_of(tokens)
    wide[:, :, 16:48] = data
    swapped = data.transpose(0, 1).contiguous().transpose(0, 1)
    apart = torch.zeros(4, 2, 32, 1, 64, dtype=torch.float16)[..., ::2]
    apart.copy_(data)
    reverse = data.numpy()[::-1].copy()[::-1]
    frozen = data.numpy().copy()
    frozen.flags.writeable = False
    forms: list[Any] = [wide[:, :, 16:48], swapped, apart, reverse, frozen, data.numpy(), data.clone().requires_grad_()]
    async with opened_kv(small(ssd=None)) as (cache, kv):
        for form in forms:
            assert (await kv.insert(tokens, form)).stored == 2 * SIZE
            assert await read(kv, tokens) == 2 * SIZE
            await kv.delete(tokens)
        await cache.check()


async def test_an_expanded_tensor_is_inserted(seed: int) -> None:
    """One plane shown as all of them is read as what it shows."""
    tokens = prompt(seed, 2)
    plane = tensor_of(tokens)[:1, :1]
    async with opened_kv(small(ssd=None)) as (_, kv):
        assert (await kv.insert(tokens, plane.expand(4, 2, 32, 1, 32))).stored == 2 * SIZE

        async with kv.match(tokens) as hit:
            given = await hit.gather()

        assert torch.equal(given.view(torch.uint8), plane.expand(4, 2, 32, 1, 32).contiguous().view(torch.uint8))


def _frozen() -> Any:
    out = np.zeros(SPEC.shape(64), dtype=np.float16)
    out.flags.writeable = False
    return out


OUTS: list[tuple[Callable[[], Any], str]] = [
    (lambda: torch.zeros(SPEC.shape(48), dtype=torch.float16), r"shape \(4, 2, 48, 1, 32\)"),
    (lambda: torch.zeros(4, 2, 64, 1, 64, dtype=torch.float16)[..., ::2], "strides"),
    (lambda: torch.zeros(4, 2, 32, 64, 1, dtype=torch.float16).permute(0, 1, 3, 4, 2), "strides"),
    (lambda: torch.zeros(1, 1, 64, 1, 32, dtype=torch.float16).expand(4, 2, 64, 1, 32), "strides"),
    (lambda: torch.zeros(4, 1, 64, 1, 32, dtype=torch.float16).expand(4, 2, 64, 1, 32), "strides"),
    (_frozen, "read-only"),
]


@pytest.mark.parametrize(("make", "message"), OUTS, ids=["short", "strided", "permuted", "all planes one", "K is V", "read-only"])
async def test_what_can_not_be_filled_in_place_is_refused(make: Callable[[], Any], message: str) -> None:
    """`out` is refused by name before a byte is written, and no block is blamed for it."""
    async with opened_kv(small(ssd=None)) as (cache, kv):
        await store(kv, KNOWN)
        out = make()
        async with kv.match(KNOWN) as hit:
            before = Books(cache)
            with pytest.raises(InvalidTensor, match=message):
                await hit.gather(out=out)
            assert Books(cache) == before and not np.asarray(out).any()
        assert await read(kv, KNOWN) == 4 * SIZE


@pytest.mark.parametrize("start", [-1, -16, 5, 17, 7 * SIZE, 2**70, True, 16.0, "16", None])
async def test_a_start_that_is_none(start: Any) -> None:
    """No boundary, not in the prompt, not an integer: the value is named."""
    tokens = [*KNOWN, *prompt(7, 2)]
    async with unchanged() as (_, kv):
        with pytest.raises(InvalidStart, match=f"start .*{re.escape(repr(start))}"):
            await kv.insert(tokens, tensor_of(tokens, start=5 * SIZE), start=start)


async def test_values_of_a_hit_that_are_none() -> None:
    """Layers, blocks and counts out of range or of another type are named, and the hit goes on."""
    async with opened_kv(small(ssd=None)) as (_, kv):
        await store(kv, KNOWN)
        async with kv.match(KNOWN) as hit:
            for layer in (-1, 4, True, 1.0, "0", None):
                with pytest.raises(InvalidInput, match=f"layer must be an integer from 0 to 3, not {layer!r}"):
                    await hit.layer(layer)  # type: ignore[arg-type]
                with pytest.raises(InvalidInput, match=f"layer must be an integer from 0 to 3, not {layer!r}"):
                    hit.view(0, layer)  # type: ignore[arg-type]
            for block in (-1, 4, True, 1.0, "0", None):
                with pytest.raises(InvalidInput, match=f"block must be an integer from 0 to 3, not {block!r}"):
                    hit.view(block, 0)  # type: ignore[arg-type]
            for tokens in (-1, True, 16.0, "16", None):
                with pytest.raises(InvalidInput, match=f"tokens must be an integer from 0 .*, not {tokens!r}"):
                    hit.take(tokens)  # type: ignore[arg-type]
            assert hit.tokens == 4 * SIZE and is_exact(await hit.gather(), KNOWN)


@pytest.mark.parametrize("ttl", [-1, -0.1, math.nan, math.inf, "1", None, True])
async def test_a_time_that_is_none(ttl: Any) -> None:
    """Negative, endless or no number: the value is named, and nothing is pinned."""
    async with unchanged() as (_, kv):
        with pytest.raises(InvalidInput, match=f"ttl .*{ttl!r}"):
            await kv.pin(KNOWN, ttl=ttl)


async def test_a_place_that_can_not_be_written() -> None:
    """SSD, a tier that is not there and what is no tier are refused with the list of those that can."""
    async with unchanged() as (_, kv):
        for tier in (Tier.SSD, "HBM", 17):
            with pytest.raises(InvalidConfig, match=f"tier {tier!s} can't be written; the tiers in memory are HBM, DRAM"):
                await kv.insert(prompt(3, 2), GOOD, tier=tier)  # type: ignore[arg-type]
            with pytest.raises(InvalidConfig, match="can't be written"):
                kv.reserve(prompt(3, 2), tier=tier)  # type: ignore[arg-type]


async def test_a_hit_that_is_not_how_the_prompt_begins() -> None:
    """A room after another prompt's hit, or after one that has ended, is refused."""
    async with opened_kv(small(ssd=None)) as (cache, kv):
        await store(kv, KNOWN)
        async with kv.match(KNOWN) as hit:
            with pytest.raises(InvalidStart, match="64 tokens are not how this prompt begins"):
                kv.reserve(prompt(9, 6), after=hit)
            with pytest.raises(InvalidStart, match="64 tokens are not how this prompt begins"):
                kv.reserve(iter(prompt(9, 6)), after=hit)
        with pytest.raises(LeaseReleased):
            kv.reserve(prompt(1, 6), after=hit)
        await cache.check()


async def test_a_request_that_names_nothing() -> None:
    """A name must be hashable; the error says what it got."""
    async with unchanged() as (_, kv):
        with pytest.raises(InvalidInput, match="not a list"):
            await kv.match(KNOWN, request=[1]).__aenter__()
