"""What trees are asked: requests of chats, few-shot prompts, thoughts and a day's traffic, made of a seed.

A workload is one array of tokens and turns in it. A turn is one request: its prompt is matched, then the whole (prompt and answer)
is inserted. The same turns in the same order give the same hits in every tree that keeps whole blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 50_000
CHAT_TURN = 256
"""Tokens of a question and its answer together: about the mean of public chat logs. A quarter of them is the question."""
SYSTEM = 256
"""Tokens of the system prompt that all chats share."""


class Turn(NamedTuple):
    """One request: tokens `start` to `start + prompt` are asked for, up to `start + whole` is inserted."""

    start: int
    prompt: int
    whole: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Tokens and what is done with them: `before`, of which nobody takes the time, then the `batches`."""

    name: str
    tokens: NDArray[np.int32]
    before: Sequence[Turn]
    batches: Sequence[Sequence[Turn]]


def chats(count: int, length: int, *, last: int, seed: int = 0) -> Workload:
    """Return `count` chats that grow to `length` tokens turn by turn; the `last` turns of all are a batch each."""
    random = np.random.default_rng(seed)
    system = _tokens(random, min(SYSTEM, length // 4))
    tokens = np.concatenate([part for _ in range(count) for part in (system, _tokens(random, length - len(system)))])
    starts = range(0, count * length, length)
    ends = list(range(length, len(system), -CHAT_TURN))[::-1]

    def turn(start: int, end: int) -> Turn:
        return Turn(start, end - CHAT_TURN * 3 // 4 + start // length % 5, end)  # prompts seldom end with a block

    before = [turn(start, end) for start in starts for end in ends[:-last]]
    return Workload("chat", tokens, before, [[turn(start, end) for start in starts] for end in ends[-last:]])


def few_shot(tasks: int, questions: int, *, shots: int = 5, shot: int = 128, question: int = 64, answer: int = 32) -> Workload:
    """Return `questions` rounds of one question a task, each behind the examples of its task. The first round is not timed."""
    random = np.random.default_rng(1)
    examples = [_tokens(random, shots * shot) for _ in range(tasks)]
    parts: list[NDArray[np.int32]] = []
    batches: list[list[Turn]] = []
    at = 0
    for _ in range(questions):
        batch = []
        for example in examples:
            parts += [example, _tokens(random, question + answer)]
            whole = len(example) + question + answer
            batch.append(Turn(at, whole - answer, whole))
            at += whole
        batches.append(batch)
    return Workload("few-shot", np.concatenate(parts), batches[0], batches[1:])


def thoughts(problems: int, *, depth: int = 4, branches: int = 3, problem: int = 512, thought: int = 64) -> Workload:
    """Return trees of thoughts, level by level: each thought is a request whose prompt is the problem and the thoughts above it."""
    random = np.random.default_rng(2)
    paths = [_tokens(random, problem) for _ in range(problems)]
    parts: list[NDArray[np.int32]] = []
    levels: list[list[Turn]] = []
    at = 0
    for _ in range(depth):
        paths = [np.concatenate([path, _tokens(random, thought)]) for path in paths for _ in range(branches)]
        level = []
        for path in paths:
            level.append(Turn(at, len(path) - thought, len(path)))
            parts.append(path)
            at += len(path)
        levels.append(level)
    return Workload("thoughts", np.concatenate(parts), (), levels)


def traffic(requests: int, *, again: float = 0.33, seed: int = 3) -> Workload:
    """Return requests of many users as a service sees them: some go on with a chat seen lately, the others are new.

    Lengths are log-normal, a few long among many short; a chat is the likelier to go on the more lately it was seen. In batches of
    100. With `again` at 0.33 more than a third of the tokens asked for are found, as in the published trace of a chat service.
    """
    random = np.random.default_rng(seed)
    seen: list[NDArray[np.int32]] = []
    parts: list[NDArray[np.int32]] = []
    turns: list[Turn] = []
    at = 0
    for _ in range(requests):
        back = int(random.exponential(20.0)) + 1
        goes_on = back <= len(seen) and random.random() < again
        history = seen.pop(-back) if goes_on else _tokens(random, 0)
        question = int(np.clip(random.lognormal(6.0, 1.2), 8, 8192))
        whole = np.concatenate([history, _tokens(random, question + int(np.clip(random.lognormal(5.3, 0.8), 8, 2048)))])
        turns.append(Turn(at, len(history) + question, len(whole)))
        parts.append(whole)
        at += len(whole)
        seen.append(whole)
    batches = [turns[first : first + 100] for first in range(0, requests, 100)]
    return Workload("traffic", np.concatenate(parts), batches[0], batches[1:])


def leaves(count: int, *, block: int = 16) -> Workload:
    """Return `count` prompts of one block with nothing in common, and as many others for later."""
    tokens = np.random.default_rng(4).integers(0, VOCABULARY, (2 * count, block), dtype=np.int32)
    tokens[:, 0] = np.arange(2 * count)
    turns = [Turn(at, block, block) for at in range(0, 2 * count * block, block)]
    return Workload("leaves", tokens.reshape(-1), turns[:count], [turns[count:]])


def expected_hits(workload: Workload, block: int) -> list[int]:
    """Return the tokens that each turn finds, those of `before` first, by a table of all prefixes: nothing is ever evicted."""
    known: set[bytes] = set()
    hits: list[int] = []
    for start, prompt, whole in (*workload.before, *(turn for batch in workload.batches for turn in batch)):
        data = workload.tokens[start : start + whole].tobytes()
        prefixes = [data[: end * 4] for end in range(block, whole + 1, block)]
        found = 0
        while (found + 1) * block <= prompt and prefixes[found] in known:
            found += 1
        hits.append(found * block)
        known.update(prefixes)
    return hits


def _tokens(random: np.random.Generator, count: int) -> NDArray[np.int32]:
    return random.integers(0, VOCABULARY, count, dtype=np.int32)
