"""Kind 1, wrong KV returned: W1 namespaces are the identity of the bytes, W2 blocks that look the same are not."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.seams import Rig
from tests.service.caches import LARGE, SIZE, lower, opened, opened_kv, placed, prompt, read, sink, small, store
from tiercache.config import Config, Share
from tiercache.errors import NoShare, SpecMismatch, UnsupportedSpec
from tiercache.keys import ROOT_KEY, block_keys
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV
from tiercache.spec import KVSpec, Namespace
from tiercache.types import Tier

TOKENS = 64
BASE_SPACE = Namespace(model="served", weights="f1")
BASE_SPEC = KVSpec(layers=4, kv_heads=8, head_dim=16, dtype="bfloat16", block_size=16)

CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # name: (what both have of a namespace, what the other one changes in it, what it changes in the layout)
    "weights under one name": ({}, {"weights": "f2"}, {}),
    "served name": ({}, {"model": "served-2"}, {}),
    "an adapter": ({}, {"adapter": "a@d1"}, {}),
    "adapter digest under one name": ({"adapter": "a@d1"}, {"adapter": "a@d2"}, {}),
    "an adapter without a name": ({}, {"adapter": ""}, {}),
    "a salt": ({}, {"salt": "tenant"}, {}),
    "another salt": ({"salt": "tenant"}, {"salt": "tenan"}, {}),
    "composed or decomposed": ({"salt": "\u00e9"}, {"salt": "e\u0301"}, {}),
    "dtype fp8": ({}, {}, {"dtype": "float8_e4m3fn"}),
    "dtype of the same width": ({}, {}, {"dtype": "float16"}),
    "5 layers": ({}, {}, {"layers": 5}),
    "4 heads": ({}, {}, {"kv_heads": 4}),
    "heads for width": ({}, {}, {"kv_heads": 4, "head_dim": 32}),
    "pages of 32": ({}, {}, {"block_size": 32}),
}


def config_for(other: KVSpec, folder: Path) -> Config:
    """Return tiers that both layouts share."""
    sizes = sorted({BASE_SPEC.block_bytes, other.block_bytes})
    shares = tuple(Share(block_bytes=size, fraction=1 / len(sizes)) for size in sizes)
    return small(hbm=32, dram=32, ssd=128, spec=BASE_SPEC, directory=folder, shares=shares)


@pytest.mark.parametrize("change", CHANGES)
async def test_w1_one_field_apart(tmp_path: Path, seed: int, change: str) -> None:
    """64 tokens under one descriptor are 0 tokens under one that differs in one field, before and after a restart from disk; both
    stored, both are read exactly, before and after another restart. An adapter's digest is part of its name (`a@d1`)."""
    given_both, in_space, in_spec = CHANGES[change]
    space = replace(BASE_SPACE, **given_both)
    theirs = replace(space, **in_space), replace(BASE_SPEC, **in_spec)
    tokens = prompt(seed, TOKENS // 16, size=16)
    config = config_for(theirs[1], tmp_path / "ssd")

    async def found(cache: TierCache, of: tuple[Namespace, KVSpec]) -> int:
        return await read(await cache.open(*of), tokens, space=of[0])

    ours = space, BASE_SPEC
    async with opened(config) as cache:
        mine = await cache.open(*ours)
        await store(mine, tokens, space=space)
        assert await mine.flush(tokens) == TOKENS
        assert (await found(cache, theirs), await found(cache, ours)) == (0, TOKENS)
    async with opened(config) as cache:
        assert (await found(cache, theirs), await found(cache, ours)) == (0, TOKENS)
        other = await cache.open(*theirs)
        await store(other, tokens, space=theirs[0])
        assert await other.flush(tokens) == TOKENS
        assert (await found(cache, theirs), await found(cache, ours)) == (TOKENS, TOKENS)
    async with opened(config) as cache:
        assert (await found(cache, theirs), await found(cache, ours)) == (TOKENS, TOKENS)
        await cache.check()


async def test_w1_the_same_descriptor_in_two_layouts_of_one_size(tmp_path: Path, seed: int) -> None:
    """Blocks of as many bytes in another shape are refused beside each other, by name, and found by nobody else after a restart."""
    other = replace(BASE_SPEC, block_size=32, layers=2)
    tokens = prompt(seed, 4, size=16)
    config = small(hbm=32, dram=32, ssd=128, spec=BASE_SPEC, directory=tmp_path / "ssd")
    async with opened_kv(config, space=BASE_SPACE, spec=BASE_SPEC) as (cache, kv):
        await store(kv, tokens, space=BASE_SPACE)
        assert await kv.flush(tokens) == TOKENS
        with pytest.raises(SpecMismatch):
            await cache.open(BASE_SPACE, other)
        with pytest.raises(NoShare):
            await cache.open(replace(BASE_SPACE, salt="t"), other)
    async with opened_kv(config, space=BASE_SPACE, spec=other) as (_, kv):
        assert await read(kv, tokens, space=BASE_SPACE) == 0
        await store(kv, tokens, space=BASE_SPACE)
        assert await read(kv, tokens, space=BASE_SPACE) == TOKENS
        await kv.flush(tokens)
    async with opened_kv(config, space=BASE_SPACE, spec=BASE_SPEC) as (_, kv):
        assert await read(kv, tokens, space=BASE_SPACE) == TOKENS


@pytest.mark.parametrize("world", [2, 4])
async def test_w1_a_split_model_is_refused_by_name(world: int) -> None:
    """Tensor-parallel shards (tp 2 rank 0 against tp 4 rank 0) are not stored in this version: `world` above 1 is refused, so
    that they can't be mixed up, and it is part of the identity all the same."""
    split = replace(BASE_SPACE, world=world)
    async with opened(small(ssd=None, spec=BASE_SPEC)) as cache:
        for shard in (0, 1):
            with pytest.raises(UnsupportedSpec, match="world"):
                await cache.open(split, BASE_SPEC, shard=shard)
        with pytest.raises(UnsupportedSpec, match="shard"):
            await cache.open(BASE_SPACE, BASE_SPEC, shard=1)

    assert split.digest(BASE_SPEC) != BASE_SPACE.digest(BASE_SPEC)


PIECES = [*"ab/.:|=,'", "\x00", "\x01", "\x07", "\x1f", "\n", "\u00e9", "e\u0301", "\u2028", "\U0001f600"]
HOSTILE = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
GLUE = st.sampled_from(
    ["", "\x00", "\x01", "/", "str\x01", "weightsstr\x01", "adapterstr\x01", "saltstr\x01", "modelstr\x01", "\x00" * 7, "None"]
)
SPACES = st.builds(Namespace, model=HOSTILE, weights=HOSTILE, adapter=st.none() | HOSTILE, salt=st.none() | HOSTILE)
SPECS = st.builds(
    KVSpec,
    layers=st.integers(1, 23),
    kv_heads=st.integers(1, 23),
    head_dim=st.integers(1, 23),
    dtype=st.sampled_from(["float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"]),
    block_size=st.integers(1, 23),
)


@given(st.lists(st.tuples(SPACES, SPECS), min_size=2, max_size=8))
def test_w1_two_identities_never_have_one_digest(identities: list[tuple[Namespace, KVSpec]]) -> None:
    """Over all fields and hostile characters: as many digests as identities, and the same one each time."""
    digests = {identity: identity[0].digest(identity[1]) for identity in identities}

    assert len(set(digests.values())) == len(digests)
    assert all(replace(space).digest(replace(spec)) == digests[space, spec] for space, spec in identities)


@given(HOSTILE, HOSTILE, HOSTILE, GLUE)
@example("a", "b", "c", "")
@example("x", "y", "z", "weightsstr\x01")
def test_w1_a_field_boundary_is_part_of_the_identity(one: str, two: str, three: str, glue: str) -> None:
    """('ab', 'c') is not ('a', 'bc'), whatever stands between them, be it what the encoding itself puts there."""
    left, right = (one, two + glue + three), (one + glue + two, three)
    pairs = [
        (Namespace(model=left[0], weights=left[1]), Namespace(model=right[0], weights=right[1])),
        *(
            (replace(BASE_SPACE, **{a: left[0], b: left[1]}), replace(BASE_SPACE, **{a: right[0], b: right[1]}))  # type: ignore[arg-type]
            for a, b in (("weights", "adapter"), ("adapter", "salt"))
        ),
    ]
    for first_space, second_space in pairs:
        same = first_space == second_space
        assert (first_space.digest(BASE_SPEC) == second_space.digest(BASE_SPEC)) == same


def test_w1_unsaid_empty_and_the_word_for_it_are_three() -> None:
    """None, '' and 'None' are three adapters, and three salts; numbers are not their texts' neighbours."""
    adapters = [replace(BASE_SPACE, adapter=value).digest(BASE_SPEC) for value in (None, "", "None", "NoneType", "\x00")]
    salts = [replace(BASE_SPACE, salt=value).digest(BASE_SPEC) for value in (None, "", "None", "NoneType", "\x00")]
    numbers = [BASE_SPACE.digest(replace(BASE_SPEC, layers=a, kv_heads=b)) for a, b in ((1, 11), (11, 1), (111, 1), (1, 111))]

    assert len({*adapters, *salts, *numbers}) == 5 + 5 - 1 + 4


# --- W2 -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restarted", [False, True], ids=["in one run", "after a restart"])
async def test_w2_a_digest_that_is_always_the_same(tmp_path: Path, seed: int, restarted: bool) -> None:
    """Two prompts of 32 tokens whose blocks all have one digest, on disk: each reads its own bytes or misses, never the other's."""
    one, two = prompt(seed, 2), prompt(seed + 1, 2)
    pages = [one[:SIZE], one[SIZE:], two[:SIZE], two[SIZE:]]
    mixed = [list(itertools.chain(*order)) for count in (1, 2, 3) for order in itertools.product(pages, repeat=count)]
    rig = Rig(digest=lambda data: b"\x2a" * 32)
    config = small(spec=LARGE, directory=tmp_path / "ssd")

    async def look(cache: TierCache, kv: LocalKV) -> list[int]:
        lengths = [await read(kv, tokens) for tokens in (one, two)]
        for tokens in mixed:  # as any two blocks have one key, each might be found after any other
            await read(kv, tokens)
        await cache.check()
        return lengths

    async with opened_kv(config, rig, spec=LARGE) as (cache, kv):
        for tokens in (one, two):
            await store(kv, tokens)
            assert await kv.flush(tokens) == 2 * SIZE
        await sink(cache)
        if not restarted:
            assert await look(cache, kv) == [2 * SIZE, 2 * SIZE], "the tree knows both by their tokens, and so do their records"
    if restarted:
        async with opened_kv(config, rig, spec=LARGE) as (cache, kv):
            assert await look(cache, kv) == [SIZE, SIZE], "what may follow either is nobody's"


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.DRAM, Tier.SSD], ids=str)
async def test_w2_one_page_64_times(tmp_path: Path, seed: int, tier: Tier) -> None:
    """Equal pages at different places have bytes of their own, from every tier and after a restart; 63 repeats are 63 pages."""
    page = prompt(seed, 1)
    config = small(hbm=64, dram=64, ssd=80, spec=LARGE, directory=tmp_path / "ssd")
    async with opened_kv(config, spec=LARGE) as (cache, kv):
        await store(kv, page * 64)
        if tier < Tier.HBM:
            await lower(cache, Tier.HBM)
        if tier < Tier.DRAM:
            await lower(cache, Tier.DRAM)
        assert placed(kv, page * 64) == {tier: 64}
        async with kv.match(page * 63) as hit:
            promised = hit.tokens, dict(hit.tiers)
        assert promised == (63 * SIZE, {tier: 63 * SIZE})
        assert await read(kv, page * 64) == 64 * SIZE
        assert await read(kv, page * 65) == 64 * SIZE
        assert await read(kv, page[:-1] * 64) == 0
        assert await kv.flush(page * 64) == 64 * SIZE
        await cache.check()
    async with opened_kv(config, spec=LARGE) as (_, kv):
        assert [await read(kv, page * count) for count in (63, 64, 1)] == [63 * SIZE, 64 * SIZE, SIZE]


def test_w2_a_key_covers_what_comes_before_it() -> None:
    """Durable keys of equal pages differ by their place, their namespace and their width."""
    symbol = b"\x01\x00\x00\x00" * 16
    keys = block_keys(bytes(32), ROOT_KEY, symbol * 64, 64)
    others = block_keys(b"\x01" * 32, ROOT_KEY, symbol * 64, 64)
    narrower = block_keys(bytes(32), ROOT_KEY, symbol * 64, 32)

    assert len({*keys, *others, *narrower}) == 64 + 64 + 128
