"""Packed keys and digests: how a prompt becomes what the tree reads.

A key is `bytes`, one fixed-width symbol a block. With token keys a symbol is `block_size` ids as little-endian 32-bit
integers; an engine that hashes blocks itself hands over a 32-byte digest a block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tiercache.errors import InvalidTokens

TOKEN_BYTES = 4
MAX_TOKEN = 2**31 - 1
ROOT_KEY = bytes(32)
_PACKED = np.dtype("<i4")
_BLOCK_ENCODING = b"tiercache-block-1"

Digest = Callable[[bytes], bytes]
"""A function from bytes to 32 bytes; tests replace it to force collisions."""


def sha256(data: bytes) -> bytes:
    """Return the SHA-256 of `data`: the digest of durable block keys."""
    return hashlib.sha256(data).digest()


def pack_tokens(tokens: Any, *, limit: int) -> bytes:
    """Return `tokens` as little-endian 32-bit integers, one after the other.

    `tokens` is a sequence, an iterator or a one-dimensional integer array (numpy, torch) of ids from 0 to 2**31 - 1, at most
    `limit` of them. Sets and mappings are refused: their order says nothing. Values are checked before they are narrowed, so
    2**32 + 5 is refused and never acts as 5.

    Raises InvalidTokens, naming what came in place of a sequence, or the position and the value of the first id that is none.
    """
    if type(tokens) is np.ndarray:
        return _pack_array(tokens, limit)
    if isinstance(tokens, (list, tuple)):
        _check_length(len(tokens), limit)
        return _pack_sequence(tokens)
    if isinstance(tokens, array):
        return _pack_array(np.array(tokens), limit)
    if hasattr(tokens, "__array__"):
        return _pack_array(_as_array(tokens), limit)
    if isinstance(tokens, (str, bytes, bytearray, memoryview)) or not isinstance(tokens, (Sequence, Iterator)):
        raise InvalidTokens(f"token ids must be a sequence of integers, not {type(tokens).__name__}", value=type(tokens).__name__)
    if isinstance(tokens, Sequence):
        _check_length(len(tokens), limit)
    listed = list(tokens)
    _check_length(len(listed), limit)
    return _pack_sequence(listed)


def unpack_tokens(key: bytes) -> list[int]:
    """Return the token ids that `key` packs."""
    ids: list[int] = np.frombuffer(key, dtype="<i4").tolist()
    return ids


def block_keys(namespace: bytes, parent: bytes, key: bytes, stride: int, digest: Digest = sha256) -> list[bytes]:
    """Return the durable key of every block of `key`, each chained to the one before; the first to `parent`.

    A block's key is the digest of a versioned, length-prefixed encoding of namespace, parent key and symbol, so that one key
    names the whole prefix.
    """
    keys: list[bytes] = []
    head = _BLOCK_ENCODING + namespace
    for start in range(0, len(key), stride):
        symbol = key[start : start + stride]
        parent = digest(head + parent + stride.to_bytes(8, "little") + symbol)
        keys.append(parent)
    return keys


def _check_length(count: int, limit: int) -> None:
    if count > limit:
        raise InvalidTokens(f"{count} token ids; the limit is {limit}", value=count, limit=limit)


def _as_array(tokens: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Return what numpy makes of an array of any library; of a torch tensor, too, without importing torch."""
    given = tokens
    try:
        if hasattr(tokens, "detach"):
            tokens = tokens.detach().cpu()
        return np.asarray(tokens)
    except (TypeError, ValueError, RuntimeError) as error:  # no values (meta), no such type in numpy (bfloat16), sparse
        came = f"{type(given).__name__} of {getattr(given, 'dtype', 'no dtype')}"
        place = ", ".join(str(getattr(given, name)) for name in ("layout", "device") if hasattr(given, name))
        came = f"{came} ({place})" if place else came
        raise InvalidTokens(f"token ids must be a one-dimensional array of integers, not {came}: {error}", value=came) from error


def _pack_array(ids: np.ndarray[Any, np.dtype[Any]], limit: int) -> bytes:
    if ids.ndim != 1:
        raise InvalidTokens(f"token ids must have one dimension, not shape {ids.shape}", value=ids.shape)
    _check_length(ids.size, limit)
    if ids.dtype.kind not in "iu":
        raise InvalidTokens(f"token ids must be integers, not {ids.dtype}", value=str(ids.dtype))
    # None that fits 32 bits with a sign is too large.
    small = ids.dtype.kind == "i" and ids.dtype.itemsize <= TOKEN_BYTES
    if ids.size and (np.minimum.reduce(ids) < 0 or not (small or np.maximum.reduce(ids) <= MAX_TOKEN)):
        place = int(np.argmax((ids < 0) | (ids > MAX_TOKEN)))
        raise _not_a_token(place, int(ids[place]))
    return (ids if ids.dtype == _PACKED else ids.astype(_PACKED)).tobytes()


def _pack_sequence(tokens: Sequence[Any]) -> bytes:
    # A set of types first: array() would take True for 1, and numpy integers are as good as int.
    for kind in set(map(type, tokens)):
        if kind is not int and not issubclass(kind, np.integer):
            place = next(i for i, token in enumerate(tokens) if type(token) is kind)
            raise _not_a_token(place, tokens[place])
    packed: array[int] | None
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError, ValueError):
        packed = None
    if packed is None or (len(packed) and max(packed) > MAX_TOKEN):
        place = next(i for i, token in enumerate(tokens) if not 0 <= int(token) <= MAX_TOKEN)
        raise _not_a_token(place, tokens[place])
    return np.frombuffer(packed, dtype=np.uint32).astype("<u4", copy=False).tobytes() if len(packed) else b""


def _not_a_token(place: int, value: object) -> InvalidTokens:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return InvalidTokens(
        f"token id at position {place} is {shown}; ids are integers from 0 to {MAX_TOKEN}", position=place, value=shown
    )
