"""The oracle: the bytes that a test block must hold, from who asks and what came before.

A block's bytes follow from its namespace, every token up to its end and its shard, and each plane of it differs from the
others. Whoever serves the bytes of another tenant, of another place in the prompt, of another layer or of a block that was
overwritten is therefore seen by comparing bytes; a hit count proves nothing.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercache.keys import TOKEN_BYTES, pack_tokens
from tiercache.spec import Geometry, KVSpec, Namespace

Bytes = NDArray[np.uint8]


def oracle_block(namespace: bytes, tokens: bytes, geometry: Geometry, *, shard: int = 0) -> Bytes:
    """Return the bytes of the block that ends `tokens`, as `[planes, unit_bytes]`.

    `namespace` is the 32-byte digest; `tokens` are all packed ids from the start of the prompt up to the block's end.
    """
    state = _start(namespace)
    state.update(tokens)
    return _bytes(state, shard, geometry.planes, geometry.unit_bytes)


def oracle_kv(namespace: Namespace | bytes, spec: KVSpec, tokens: Any, *, shard: int = 0) -> Bytes:
    """Return the bytes of `spec.shape(len(tokens))`, as `[planes, tokens * token_bytes]`.

    Tokens after the last whole block get bytes of their own, which no whole block shares.
    """
    digest = namespace if isinstance(namespace, bytes) else namespace.digest(spec)
    key = tokens if isinstance(tokens, bytes) else pack_tokens(tokens, limit=1 << 26)
    geometry = spec.geometry
    result = np.empty((geometry.planes, len(key) // TOKEN_BYTES * spec.token_bytes), dtype=np.uint8)
    state = _start(digest)
    stride = spec.block_size * TOKEN_BYTES
    for number, start in enumerate(range(0, len(key), stride)):
        symbol = key[start : start + stride]
        state.update(symbol)
        unit = len(symbol) // TOKEN_BYTES * spec.token_bytes
        place = number * geometry.unit_bytes
        result[:, place : place + unit] = _bytes(state, shard, geometry.planes, unit)
    return result


def _start(namespace: bytes) -> hashlib.blake2b:
    return hashlib.blake2b(len(namespace).to_bytes(8, "little") + namespace, digest_size=32, person=b"tiercache-oracle")


def _bytes(state: hashlib.blake2b, shard: int, planes: int, unit: int) -> Bytes:
    end = state.copy()
    end.update(b"shard" + shard.to_bytes(8, "little"))
    stream = np.random.SFC64(np.frombuffer(end.digest(), dtype="<u4"))
    words = stream.random_raw(-(-planes * unit // 8))
    return words.astype("<u8", copy=False).view(np.uint8)[: planes * unit].reshape(planes, unit)
