"""An engine's blocks are stored from where they lie, on the host and on a device whose copies come late."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.engines import layouts
from tests.service.client.attached import IDS, TOKENS, attached, beside, committed, engine_of, gives_room, outcome, runs_last
from tests.service.client.fake import SIZE, SPACE, SPEC, FakeDaemon, until
from tiercache.kernels.lazy import LazyDevice
from tiercache.service import wire
from tiercache.service.client.remote_room import Reserved


@pytest.mark.parametrize("layout", layouts(SPEC))
async def test_blocks_are_stored_as_they_lie(fake: FakeDaemon, device: LazyDevice | None, layout: str) -> None:
    """Every layout: the slots hold what a runner would have inserted, and the checksums are theirs."""
    engine = engine_of(layout)
    engine.compute(TOKENS, IDS, space=SPACE)
    gives_room(fake, [3, 1, 8, 12])
    async with beside(fake.address, device) as client:
        _, paged = await attached(client, engine)
        stored = await paged.store([*TOKENS, 1, 2], IDS)

        assert (stored.stored, stored.present, stored.refused) == (4 * SIZE, 0, 0)
        found = fake.places([3, 1, 8, 12], [int(one) for one in np.frombuffer(committed(fake)[0].checksums, "<u8")])
        assert found == fake.fill(TOKENS, [3, 1, 8, 12]) and client.stats().written == 4 * SPEC.block_bytes


async def test_what_is_there_already_is_not_read(fake: FakeDaemon, device: LazyDevice | None) -> None:
    """`start`, and blocks that another has stored: each slot gets the block that is its own."""
    engine = engine_of()
    engine.compute(TOKENS, [6, 1, 4], space=SPACE, start=SIZE)
    gives_room(fake, [5, 6], present=2)
    async with beside(fake.address, device) as client:
        _, paged = await attached(client, engine)
        stored = await paged.store(TOKENS, [6, 1, 4], start=SIZE)
        slots = [fake.slots[slot].copy() for slot in (5, 6)]
        fake.fill(TOKENS, [0, 1, 2, 3])

        assert (stored.stored, stored.present, stored.refused) == (2 * SIZE, SIZE, 0)
        assert all(np.array_equal(slot, fake.slots[place]) for slot, place in zip(slots, (2, 3), strict=True))


@pytest.mark.parametrize("given", [False, True])
async def test_a_store_comes_after_what_computes_the_blocks(fake: FakeDaemon, lazy: LazyDevice, given: bool) -> None:
    """The pass that writes the KV is enqueued, not done, when it is handed over."""
    engine = engine_of()
    gives_room(fake, [0, 1, 2, 3])
    async with beside(fake.address, lazy) as client:
        _, paged = await attached(client, engine)
        runs_last(lazy, lazy.adopt(0))
        lazy.adopt(0).call(lambda: engine.compute(TOKENS, IDS, space=SPACE))
        point = paged.now() if given else None
        stored = await paged.store(TOKENS, IDS, after=point)
        slots = [slot.copy() for slot in fake.slots[:4]]
        fake.fill(TOKENS, [0, 1, 2, 3])

        assert stored.stored == 4 * SIZE and all(np.array_equal(*pair) for pair in zip(slots, fake.slots[:4], strict=True))


async def test_a_store_that_is_cancelled_reads_no_more_and_stores_nothing(fake: FakeDaemon, lazy: LazyDevice) -> None:
    """Who waited leaves when the blocks are his again; the slots go back after the last copy."""
    engine = engine_of()
    engine.compute(TOKENS, IDS, space=SPACE)
    gives_room(fake, [0, 1, 2, 3])
    async with beside(fake.address, lazy) as client:
        _, paged = await attached(client, engine)
        computed = paged.now()
        lazy.run()
        lazy.held = True
        storing = paged.store(TOKENS, IDS, after=computed)
        waiting = asyncio.ensure_future(outcome(storing))
        await until(lambda: lazy.enqueued >= SPEC.layers + 1)
        waiting.cancel()
        await client.check()
        assert fake.count(wire.Close) == 0 and not any(one.done for one in [storing]) and not waiting.done()

        lazy.held = False
        lazy.run()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert storing.done
        await fake.until(wire.Close)
        assert committed(fake) == []


async def test_a_store_that_is_cancelled_as_its_copies_begin(
    fake: FakeDaemon, device: LazyDevice | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies are a task that has not run when the cancellation comes: who waited stays for them all the same."""
    engine = engine_of()
    gives_room(fake, [0, 1, 2, 3])
    async with beside(fake.address, device) as client:
        kv, paged = await attached(client, engine)

        async def reserve(*args: Any, **named: Any) -> Reserved:
            room = await reserved(*args, **named)
            waiting.cancel()
            return room

        reserved = kv._reserve
        monkeypatch.setattr(kv, "_reserve", reserve)
        storing = paged.store(TOKENS, IDS)
        waiting = asyncio.ensure_future(outcome(storing))
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert storing.done
        await fake.until(wire.Close)

        assert committed(fake) == []


async def test_a_store_that_a_device_fails_is_refused(fake: FakeDaemon, lazy: LazyDevice) -> None:
    engine = engine_of()
    gives_room(fake, [0, 1, 2, 3])
    async with beside(fake.address, lazy) as client:
        _, paged = await attached(client, engine)
        lazy.fails_after = lazy.enqueued + 2
        stored = await paged.store(TOKENS, IDS)
        await fake.until(wire.Close)

        assert (stored.stored, stored.refused) == (0, 4 * SIZE) and committed(fake) == []
        assert client.stats().misses == {"device": 1}
