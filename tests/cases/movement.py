"""What the cases of tier movement share: two pairs of tiers, a demotion to hold, and where a prompt lies. See `test_3_movement`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.seams import Hold, Rig
from tests.service.caches import small, stack_of
from tiercache.config import Config
from tiercache.leases import Lease
from tiercache.moves import Moves
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV
from tiercache.transfer import Work
from tiercache.types import Tier

LONG = 60_000
"""Milliseconds that no test waits for."""


class Pair(NamedTuple):
    """Two neighbouring tiers, of which the cases say the same: `upper` is the fastest that the cache has."""

    upper: Tier
    lower: Tier

    def config(self, path: Path, *, upper: int, lower: int, ssd: int = 64, **fields: Any) -> Config:
        """Return a configuration with so many blocks in each; below DRAM there is always a disk."""
        directory = path / "ssd"
        if self.upper is Tier.HBM:
            return small(hbm=upper, dram=lower, ssd=ssd, directory=directory, **fields)
        return small(hbm=None, dram=upper, ssd=lower, directory=directory, **fields)

    def hold(self, rig: Rig, *, after: bool = False) -> Hold:
        """Hold the copies from the upper tier to the lower one."""
        return rig.copies.hold(*self.copy, after=after)

    @property
    def copy(self) -> tuple[str]:
        """What the copier calls such a copy."""
        return ("blocks",) if self.upper is Tier.HBM else ("put",)


PAIRS = [Pair(Tier.HBM, Tier.DRAM), Pair(Tier.DRAM, Tier.SSD)]
each_pair = pytest.mark.parametrize("pair", PAIRS, ids=["HBM to DRAM", "DRAM to SSD"])
both_sides = pytest.mark.parametrize("after", [False, True], ids=["before the copy", "after the copy"])


def begin_demotion(cache: TierCache, blocks: int, *, drop: bool = False, past: bool = False) -> list[Work]:
    """Have `blocks` more slots of the fastest tier made free; return the moves that this began."""
    stack = stack_of(cache)
    work = stack.cache.moves.make_room(0, stack.cache.residency.slots[0].free + blocks, drop=drop, past=past)
    stack.mover.start(work)
    return work


def leased(cache: TierCache, kv: LocalKV, tokens: list[int]) -> Lease:
    """Take a lease that promotes nothing."""
    return stack_of(cache).cache.match(kv._desk.session, kv._desk.space, kv._key(tokens), count=False, charged=False)


async def turns(count: int = 50) -> None:
    """Let everything run that can run without a thread's answer."""
    for _ in range(count):
        await asyncio.sleep(0)


async def well_again(cache: TierCache) -> None:
    """Wait until no store is left alone any more after a refusal."""
    stack = stack_of(cache)
    while stack.cache.moves.refusing:
        await stack.mover.change()


class Asked:
    """How often room was asked for, by whomever: who waits without spinning asks a few times, not once a turn."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        ask: Callable[..., list[Work]] = Moves.make_room

        def make_room(moves: Moves, *given: Any, **named: Any) -> list[Work]:
            self.count += 1
            return ask(moves, *given, **named)

        patch.setattr(Moves, "make_room", make_room)
