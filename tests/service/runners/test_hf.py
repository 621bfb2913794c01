"""The runner on a tiny model: what the cache gives and what it refuses never changes a token."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.service.runners.fake import FakeKV
from tiercache.errors import Closed, InvalidInput, InvalidTensor, InvalidTokens, LeaseLost, Refused, StaleHandle
from tiercache.leases import Refusal
from tiercache.service import face
from tiercache.service.face import Stored
from tiercache.service.runners import prefix
from tiercache.service.runners.generation import Generation
from tiercache.service.runners.hf import Runner
from tiercache.spec import KVSpec
from tiercache.types import Tier

Make = Callable[[FakeKV | None], Runner]
PROMPT = [(i * 37 + 11) % 97 for i in range(23)]


def same(one: Generation, other: Generation) -> bool:
    return (one.tokens, one.text) == (other.tokens, other.text) and torch.allclose(one.first_logits, other.first_logits, atol=1e-4)


async def test_text_without_a_cache_is_what_transformers_generates(tiny_model: Any, runner_of: Make) -> None:
    """Without a cache the runner is an ordinary greedy decoder."""
    expected = tiny_model.generate(torch.tensor([PROMPT]), max_new_tokens=12, do_sample=False)[0, len(PROMPT) :].tolist()

    generation = await runner_of(None).generate(PROMPT, max_new_tokens=12)

    assert generation.tokens == expected
    assert (generation.hit, generation.computed, generation.inserted) == ({}, 23, None)


async def test_second_run_hits_and_says_the_same(kv: FakeKV, runner_of: Make) -> None:
    """The second run of a prompt computes only what is no whole block, and gives the same text and logits."""
    baseline = await runner_of(None).generate(PROMPT, max_new_tokens=12)
    runner = runner_of(kv)

    first = await runner.generate(PROMPT, max_new_tokens=12)
    second = await runner.generate(PROMPT, max_new_tokens=12)

    assert same(first, baseline)
    assert same(second, baseline)
    assert (first.hit_tokens, first.computed, second.hit_tokens, second.computed) == (0, 23, 20, 3)
    assert kv.inserts == [(0, Stored(32, 0, 0)), (20, Stored(0, 12, 0))]
    assert kv.leases == 0


async def test_next_turn_hits_generated_tokens(kv: FakeKV, runner_of: Make) -> None:
    """A prompt that extends prompt and reply hits all whole blocks of both whose KV exists."""
    runner = runner_of(kv)
    first = await runner.generate(PROMPT, max_new_tokens=10)
    longer = [*PROMPT, *first.tokens, 1, 2, 3]

    second = await runner.generate(longer, max_new_tokens=5)

    assert second.hit_tokens == 32  # 23 + 10 tokens, of which the last has no KV yet
    assert same(second, await runner_of(None).generate(longer, max_new_tokens=5))


async def test_random_prompts_that_share_prefixes(kv: FakeKV, runner_of: Make, seed: int) -> None:
    """Whatever prefixes prompts share, the text is that of the runner without a cache, in any order of lengths."""
    chance = random.Random(seed)
    plain, cached = runner_of(None), runner_of(kv)

    for _ in range(12):
        prompt = PROMPT[: chance.randint(1, 23)] + [chance.randrange(97) for _ in range(chance.choice((0, 1, 7, 300)))]
        limit = chance.randint(1, 6)

        assert same(await cached.generate(prompt, max_new_tokens=limit), await plain.generate(prompt, max_new_tokens=limit))


async def test_tiers_tell_where_the_used_tokens_came_from(kv: FakeKV, runner_of: Make) -> None:
    """Of the promised tokens by tier, those that were not readable are taken from the slow end."""
    runner = runner_of(kv)
    await runner.generate(PROMPT, max_new_tokens=1)
    kv.fast_tokens, kv.ready_tokens = 8, 12

    generation = await runner.generate(PROMPT, max_new_tokens=1)

    assert generation.hit == {Tier.HBM: 8, Tier.SSD: 4}
    assert generation.computed == 11


@pytest.mark.parametrize(("ready", "good", "used"), [(0, 99, 0), (8, 99, 8), (20, 12, 12), (20, 0, 0)])
@pytest.mark.parametrize("own", [False, True])
async def test_fewer_tokens_than_promised(kv: FakeKV, runner_of: Make, ready: int, good: int, used: int, own: bool) -> None:
    """Blocks that are not readable, or turn out bad while they are copied, are computed; whosever tensor they come in."""
    runner = runner_of(kv)
    first = await runner.generate(PROMPT, max_new_tokens=6)
    kv.ready_tokens, kv.good_tokens, kv.own_tensors = ready, good, own

    second = await runner.generate(PROMPT, max_new_tokens=6)

    assert same(second, first)
    assert second.hit_tokens == used
    assert kv.inserts[-1][0] == used


@pytest.mark.parametrize("call", ["match", "ready", "gather", "release", "insert"])
@pytest.mark.parametrize("error", [LeaseLost, StaleHandle, Refused, Closed])
async def test_failing_cache_is_a_miss(kv: FakeKV, runner_of: Make, call: str, error: type[Refused]) -> None:
    """A cache that fails at any call is counted, and the text is the same."""
    runner = runner_of(kv)
    first = await runner.generate(PROMPT, max_new_tokens=6)
    kv.failures[call] = lambda: error("no")

    second = await runner.generate(PROMPT, max_new_tokens=6)
    third = (await runner.samples(PROMPT, seeds=[1], max_new_tokens=6, temperature=0))[0]

    assert same(second, first)
    assert same(third, first)
    assert runner.faults == {f"{call}: {error.__name__}": 2}
    assert (second.inserted is None) == (call == "insert")
    assert kv.leases == 0


async def test_cache_that_forgot_the_hit_refuses(kv: FakeKV, runner_of: Make) -> None:
    """Who deleted the prompt meanwhile, or a daemon that began anew, gets nothing back of it: that is counted, and no fault."""
    runner = runner_of(kv)
    await runner.generate(PROMPT, max_new_tokens=6)

    async for _ in (stream := runner.stream(PROMPT, max_new_tokens=6)):
        kv.blocks.clear()

    assert stream.generation.hit_tokens == 20
    assert not kv.blocks and runner.refused == {Refusal.DROPPED: 8}
    assert not runner.faults


async def test_wrong_use_of_the_cache_is_not_hidden(kv: FakeKV, runner_of: Make) -> None:
    """InvalidInput of the cache says that the program is wrong, and leaves the runner."""
    kv.failures["insert"] = lambda: InvalidTensor("wrong")

    with pytest.raises(InvalidTensor):
        await runner_of(kv).generate(PROMPT, max_new_tokens=2)

    assert kv.leases == 0


async def test_error_of_the_model_ends_the_lease(kv: FakeKV, runner_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that fails is not a miss: its error leaves the runner, and nothing is inserted."""
    runner = runner_of(kv)

    def fail(*_: object) -> torch.Tensor:
        raise ArithmeticError("the model")

    monkeypatch.setattr(runner, "_forward", fail)

    with pytest.raises(ArithmeticError):
        await runner.generate(PROMPT, max_new_tokens=2)

    assert kv.leases == 0
    assert kv.inserts == []


async def test_stop_token_ends_the_text(kv: FakeKV, runner_of: Make) -> None:
    """Generation ends with the first stop token, which belongs to the tokens."""
    runner = runner_of(kv)
    free = await runner.generate(PROMPT, max_new_tokens=12)
    stop = free.tokens[4]

    stopped = await runner.generate(PROMPT, max_new_tokens=12, stop_tokens=[stop])

    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]


async def test_models_own_stop_tokens_are_the_default(tiny_model: Any, runner_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without stop tokens in the call, those of the model's generation configuration hold; an empty list means none."""
    runner = runner_of(None)
    free = await runner.generate(PROMPT, max_new_tokens=8)
    monkeypatch.setattr(tiny_model.generation_config, "eos_token_id", [96, free.tokens[2]])

    stopped = await runner.generate(PROMPT, max_new_tokens=8)
    unstopped = await runner.generate(PROMPT, max_new_tokens=8, stop_tokens=())

    assert stopped.tokens == free.tokens[: free.tokens.index(free.tokens[2]) + 1]
    assert unstopped.tokens == free.tokens


async def test_stream_gives_tokens_as_they_come(kv: FakeKV, runner_of: Make) -> None:
    """A stream yields what generate returns, inserts after the last token, and tells the rest at its end."""
    runner = runner_of(kv)
    stream = runner.stream(PROMPT, max_new_tokens=6)

    seen = [(token, len(kv.inserts)) async for token in stream]

    assert [token for token, _ in seen] == stream.generation.tokens
    assert {inserts for _, inserts in seen} == {0}
    assert same(stream.generation, await runner_of(None).generate(PROMPT, max_new_tokens=6))


async def test_stream_that_is_closed_early_keeps_what_was_computed(kv: FakeKV, runner_of: Make) -> None:
    """A reader that has had enough ends the lease, and the KV up to there is cached."""
    async with runner_of(kv).stream(PROMPT, max_new_tokens=50) as stream:
        async for _ in stream:
            break

    assert stream.generation.tokens == (await runner_of(None).generate(PROMPT, max_new_tokens=1)).tokens
    assert kv.inserts == [(0, Stored(20, 0, 0))]
    assert kv.leases == 0


async def test_stream_tells_nothing_before_its_end(runner_of: Make) -> None:
    """`generation` of a stream that has not ended is an error of the program."""
    stream = runner_of(None).stream(PROMPT, max_new_tokens=2)

    with pytest.raises(InvalidInput):
        _ = stream.generation

    await stream.aclose()


async def test_cancelled_generation_ends_its_lease(kv: FakeKV, runner_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelling in the middle of a forward pass ends the lease at once, inserts nothing and leaves the runner usable."""
    runner = runner_of(kv)
    loop, entered, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    forward = runner._forward

    def held(*args: Any) -> torch.Tensor:
        loop.call_soon_threadsafe(entered.set)
        assert go_on.wait(60)
        return forward(*args)

    monkeypatch.setattr(runner, "_forward", held)
    task = asyncio.create_task(runner.generate(PROMPT, max_new_tokens=50))
    await entered.wait()

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert kv.leases == 0
    assert kv.inserts == []
    go_on.set()
    assert same(await runner.generate(PROMPT, max_new_tokens=3), await runner_of(None).generate(PROMPT, max_new_tokens=3))


async def test_loop_is_free_while_the_model_computes(runner_of: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward passes run in the runner's own named thread."""
    runner = runner_of(None)
    names = set()
    forward = runner._forward

    def named(*args: Any) -> torch.Tensor:
        names.add(threading.current_thread().name)
        return forward(*args)

    monkeypatch.setattr(runner, "_forward", named)

    await runner.generate(PROMPT, max_new_tokens=3)

    assert names == {"tiercache-runner_0"}


async def test_concurrent_requests_do_not_mix(kv: FakeKV, runner_of: Make) -> None:
    """Requests that run at the same time on one runner, with one prefix or another, each get their own text."""
    prompts = [PROMPT, PROMPT[:9] + PROMPT, PROMPT[::-1], PROMPT[:1]]
    expected = [await runner_of(None).generate(prompt, max_new_tokens=7) for prompt in prompts]
    runner = runner_of(kv)

    found = await asyncio.gather(*(runner.generate(prompt, max_new_tokens=7) for prompt in prompts))

    assert all(map(same, found, expected))


async def test_drawn_tokens_depend_on_the_seed_alone(kv: FakeKV, runner_of: Make) -> None:
    """At a temperature, the same seed gives the same tokens, with a cache and without; other seeds give others."""
    runner = runner_of(kv)

    runs = [(await runner.generate(PROMPT, max_new_tokens=8, temperature=3.0, seed=seed)).tokens for seed in (1, 2, 1)]
    plain = await runner_of(None).generate(PROMPT, max_new_tokens=8, temperature=3.0, seed=1)

    assert runs[0] == runs[2] == plain.tokens
    assert runs[0] != runs[1]


async def test_samples_are_what_each_seed_gives_alone(kv: FakeKV, runner_of: Make) -> None:
    """A batch of samples equals single generations with the same seeds, whatever else is in the batch."""
    runner = runner_of(kv)
    alone = [await runner_of(None).generate(PROMPT, max_new_tokens=8, temperature=3.0, seed=seed) for seed in (5, 6, 7)]

    together = await runner.samples(PROMPT, seeds=[5, 6, 7], max_new_tokens=8, temperature=3.0)
    again = await runner.samples(PROMPT, seeds=[7, 5], max_new_tokens=8, temperature=3.0)

    assert all(map(same, together, alone))
    assert [sample.tokens for sample in again] == [alone[2].tokens, alone[0].tokens]
    assert again[0].hit_tokens == 20


async def test_samples_end_at_their_own_stop_tokens(kv: FakeKV, runner_of: Make) -> None:
    """A sample that reached its stop token stays as it is while the others go on, and only its own tokens are inserted."""
    runner = runner_of(kv)
    free = await runner_of(None).samples(PROMPT, seeds=[5, 6], max_new_tokens=10, temperature=3.0)
    stop = next(token for token in free[0].tokens[1:] if token not in free[1].tokens)

    stopped = await runner.samples(PROMPT, seeds=[5, 6], max_new_tokens=10, temperature=3.0, stop_tokens=[stop])

    assert stopped[0].tokens == free[0].tokens[: free[0].tokens.index(stop) + 1]
    assert stopped[1].tokens == free[1].tokens
    known = [tuple(PROMPT + sample.tokens[:-1]) for sample in stopped]
    assert all(any(tokens[: len(key)] == key for tokens in known) for key in kv.blocks)


async def test_samples_insert_what_generate_hits(kv: FakeKV, runner_of: Make) -> None:
    """The KV that a batch leaves is the KV that a single generation would have computed."""
    runner = runner_of(kv)
    samples = await runner.samples(PROMPT, seeds=[5, 6], max_new_tokens=10, temperature=3.0)

    for sample in samples:
        longer = PROMPT + sample.tokens
        found = await runner.generate(longer, max_new_tokens=5)

        assert found.hit_tokens == 32
        assert same(found, await runner_of(None).generate(longer, max_new_tokens=5))


async def test_no_seeds_no_samples(runner_of: Make) -> None:
    """An empty list of seeds is an empty list of samples."""
    assert await runner_of(None).samples(PROMPT, seeds=[], max_new_tokens=3) == []


@pytest.mark.parametrize("prompt", [[], [97], [-1], [0, 1 << 40], [1, 2.0], [True]])
async def test_prompts_that_cannot_be_are_refused(runner_of: Make, prompt: list[Any]) -> None:
    """An empty prompt, what is no id, or an id that the model has no embedding for, is refused before anything runs."""
    with pytest.raises(InvalidTokens):
        await runner_of(None).generate(prompt, max_new_tokens=1)


async def test_limits_that_cannot_be_are_refused(runner_of: Make) -> None:
    """At least one new token must be asked for."""
    with pytest.raises(InvalidInput):
        await runner_of(None).generate(PROMPT, max_new_tokens=0)


async def test_closed_runner_says_so(runner_of: Make) -> None:
    """A closed runner computes nothing; closing it twice is fine."""
    runner = runner_of(None)
    await runner.close()
    await runner.close()

    with pytest.raises(Closed):
        await runner.generate(PROMPT, max_new_tokens=1)


def test_face_is_what_a_runner_takes() -> None:
    """The type checker holds that every implementation of the face suits a runner."""

    def narrow(kv: face.KV) -> prefix.KV:
        return kv

    assert callable(narrow)


async def test_spec_is_the_models(tiny_model: Any, runner_of: Make) -> None:
    """A runner says which layout its cache must be opened with."""
    assert runner_of(None).spec == KVSpec(layers=3, kv_heads=2, head_dim=8, dtype="float32", block_size=4)
