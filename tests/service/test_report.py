"""One report, whether the cache is in this process or a daemon says what it counted."""

from __future__ import annotations

from pathlib import Path

from tests.service.caches import LARGE, SPACE, prompt, small, tensor_of
from tests.service.client.daemons import running
from tiercache.service.cli_client import Asker
from tiercache.service.client.client import connect
from tiercache.service.report import reports, reports_of
from tiercache.types import Tier


async def test_a_daemons_statistics_make_the_report_of_its_cache(tmp_path: Path) -> None:
    """Tiers, moves and what left: the same in both ways, in tokens where the daemon counts blocks."""
    config = small(hbm=4, dram=4, ssd=8, spec=LARGE, directory=tmp_path)
    async with running(config) as (daemon, address), connect(address, deadline=60.0) as client:
        kv = await client.open(SPACE, LARGE)
        for number in range(8):
            tokens = prompt(number, 4)
            await kv.insert(tokens, tensor_of(tokens, spec=LARGE))
            async with kv.match([*tokens[:32], *prompt(99, 1)]) as hit:
                assert hit.tokens == 32
        await daemon.cache.settle()

        [here] = reports(daemon.cache)
        [there] = reports_of(await Asker(daemon.path).ask("/v1/stats"))

    assert there == here
    assert (here.tiers[0].hits, here.tiers[0].queries) == (8 * 32, 8 * 48)
    assert here.copied[Tier.HBM, Tier.DRAM] and here.evicted
    assert here.tiers[0].used == 4 == here.tiers[0].capacity
