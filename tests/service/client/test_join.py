"""A second process of one engine uses the leases and the room of the first."""

from __future__ import annotations

import pytest

from tests.service.caches import LARGE, SPACE, is_exact, prompt, read, small, store, tensor_of
from tests.service.client.daemons import running
from tiercache.errors import JoinRefused
from tiercache.service.client.client import connect

SIZE = LARGE.block_size


async def test_a_joined_client_reads_and_writes_what_the_first_holds(seed: int) -> None:
    """A lease ends when both have left it; the owner commits what the other wrote."""
    tokens, more = prompt(seed, 3), prompt(seed, 5)
    data = tensor_of(more, spec=LARGE)
    async with running(small(spec=LARGE, ssd=None)) as (_, address), connect(address, deadline=30.0) as first:
        kv = await first.open(SPACE, LARGE)
        await store(kv, tokens)
        async with connect(address, deadline=30.0, join=first.token) as second:
            worker = await second.open(SPACE, LARGE)
            async with kv.match(more) as hit, kv.reserve(more, after=hit) as room:
                assert hit.number is not None and room.number is not None
                async with worker.shared_hit(hit.number) as shared, worker.shared_room(room.number) as part:
                    await hit.ready()
                    assert is_exact(await shared.gather(), tokens, spec=LARGE)
                    assert is_exact(await shared.gather(), tokens, spec=LARGE) and shared.tokens == 3 * SIZE
                    for number, block in enumerate(part.blocks):
                        block.copy_(data[:, :, (3 + number) * SIZE : (4 + number) * SIZE])
                    assert part.present == 3 * SIZE
                assert await room.commit(5 * SIZE) == 5 * SIZE
                assert await read(kv, more) == 5 * SIZE
            async with worker.shared_hit(12345) as nothing:
                assert nothing.tokens == 0
        assert (await first.check())["leases"] == 0


async def test_a_token_that_is_wrong_or_old_is_refused(seed: int) -> None:
    """By name."""
    async with running(small(spec=LARGE, ssd=None)) as (_, address):
        async with connect(address) as first:
            old = first.token
        for token in (old, b"", b"wrong"):
            with pytest.raises(JoinRefused):
                async with connect(address, join=token):
                    raise AssertionError
