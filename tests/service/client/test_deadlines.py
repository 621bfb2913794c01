"""Deadlines of calls on one connection: under a loop that is late, and beside calls that are more patient."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.service.client.fake import SIZE, SPACE, SPEC, FakeDaemon, until
from tiercache.service import wire
from tiercache.service.client.client import connect

TOKENS = list(range(4 * SIZE))


class Late:
    """A clock on which every turn of the loop has taken a second."""

    def __init__(self) -> None:
        self.turns = 0

    def monotonic(self) -> float:
        self.turns += 1
        return time.monotonic() + self.turns


async def test_a_loop_that_is_late_in_every_turn_keeps_its_deadlines(fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came while it was away is read first, once: an engine that computes on its loop is late for ever."""
    async with connect(fake.address, deadline=0.05) as client:
        kv = await client.open(SPACE, SPEC)
        fake.answers[wire.Flush] = lambda asked: None
        monkeypatch.setattr("tiercache.service.client.connection.time", Late())
        async with asyncio.timeout(20):
            assert await kv.flush(TOKENS) == 0

        assert client.stats().misses.keys() == {"slow"}


async def test_a_patient_call_that_ends_says_nothing_of_a_daemon_that_is_silent(fake: FakeDaemon) -> None:
    """It was asked before the last word that was heard; the daemon has been silent since another call was."""
    async with connect(fake.address, deadline=0.05) as client:
        kv = await client.open(SPACE, SPEC)
        fake.answers[wire.Prefetch] = fake.answers[wire.Flush] = lambda asked: None
        connection = client._connection
        assert connection is not None
        key = b"\0" * 64
        patient = asyncio.create_task(connection.call(wire.Count, wire.Prefetch, key=key, kv=1, patience=0.2))
        await fake.until(wire.Prefetch)
        heard = connection._heard
        await fake.say(wire.Draining(seconds=1.0))
        await until(lambda: connection._heard > heard)
        assert await kv.flush(TOKENS) == 0 and not patient.done()
        await patient
        asked = len(fake.asked)

        assert await kv.flush(TOKENS) == 0 and len(fake.asked) == asked
