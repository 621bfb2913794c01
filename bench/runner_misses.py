"""What the cache costs a runner when nothing hits: time to the first token, tokens a second, and decoding alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from tiercache.bench.figures import Goal, Reference, Spread
from tiercache.bench.run import Run
from tiercache.bench.runner_hits import Setting
from tiercache.bench.runner_passes import Passes
from tiercache.bench.runner_subject import Subject
from tiercache.bench.timing import quiet
from tiercache.service.runners.hf import Runner

WITHOUT = "no cache"


class _Timed(NamedTuple):
    """One generation: seconds to its first token, to its last one, and to its end, when its KV has been inserted."""

    first: float
    last: float
    end: float
    passes: list[float]
    """Seconds that the model computed, for each token."""
    tokens: list[int]


class Misses:
    """The measurements of one model: the same prompts with and without a cache, in turns."""

    def __init__(self, run: Run, subject: Subject, passes: Passes, *, rounds: int, new: int) -> None:
        self._run = run
        self._subject = subject
        self._passes = passes
        self._rounds = rounds
        self._new = new
        self._seeds = count(1 << 41)

    async def measure(self, setting: Setting, prompts: Sequence[int]) -> None:
        """Measure prompts of so many tokens, each another one."""
        subject, spec = self._subject, self._subject.spec
        tokens = sum((length + self._new) * (self._rounds + 2) for length in prompts)
        room = 2 * tokens * spec.block_bytes // spec.block_size + 64 * spec.block_bytes
        async with (
            setting.house(setting.folder / "misses", subject.space, spec, dram=room) as house,
            Runner(subject.model, subject.tokenizer, house.kv) as beside,
            Runner(subject.model, subject.tokenizer, None) as alone,
        ):
            for length in prompts:
                pairs = await self._pairs(setting, beside, alone, length)
                assert not beside.faults, f"the cache failed: {beside.faults}"
                self._add(setting, length, pairs)

    async def _pairs(self, setting: Setting, beside: Runner, alone: Runner, length: int) -> list[tuple[_Timed, _Timed]]:
        """Return generations with the cache, and without it; the first pair is not counted."""
        pairs: list[tuple[_Timed, _Timed]] = []
        with quiet():
            for number in self._run.track(range(self._rounds + 1), f"{setting.name}, no hit, {length} tokens"):
                prompt = self._subject.prompt(next(self._seeds), length)
                # Who goes first changes: the second finds the weights in the processor's cache.
                order = (beside, alone) if number % 2 else (alone, beside)
                timed = {runner: await self._timed(runner, prompt) for runner in order}
                assert timed[beside].tokens == timed[alone].tokens, "the cache changes what is generated"
                pairs.append((timed[beside], timed[alone]))
        return pairs[1:]

    async def _timed(self, runner: Runner, prompt: list[int]) -> _Timed:
        began = time.perf_counter()
        stream = runner.stream(prompt, max_new_tokens=self._new, stop_tokens=())
        times = [time.perf_counter() - began async for _ in stream]
        end = time.perf_counter() - began
        assert not stream.generation.hit, "a prompt that was to be new hits"
        return _Timed(times[0], times[-1], end, self._passes.take(), stream.generation.tokens)

    def _add(self, setting: Setting, length: int, pairs: Sequence[tuple[_Timed, _Timed]]) -> None:
        at: dict[str, str | int | float] = {"prompt tokens": length, "cache": setting.name}

        def reference(samples: list[float]) -> Reference:
            return Reference(WITHOUT, Spread.of(samples))

        # The passes are the same work with and without the cache: each sample is their common median, and what was around them.
        first = statistics.median(timed.passes[0] for pair in pairs for timed in pair)
        whole = statistics.median(sum(timed.passes) for pair in pairs for timed in pair)

        def to_first(timed: _Timed) -> float:
            return first + timed.first - timed.passes[0]

        def a_second(timed: _Timed) -> float:
            return self._new / (whole + timed.end - sum(timed.passes))

        self._run.add(
            "first token, no hit",
            [to_first(beside) for beside, _ in pairs],
            "s",
            at=at,
            reference=reference([to_first(alone) for _, alone in pairs]),
            goal=None if self._run.quick else Goal(key="miss-first", at_most=1.01),
        )
        self._run.add(
            "tokens a second, no hit",
            [a_second(beside) for beside, _ in pairs],
            "1/s",
            at=at,
            reference=reference([a_second(alone) for _, alone in pairs]),
            goal=None if self._run.quick else Goal(key="miss-rate", at_least=0.99),
        )
        self._run.add(
            "tokens a second after the first",
            [(self._new - 1) / (beside.last - beside.first) for beside, _ in pairs],
            "1/s",
            at=at,
            reference=reference([(self._new - 1) / (alone.last - alone.first) for _, alone in pairs]),
        )
