"""Where a node's blocks lie is written down once, and never told after it has changed."""

from __future__ import annotations

import numpy as np

from tests.service.caches import SPACE, SPEC, prompt, small, store
from tiercache.keys import pack_tokens
from tiercache.leases import Lease
from tiercache.service import wire
from tiercache.service.inprocess import TierCache
from tiercache.service.stack import Stack
from tiercache.tree import path
from tiercache.types import Tier


def truth(stack: Stack, lease: Lease) -> list[wire.Place]:
    """Return where the blocks of a lease lie, from the books, one by one."""
    residency = stack.cache.residency
    places = []
    for node in path(lease.node):
        assert node.tag is not None
        for block in node.blocks:
            slot = int(residency.table.slot[node.tag, block])
            generation = int(residency.slots[node.tag].generations[slot])
            places.append(wire.Place(node.tag, slot, generation, int(residency.table.checksum[block])))
    return places


async def test_what_is_told_is_where_blocks_lie_now() -> None:
    """After a promotion, a demotion, a split, and in a slot that was another block's before, each time asked twice."""
    async with TierCache(small(hbm=4, dram=8, ssd=None)) as cache:
        kv = await cache.open(SPACE, SPEC)
        [stack] = cache.stacks
        [space] = stack.cache.residency.spaces.values()
        session = stack.cache.begin_session()
        whole, other = prompt(1, 4), [*prompt(1, 2), *prompt(2, 1)]

        async def require() -> set[int]:
            lease = stack.cache.match(session, space, pack_tokens(whole, limit=1 << 20))
            assert lease.blocks == 4
            told: list[wire.Place] = []
            for _ in range(2):
                told = wire.unpack_places(stack.whereabouts(lease, wire.pack_places))
                assert told == truth(stack, lease)
                assert [wire.unpack_place(wire.pack_places(*np.array(told, np.uint64).T), at) for at in range(4)] == told
            stack.cache.release(lease)
            return {place.position for place in told}

        await store(kv, whole, tier=Tier.DRAM)
        assert await require() == {1}
        await kv.prefetch(whole)
        await cache.settle()
        assert await require() == {0}
        for flight in stack.mover.start(stack.cache.moves.make_room(0, 4)):
            await flight.wait()
        await cache.settle()
        assert 1 in await require()
        await store(kv, other)
        assert await require()
        await kv.delete(whole)
        await store(kv, whole)
        assert await require()
