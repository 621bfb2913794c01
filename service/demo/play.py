"""Plays the scenes: every request without the cache and with it, through the public face alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tiercache.config import Config
from tiercache.errors import AuditFailed
from tiercache.service import runners
from tiercache.service.demo.result import Outcome, Result
from tiercache.service.demo.screen import Screen
from tiercache.service.demo.workload import Again, Chats, FewShot, Replies, Request, Scene, SelfConsistency, TreeOfThoughts
from tiercache.service.inprocess import TierCache
from tiercache.service.report import reports
from tiercache.spec import KVSpec

if TYPE_CHECKING:
    from tiercache.service.runners import Generation, Loaded, Runner

BLOCK_SIZE = 16
SLOTS = {"hbm": 24, "dram": 32, "ssd": 256}
"""Blocks that each tier holds: the chats alone need 40, all scenes together about 90."""
TEMPERATURE = 0.6
_SLACK = 4096


def small_tiers(spec: KVSpec, directory: str) -> Config:
    """Return tiers that hold `SLOTS` blocks of `spec`, the SSD tier in `directory`."""
    block = -(-spec.block_bytes // _SLACK) * _SLACK
    # A record on SSD has a head beside the block.
    sizes = {name: slots * (block + (_SLACK if name == "ssd" else 0)) for name, slots in SLOTS.items()}
    return Config.of(**sizes, directory=directory, drain_seconds=10.0)


def scenes(tokenizer: Any, seed: int) -> list[Scene]:
    """Return what is played before the cache is closed."""
    return [FewShot(tokenizer), SelfConsistency(tokenizer, seed), Chats(tokenizer), TreeOfThoughts(tokenizer, seed)]


class Player:
    """Plays `scenes`, then `again` on the same directory after a restart. The result grows as it plays."""

    def __init__(self, loaded: Loaded, screen: Screen, *, directory: str, scenes: Sequence[Scene], labels: Sequence[str]) -> None:
        self.result = Result()
        self._loaded = loaded
        self._screen = screen
        self._directory = directory
        self._scenes = scenes
        self._again = labels
        self._asked: list[Request] = []
        self._expected: dict[Request, list[Generation]] = {}

    async def play(self) -> Result:
        """Play everything and return what came of it. What the demo left in the directory before is cleared first."""
        model, tokenizer, _ = self._loaded
        async with runners.Runner(model, tokenizer, None, block_size=BLOCK_SIZE) as plain:
            config = small_tiers(plain.spec, self._directory)
            self._screen.begin(self._loaded, plain.spec, config, sum(scene.requests for scene in self._scenes) + len(self._again))
            # The first passes through a model take longer than the later ones.
            await plain.generate(list(range(40)), max_new_tokens=2)
            await self._live(config, plain, self._scenes, clear=True)
            await self._live(config, plain, [Again(self._asked, self._again)], clear=False)
        return self.result

    async def _live(self, config: Config, plain: Runner, scenes: Sequence[Scene], *, clear: bool) -> None:
        """Play scenes from the opening of the cache to its end."""
        model, tokenizer, namespace = self._loaded
        began = time.perf_counter()
        async with TierCache(config) as cache:
            kv = await cache.open(namespace, plain.spec)
            self.result.reopened_seconds = time.perf_counter() - began
            if clear:
                await kv.clear()
            async with runners.Runner(model, tokenizer, kv, block_size=BLOCK_SIZE) as cached:
                for scene in scenes:
                    self._screen.scene(scene.title)
                    await scene.play(_Asked(self, scene.title, plain, cached))
                    await cache.settle()
                    [report] = reports(cache)
                    self._screen.tiers(report)
                self.result.faults += cached.faults
            await self._audit(cache)
            [before] = reports(cache)
            self._screen.closing()
        [report] = reports(cache)
        self._screen.closed(report.written() - before.written())
        self.result.lives.append(report)

    async def _audit(self, cache: TierCache) -> None:
        try:
            await cache.check()
        except AuditFailed as error:
            self.result.audit += str(error).splitlines()

    async def answer(self, scene: str, request: Request, plain: Runner, cached: Runner) -> Replies:
        """Answer a request on both runners, compare, show, and return the new tokens that the cached one gave."""
        self._screen.asking(request.label)
        expected = self._expected.get(request)
        if expected is None:
            expected = self._expected[request] = await _generate(plain, request)
        found = await _generate(cached, request)
        outcome = Outcome(
            request=request,
            hit=found[0].hit,
            computed=found[0].computed,
            first_token=found[0].first_token_seconds,
            first_token_without=expected[0].first_token_seconds,
            texts=[one.text for one in found],
            expected=[one.text for one in expected],
            same=[one.tokens for one in found] == [one.tokens for one in expected],
            drift=max(_drifts(found, expected)),
        )
        self._asked.append(request)
        self.result.outcomes.append((scene, outcome))
        self._screen.outcome(outcome)
        return [one.tokens for one in found]


class _Asked:
    """The `ask` of one scene."""

    def __init__(self, player: Player, scene: str, plain: Runner, cached: Runner) -> None:
        self._player = player
        self._scene = scene
        self._runners = plain, cached

    async def __call__(self, request: Request) -> Replies:
        return await self._player.answer(self._scene, request, *self._runners)


async def _generate(runner: Runner, request: Request) -> list[Generation]:
    if not request.seeds:
        return [await runner.generate(request.prompt, max_new_tokens=request.limit, stop_tokens=request.stop)]
    return await runner.samples(
        request.prompt, seeds=request.seeds, max_new_tokens=request.limit, temperature=TEMPERATURE, stop_tokens=request.stop
    )


def _drifts(found: Sequence[Generation], expected: Sequence[Generation]) -> Iterator[float]:
    for one, other in zip(found, expected, strict=True):
        yield float((one.first_logits - other.first_logits).abs().max())
