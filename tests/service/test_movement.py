"""Reading over tiers, at the face: copies are held open, and every byte is compared. Positions: 0 HBM, 1 DRAM, 2 SSD."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.seams import Rig
from tests.service.caches import (
    LARGE,
    SIZE,
    SPEC,
    opened_kv,
    placed,
    prompt,
    read,
    sink,
    small,
    store,
)
from tiercache.types import Tier


async def test_pieces_of_one_copy_may_arrive_in_any_order(tmp_path: Path, seed: int) -> None:
    """Blocks whose reads end last first are committed in chain order; with one of them failing, only those before it."""
    rig = Rig()
    rig.copies.chunk = 1
    tokens = prompt(seed, 6)
    async with opened_kv(small(hbm=8, dram=16, directory=tmp_path / "ssd"), rig) as (cache, kv):
        await store(kv, tokens)
        await sink(cache)
        hold = rig.copies.hold("blocks", to=1, after=True)
        fetching = asyncio.ensure_future(read(kv, tokens))
        await hold.reached(6)
        for _ in range(5):
            hold.let(-1)
            await asyncio.sleep(0)
            assert placed(kv, tokens) == {Tier.SSD: 6} and not fetching.done()

        hold.let(-1)

        assert await fetching == 6 * SIZE
        hold.release()
        await cache.settle()
        await cache.check()


def test_the_specs_here_lie_differently_on_disk() -> None:
    """One is stored several to a value, the other alone: both ways are moved above."""
    assert SPEC.block_bytes < 16 * 1024 <= LARGE.block_bytes
