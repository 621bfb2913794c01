"""How sure a client is of what it holds: nothing is handed out in place under a lease that the daemon may have taken for lost."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.service.client.fake import SIZE, SPACE, SPEC, FakeDaemon, turn, until
from tiercache.errors import LeaseLost
from tiercache.service import wire
from tiercache.service.client.client import connect
from tiercache.service.client.renewal import Renewal

TOKENS = list(range(4 * SIZE))
TERM = 60.0


class Shifted:
    """The time and the loop, as far as a renewal asks them, at a time of the test's own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def call_later(self, seconds: float, call: object) -> object:
        self.calls.append(seconds)
        return asyncio.get_running_loop().call_later(1e6, lambda: None)


def renewal(monkeypatch: pytest.MonkeyPatch) -> tuple[Renewal, Shifted, list[float]]:
    """Return a renewal with a term of a minute, its loop, and when it renewed."""
    sent: list[float] = []
    loop = Shifted()
    found = Renewal(lambda: sent.append(loop.now))
    found.term, found._loop = TERM, loop  # type: ignore[assignment]
    monkeypatch.setattr("tiercache.service.client.renewal.time", loop)
    return found, loop, sent


async def test_it_renews_every_third_of_a_term_while_something_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """One timer, however much is held; it ends with what is held, and comes again with more."""
    one, loop, sent = renewal(monkeypatch)
    for number in range(3):
        one.take(number, 0.0)
    assert loop.calls == [TERM / 3]
    one._tick()
    assert len(sent) == 1 and loop.calls == [TERM / 3] * 2
    for number in range(3):
        one.drop(number)
    one._tick()
    assert len(sent) == 1 and len(loop.calls) == 2
    one.take(7, 0.0)

    assert len(loop.calls) == 3
    one.end()
    assert not one.is_sure(7)


async def test_it_is_sure_for_two_thirds_of_a_term(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the request, or the last renewal that was answered; never of what is not held; always where there is no term."""
    one, loop, _ = renewal(monkeypatch)
    one.take(1, 0.0)
    loop.now = 39.9
    assert one.is_sure(1) and not one.is_sure(2)
    loop.now = 40.0
    assert not one.is_sure(1)
    one.heard(20.0)
    loop.now = 59.9
    assert one.is_sure(1)
    one.heard(10.0)
    assert one.is_sure(1)
    loop.now = 60.0

    assert not one.is_sure(1)
    one.end()
    one.term = 0.0
    assert one.is_sure(2)


@pytest.mark.parametrize("why", ["late", "silent"])
async def test_a_view_that_may_come_too_late_is_not_given(fake: FakeDaemon, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the block is there: the last renewal is too old, or no renewal is answered."""
    fake.limits = {"tokens": 1 << 20, "lease_ms": 60_000}
    fake.holds(TOKENS, [0, 1, 2, 3])
    if why == "silent":
        fake.answers[wire.Renew] = lambda asked: None
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        async with kv.match(TOKENS) as hit, kv.match(TOKENS) as other:
            connection, clock = client._connection, Shifted()
            assert connection is not None
            clock.now = time.monotonic() + 30
            monkeypatch.setattr("tiercache.service.client.renewal.time", clock)
            monkeypatch.setattr("tiercache.service.client.connection.time", clock)
            connection.renew()
            await client.check()
            clock.now += 30
            if why == "silent":
                with pytest.raises(LeaseLost):
                    hit.view(0, 0)
            else:
                hit.view(0, 0)
                clock.now += 10
            with pytest.raises(LeaseLost):
                other.view(0, 0)
        assert client.stats().misses == {"lost": 2 if why == "silent" else 1}


async def test_a_view_whose_word_can_not_leave_at_once_is_not_given(fake: FakeDaemon) -> None:
    """An earlier request, larger than the socket takes, waits to be written: nothing says when the daemon would hear of it."""
    fake.limits = {"tokens": 1 << 20, "lease_ms": 60_000}
    fake.holds(TOKENS, [0, 1, 2, 3])
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        async with kv.match(TOKENS) as hit:
            asking = asyncio.create_task(kv.prefetch(range(1 << 20)))
            await turn()
            assert client._connection is not None and client._connection._channel is not None
            assert client._connection._channel.queued
            with pytest.raises(LeaseLost):
                hit.view(0, 0)
            await asking
        async with kv.match(TOKENS) as hit:
            hit.view(0, 0)
        assert client.stats().misses == {"lost": 1}


async def test_in_place_leases_need_no_renewal(fake: FakeDaemon) -> None:
    """And rooms do, until they are closed; a lost claim does not any more."""
    fake.limits = {"tokens": 1 << 20, "lease_ms": 60_000}
    fake.holds(TOKENS, [0, 1, 2, 3])
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        held = client._connection._renewal._held  # type: ignore[union-attr]
        async with kv.match(TOKENS) as hit, kv.match(TOKENS) as lost, kv.reserve(TOKENS, after=hit):
            assert len(held) == 3
            hit.view(0, 0)
            assert len(held) == 2
            await fake.say(wire.Lost(lease=lost.claim.lease or 0, reason="late"))
            await until(lambda: lost.claim.gone is not None)
            assert len(held) == 1
        assert not held


async def test_a_match_says_ahead_what_the_last_hit_was_read_like(fake: FakeDaemon) -> None:
    """A first view says it in a frame of its own; the next matches say it themselves, until a hit is copied."""
    fake.limits = {"tokens": 1 << 20, "lease_ms": 60_000}
    fake.holds(TOKENS, [0, 1, 2, 3])
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        held = client._connection._renewal._held  # type: ignore[union-attr]
        for _ in range(2):
            async with kv.match(TOKENS) as hit:
                hit.view(0, 0)
                assert not held and hit.is_in_place
        async with kv.match(TOKENS) as hit:
            await hit.gather()
        async with kv.match(TOKENS):
            assert len(held) == 1
        await client.check()

        said = [asked.in_place for asked in fake.asked if isinstance(asked, wire.Match)]
        assert said == [False, True, True, False] and fake.count(wire.InPlace) == 1
