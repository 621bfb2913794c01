"""From messages to token ids, such that a conversation only ever grows at its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tiercache.errors import Refused

_REPLY = "\u2402reply\u2403"  # stands for a reply in a rendered template; holds no character that a template escapes


def chat_tokens(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Return the token ids of `messages` in the model's chat template, up to where its reply begins."""
    ids: list[int] = tokenizer.apply_chat_template(
        [dict(message) for message in messages], add_generation_prompt=True, return_dict=False
    )
    return ids


class Conversation:
    """A chat kept as token ids: what was said stays as it was said, so that each turn's prompt extends the turn before.

    Rendering and tokenising the whole chat anew at each turn may split a reply into other tokens than the model chose, and
    from there on nothing hits. `tokens` is everything so far, prompt and replies.
    """

    def __init__(self, tokenizer: Any, *, system: str | None = None) -> None:
        self.tokens: list[int] = []
        self._tokenizer = tokenizer
        self._system = system

    def ask(self, text: str) -> list[int]:
        """Append what the user says and the opening of the reply; return all tokens, the prompt of this turn.

        Raises Refused when the model's chat template hides replies, so that no turn can be appended.
        """
        if not self.tokens:
            opening = [] if self._system is None else [{"role": "system", "content": self._system}]
            self.tokens = chat_tokens(self._tokenizer, [*opening, {"role": "user", "content": text}])
        else:
            self.tokens += self._continuation(text)
        return list(self.tokens)

    def reply(self, tokens: Iterable[int]) -> None:
        """Append the tokens that the model generated, the one that ended its turn included."""
        self.tokens += tokens

    def _continuation(self, text: str) -> list[int]:
        turns = [{"role": "user", "content": "."}, {"role": "assistant", "content": _REPLY}, {"role": "user", "content": text}]
        rendered = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        _, found, rest = rendered.partition(_REPLY)
        if not found:
            raise Refused("the chat template of this model does not show replies as they are", template=rendered[:200])
        piece: list[int] = self._tokenizer.encode(rest, add_special_tokens=False)
        # A reply that reached its end brought the token that ends a turn; one that was cut off by its limit did not.
        return piece[1:] if piece[:1] == self.tokens[-1:] else piece
