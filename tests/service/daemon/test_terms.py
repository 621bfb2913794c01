"""What is not renewed in time: leases and reservations end, and what a silent process may still touch is kept from use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.seams import FakeClock, Rig
from tests.service.caches import prompt, small
from tests.service.client.fake import until
from tests.service.daemon.http import get
from tests.service.daemon.raw import Handed, Raw, are_exact, daemon_of, fetched, fill, session_at, stored, whole
from tiercache.cache import Cache
from tiercache.config import Limits
from tiercache.service import wire
from tiercache.service.daemon.daemon import Daemon
from tiercache.service.daemon.heartbeat import EDGES, INTERVAL, Heartbeat
from tiercache.service.daemon.terms import Terms

TERM = 10.0
TOKENS = prompt(1, 3)
BLOCKS = 8


@asynccontextmanager
async def house(folder: Path, **limits: float) -> AsyncIterator[tuple[Daemon, FakeClock, Cache]]:
    """A daemon with eight blocks of HBM, on a clock of the test's own."""
    clock = FakeClock()
    config = small(hbm=BLOCKS, dram=None, ssd=None, limits=Limits(lease_seconds=TERM, **limits))  # type: ignore[arg-type]
    async with daemon_of(folder, config, Rig(clock=clock)) as daemon, session_at(daemon.path) as raw:
        await raw.open()
        yield daemon, clock, daemon.cache.stacks[0].cache


@asynccontextmanager
async def member(daemon: Daemon, join: bytes | None = None) -> AsyncIterator[tuple[Raw, wire.Opened, Handed]]:
    """A session with a namespace and the memory."""
    async with session_at(daemon.path, join=join) as raw:
        opened = await raw.open()
        yield raw, opened, await fetched(raw)


def apart(core: Cache) -> int:
    """Return how many slots are in quarantine."""
    return core.residency.slots[0].census().quarantined


async def sums(opened: wire.Opened, handed: Handed, room: wire.Reserved) -> dict[str, object]:
    """Fill reserved slots; return how they are committed."""
    found = fill(opened, handed, room, TOKENS)
    packed = b"".join(value.to_bytes(8, "little") for value in found)
    return {"reservation": room.reservation, "upto": len(found), "checksums": packed}


async def test_a_silent_writers_keys_are_free_and_its_slots_are_not(folder: Path) -> None:
    """Another one writes the same blocks in other slots; the late commit is refused by name; closing gives the slots back."""
    async with (
        house(folder) as (daemon, clock, core),
        member(daemon) as (late, there, theirs),
        member(daemon) as (raw, opened, handed),
    ):
        room = await late.call(wire.Reserved, wire.Reserve, kv=there.kv, prompt=whole(TOKENS))
        commit = await sums(there, theirs, room)
        clock.advance(TERM - 1)
        other = await raw.call(wire.Reserved, wire.Reserve, kv=opened.kv, prompt=whole(TOKENS))
        assert (other.pending, other.places) == (3, b"")
        waiting = asyncio.create_task(raw.call(wire.Reserved, wire.Reserve, kv=opened.kv, prompt=whole(TOKENS), wait=True))
        await until(lambda: daemon.house.counts.requests["Reserve"] == 3)
        clock.advance(1)
        again = await waiting
        assert again.pending == 0 and apart(core) == 3
        mine, its = ({place.slot for place in wire.unpack_places(one.places)} for one in (again, room))
        assert len(mine) == 3 and not mine & its
        assert (await late.notice()) == wire.Lost(room.reservation, "the reservation was not renewed within 10 s")

        assert await late.refused(wire.Commit, **commit) == "LeaseLost"
        fill(there, theirs, room, prompt(2, 3))  # it still writes, wherever it thinks it may
        assert (
            await raw.call(wire.Count, wire.Commit, **(await sums(opened, handed, again)) | {"reservation": again.reservation})
        ).count == 3
        hit = await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(TOKENS))
        assert hit.places is not None and are_exact(opened, handed, hit.places, TOKENS) == 3
        assert apart(core) == 3
        await late.call(wire.Done, wire.Close, reservation=room.reservation)
        assert apart(core) == 0 and daemon.house.counts.lost == {"reservation": 1}


async def test_a_lost_reservations_slots_wait_for_the_process_too(folder: Path) -> None:
    """Its session ends without closing: the slots come back when nothing maps the memory any more."""
    async with house(folder) as (daemon, clock, core):
        async with session_at(daemon.path) as late:
            there = await late.open()
            theirs = await fetched(late)
            late.handed.clear()  # the connection for descriptors outlives the session
            await late.call(wire.Reserved, wire.Reserve, kv=there.kv, prompt=whole(TOKENS))
            [session] = [one for one in daemon.house.sessions if one.token == late.welcome.token]
            clock.advance(TERM)
            await until(lambda: daemon.house.counts.lost["reservation"] == 1)
        await until(session.done.is_set)
        assert apart(core) == 3
        theirs.close()
        await until(session.watch.over.is_set)

        assert apart(core) == 0


@pytest.mark.parametrize("who", ["owner", "joined"])
async def test_a_renewal_is_for_all_that_is_held(folder: Path, who: str) -> None:
    """Leases and reservations, all with one frame; for a reservation that of a joined writer counts, too."""
    async with house(folder) as (daemon, clock, _), member(daemon) as (raw, opened, handed):
        await stored(raw, opened, handed, TOKENS)
        hits = [await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(TOKENS)) for _ in range(3)]
        room = await raw.call(wire.Reserved, wire.Reserve, kv=opened.kv, prompt=whole(prompt(5, 2)))
        async with member(daemon, raw.welcome.token) as (joined, _, _):
            await joined.call(wire.Reserved, wire.Use, reservation=room.reservation)
            await joined.call(wire.Places, wire.Ready, lease=hits[0].lease)
            for _ in range(4):
                clock.advance(TERM * 0.6)
                await (raw if who == "owner" else joined).call(wire.Done, wire.Renew)
                daemon.house.terms.sweep()

            lost = daemon.house.counts.lost
            if who == "owner":
                assert lost == {"lease": 1}  # the joined session's own
                assert (await joined.call(wire.Places, wire.Ready, lease=hits[0].lease)).places  # anew: the owner's stands
            else:
                assert lost == {"lease": 3}
                assert (await joined.call(wire.Places, wire.Ready, lease=hits[0].lease)).places
                assert (await raw.refused(wire.Ready, lease=hits[0].lease)) == "LeaseLost"
            assert (await raw.call(wire.Count, wire.Commit, reservation=room.reservation, upto=0, checksums=b"")).count == 0


@pytest.mark.parametrize("ahead", [True, False], ids=["said with the match", "said later"])
async def test_leases_end_in_the_order_of_their_age(folder: Path, ahead: bool) -> None:
    """Each a term after it was taken; those in place never; all uses of a shared one at once; a release of a lost one is done."""
    async with house(folder) as (daemon, clock, core), member(daemon) as (raw, opened, handed):
        await stored(raw, opened, handed, TOKENS)
        asked = {"kv": opened.kv, "prompt": whole(TOKENS)}
        hits = []
        for number in range(4):
            how = {"request": None if number else "name", "in_place": ahead and number == 1}
            hits.append((await raw.call(wire.Leased, wire.Match, **asked, **how)).lease)
            clock.advance(1)
        assert (await raw.call(wire.Leased, wire.Match, **asked, request="name")).lease == hits[0]
        if not ahead:
            await raw.call(wire.Done, wire.InPlace, lease=hits[1])
        gone = []
        for number in (0, 2, 3):
            clock.advance(TERM - 4 + number - (clock.now() - 1004))
            daemon.house.terms.sweep()
            gone.append(await raw.notice())

        assert [one.lease for one in gone if isinstance(one, wire.Lost)] == [hits[0], hits[2], hits[3]]
        clock.advance(1000)
        daemon.house.terms.sweep()
        assert sum(len(one.leases) for one in core.sessions) == 1 and daemon.house.counts.lost == {"lease": 3}
        for _ in range(2):
            await raw.call(wire.Done, wire.Release, lease=hits[0])
        assert await raw.refused(wire.Take, lease=hits[0], blocks=1) == "LeaseLost"
        assert await raw.refused(wire.InPlace, lease=hits[2]) == "LeaseLost"
        assert await raw.refused(wire.Reserve, **asked, after=hits[2]) == "LeaseLost"
        assert (await raw.call(wire.Leased, wire.Match, **asked, request="name")).lease not in hits
        await raw.call(wire.Done, wire.Release, lease=hits[1])


async def test_a_lease_that_is_lost_while_ready_is_waited_for(folder: Path) -> None:
    """Is an answer by name, too."""
    rig = Rig(clock=FakeClock())
    config = small(directory=folder / "kv", limits=Limits(lease_seconds=TERM))
    async with daemon_of(folder, config, rig) as daemon, member(daemon) as (raw, opened, handed):
        await stored(raw, opened, handed, TOKENS)
        await raw.call(wire.Count, wire.Flush, kv=opened.kv, prompt=whole(TOKENS))
        stack = daemon.cache.stacks[0]
        for position in (0, 1):
            stack.mover.start(stack.cache.moves.make_room(position, 8))
        await daemon.cache.settle()
        hold = rig.disk.hold("read")
        hit = await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(TOKENS))
        await hold.reached()
        number = await raw.send(wire.Ready, lease=hit.lease)
        await until(lambda: daemon.house.counts.requests["Ready"] == 1)
        rig.clock.advance(TERM)  # type: ignore[attr-defined]
        await until(lambda: daemon.house.counts.lost["lease"] == 1)
        rig.release()
        answer = await raw.reply(number)

        assert isinstance(answer, wire.Failed) and answer.kind == "LeaseLost"


class Counted:
    """Something timed that counts how often it is asked."""

    def __init__(self, due: float | None) -> None:
        self.time = due
        self.asked = 0
        self.ended: list[float] = []

    def due(self) -> float | None:
        self.asked += 1
        return self.time

    def expire(self, now: float) -> None:
        self.ended.append(now)
        self.time = None


def test_looking_costs_what_is_due() -> None:
    """A thousand sweeps with a thousand things that are not due ask none of them; renewing asks none either."""
    clock = FakeClock()
    terms = Terms(clock)
    every = [Counted(clock.now() + 100 + number) for number in range(1000)]
    for one in every:
        terms.watch(one)
        terms.watch(one)
    for _ in range(1000):
        terms.sweep()
        every[0].time = clock.now() + 150
    assert [one.asked for one in every] == [1] * 1000
    clock.advance(100)
    terms.sweep()  # the first was renewed: asked, and entered anew
    clock.advance(10)
    terms.forget(every[1])
    terms.sweep()

    assert [bool(one.ended) for one in every[:12]] == [False, False, *[True] * 9, False]
    assert [one.asked for one in every[10:13]] == [3, 1, 1]
    clock.advance(40)
    terms.sweep()
    assert every[0].ended == [clock.now()] and not every[1].ended
    clock.advance(5000)
    terms.sweep()
    assert all(one.ended for one in every if one is not every[1])


async def test_a_daemon_that_was_away_lets_renewals_be_read_first(folder: Path) -> None:
    """After a tick that comes late by a third of a term, nothing is lost for another third."""
    async with house(folder) as (daemon, clock, _), member(daemon) as (raw, opened, handed):
        await stored(raw, opened, handed, TOKENS)
        await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(TOKENS))
        daemon.heartbeat.stop()
        clock.advance(1000)
        daemon._beat(TERM / 3 + 0.1)
        daemon._beat(0.0)
        assert not daemon.house.counts.lost
        await raw.call(wire.Done, wire.Renew)
        daemon._doubtful = 0.0
        daemon._beat(0.0)
        assert not daemon.house.counts.lost
        clock.advance(TERM)
        daemon._beat(TERM / 3 - 0.1)

        assert daemon.house.counts.lost == {"lease": 1}


async def test_the_heartbeat_sees_what_holds_the_loop() -> None:
    """What holds the loop shows as a lag of its length less one interval, in its class. What a beat raises ends nothing."""
    said: list[float] = []
    complaints: list[dict[str, object]] = []

    def beat(lag: float) -> None:
        said.append(lag)
        if len(said) == 2:
            raise ZeroDivisionError

    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    heart = Heartbeat(beat)
    heart.start()
    await until(lambda: len(said) >= 3)
    end = loop.time() + 0.3
    while loop.time() < end:
        pass
    seen = len(said)
    await until(lambda: len(said) > seen)
    heart.stop()
    ticks = heart.ticks
    await asyncio.sleep(3 * INTERVAL)

    assert heart.longest >= 0.3 - INTERVAL and heart.longest == max(said) and heart.ticks == len(said) == ticks
    assert sum(heart.counts[EDGES.index(0.25) :]) >= 1 and heart.total == pytest.approx(sum(said))
    assert len(complaints) == 1


async def test_figures_say_what_was_lost_and_how_late_the_loop_is(folder: Path) -> None:
    """In the statistics and for Prometheus, the same ticks in both; the longest is in the last class that has any."""
    async with house(folder) as (daemon, clock, _), member(daemon) as (raw, opened, _):
        await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(TOKENS))
        await raw.call(wire.Reserved, wire.Reserve, kv=opened.kv, prompt=whole(TOKENS))
        clock.advance(TERM)
        daemon.house.terms.sweep()
        await until(lambda: daemon.heartbeat.ticks > 2)
        daemon.heartbeat.stop()
        _, stats = await get(daemon.path, "/v1/stats")
        _, text = await get(daemon.path, "/metrics")

        assert stats["counts"]["lost"] == {"leases": 1, "reservations": 1} and stats["counts"]["stalled"] == 0
        loop = stats["loop"]
        assert sum(one["ticks"] for one in loop["lags"]) == loop["ticks"] > 2
        last = [one["upto"] for one in loop["lags"] if one["ticks"]][-1]
        assert 0 <= loop["lag_max"] <= (last or float("inf")) and loop["lag_sum"] >= loop["lag_max"]
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert float(lines['tiercache_loop_lag_seconds_bucket{le="+Inf"}']) == loop["ticks"]
        assert float(lines["tiercache_loop_lag_longest_seconds"]) == loop["lag_max"]
        assert float(lines['tiercache_lost_total{what="lease"}']) == float(lines['tiercache_lost_total{what="reservation"}']) == 1
        assert float(lines["tiercache_sessions_stalled_total"]) == 0


async def test_a_match_that_found_nothing_leaves_nothing_behind(folder: Path) -> None:
    """Though it said that it would be read in place: there is nothing to be kept from use until the process is gone."""
    async with house(folder) as (daemon, _, _core):
        async with session_at(daemon.path) as raw:
            opened = await raw.open()
            [session] = [one for one in daemon.house.sessions if one.token == raw.welcome.token]
            hit = await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(TOKENS), in_place=True)
            assert hit.blocks == 0 and (await daemon.cache.check())["leases"] == 1
        await session.done.wait()

        assert (await daemon.cache.check())["leases"] == 0
