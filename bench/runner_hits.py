"""What a hit adds to the pass over the tokens after it, by where its KV lies, beside the same pass with the KV in RAM."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch

from tiercache.bench.calibrate import disk_rates, memcpy_rate
from tiercache.bench.cold import chill
from tiercache.bench.figures import Goal, Reference, Spread
from tiercache.bench.run import Run
from tiercache.bench.runner_house import Beside, House, InProcess
from tiercache.bench.runner_passes import Passes
from tiercache.bench.runner_subject import NEW, Subject
from tiercache.bench.timing import quiet
from tiercache.service.runners.hf import Runner
from tiercache.service.runners.room import Room
from tiercache.types import Tier

GOAL_TOKENS = 2048
KV_IN_RAM = "KV in RAM"
_COLD = 0.01
"""The share of a disk's files that may be in memory for a read to count as cold."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How many tokens hits have, and how often each is measured."""

    lengths: Sequence[int]
    rounds: int
    rounds_at_goal: int

    def of(self, tokens: int) -> int:
        """Return how many prefixes of so many tokens are measured, each once in every tier."""
        return self.rounds_at_goal if tokens == GOAL_TOKENS else self.rounds

    @property
    def tokens(self) -> int:
        """Tokens of all prefixes, one more of each length than are measured, and of what is inserted after them."""
        return sum((self.of(tokens) + 1) * (tokens + 4 * NEW) for tokens in self.lengths)


class Place(NamedTuple):
    """Where the KV of a hit lies."""

    name: str
    tier: Tier
    goal: str | None = None
    """The goal of what such a hit adds."""


class Setting(NamedTuple):
    """A cache under one name, where it may keep files, and what is measured of it."""

    name: str
    house: type[Beside] | type[InProcess]
    folder: Path
    plan: Plan


class _Added(NamedTuple):
    """What hits of one length added to a pass."""

    at: dict[str, str | int | float]
    seconds: list[float]
    size: int
    """Bytes of KV of one hit."""
    memcpy: Reference
    place: Place


class _Timed(NamedTuple):
    """Seconds to the first token behind a hit, of the same pass with its KV in RAM, and what the first one has around its pass."""

    hit: float
    alone: float
    added: float


class Hits:
    """The measurements of one model. `kv` is the KV of a prompt as long as the longest prefix; all prefixes have its bytes."""

    def __init__(self, run: Run, subject: Subject, passes: Passes, kv: torch.Tensor) -> None:
        self._run = run
        self._subject = subject
        self._passes = passes
        self._kv = kv
        self._seeds = count(1 << 40)

    async def measure(self, setting: Setting) -> None:
        """Measure hits in every tier of one cache: in memory, and after restarts on a cold and on a warm disk."""
        subject, plan = self._subject, setting.plan
        size = plan.tokens * self._token_bytes
        size += size // 4 + 64 * subject.spec.block_bytes  # so that no watermark is reached
        where = setting.folder / "memory"
        async with setting.house(where, subject.space, subject.spec, hbm=size) as house:
            await self._store(house, plan)
            await self._tier(setting, house, Place("HBM", Tier.HBM))
        where = setting.folder / "disk"
        async with setting.house(where, subject.space, subject.spec, dram=size, ssd=2 * size + (64 << 20)) as house:
            await self._store(house, plan)
            await self._tier(setting, house, Place("DRAM", Tier.DRAM, "hit-dram"))
            await house.stop()
            left = chill(where)
            if left > _COLD:
                self._run.note(f"{left:.0%} of the SSD tier's files stayed in memory: hits that are called cold are not")
            before = self._disk(setting)
            await house.start()
            cold = await self._hits(setting, house, Place("SSD", Tier.SSD, "hit-ssd"))
            await house.stop()
            self._add_cold(cold, before, self._disk(setting))
            await house.start()
            await self._tier(setting, house, Place("SSD, warm", Tier.SSD))

    # --- inside -----------------------------------------------------------------------------------------------------------

    @property
    def _token_bytes(self) -> int:
        return self._subject.spec.block_bytes // self._subject.spec.block_size

    async def _store(self, house: House, plan: Plan) -> None:
        """Insert all prefixes, and see that what comes back are their bytes."""
        for tokens in plan.lengths:
            kv, out = self._kv[:, :, :tokens], torch.empty(self._subject.spec.shape(tokens), dtype=self._kv.dtype)
            for number in range(plan.of(tokens) + 1):
                prefix = self._prefix(tokens, number)
                stored = await house.kv.insert(prefix, kv)
                assert stored.stored == tokens, f"of {tokens} tokens: {stored}"
                async with house.kv.match(prefix) as hit:
                    assert torch.equal(await hit.gather(out), kv), "a hit has other bytes than were inserted"

    async def _tier(self, setting: Setting, house: House, place: Place) -> None:
        """Measure hits that are copies between memories."""
        for added in await self._hits(setting, house, place):
            rate = added.memcpy.value.median
            self._add(added, _sum("1.5 · bytes / memcpy + 2 ms", 1.5, added.size, [rate], 0.002, added.memcpy.drift))

    def _add_cold(self, found: Sequence[_Added], before: float | None, after: float | None) -> None:
        for added in found:
            if before is None or after is None:
                self._run.add("added", added.seconds, "s", at=added.at)
            else:
                self._add(added, _sum("1.3 · bytes / disk rate + 10 ms", 1.3, added.size, [before, after], 0.010, after / before))

    def _add(self, added: _Added, limit: Reference) -> None:
        goal = Goal(key=added.place.goal, at_most=1.0) if added.place.goal and added.at["tokens"] == GOAL_TOKENS else None
        self._run.add("added", added.seconds, "s", at=added.at, reference=limit, goal=goal)

    async def _hits(self, setting: Setting, house: House, place: Place) -> list[_Added]:
        """Measure hits of every length that lie in one place, each prefix once, and each beside the same pass with KV in RAM."""
        subject, plan = self._subject, setting.plan
        found: list[_Added] = []
        async with Runner(subject.model, subject.tokenizer, house.kv) as runner:
            for tokens in plan.lengths:
                room = subject.room(tokens + NEW)
                room.kv(0, tokens).copy_(self._kv[:, :, :tokens])
                # The first hit of a length is not counted: it makes the runner's room, and touches its memory.
                await self._request(runner, room, tokens, plan.of(tokens), place)
                size = tokens * self._token_bytes
                with self._run.beside("memcpy", lambda size=size: self._memcpy(size)) as memcpy, quiet():  # type: ignore[misc]
                    numbers = self._run.track(range(plan.of(tokens)), f"{setting.name}, {place.name}, {tokens} tokens")
                    timed = [await self._request(runner, room, tokens, number, place) for number in numbers]
                assert not runner.faults, f"the cache failed: {runner.faults}"
                at: dict[str, str | int | float] = {"tokens": tokens, "KV from": place.name, "cache": setting.name}
                alone = [one.alone for one in timed]
                self._run.add(
                    "first token", [one.hit for one in timed], "s", at=at, reference=Reference(KV_IN_RAM, Spread.of(alone))
                )
                found.append(_Added(at, [one.added for one in timed], size, memcpy.reference, place))
                ram: dict[str, str | int | float] = {**at, "KV from": "RAM", "cache": "none"}
                if place.tier is Tier.DRAM and all(figure.at != ram for figure in self._run.figures):
                    self._run.add("first token", alone, "s", at=ram)
        return found

    async def _request(self, runner: Runner, room: Room, tokens: int, number: int, place: Place) -> _Timed:
        """Time a request whose prefix hits, and the same pass behind `room`."""
        new = self._subject.prompt(next(self._seeds), NEW)
        room.resize(tokens)
        began = time.perf_counter()
        expected = self._subject.first_logits(new, room)
        alone = time.perf_counter() - began
        around = alone - sum(self._passes.take())
        prompt = [*self._prefix(tokens, number), *new]
        began = time.perf_counter()
        stream = runner.stream(prompt, max_new_tokens=1, stop_tokens=())
        await anext(stream)
        hit = time.perf_counter() - began
        [inside] = self._passes.take()
        async for _ in stream:
            pass
        found = stream.generation
        assert found.hit == {place.tier: tokens}, f"{tokens} tokens were to be in {place.tier}, and were {found.hit}"
        assert torch.allclose(found.first_logits, expected, rtol=1e-3, atol=1e-3), "a hit gives other logits than KV in RAM"
        return _Timed(hit, alone, hit - inside - around)

    def _memcpy(self, size: int) -> list[float]:
        return [memcpy_rate(size, self._subject.spec.block_bytes, rounds=3) for _ in range(self._run.pick(1, 3))]

    def _disk(self, setting: Setting) -> float | None:
        total = self._run.pick(4 << 20, 128 << 20)
        rates = disk_rates(setting.folder, total, self._subject.spec.block_bytes)
        if rates is None:
            self._run.note("the file system has no O_DIRECT: a cold hit is compared with nothing")
        return rates.read if rates is not None else None

    def _prefix(self, tokens: int, number: int) -> list[int]:
        return self._subject.prompt(1000 * tokens + number, tokens)


def _sum(name: str, times: float, size: int, rates: Sequence[float], more: float, drift: float) -> Reference:
    """Return what a hit may add: `times` what its bytes take at the rates that were measured, and `more` seconds."""
    return Reference(name, Spread.of([times * size / rate + more for rate in rates]), drift)
