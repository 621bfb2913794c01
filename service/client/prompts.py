"""What the daemon has been told of prompts, so that a growing one is not told again from its beginning."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from tiercache.keys import TOKEN_BYTES
from tiercache.service.wire import Prompt

_IDS = np.dtype("<u4")
_WORTH = 256
"""Bytes; a shorter common beginning is sent again: it costs less than looking for it."""


class Prompts:
    """The last prompts of a session, at most `count` of them and `size` bytes together: what the daemon keeps as bases.

    A number names one prompt and never another: were it used again, a request that the daemon refuses could leave the old
    prompt behind it, and the next one would continue a prompt that nobody asked for. The daemon may keep fewer than these; it
    says so (`UNKNOWN_BASE`), and then `forget` makes the next one go whole.
    """

    def __init__(self, count: int, size: int) -> None:
        self._count = count
        self._size = size
        self._known: OrderedDict[int, bytes] = OrderedDict()
        self._bytes = 0
        self._next = 0

    def say(self, key: bytes) -> Prompt:
        """Return `key` as what it shares with a known prompt, and the rest; it must be sent, and is known from then on."""
        base, keep = self._longest(key)
        if base is not None:
            self._known.move_to_end(base)
            if keep == len(key) == len(self._known[base]):
                return Prompt(base, base, keep, b"")
        number = self._next
        self._next += 1
        self._known[number] = key
        self._bytes += len(key)
        while len(self._known) > self._count or self._bytes > self._size:
            self._bytes -= len(self._known.popitem(last=False)[1])
        return Prompt(number, base, keep, key[keep:] if keep else key)

    def forget(self) -> None:
        """Know nothing."""
        self._known.clear()
        self._bytes = 0

    def _longest(self, key: bytes) -> tuple[int | None, int]:
        found, most, following = None, _WORTH - 1, b""
        for number, known in reversed(self._known.items()):
            # Most prompts of a chat part from this one at the same place: a look at the token after the longest beginning
            # found so far tells all that have no longer one.
            if found is not None and known[most : most + TOKEN_BYTES] != following:
                continue
            shared = _common(known, key)
            if shared > most:
                found, most, following = number, shared, key[shared : shared + TOKEN_BYTES]
                if shared == len(key):
                    break
        return found, most if found is not None else 0


def _common(left: bytes, right: bytes) -> int:
    """Return how many leading bytes of whole tokens both share."""
    if len(left) > len(right):
        left, right = right, left
    if left[:_WORTH] != right[:_WORTH]:
        return 0
    if right.startswith(left):
        return len(left)
    differ = np.frombuffer(left, _IDS) != np.frombuffer(right, _IDS, len(left) // TOKEN_BYTES)
    return int(differ.argmax()) * TOKEN_BYTES  # `left` is not how `right` begins, so some id differs
