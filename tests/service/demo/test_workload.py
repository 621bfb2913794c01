"""The scenes on the real tokenizer: as many requests as they say, prompts that share beginnings, none too long."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tiercache.service.demo.play import scenes
from tiercache.service.demo.workload import AGAIN, Again, Replies, Request


class Answers:
    """Answers every request with made-up tokens, and remembers it."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    async def __call__(self, request: Request) -> Replies:
        self.asked.append(request)
        return [[200 + sample + i for i in range(request.limit)] for sample in range(max(1, len(request.seeds)))]


@pytest.fixture
async def asked(real_tokenizer: Any) -> list[Request]:
    answers = Answers()
    for scene in scenes(real_tokenizer, 0):
        before = len(answers.asked)
        await scene.play(answers)
        assert len(answers.asked) - before == scene.requests
    return answers.asked


async def test_the_demo_stays_small(asked: list[Request]) -> None:
    """At most 24 requests, prompts of up to 350 tokens, up to 16 new ones."""
    assert len(asked) + len(AGAIN) <= 24
    assert max(len(request.prompt) for request in asked) <= 350
    assert max(request.limit for request in asked) <= 16


async def test_prompts_of_a_scene_share_beginnings(asked: list[Request]) -> None:
    """Each chat's turn begins with the turn before, and all chats begin alike."""
    turns = {request.label: request.prompt for request in asked if "turn" in request.label}
    for name in ("Ada", "Ben", "Cleo"):
        for turn in (1, 2):
            before = turns[f"{name}, turn {turn}"]
            assert turns[f"{name}, turn {turn + 1}"][: len(before)] == before
    for one, other in itertools.pairwise(turns.values()):
        assert one[:100] == other[:100]


async def test_again_asks_what_was_asked(asked: list[Request]) -> None:
    answers = Answers()
    again = Again(asked)

    await again.play(answers)

    assert [request.label for request in answers.asked] == list(AGAIN)
    assert len(AGAIN) == again.requests
    assert set(answers.asked) <= set(asked)
