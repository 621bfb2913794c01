"""A prompt is told once: what a daemon that follows the rules puts together is what was meant."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercache.service.client.prompts import Prompts
from tiercache.service.wire import Prompt


class Listener:
    """What a daemon keeps of prompts."""

    def __init__(self) -> None:
        self.known: dict[int, bytes] = {}

    def hear(self, prompt: Prompt) -> bytes:
        assert prompt.number not in self.known or prompt.base == prompt.number
        head = self.known[prompt.base][: prompt.keep] if prompt.base is not None else b""
        assert len(head) == prompt.keep
        self.known[prompt.number] = head + prompt.tail
        return self.known[prompt.number]


def tokens(seed: int, count: int) -> bytes:
    return b"".join((seed * 1_000_003 + number).to_bytes(4, "little") for number in range(count))


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 300), st.integers(0, 2), st.integers(0, 200)), max_size=30),
    st.integers(1, 4),
    st.integers(0, 4000),
)
def test_what_is_heard_is_what_was_said(turns: list[tuple[int, int, int, int]], count: int, size: int) -> None:
    """Whatever shares whatever, in any order, however little is kept."""
    prompts, listener = Prompts(count, size), Listener()
    for first, shared, second, more in turns:
        key = tokens(first, shared) + tokens(second + 10, more)

        assert listener.hear(prompts.say(key)) == key


def test_a_growing_chat_sends_what_is_new() -> None:
    """Also after a side request, and for the same prompt again nothing at all."""
    prompts = Prompts(8, 1 << 20)
    prompts.say(tokens(1, 10_000))
    prompts.say(tokens(2, 500))

    longer = prompts.say(tokens(1, 10_016))
    again = prompts.say(tokens(1, 10_016))
    shorter = prompts.say(tokens(1, 9_999))

    assert (longer.keep, len(longer.tail)) == (40_000, 64)
    assert (again.keep, again.tail, again.number) == (40_064, b"", again.base)
    assert (shorter.keep, shorter.tail) == (39_996, b"")


def test_what_was_forgotten_goes_whole() -> None:
    """And under a number that was never used, so that nothing old can be taken for it."""
    prompts = Prompts(8, 1 << 20)
    first = prompts.say(tokens(1, 1000))
    prompts.forget()

    second = prompts.say(tokens(1, 1000))

    assert (second.base, second.keep, len(second.tail)) == (None, 0, 4000)
    assert second.number != first.number


def test_ids_that_begin_with_the_same_bytes_are_not_shared_in_part() -> None:
    """What is kept of a base are whole token ids: a daemon refuses parts of one."""
    known = tokens(1, 1000)
    for place in (64, 100, 999):
        for same in range(4):
            prompts = Prompts(8, 1 << 20)
            prompts.say(known)
            other = bytearray(known + tokens(2, 3))
            other[4 * place + same] ^= 1  # the first `same` bytes of the id are those of the base's

            said = prompts.say(bytes(other))

            assert (said.keep, said.tail) == (4 * place, bytes(other[4 * place :]))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(64, 90), st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=12))
def test_the_longest_beginning_is_found(turns: list[tuple[int, int, int, int]]) -> None:
    """Nothing that is known of a prompt is sent again, however many known prompts part from it at other places."""
    prompts, said = Prompts(64, 1 << 20), list[bytes]()
    for first, shared, second, more in turns:
        key = tokens(first, shared) + tokens(second + 10, more)
        shared_most = max((_shared(key, known) for known in said), default=0)

        prompt = prompts.say(key)

        assert prompt.keep == (shared_most if shared_most >= 256 else 0)
        said.append(key)


def _shared(left: bytes, right: bytes) -> int:
    pairs = zip(range(0, len(left), 4), range(0, len(right), 4), strict=False)
    return next((at for at, _ in pairs if left[at : at + 4] != right[at : at + 4]), min(len(left), len(right)))
