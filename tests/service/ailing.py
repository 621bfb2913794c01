"""What tests of degraded modes ask of a cache."""

from __future__ import annotations

import asyncio
from collections.abc import Set

from tests.seams import PATIENCE
from tests.service.client.fake import until
from tiercache.service.health import Ailment, Code
from tiercache.service.inprocess import TierCache


async def ailments(cache: TierCache) -> dict[Code, Ailment]:
    """Return what ails a cache, by code; each code once."""
    health = await cache.health()
    found = {ailment.code: ailment for ailment in health.ailments}
    assert len(found) == len(health.ailments), health
    assert health.status == ("degraded" if found else "ok") and health.codes == set(found)
    return found


async def eventually(cache: TierCache, codes: Set[Code]) -> None:
    """Wait until a cache has these ailments and no others."""
    async with asyncio.timeout(PATIENCE):
        while set(await ailments(cache)) != codes:  # noqa: ASYNC110 - health is computed when asked for, and sets no event
            await asyncio.sleep(0.005)


async def compared(cache: TierCache) -> None:
    """Wait until metadata has been compared with data: that waits for a write that hangs, too, and would be told beside it."""
    await until(lambda: all(stack._sweeping is None or stack._sweeping.done() for stack in cache.stacks))
