"""What a daemon says of the device that its HBM tier lies on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.seams import Rig
from tests.service.caches import SPACE, SPEC, small
from tests.service.daemon.http import get
from tests.service.daemon.raw import daemon_of
from tiercache.kernels.device import LEAST_EXPORT
from tiercache.kernels.lazy import LazyDevice


@pytest.mark.parametrize("pinned", [True, False])
async def test_a_daemon_says_what_it_takes_of_the_device(seed: int, tmp_path: Path, pinned: bool) -> None:
    """In /v1/stats, to Prometheus, and in its health; nothing of it stays when it has stopped."""
    device, rig = LazyDevice(seed), Rig()
    device.most_registered = None if pinned else 0
    rig.device = lambda name: device
    size = 8 * SPEC.block_bytes
    card, host = (4 + 2) * size + SPEC.block_bytes, 4 * size + SPEC.block_bytes  # stages, and one block's
    async with daemon_of(tmp_path, small(device="cuda:0", ssd=None), rig) as daemon:
        await daemon.cache.open(SPACE, SPEC)
        _, stats = await get(daemon.path, "/v1/stats")
        _, text = await get(daemon.path, "/metrics")
        _, health = await get(daemon.path, "/health")

        [found] = [one["device"] for one in stats["stacks"]]
        assert (found["name"], found["slot_bytes"], found["stage_bytes"]) == ("lazy", LEAST_EXPORT, card)
        assert (found["pinned_bytes"], found["pageable_bytes"]) == ((size, 0) if pinned else (0, size))
        who = f'block_bytes="{SPEC.block_bytes}",device="lazy"'
        gauges = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("tiercache_device_"))
        assert {name: int(float(value)) for name, value in gauges.items()} == {
            f'tiercache_device_bytes{{{who},what="slots"}}': LEAST_EXPORT,
            f'tiercache_device_bytes{{{who},what="stages"}}': card,
            f'tiercache_device_host_bytes{{{who},what="stages"}}': host,
            f'tiercache_device_host_bytes{{{who},what="pinned"}}': size if pinned else 0,
            f'tiercache_device_host_bytes{{{who},what="pageable"}}': 0 if pinned else size,
        }
        assert {lane["lane"] for lane in stats["workers"]} >= {"up", "down"}
        assert [reason["code"] for reason in health["reasons"]] == ([] if pinned else ["pageable"])
    assert device.registered == [] and device.allocated == 0
