"""The model computes with the first layers of a hit while the later ones are being copied; what befalls those is a miss."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.seams import Rig
from tests.service.caches import leases, opened, sink
from tests.service.client.daemons import own_process, running
from tests.service.runners.conftest import BLOCK, Letters
from tests.service.runners.fake import FakeKV
from tiercache.config import Config
from tiercache.errors import InvalidTensor, LeaseLost
from tiercache.prefetch import PrefetchPolicy
from tiercache.service import wire
from tiercache.service.client import copies
from tiercache.service.client.client import connect
from tiercache.service.daemon.session import Session
from tiercache.service.runners import layers
from tiercache.service.runners.generation import Generation
from tiercache.service.runners.hf import Runner, spec_of
from tiercache.service.runners.room import Room, cache_argument
from tiercache.spec import Namespace

SPACE = Namespace(model="tiny", weights="sha256:none")
PROMPT = [(i * 37 + 11) % 97 for i in range(23)]
HIT = 20
SECONDS = 30.0
Make = Callable[[Any], Runner]


@pytest.fixture
def runner_of(runner_of: Callable[..., Runner]) -> Make:
    """Runners that compute while layers come."""
    return partial(runner_of, by_layers=True)


class Watched:
    """Says which layers of a model have computed, in whatever thread."""

    def __init__(self, model: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.done: list[int] = []
        self.came = asyncio.Event()
        self._hooks = [
            layer.register_forward_hook(lambda *_, number=number: self._saw(number))
            for number, layer in enumerate(model.model.layers)
        ]

    def _saw(self, number: int) -> None:
        self.done.append(number)
        self.loop.call_soon_threadsafe(self.came.set)

    async def computed(self) -> list[int]:
        """Wait until a layer has computed; return which have."""
        async with asyncio.timeout(SECONDS):
            await self.came.wait()
        return list(self.done)

    def end(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()


@pytest.fixture
async def watched(tiny_model: Any) -> AsyncIterator[Callable[[], Watched]]:
    """A function that begins to watch the tiny model."""
    made: list[Watched] = []

    def watch() -> Watched:
        made.append(Watched(tiny_model))
        return made[-1]

    yield watch
    for each in made:
        each.end()


def same(one: Generation, other: Generation) -> bool:
    """Return whether two generations agree to the bit."""
    return one.tokens == other.tokens and torch.equal(one.first_logits, other.first_logits)


async def gathered(tiny_model: Any, kv: Any, tokens: list[int]) -> torch.Tensor:
    """Return the logits after `tokens` when the hit is gathered first, and computed with then."""
    room = Room(spec_of(tiny_model, BLOCK), 64)
    async with kv.match(tokens[:-1]) as hit:
        found = await hit.gather(out=room.kv(0, hit.tokens))
    room.resize(found.shape[2])
    with torch.inference_mode():
        inputs: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1, cache_argument(tiny_model): room.cache}
        output = tiny_model(input_ids=torch.tensor([tokens[room.length :]]), **inputs)
    logits: torch.Tensor = output.logits[0, -1]
    return logits


@asynccontextmanager
async def in_process(folder: Path, rig: Rig) -> AsyncIterator[tuple[Any, Any]]:
    """A cache in this process, and its KV opened for the tiny model."""
    async with opened(Config.of(dram="1 MiB", ssd="8 MiB", directory=str(folder)), rig) as cache:
        yield cache, cache


@asynccontextmanager
async def beside(folder: Path, rig: Rig) -> AsyncIterator[tuple[Any, Any]]:
    """A daemon, and a client of it."""
    config = Config.of(dram="1 MiB", ssd="8 MiB", directory=str(folder))
    async with running(config, rig) as (daemon, address), connect(address) as client:
        yield daemon.cache, client


both = pytest.mark.parametrize("house", [in_process, beside])


# --- the overlap ------------------------------------------------------------------------------------------------------------


async def test_the_model_computes_while_the_last_layer_is_being_copied(
    tiny_model: Any, runner_of: Make, watched: Callable[[], Watched], tmp_path: Path
) -> None:
    """With the copy of the last layer held in its thread, every layer before it has computed, and it has not."""
    rig = Rig()
    async with in_process(tmp_path, rig) as (cache, house):
        kv = await house.open(SPACE, spec_of(tiny_model, BLOCK))
        runner = runner_of(kv)
        first = await runner.generate(PROMPT, max_new_tokens=4)
        hold = rig.threads.hold_when("_layer", lambda places, layer, into: layer == 2)
        seen = watched()

        running = asyncio.create_task(runner.generate(PROMPT, max_new_tokens=4))
        await hold.reached()
        async with asyncio.timeout(SECONDS):
            while seen.done != [0, 1]:
                await seen.came.wait()
                seen.came.clear()
        waiting = not running.done()
        hold.release()
        second = await running

        assert waiting and second.hit_tokens == HIT and second.tokens == first.tokens
        assert torch.equal(second.first_logits, await gathered(tiny_model, kv, PROMPT))
        assert runner.faults == Counter()
        await cache.check()
        assert leases(cache) == 0


async def test_the_model_computes_before_later_layers_are_announced(
    tiny_model: Any, runner_of: Make, watched: Callable[[], Watched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that has said of layer 0 alone that it has arrived: layer 0 has computed, and layer 1 waits for its notice."""
    async with beside(tmp_path, Rig()) as (cache, client):
        kv = await client.open(SPACE, spec_of(tiny_model, BLOCK))
        runner = runner_of(kv)
        first = await runner.generate(PROMPT, max_new_tokens=4)
        await client.check()
        await sink(cache)
        tell, kept = Session.tell, []

        def keep_back(session: Session, notice: wire.Notice) -> None:
            if isinstance(notice, wire.Arrived) and notice.layer > 0:
                kept.append((session, notice))
            else:
                tell(session, notice)

        monkeypatch.setattr(Session, "tell", keep_back)
        seen = watched()
        running = asyncio.create_task(runner.generate(PROMPT, max_new_tokens=4))
        at_first = await seen.computed()
        await client.check()
        still = list(seen.done)
        for session, notice in kept:
            tell(session, notice)
        second = await running

        assert at_first == still == [0] and [notice.layer for _, notice in kept] == [1, 2]
        assert second.hit_tokens == HIT and second.tokens == first.tokens
        assert runner.faults == Counter() and client.stats().misses == {}


# --- the same to the bit ------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("low", [False, True], ids=["in memory", "on SSD"])
async def test_logits_are_those_of_a_gathered_hit(tiny_model: Any, runner_of: Make, tmp_path: Path, house: Any, low: bool) -> None:
    """Wherever the blocks lie, the same values are loaded, so that logits agree to the bit; samples are one prefill, too."""
    rig = Rig()
    async with house(tmp_path, rig) as (cache, client):
        kv = await client.open(SPACE, spec_of(tiny_model, BLOCK))
        runner = runner_of(kv)
        await runner.generate(PROMPT, max_new_tokens=1)
        if low:
            await client.check()
            await sink(cache)

        one = await runner.generate(PROMPT, max_new_tokens=6)
        many = await runner.samples(PROMPT, seeds=[1, 2], max_new_tokens=6, temperature=0)

        expected = await gathered(tiny_model, kv, PROMPT)
        assert [each.hit_tokens for each in (one, *many)] == [HIT] * 3
        assert all(torch.equal(each.first_logits, expected) for each in (one, *many))
        assert {tuple(each.tokens) for each in many} == {tuple(one.tokens)}
        assert runner.faults == Counter()
        await client.check()


# --- what goes wrong ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("error", [LeaseLost, OSError, RuntimeError], ids=lambda error: error.__name__)
@pytest.mark.parametrize("many", [False, True], ids=["one", "samples"])
async def test_a_layer_that_fails_is_a_miss(
    kv: FakeKV, runner_of: Make, layer: int, error: Callable[[str], Any], many: bool
) -> None:
    """In the middle of a pass, too: it is counted once, everything is computed, and no byte of the failed copy is used."""
    runner = runner_of(kv)
    plain = await runner_of(None).generate(PROMPT, max_new_tokens=6)
    await runner.generate(PROMPT, max_new_tokens=6)
    kv.failures[f"layer {layer}"] = lambda: error("no")

    if many:
        found = (await runner.samples(PROMPT, seeds=[1], max_new_tokens=6, temperature=0))[0]
    else:
        found = await runner.generate(PROMPT, max_new_tokens=6)

    assert found.tokens == plain.tokens and torch.equal(found.first_logits, plain.first_logits)
    assert (found.hit, found.computed) == ({}, 23)
    assert runner.faults == {f"layer: {error.__name__}": 1}
    assert kv.leases == 0
    kv.failures.clear()
    assert (await runner.generate(PROMPT, max_new_tokens=1)).hit_tokens == HIT


async def test_a_layer_with_fewer_tokens_than_the_first_is_a_miss(kv: FakeKV, runner_of: Make) -> None:
    """A block that turns out bad while the model computes with it: the pass is given up, and everything is computed."""
    runner = runner_of(kv)
    plain = await runner_of(None).generate(PROMPT, max_new_tokens=6)
    await runner.generate(PROMPT, max_new_tokens=6)
    kv.good_in_layer[2] = 8

    found = await runner.generate(PROMPT, max_new_tokens=6)

    assert same(found, plain) and found.hit == {}
    assert runner.faults == {"layer: LeaseLost": 1}


async def test_a_layer_that_never_comes_is_not_waited_for(kv: FakeKV, runner_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's thread waits a bounded time, then everything is computed; the copy that hangs is left alone."""
    runner = runner_of(kv)
    plain = await runner_of(None).generate(PROMPT, max_new_tokens=6)
    await runner.generate(PROMPT, max_new_tokens=6)
    kv.gates[1] = asyncio.Event()
    monkeypatch.setattr(layers, "PATIENCE", 0.05)

    found = await runner.generate(PROMPT, max_new_tokens=6)

    assert same(found, plain) and runner.faults == {"layer: TimeoutError": 1}
    assert kv.leases == 0


async def test_wrong_use_in_the_middle_is_not_hidden(kv: FakeKV, runner_of: Make) -> None:
    """InvalidInput of a later layer leaves the runner, as that of the first one does."""
    runner = runner_of(kv)
    await runner.generate(PROMPT, max_new_tokens=1)
    kv.failures["layer 2"] = lambda: InvalidTensor("wrong")

    with pytest.raises(InvalidTensor):
        await runner.generate(PROMPT, max_new_tokens=1)

    assert kv.leases == 0


async def test_a_slot_that_is_given_away_in_the_middle_is_a_miss(
    tiny_model: Any, runner_of: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose slots get another generation under its copies computes everything, and says what happened."""
    async with beside(tmp_path, Rig()) as (cache, client):
        kv = await client.open(SPACE, spec_of(tiny_model, BLOCK))
        runner = runner_of(kv)
        plain = await runner_of(None).generate(PROMPT, max_new_tokens=6)
        await runner.generate(PROMPT, max_new_tokens=6)
        copy = copies.layer

        def lost(arenas: Any, places: Any, low: int, into: Any) -> bool:
            return copy(arenas, places, low, into) and low == 0

        monkeypatch.setattr(copies, "layer", lost)
        found = await runner.generate(PROMPT, max_new_tokens=6)

        assert same(found, plain) and found.hit == {}
        assert runner.faults["layer: LeaseLost"] == 1
        await client.check()
        assert leases(cache) == 0


async def test_a_daemon_that_dies_in_the_middle_is_a_miss(
    tiny_model: Any, runner_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after layer 0 was given: the pass is given up, everything is computed, the text is the same."""
    with own_process(Config.of(dram="1 MiB", admit_ms=5000)) as daemon:
        async with connect(daemon.address) as client:
            async with asyncio.timeout(SECONDS):
                await client.connected()
            kv = await client.open(SPACE, spec_of(tiny_model, BLOCK))
            runner = runner_of(kv)
            plain = await runner_of(None).generate(PROMPT, max_new_tokens=6)
            await runner.generate(PROMPT, max_new_tokens=6)
            copy, killed = copies.layer, threading.Event()

            def dies(arenas: Any, places: Any, low: int, into: Any) -> bool:
                if low and not killed.is_set():
                    daemon.kill()
                    killed.set()
                return copy(arenas, places, low, into)

            monkeypatch.setattr(copies, "layer", dies)
            found = await runner.generate(PROMPT, max_new_tokens=6)

            assert killed.is_set() and found.tokens == plain.tokens
            assert torch.allclose(found.first_logits, plain.first_logits, atol=1e-4)


@both
async def test_a_cancelled_pass_leaves_nothing(tiny_model: Any, runner_of: Make, tmp_path: Path, house: Any) -> None:
    """Cancelled while the model waits for a layer: the lease ends, no task and no thread is left, and the runner goes on."""
    rig = Rig()
    async with house(tmp_path, rig) as (cache, client):
        kv = await client.open(SPACE, spec_of(tiny_model, BLOCK))
        runner = runner_of(kv)
        plain = await runner.generate(PROMPT, max_new_tokens=6)
        came, go = asyncio.Event(), asyncio.Event()
        stopping: Any = Stopping(kv, came, go)
        runner._kv = stopping
        task = asyncio.create_task(runner.generate(PROMPT, max_new_tokens=6))
        async with asyncio.timeout(SECONDS):
            await came.wait()

        task.cancel()
        await asyncio.wait([task])

        assert task.cancelled()
        await client.check()
        assert leases(cache) == 0
        assert not [each for each in asyncio.all_tasks() if each.get_name() == "tiercache-layers"]
        go.set()
        found = await asyncio.wait_for(runner.generate(PROMPT, max_new_tokens=6), SECONDS)
        assert found.tokens == plain.tokens and found.hit_tokens == HIT


class Stopping:
    """A KV whose hits stop at layer 1 until they may go on."""

    def __init__(self, kv: Any, came: asyncio.Event, go: asyncio.Event) -> None:
        self._kv, self._came, self._go = kv, came, go
        self.insert = kv.insert

    @asynccontextmanager
    async def match(self, tokens: list[int]) -> AsyncIterator[Any]:
        async with self._kv.match(tokens) as hit:
            layer: Callable[..., Awaitable[Any]] = hit.layer

            async def held(number: int, out: Any = None) -> Any:
                if number == 1:
                    self._came.set()
                    await self._go.wait()
                return await layer(number, out)

            hit.layer = held
            yield hit


async def test_a_runner_says_how_long_it_waits(tiny_model: Any, kv: FakeKV) -> None:
    """`Runner(prefetch=…)` is what each hit's `ready` is asked for; without it the cache's own policy holds."""
    for prefetch, asked in (("best-effort", PrefetchPolicy(0.0)), (0.5, PrefetchPolicy(0.5)), (None, None)):
        async with Runner(tiny_model, Letters(), kv, block_size=BLOCK, prefetch=prefetch) as runner:
            await runner.generate(PROMPT, max_new_tokens=1)
            await runner.generate(PROMPT, max_new_tokens=1)

        assert kv.patience[-1] == asked
