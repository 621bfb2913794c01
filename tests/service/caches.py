"""Small caches, prompts and their oracle bytes as tensors, for tests of the face."""

from __future__ import annotations

import copy
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.oracle import oracle_kv
from tests.seams import Rig
from tests.storage.ssd_fixture import capacity_for
from tiercache.config import Config
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV
from tiercache.service.stack import Stack
from tiercache.spec import KVSpec, Namespace
from tiercache.storage.ssd import SsdStore
from tiercache.tree import path
from tiercache.types import Tier

SPEC = KVSpec(layers=4, kv_heads=1, head_dim=32, dtype="float16", block_size=16)
"""Blocks of 8 KiB, which share values on SSD."""
LARGE = KVSpec(layers=4, kv_heads=2, head_dim=32, dtype="float32", block_size=16)
"""Blocks of 32 KiB, each a value of its own on SSD."""
SPACE = Namespace(model="m", weights="sha256:1")
SIZE = SPEC.block_size
FLUSH_EVERYTHING = 1 << 30


def prompt(seed: int, blocks: int, more: int = 0, *, size: int = SIZE) -> list[int]:
    """Return the token ids of `blocks` blocks, and `more` of them, that `seed` makes; a longer one continues a shorter one."""
    choose = random.Random(seed)
    return [choose.randrange(2**31) for _ in range(blocks * size + more)]


def kv_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return a tensor's bytes as `[planes, tokens * token_bytes]`."""
    whole = tensor.contiguous().view(torch.uint8).numpy()
    return whole.reshape(tensor.shape[0] * tensor.shape[1], -1)


def tensor_of(tokens: Sequence[int], *, space: Namespace = SPACE, spec: KVSpec = SPEC, start: int = 0) -> torch.Tensor:
    """Return what a runner would have computed for `tokens[start:]`: the oracle's bytes."""
    planes = oracle_kv(space, spec, list(tokens))[:, start * spec.token_bytes :]
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return torch.from_numpy(planes.reshape(-1)).view(dtype).reshape(spec.shape(len(tokens) - start))


def is_exact(tensor: torch.Tensor, tokens: Sequence[int], *, space: Namespace = SPACE, spec: KVSpec = SPEC) -> bool:
    """Return whether `tensor` is the KV of as many leading `tokens` as it has, byte for byte."""
    count = tensor.shape[2]
    expected = oracle_kv(space, spec, list(tokens[:count]))
    return tuple(tensor.shape) == spec.shape(count) and np.array_equal(kv_bytes(tensor), expected)


async def read(kv: Any, tokens: Sequence[int], *, space: Namespace = SPACE, spec: KVSpec | None = None) -> int:
    """Match and gather `tokens`, compare every byte with the oracle, and return how many tokens came."""
    async with kv.match(tokens) as hit:
        tensor = await hit.gather()
    assert is_exact(tensor, tokens, space=space, spec=spec or kv.spec)
    return int(tensor.shape[2])


async def store(kv: Any, tokens: Sequence[int], *, space: Namespace = SPACE, tier: Tier | None = None) -> None:
    """Insert all of `tokens`; all whole blocks must be stored."""
    size = kv.spec.block_size
    outcome = await kv.insert(tokens, tensor_of(tokens, space=space, spec=kv.spec), tier=tier)
    assert outcome.refused == 0 and outcome.stored + outcome.present == len(tokens) // size * size


def small(
    *,
    hbm: int | None = 8,
    dram: int | None = 8,
    ssd: int | None = 64,
    directory: Path | None = None,
    spec: KVSpec = SPEC,
    **fields: object,
) -> Config:
    """Return a configuration with so many blocks of `spec` in each tier; None leaves the tier out."""
    size = spec.block_bytes
    return Config.of(
        hbm=None if hbm is None else hbm * size,
        dram=None if dram is None else dram * -(-size // 4096) * 4096,
        ssd=None if ssd is None or directory is None else capacity_for(spec.geometry, ssd),
        directory=None if directory is None else str(directory),
        **{"admit_ms": 200, "promote_ms": 200, "drain_seconds": 10.0, "lease_share": 1.0, **fields},
    )


@asynccontextmanager
async def opened(config: Config, rig: Rig | None = None) -> AsyncIterator[TierCache]:
    """A cache whose holds all end before it is closed."""
    rig = rig or Rig()
    async with TierCache(config, seams=rig.seams()) as cache:
        try:
            yield cache
        finally:
            rig.release()


@asynccontextmanager
async def opened_kv(
    config: Config, rig: Rig | None = None, *, space: Namespace = SPACE, spec: KVSpec = SPEC
) -> AsyncIterator[tuple[TierCache, LocalKV]]:
    """A cache and its one namespace."""
    async with opened(config, rig) as cache:
        yield cache, await cache.open(space, spec)


def stack_of(cache: TierCache) -> Stack:
    """Return the one stack of a cache."""
    [stack] = cache.stacks
    return stack


async def lower(cache: TierCache, tier: Tier, blocks: int = FLUSH_EVERYTHING) -> None:
    """Move the least recently used `blocks` blocks of a tier down, or drop its copies, and wait until that is done."""
    await cache.settle()
    stack = stack_of(cache)
    position = stack.position(tier)
    pool = stack.cache.residency.slots[position]
    want = min(pool.capacity, pool.free + blocks)
    before = -1
    while before < pool.free < want:
        before = pool.free
        while work := stack.cache.moves.make_room(position, want):
            stack.mover.start(work)
            await cache.settle()


async def sink(cache: TierCache) -> None:
    """Move everything to the last tier."""
    for tier in stack_of(cache).cache.tiers[:-1]:
        await lower(cache, tier)


class Books:
    """What a cache's books say, to be compared: slots by state in each tier, claims, nodes, counters."""

    def __init__(self, cache: TierCache, *, counters: bool = True) -> None:
        self.slots = {}
        self.claims = {}
        self.counters = {}
        for stack in cache.stacks:
            core = stack.cache
            for tier, pool in zip(core.tiers, core.residency.slots, strict=True):
                count = pool.census()
                assert count.free + count.held + count.owned + count.quarantined == pool.capacity
                self.slots[stack.geometry, tier] = (count.free, count.held, count.owned, count.quarantined)
            self.claims[stack.geometry] = (
                sum(len(session.leases) for session in core.sessions),
                sum(len(session.reservations) for session in core.sessions),
                len(core.pending),
                core.residency.table.live,
            )
            if counters:
                self.counters[stack.geometry] = copy.deepcopy(core.stats)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Books) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(vars(self))


def durable_slots(kv: LocalKV, tokens: Sequence[int]) -> list[int]:
    """Return the SSD slots of a prompt's blocks, in order, up to the first that has none."""
    stack, space = kv._desk.stack, kv._desk.space
    position = stack.position(Tier.SSD)
    lease = stack.cache.match(kv._desk.session, space, kv._key(tokens), count=False, charged=False)
    nodes = [node for node in path(lease.node) if node.copies >> position & 1]
    slots = [slot for node in nodes for slot in stack.cache.residency.table.slots(node.blocks, position)]
    stack.cache.release(lease)
    return slots


def placed(kv: LocalKV, tokens: Sequence[int]) -> dict[Tier, int]:
    """Return how many blocks of a prompt have their fastest copy where, without moving any."""
    core, desk = kv._desk.stack.cache, kv._desk
    lease = core.match(desk.session, desk.space, kv._key(tokens), count=False, charged=False)
    found = {core.tiers[position]: blocks for position, blocks in core.tiers_of(lease).items()}
    core.release(lease)
    return found


def disk_of(cache: TierCache) -> SsdStore:
    """Return the SSD store of a cache with one stack."""
    [store] = [store for store in stack_of(cache).stores if isinstance(store, SsdStore)]
    return store


def leases(cache: TierCache) -> int:
    """Return how many leases live."""
    return sum(len(session.leases) for stack in cache.stacks for session in stack.cache.sessions)


def reservations(cache: TierCache) -> int:
    """Return how many reservations live."""
    return sum(len(session.reservations) for stack in cache.stacks for session in stack.cache.sessions)


def free(cache: TierCache) -> dict[Tier, int]:
    """Return how many slots each tier has free."""
    core = stack_of(cache).cache
    return {tier: pool.free for tier, pool in zip(core.tiers, core.residency.slots, strict=True)}


async def wind_down(task: Any) -> BaseException | None:
    """Cancel a task, wait for its end, and return what it raised."""
    task.cancel()
    try:
        await task
    except BaseException as error:  # noqa: BLE001 - whatever it raised is what is asked for
        return error
    return None
