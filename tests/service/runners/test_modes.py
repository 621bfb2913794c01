"""The real model on the real cache: one text, wherever the KV of the prompt lies.

The texts without a cache are computed once, and so is the KV that every mode begins with.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from tiercache.config import Config
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV
from tiercache.service.report import reports
from tiercache.service.runners.generation import Generation
from tiercache.service.runners.hf import Runner, spec_of
from tiercache.service.runners.model import Loaded
from tiercache.types import Tier

BLOCK = 16
NEW = 8
LONGEST = 200
TOLERANCE = 1e-3
"""Of a logit: what computing a prompt in two pieces changes is a hundredth of it."""
ONE_PROMPT = -(-(LONGEST + NEW) // BLOCK)
EVERYTHING = 20 * ONE_PROMPT
SUBJECTS = (
    *("apples", "bridges", "candles", "deserts", "engines", "forests", "gardens", "harbours", "islands", "jackets"),
    *("kitchens", "lanterns", "markets", "needles", "oceans", "pencils", "queens", "rivers", "schools", "trains"),
)


class Prompt(NamedTuple):
    """One prompt, what it gives without a cache, and the KV of its tokens."""

    tokens: list[int]
    plain: Generation
    kv: torch.Tensor

    @property
    def whole(self) -> int:
        """How many of its tokens a hit covers: whole blocks, and never the last token."""
        return (len(self.tokens) - 1) // BLOCK * BLOCK


class _Keeper:
    """A cache that never hits, and keeps what is inserted."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    @asynccontextmanager
    async def match(self, tokens: Sequence[int]) -> AsyncIterator[_NoHit]:
        yield _NoHit()

    async def insert(self, tokens: Sequence[int], tensor: torch.Tensor, *, start: int) -> None:
        self.kept.append(tensor.clone())


class _NoHit:
    tokens = 0
    tiers: dict[Tier, int] = {}  # noqa: RUF012 - nobody adds to it


def texts(tokenizer: object) -> list[list[int]]:
    """Return 20 prompts of 40 to 200 tokens, no two of which begin alike."""
    found = []
    for number, subject in enumerate(SUBJECTS):
        story = (
            f"{subject.capitalize()} were what my grandfather talked about most, and he knew a lot about {subject}. "
            f"When he was young, he lived in a small town near the sea, where everybody had something to do with {subject}. "
            f"In the morning he went to work, and in the evening he wrote a page of his book about {subject}. He said that there "
            f"were three kinds of {subject}: those that you can use every day, those that you keep for your children, and those "
            f"that nobody needs. My grandmother laughed at him and his {subject}, but she read every page, and sometimes she added "
            f"a line of her own. Many years later I found the book in a wooden box under the roof, between old letters, a broken "
            f"clock and a photograph of the harbour. The first page begins with a question about {subject}, and the answer, which "
            f"is on the last page, is quite short. He wrote that the best {subject}"
        )
        tokens: list[int] = tokenizer.encode(story, add_special_tokens=False)  # type: ignore[attr-defined]
        length = 40 + number * (LONGEST - 40) // (len(SUBJECTS) - 1)
        found.append(tokens[:length])
    return found


@pytest.fixture(scope="session")
def prompts(real_model: Loaded) -> list[Prompt]:
    model, tokenizer, _ = real_model

    async def compute() -> list[Prompt]:
        keeper = _Keeper()
        found = []
        async with Runner(model, tokenizer, None) as plain, Runner(model, tokenizer, keeper) as keeping:  # type: ignore[arg-type]
            for tokens in texts(tokenizer):
                expected = await plain.generate(tokens, max_new_tokens=NEW, stop_tokens=[])
                await keeping.generate(tokens, max_new_tokens=1)
                found.append(Prompt(tokens, expected, keeper.kept[-1]))
        return found

    return asyncio.run(compute())


class Opened(NamedTuple):
    """An open cache, its KV and a runner on it."""

    cache: TierCache
    kv: LocalKV
    runner: Runner


@asynccontextmanager
async def opened(model: Loaded, directory: Path, **slots: int) -> AsyncIterator[Opened]:
    """A cache with so many blocks in each tier, in which nothing is dropped because the machine is busy."""
    spec = spec_of(model.model, BLOCK)
    sizes = {tier: count * (spec.block_bytes + 4096 * (tier == "ssd")) for tier, count in slots.items()}
    config = Config.of(**sizes, directory=str(directory), admit_ms=600_000, promote_ms=600_000, lease_share=1.0)
    async with TierCache(config) as cache:
        kv = await cache.open(model.namespace, spec)
        async with Runner(model.model, model.tokenizer, kv, block_size=BLOCK) as runner:
            yield Opened(cache, kv, runner)
        await cache.check()


async def fill(kv: LocalKV, prompts: Sequence[Prompt], *, fillers: int = 0) -> None:
    """Insert the prompts, and then as many others, each of which takes a tier of `ONE_PROMPT` blocks whole."""
    for prompt in prompts:
        stored = await kv.insert(prompt.tokens, prompt.kv)
        assert stored.refused == 0
    length = ONE_PROMPT * BLOCK
    for filler in range(fillers):
        tokens = [filler] * length
        stored = await kv.insert(tokens, torch.zeros(kv.spec.shape(length)))
        assert stored.stored == length


async def ask(runner: Runner, prompt: Prompt) -> Generation:
    return await runner.generate(prompt.tokens, max_new_tokens=NEW, stop_tokens=[])


async def assert_all_the_same(house: Opened, prompts: Sequence[Prompt], tier: Tier) -> None:
    """Ask each prompt once; its whole blocks are all found in `tier`, and what it gives is what it gives without a cache."""
    for prompt in prompts:
        found = await ask(house.runner, prompt)
        assert found.hit == {tier: prompt.whole}
        assert (found.tokens, found.text) == (prompt.plain.tokens, prompt.plain.text)
        torch.testing.assert_close(found.first_logits, prompt.plain.first_logits, atol=TOLERANCE, rtol=0)
    assert house.runner.faults == Counter()


@pytest.mark.slow
async def test_all_hits_in_hbm(real_model: Loaded, prompts: list[Prompt], tmp_path: Path) -> None:
    """HBM holds everything, and nothing moves."""
    async with opened(real_model, tmp_path, hbm=EVERYTHING, dram=EVERYTHING) as house:
        await fill(house.kv, prompts)

        await assert_all_the_same(house, prompts, Tier.HBM)
        assert [count for *_, count in reports(house.cache)[0].moves()] == [0, 0]


async def test_all_hits_in_dram(real_model: Loaded, prompts: list[Prompt], tmp_path: Path) -> None:
    """HBM holds one prompt: each was pushed down by the next, the last one by a filler, and comes up when it is asked for."""
    async with opened(real_model, tmp_path, hbm=ONE_PROMPT, dram=EVERYTHING + 2 * ONE_PROMPT) as house:
        await fill(house.kv, prompts, fillers=1)

        await assert_all_the_same(house, prompts, Tier.DRAM)
        assert all(count for *_, count in reports(house.cache)[0].moves())


async def test_all_hits_on_ssd_and_after_reopening(real_model: Loaded, prompts: list[Prompt], tmp_path: Path) -> None:
    """HBM and DRAM hold one prompt each, so that all blocks go down and come up again; then the cache is closed and opened."""
    async with opened(real_model, tmp_path, hbm=ONE_PROMPT, dram=ONE_PROMPT, ssd=2 * EVERYTHING) as house:
        await fill(house.kv, prompts, fillers=2)

        await assert_all_the_same(house, prompts, Tier.SSD)
        assert all(count for *_, count in reports(house.cache)[0].moves())

    async with opened(real_model, tmp_path, hbm=ONE_PROMPT, dram=ONE_PROMPT, ssd=2 * EVERYTHING) as house:
        await assert_all_the_same(house, prompts, Tier.SSD)
        assert reports(house.cache)[0].failures == Counter()


async def test_one_flipped_byte_under_a_valid_checksum_changes_the_logits(
    real_model: Loaded, prompts: list[Prompt], tmp_path: Path
) -> None:
    """The KV of a hit is what the model computes with: one value that is 65536 times too large is seen in the logits."""
    prompt = prompts[-1]
    wrong = prompt.kv.clone()
    second = wrong[10, 1, BLOCK : 2 * BLOCK].flatten()
    largest = int(second.abs().argmax())
    before = float(second[largest])
    wrong[10, 1, BLOCK : 2 * BLOCK].view(torch.uint8).reshape(-1)[4 * largest + 3] ^= 0x08  # the exponent's fifth bit
    assert float(wrong[10, 1, BLOCK : 2 * BLOCK].flatten()[largest]) == before * 65536
    async with opened(real_model, tmp_path, hbm=ONE_PROMPT) as house:
        await house.kv.insert(prompt.tokens, wrong)

        found = await ask(house.runner, prompt)

    assert found.hit == {Tier.HBM: prompt.whole}
    assert (found.first_logits - prompt.plain.first_logits).abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize("tier", [Tier.HBM, Tier.DRAM])
async def test_one_flipped_byte_in_a_slot_is_a_miss(real_model: Loaded, prompts: list[Prompt], tmp_path: Path, tier: Tier) -> None:
    """A byte that changed behind the cache's back costs its block and what follows, and nothing else."""
    prompt = prompts[-1]
    # The bad blocks keep their slots until the lease on them ends, so that the good ones need others.
    async with opened(real_model, tmp_path, **{tier.name.lower(): 2 * ONE_PROMPT}) as house:
        await fill(house.kv, [prompt])
        async with house.kv.match(prompt.tokens) as hit:
            keys, _ = hit.view(2, 10)
            keys.view(torch.uint8)[3, 1, 0] ^= 0x01

        found = await ask(house.runner, prompt)
        again = await ask(house.runner, prompt)

        assert found.hit == {tier: 2 * BLOCK}
        assert again.hit == {tier: prompt.whole}
        assert found.tokens == again.tokens == prompt.plain.tokens
        assert reports(house.cache)[0].failures == {"checksum": 1}
