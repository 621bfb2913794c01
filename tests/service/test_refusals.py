"""Why an insert is refused where it takes a fault, a policy or a race to bring it about; the rest is in the suite of all faces."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import errno
from pathlib import Path

import pytest

from tests.seams import Rig
from tests.service.caches import SIZE, SPACE, SPEC, opened_kv, prompt, read, small, store, tensor_of
from tiercache.config import Config
from tiercache.leases import Refusal
from tiercache.policy import LRU
from tiercache.service.face import Stored
from tiercache.service.inprocess import TierCache


class _Choosy(LRU):
    """Wants nothing in the fastest tier, and no more than two blocks at once in the next."""

    def admit(self, position: int, blocks: int) -> bool:
        return position > 0 and blocks <= 2


async def test_a_policy_does_not_want_them(seed: int) -> None:
    """Two blocks are taken; three are not admitted, though there is room."""
    tokens, more = prompt(seed, 2), prompt(seed + 1, 3)
    seams = dataclasses.replace(Rig().seams(), policy=_Choosy)
    async with TierCache(small(hbm=8, dram=8, ssd=None), seams=seams) as cache:
        kv = await cache.open(SPACE, SPEC)
        taken = await kv.insert(tokens, tensor_of(tokens))
        refused = await kv.insert(more, tensor_of(more))

        assert taken == (2 * SIZE, 0, 0) and taken.refused_because is None
        assert refused == (0, 0, 3 * SIZE) and refused.refused_because is Refusal.NOT_ADMITTED
        await cache.check()


@pytest.mark.parametrize("started", [0, 2], ids=["from the beginning", "after two blocks"])
async def test_what_they_follow_is_deleted_meanwhile(seed: int, started: int) -> None:
    """The delete comes while the bytes are copied: nothing hangs in the air, and the counts say what is there afterwards."""
    rig = Rig()
    tokens = prompt(seed, 4)
    async with opened_kv(small(ssd=None), rig) as (cache, kv):
        await store(kv, tokens[: 2 * SIZE])
        hold = rig.threads.hold("_scatter", times=1)
        begin = started * SIZE
        inserting = asyncio.ensure_future(kv.insert(tokens, tensor_of(tokens, start=begin), start=begin))
        await hold.reached()
        assert await kv.delete(tokens[: 2 * SIZE]) == 2 * SIZE
        hold.release()

        outcome = await inserting

        assert outcome == (0, 0, (4 - started) * SIZE) and outcome.refused_because is Refusal.DROPPED
        assert await read(kv, tokens) == 0
        await cache.check()


async def test_a_disk_that_fails_refuses_no_insert(tmp_path: Path, seed: int) -> None:
    """What can't go down is dropped and counted: room in memory is there all the same, so the disk is never the reason."""
    rig = Rig()
    async with opened_kv(small(hbm=None, dram=4, directory=tmp_path / "ssd", admit_ms=20), rig) as (cache, kv):
        rig.disk.fail("commit", OSError(errno.EIO, "injected"))
        outcomes = [await kv.insert(tokens, tensor_of(tokens)) for tokens in (prompt(seed + number, 3) for number in range(6))]

        assert outcomes == [(3 * SIZE, 0, 0)] * 6
        assert {outcome.refused_because for outcome in outcomes} == {None}
        await cache.settle()
        await cache.check()


async def test_a_cache_of_disk_alone_takes_nothing_from_a_writer(tmp_path: Path, seed: int) -> None:
    """Nothing can be written in place: every prompt is too large for no memory."""
    config = Config.of(ssd="16 MiB", directory=str(tmp_path / "ssd"))
    async with opened_kv(config) as (_, kv):
        outcome = await kv.insert(prompt(seed, 2), tensor_of(prompt(seed, 2)))

    assert outcome == (0, 0, 2 * SIZE) and outcome.refused_because is Refusal.TOO_LARGE


def test_the_reason_is_beside_the_counts() -> None:
    """Three counts are unpacked and compared as before; copies keep the reason."""
    outcome = Stored(1, 2, 3, Refusal.LEASED)
    stored, present, refused = outcome

    assert (stored, present, refused) == outcome == Stored(1, 2, 3)
    assert Stored(1, 2, 0).refused_because is None
    assert str(outcome.refused_because) == "leased"
    assert copy.deepcopy(outcome).refused_because is Refusal.LEASED
