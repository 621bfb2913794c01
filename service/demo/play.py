"""Plays the scenes: every request without the cache and with it, through the daemon's public face alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tiercache.config import Config
from tiercache.errors import AuditFailed, Refused
from tiercache.service import runners
from tiercache.service.cli_client import Asker
from tiercache.service.client.client import BackOff, Client, connect
from tiercache.service.client.remote_kv import RemoteKV
from tiercache.service.demo.result import Life, Outcome, Result
from tiercache.service.demo.screen import Screen
from tiercache.service.demo.sidecar import Sidecar
from tiercache.service.demo.workload import Again, Chats, FewShot, Replies, Request, Scene, SelfConsistency, TreeOfThoughts
from tiercache.service.report import Report, reports_of
from tiercache.spec import KVSpec

if TYPE_CHECKING:
    from tiercache.service.runners import Generation, Loaded, Runner

BLOCK_SIZE = 16
SLOTS = {"hbm": 24, "dram": 32, "ssd": 256}
"""Blocks that each tier holds: the chats alone need 40, all scenes together about 90."""
TEMPERATURE = 0.6
_SLACK = 4096
_AT_ONCE = BackOff(first=0.01, most=0.02)
"""The demo measures how soon the daemon can be used again: the client is not to sleep through it."""
_DEADLINE = 20.0
"""Long: an engine would rather compute, but here a miss means no."""
_SETTLED = 5.0
_LOOK = 0.01


def small_tiers(spec: KVSpec, directory: str) -> Config:
    """Return tiers that hold `SLOTS` blocks of `spec`, the SSD tier in `directory`."""
    block = -(-spec.block_bytes // _SLACK) * _SLACK
    # A record on SSD has a head beside the block.
    sizes = {name: slots * (block + (_SLACK if name == "ssd" else 0)) for name, slots in SLOTS.items()}
    return Config.of(**sizes, directory=directory, drain_seconds=10.0)


def scenes(tokenizer: Any, seed: int) -> list[Scene]:
    """Return what is played before the daemon is stopped."""
    return [FewShot(tokenizer), SelfConsistency(tokenizer, seed), Chats(tokenizer), TreeOfThoughts(tokenizer, seed)]


class Player:
    """Plays `scenes`, stops `sidecar`, starts it again, and asks the requests with `labels` once more.

    The result grows as it plays.
    """

    def __init__(self, loaded: Loaded, screen: Screen, *, sidecar: Sidecar, scenes: Sequence[Scene], labels: Sequence[str]) -> None:
        self.result = Result()
        self._loaded = loaded
        self._screen = screen
        self._sidecar = sidecar
        self._scenes = scenes
        self._labels = labels
        self._asker = Asker(sidecar.places.socket)
        self._asked: list[Request] = []
        self._expected: dict[Request, list[Generation]] = {}

    async def play(self) -> Result:
        """Play everything and return what came of it. What the demo left in the directory before is cleared first.

        Raises what keeps the daemon from beginning; what ends it later is in the result.
        """
        model, tokenizer, _ = self._loaded
        places = self._sidecar.places
        async with runners.Runner(model, tokenizer, None, block_size=BLOCK_SIZE) as plain:
            config = small_tiers(plain.spec, str(places.tier))
            places.prepare(config)
            requests = sum(scene.requests for scene in self._scenes) + len(self._labels)
            self._screen.begin(self._loaded, plain.spec, config, places, requests)
            # The first passes through a model take longer than the later ones.
            await plain.generate(list(range(40)), max_new_tokens=2)
            async with self._sidecar:
                await self._sidecar.start()
                async with connect(self._sidecar.address, deadline=_DEADLINE, back_off=_AT_ONCE) as client:
                    await self._both_lives(client, plain)
        return self.result

    async def _both_lives(self, client: Client, plain: Runner) -> None:
        try:
            kv, first, _ = await self._begin(client, plain.spec)
            self._screen.serving(self.result.pid, first, self._sidecar.places)
            await kv.clear()
            before = await self._live(client, kv, plain, self._scenes)
            self._screen.stopping()
            boot = client.boot
            self.result.stopped_seconds = await self._sidecar.stop()
            self._screen.stopped(first, self.result.stopped_seconds)
            await self._sidecar.start()
            kv, second, after = await self._begin(client, plain.spec, boot)
            self.result.drained = after.durable() - before.durable()
            self._screen.restarted(second, self.result.drained)
            await self._live(client, kv, plain, [Again(self._asked, self._labels)])
            await self._sidecar.stop()
        except Refused as error:
            if not self.result.daemons:
                raise
            self.result.broken = await self._sidecar.fate() or str(error)
        finally:
            self.result.client = client.stats()

    async def _begin(self, client: Client, spec: KVSpec, last: bytes | None = None) -> tuple[RemoteKV, Life, Report]:
        """Wait for a daemon of another boot than the last one's; return its KV, who it is, and what it found on SSD."""
        boot = await self._sidecar.serves(client, after=last)
        kv = await client.open(self._loaded.namespace, spec)
        seconds = time.perf_counter() - self._sidecar.began
        life = Life(pid=self._sidecar.listener(), boot=boot.hex(), started_seconds=seconds)
        report = await self._report()
        self.result.daemons.append(life)
        return kv, life, report

    async def _live(self, client: Client, kv: RemoteKV, plain: Runner, scenes: Sequence[Scene]) -> Report:
        """Play scenes, audit the daemon's books, and return them."""
        model, tokenizer, _ = self._loaded
        async with runners.Runner(model, tokenizer, kv, block_size=BLOCK_SIZE) as cached:
            for scene in scenes:
                self._screen.scene(scene.title)
                await scene.play(_Asked(self, scene.title, plain, cached))
                self._screen.tiers(await self._report())
            self.result.faults += cached.faults
        try:
            await client.check()
        except AuditFailed as error:
            self.result.audit += [str(fault) for fault in error.fields["faults"]]
        report = await self._report()
        self.result.lives.append(report)
        return report

    async def _report(self) -> Report:
        """Return the daemon's report, as soon as no transfer is under way, or after a while."""
        until = time.perf_counter() + _SETTLED
        while True:
            stats = await self._asker.ask("/v1/stats")
            late, found = time.perf_counter() > until, reports_of(stats)
            if found and (late or not any(stack["in_flight"] for stack in stats["stacks"])):
                return found[0]
            if late:
                raise Refused("the daemon did not open the model's namespace")
            await asyncio.sleep(_LOOK)

    async def answer(self, scene: str, request: Request, plain: Runner, cached: Runner) -> Replies:
        """Answer a request on both runners, compare, show, and return the new tokens that the cached one gave."""
        self._screen.asking(request.label)
        expected = self._expected.get(request)
        if expected is None:
            expected = self._expected[request] = await _generate(plain, request)
        found = await _generate(cached, request)
        await self._sidecar.require_running()  # without it everything is a miss, and the rest would say nothing
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
