"""Conversations with a small template: what is appended, and when that is not possible."""

from __future__ import annotations

from typing import Any

import pytest

from tiercache.errors import Refused
from tiercache.service.runners.chat import Conversation, chat_tokens

END = ord("\n")


class Lines:
    """A tokenizer whose tokens are characters and whose template is one line a message."""

    hides_replies = False

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, tokenize: bool = True, add_generation_prompt: bool, return_dict: bool = False
    ) -> Any:
        shown = [message for message in messages if not (self.hides_replies and message["role"] == "assistant")]
        text = "".join(f"{message['role'][0]}:{message['content']}\n" for message in shown) + "a:" * add_generation_prompt
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [ord(letter) for letter in text]


def text(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


def test_messages_end_where_the_reply_begins() -> None:
    """The prompt ends with the opening of the reply."""
    assert text(chat_tokens(Lines(), [{"role": "user", "content": "hi"}])) == "u:hi\na:"


def test_conversation_grows_at_its_end() -> None:
    """System text comes once, replies as they were generated, and a cut reply is closed by the template."""
    chat = Conversation(Lines(), system="be brief")

    chat.ask("one")
    chat.reply([ord("1"), END])
    chat.ask("two")
    chat.reply([ord("2")])
    prompt = chat.ask("three")

    assert text(prompt) == "s:be brief\nu:one\na:1\nu:two\na:2\nu:three\na:"
    assert chat.tokens == prompt


def test_prompt_is_the_callers_own() -> None:
    """What the caller does with a prompt changes nothing in the conversation."""
    chat = Conversation(Lines())

    chat.ask("one").clear()

    assert text(chat.tokens) == "u:one\na:"


def test_template_that_hides_replies_is_refused() -> None:
    """Where a template drops replies, nothing can be appended, and the conversation says so and stays as it is."""
    tokenizer = Lines()
    tokenizer.hides_replies = True
    chat = Conversation(tokenizer)
    chat.ask("one")
    chat.reply([END])
    before = list(chat.tokens)

    with pytest.raises(Refused):
        chat.ask("two")

    assert chat.tokens == before
