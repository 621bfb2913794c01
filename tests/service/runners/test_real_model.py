"""The runner and the chat on the packaged SmolLM2-135M-Instruct."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch

from tests.service.runners.fake import FakeKV
from tiercache.service.runners.chat import Conversation, chat_tokens
from tiercache.service.runners.hf import Runner
from tiercache.service.runners.model import Loaded

pytestmark = pytest.mark.slow

QUESTIONS = [
    "What is the capital of France?",
    "Count from one to five.",
    "Name a colour of the rainbow — and say why ☂ you like it.",
]


@pytest.fixture
def kv() -> FakeKV:
    return FakeKV(16)


@pytest.fixture
async def cached(real_model: Loaded, kv: FakeKV) -> AsyncIterator[Runner]:
    async with Runner(real_model.model, real_model.tokenizer, kv) as runner:
        yield runner


@pytest.mark.parametrize("question", QUESTIONS)
async def test_text_is_what_transformers_generates(real_model: Loaded, cached: Runner, question: str) -> None:
    """With the cache empty and full, the greedy text is that of transformers' own generate."""
    prompt = chat_tokens(real_model.tokenizer, [{"role": "user", "content": question}])
    inputs = torch.tensor([prompt])
    expected = real_model.model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=12, do_sample=False)

    cold = await cached.generate(prompt, max_new_tokens=12)
    warm = await cached.generate(prompt, max_new_tokens=12)

    assert cold.tokens == warm.tokens == expected[0, len(prompt) :].tolist()
    assert torch.allclose(cold.first_logits, warm.first_logits, atol=1e-3)
    assert (cold.hit_tokens, warm.hit_tokens) == (0, (len(prompt) - 1) // 16 * 16)


async def test_each_turn_of_a_chat_hits_the_turn_before(real_model: Loaded, cached: Runner) -> None:
    """The second turn computes only what the user said last, and answers as without a cache."""
    chat = Conversation(real_model.tokenizer, system="Answer in few words.")
    first = await cached.generate(chat.ask(QUESTIONS[0]), max_new_tokens=16)
    said = len(chat.tokens)
    chat.reply(first.tokens)
    prompt = chat.ask(QUESTIONS[1])

    second = await cached.generate(prompt, max_new_tokens=8)

    async with Runner(real_model.model, real_model.tokenizer, None) as plain:
        assert second.tokens == (await plain.generate(prompt, max_new_tokens=8)).tokens
    assert second.hit_tokens == (said + len(first.tokens) - 1) // 16 * 16


async def test_samples_of_the_real_model(real_model: Loaded, cached: Runner) -> None:
    """Samples with the prompt cached are those without a cache, one for one."""
    prompt = chat_tokens(real_model.tokenizer, [{"role": "user", "content": QUESTIONS[2]}])
    async with Runner(real_model.model, real_model.tokenizer, None) as plain:
        expected = await plain.samples(prompt, seeds=[1, 2, 3], max_new_tokens=6)

    await cached.generate(prompt, max_new_tokens=1)
    found = await cached.samples(prompt, seeds=[1, 2, 3], max_new_tokens=6)

    assert [sample.text for sample in found] == [sample.text for sample in expected]
    assert len({sample.text for sample in found}) > 1


def test_conversation_is_the_template_of_its_messages(real_model: Loaded) -> None:
    """Where a reply tokenises as the model chose its tokens, the growing chat equals the whole chat rendered anew."""
    tokenizer = real_model.tokenizer
    chat = Conversation(tokenizer, system="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})

        assert chat.ask(question) == chat_tokens(tokenizer, messages)

        messages.append({"role": "assistant", "content": "Paris, surely."})
        chat.reply([*tokenizer.encode("Paris, surely.", add_special_tokens=False), tokenizer.eos_token_id])


@pytest.mark.parametrize("ended", [True, False])
def test_every_turn_extends_the_turn_before(real_model: Loaded, ended: bool) -> None:
    """Prompt and generated ids stay as they were, odd ones too, and the template closes a reply that was cut off."""
    tokenizer = real_model.tokenizer
    chat = Conversation(tokenizer)
    odd = [17, 17, 30000, 198, 1234] + [tokenizer.eos_token_id] * ended
    first = chat.ask("Hello")
    chat.reply(odd)

    second = chat.ask("And now?")

    assert second[: len(first) + len(odd)] == first + odd
    rest = tokenizer.decode(second[len(first) + 5 :])
    assert rest == "<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
