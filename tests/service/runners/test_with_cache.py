"""The runner on the cache itself, with tiers so small that everything moves."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.service.runners.conftest import BLOCK, Letters
from tiercache.config import Config
from tiercache.leases import Refusal
from tiercache.service.inprocess import TierCache
from tiercache.service.runners.hf import Runner, spec_of
from tiercache.spec import Namespace

SPACE = Namespace(model="tiny", weights="sha256:none")


@pytest.mark.parametrize(
    "tiers", [{"hbm": "64 KiB", "dram": "128 KiB"}, {"dram": "512 KiB"}, {"hbm": "32 KiB", "dram": "64 KiB", "ssd": "4 MiB"}]
)
async def test_text_is_the_same_while_blocks_move_and_leave(
    tiny_model: Any, tiers: dict[str, str], tmp_path: Path, seed: int
) -> None:
    """Prompts that share prefixes, beyond what the tiers hold: every text is the one without a cache, and the books are right."""
    chance = random.Random(seed)
    stems = [[chance.randrange(97) for _ in range(40)] for _ in range(4)]
    hits = 0
    async with TierCache(Config.of(**tiers, directory=str(tmp_path))) as cache:
        kv = await cache.open(SPACE, spec_of(tiny_model, BLOCK))
        async with Runner(tiny_model, Letters(), kv, block_size=BLOCK) as cached, Runner(tiny_model, Letters(), None) as plain:
            for _ in range(25):
                prompt = chance.choice(stems)[: chance.randint(1, 40)] + [chance.randrange(97) for _ in range(chance.randrange(60))]
                found = await cached.generate(prompt, max_new_tokens=4)
                hits += found.hit_tokens

                assert found.tokens == (await plain.generate(prompt, max_new_tokens=4)).tokens
            assert cached.faults == Counter()
        await cache.check()

    assert hits


async def test_what_the_cache_refuses_is_counted_by_reason(tiny_model: Any) -> None:
    """A prompt that no tier can hold whole: the text is there, the first two blocks are kept, and the rest is counted."""
    spec = spec_of(tiny_model, BLOCK)
    prompt = list(range(1, 8 * BLOCK))
    async with TierCache(Config.of(hbm=2 * spec.block_bytes)) as cache:
        kv = await cache.open(SPACE, spec)
        async with Runner(tiny_model, Letters(), kv, block_size=BLOCK) as runner:
            found = await runner.generate(prompt, max_new_tokens=4)
            counted, faults = dict(runner.refused), dict(runner.faults)

        assert found.inserted is not None and found.inserted.stored == 2 * BLOCK
        assert found.inserted.refused_because is Refusal.TOO_LARGE
        assert (counted, faults) == ({Refusal.TOO_LARGE: found.inserted.refused}, {})
        await cache.check()
