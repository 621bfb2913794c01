"""The prompts that a session has named: what a growing chat sends is only its new end."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from tiercache.errors import InvalidFrame, InvalidTokens
from tiercache.keys import MAX_TOKEN, TOKEN_BYTES
from tiercache.service.wire import Prompt

_IDS = np.dtype("<i4")


class Prompts:
    """The last prompts of a session, at most `count` of them and `size` bytes; one of `most` tokens always fits."""

    def __init__(self, *, count: int, size: int, most: int) -> None:
        self._count = count
        self._size = size
        self._most = most
        self._known: OrderedDict[int, bytes] = OrderedDict()
        self._bytes = 0

    def resolve(self, prompt: Prompt) -> bytes | None:
        """Return the packed token ids that `prompt` says, and keep them under its number; None if its base is not known.

        Raises InvalidFrame for parts that can't be, InvalidTokens for too many ids, or for one that is none. Nothing is kept
        then.
        """
        head = b""
        if prompt.base is not None:
            known = self._known.get(prompt.base)
            if known is None:
                return None
            if not 0 <= prompt.keep <= len(known) or prompt.keep % TOKEN_BYTES:
                raise InvalidFrame(f"the first {prompt.keep} bytes of a prompt of {len(known)} bytes are no token ids")
            head = known[: prompt.keep]
            self._known.move_to_end(prompt.base)
        elif prompt.keep:
            raise InvalidFrame(f"a prompt keeps {prompt.keep} bytes of none")
        if len(prompt.tail) % TOKEN_BYTES:
            raise InvalidFrame(f"{len(prompt.tail)} bytes are no number of token ids")
        count = (len(head) + len(prompt.tail)) // TOKEN_BYTES
        if count > self._most:
            raise InvalidTokens(f"{count} token ids; the limit is {self._most}", value=count, limit=self._most)
        if not prompt.tail[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii():  # a highest byte with its highest bit
            ids = np.frombuffer(prompt.tail, _IDS)
            place = len(head) // TOKEN_BYTES + int(np.argmax(ids < 0))
            raise InvalidTokens(f"the token id at position {place} is above {MAX_TOKEN}", position=place)
        whole = head + prompt.tail if prompt.tail else head
        self._keep(prompt.number, whole)
        return whole

    def _keep(self, number: int, packed: bytes) -> None:
        self._bytes += len(packed) - len(self._known.pop(number, b""))
        self._known[number] = packed
        while len(self._known) > self._count or (self._bytes > self._size and len(self._known) > 1):
            self._bytes -= len(self._known.popitem(last=False)[1])
