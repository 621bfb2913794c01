"""How sessions end: what a process may still touch is kept from use until it can't any more, and everything comes back."""

from __future__ import annotations

import asyncio
import fcntl
import json
import mmap
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.service.caches import prompt, small
from tests.service.daemon.raw import PATIENCE, are_exact, connected, daemon_of, fetched, fill, session_at, stored, whole
from tiercache.cache import Cache
from tiercache.service import wire, wire_memory
from tiercache.service.daemon.daemon import Daemon
from tiercache.service.daemon.peers import Watch
from tiercache.service.daemon.session import Session

CHILD = Path(__file__).with_name("child.py")
HELD, NEW, NEIGHBOUR = prompt(1, 2), prompt(2, 3), prompt(3, 2)


class Child:
    """The other process, as the daemon's test sees it."""

    def __init__(self, process: asyncio.subprocess.Process, session: Session) -> None:
        self.process = process
        self.session = session

    async def drop(self) -> None:
        """Let it drop its session and live on."""
        await self.say()
        assert await self.line() == "dropped"
        await self.session.done.wait()

    async def kill(self) -> None:
        """Kill it, and wait until its session has ended and all that was kept back has come back."""
        self.process.kill()
        await self.process.wait()
        async with asyncio.timeout(PATIENCE):
            await self.session.done.wait()
            await self.session.watch.over.wait()

    async def say(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        await self.process.stdin.drain()

    async def line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            return (await self.process.stdout.readline()).decode().strip()


@asynccontextmanager
async def child(daemon: Daemon, phase: str, *, mapped: bool) -> AsyncIterator[Child]:
    """A client in a process of its own that has gone as far as `phase`."""
    before = set(daemon.house.sessions)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        CHILD,
        daemon.path,
        phase,
        "yes" if mapped else "no",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("".join(json.dumps(tokens) + "\n" for tokens in (HELD, NEW)).encode())
        async with asyncio.timeout(PATIENCE):
            assert await process.stdout.readline() == b"there\n"
        [session] = set(daemon.house.sessions) - before
        yield Child(process, session)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def house(folder: Path) -> AsyncIterator[tuple[Daemon, Cache]]:
    """A daemon that holds a prompt to be leased, and a neighbour's; the neighbour's bytes must be untouched in the end."""
    async with daemon_of(folder, small(hbm=24, dram=24)) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        handed = await fetched(raw)
        await stored(raw, opened, handed, HELD)
        await stored(raw, opened, handed, NEIGHBOUR)
        yield daemon, daemon.cache.stacks[0].cache
        hit = await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(NEIGHBOUR))
        assert hit.places is not None and are_exact(opened, handed, hit.places, NEIGHBOUR) == 2


def claims(core: Cache) -> tuple[int, int, int]:
    """Return how many leases there are, how many reservations, and how many slots in quarantine."""
    apart = sum(len(kept.places) for kept in core.quarantines)
    return (
        sum(len(session.leases) for session in core.sessions),
        sum(len(session.reservations) for session in core.sessions),
        apart,
    )


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "not mapped"])
@pytest.mark.parametrize("phase", ["hello", "match", "in-place", "reserve", "write", "commit"])
async def test_a_killed_client_leaves_nothing(folder: Path, phase: str, mapped: bool) -> None:
    """Whenever it is killed: leases and slots come back, and the same prompt can be written again."""
    async with house(folder) as (daemon, core):
        async with child(daemon, phase, mapped=mapped) as client:
            await client.kill()

        assert claims(core) == (0, 0, 0)
        await daemon.cache.check()
        async with session_at(daemon.path) as raw:
            opened = await raw.open()
            room = await raw.call(wire.Reserved, wire.Reserve, kv=opened.kv, prompt=whole(NEW))
            assert room.pending == 0 and room.present == (1 if phase == "commit" else 0)


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "not mapped"])
async def test_what_a_silent_process_may_touch_is_kept_until_it_is_gone(folder: Path, mapped: bool) -> None:
    """Its session is over, its process lives: the lease in place and the reserved slots are nobody else's, but others go on."""
    async with house(folder) as (daemon, core), child(daemon, "commit", mapped=mapped) as client:
        await client.drop()

        assert claims(core) == (1, 0, 2)  # one of three reserved slots was committed
        await daemon.cache.check()
        async with session_at(daemon.path) as raw:
            opened = await raw.open()
            assert (await raw.call(wire.Count, wire.Delete, kv=opened.kv, prompt=whole(HELD))).count == 2
            room = await raw.call(wire.Reserved, wire.Reserve, kv=opened.kv, prompt=whole(prompt(9, 30)))
            taken = {(place.position, place.slot) for place in wire.unpack_places(room.places)}
            assert not taken & {place for kept in core.quarantines for place in kept.places}
            assert daemon.house.kept_back == 1
            await raw.call(wire.Done, wire.Close, reservation=room.reservation)
        await client.kill()
        assert claims(core) == (0, 0, 0)
        assert daemon.house.kept_back == 0


async def test_a_copying_lease_is_not_kept(folder: Path) -> None:
    async with house(folder) as (daemon, core), child(daemon, "match", mapped=True) as client:
        await client.drop()

        assert claims(core) == (0, 0, 0)
        await client.kill()


async def test_a_living_process_that_unmaps_everything_is_waited_for_no_more(folder: Path) -> None:
    """The connection for descriptors stands for the mappings: when it ends, what was kept comes back, the process living on."""
    async with house(folder) as (daemon, core):
        async with session_at(daemon.path) as raw:
            opened = await raw.open()
            handed = await fetched(raw)
            await raw.call(wire.Reserved, wire.Reserve, kv=opened.kv, prompt=whole(NEW))
            [session] = [one for one in daemon.house.sessions if one.token == raw.welcome.token]
            await raw.ws.close()
            await session.done.wait()
            assert claims(core) == (0, 0, 3)

            handed.close()
            async with asyncio.timeout(PATIENCE):
                await session.watch.over.wait()

        assert claims(core) == (0, 0, 0)


@pytest.mark.parametrize("announced", [True, False])
async def test_where_a_device_writes_only_an_announced_end_of_the_connection_is_believed(folder: Path, announced: bool) -> None:
    """A killed process's connections may end before its device stops: then the process, too, has to be gone."""
    async with house(folder) as (daemon, core):
        async with session_at(daemon.path) as raw:
            opened = await raw.open()
            handed = await fetched(raw)
            await raw.call(wire.Reserved, wire.Reserve, kv=opened.kv, prompt=whole(NEW))
            [session] = [one for one in daemon.house.sessions if one.token == raw.welcome.token]
            session.watch.on_device = True
            await raw.ws.close()
            await session.done.wait()
            if announced:
                handed.link.send(wire.encoder.encode(wire_memory.Unmapped()))

            handed.close()
            if announced:
                async with asyncio.timeout(PATIENCE):
                    await session.watch.over.wait()
            else:
                async with session_at(daemon.path) as other:  # which fetches after that end
                    await other.open()
                    await fetched(other)

        assert claims(core) == (0, 0, 0 if announced else 3) and session.watch.waiting is not announced


async def test_a_released_slot_has_another_generation(folder: Path) -> None:
    """Who copied sees in the shared page that the slot was given up meanwhile; the page can't be written."""
    async with house(folder) as (daemon, _), session_at(daemon.path) as raw:
        opened = await raw.open()
        handed = await fetched(raw)
        hit = await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(HELD))
        assert hit.places is not None
        place = wire.unpack_places(hit.places)[0]
        page = generations(handed.names[wire_memory.GENERATIONS])
        number = opened.arenas[place.position].generations // 4 + place.slot

        assert page[number] == place.generation
        await raw.call(wire.Count, wire.Delete, kv=opened.kv, prompt=whole(HELD))
        assert page[number] == place.generation, "the lease holds the slot"
        await raw.call(wire.Done, wire.Release, lease=hit.lease)
        assert page[number] == place.generation + 1


def generations(descriptor: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, 0)
    return np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), np.uint32)


async def test_memory_that_is_handed_out_can_not_shrink_and_is_written_only_where_it_may_be(folder: Path) -> None:
    async with house(folder) as (daemon, _), session_at(daemon.path) as raw:
        handed = await fetched(raw)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

        assert sorted(handed.names) == ["generations", "memory 0", "memory 0 writable", "memory 1", "memory 1 writable"]
        for name, descriptor in handed.names.items():
            assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & seals == seals
            with pytest.raises(OSError):
                os.ftruncate(descriptor, 1)
            if not name.endswith("writable"):
                with pytest.raises(PermissionError):
                    mmap.mmap(descriptor, 0)


# --- several processes of one session -------------------------------------------------------------------------------------


async def test_a_joined_session_reads_a_lease_beyond_its_owners_release(folder: Path) -> None:
    async with house(folder) as (daemon, core), session_at(daemon.path) as owner:
        opened = await owner.open()
        hit = await owner.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(HELD))
        async with session_at(daemon.path, join=owner.welcome.token) as worker:
            handed = await fetched(worker)

            ready = await worker.call(wire.Places, wire.Ready, lease=hit.lease)
            await owner.call(wire.Done, wire.Release, lease=hit.lease)
            await owner.call(wire.Count, wire.Delete, kv=opened.kv, prompt=whole(HELD))

            assert are_exact(opened, handed, ready.places, HELD) == 2
            assert claims(core)[0] == 1
            await worker.call(wire.Done, wire.Release, lease=hit.lease)
            assert claims(core)[0] == 0
            assert await worker.refused(wire.Ready, lease=hit.lease) == "UnknownHandle"


async def test_a_joined_session_writes_reserved_slots_that_wait_for_both(folder: Path) -> None:
    """Two write one reservation; what the owner gives back is free when the other one has left it, too."""
    async with house(folder) as (daemon, core), session_at(daemon.path) as owner:
        opened = await owner.open()
        room = await owner.call(wire.Reserved, wire.Reserve, kv=opened.kv, prompt=whole(NEW))
        async with session_at(daemon.path, join=owner.welcome.token) as worker:
            handed = await fetched(worker)
            same = await worker.call(wire.Reserved, wire.Use, reservation=room.reservation)
            sums = np.array(fill(opened, handed, same, NEW), "<u8")

            assert same.places == room.places
            done = await worker.call(wire.Count, wire.Commit, reservation=room.reservation, upto=1, checksums=sums[:1].tobytes())
            assert done.count == 1
            await owner.call(wire.Done, wire.Close, reservation=room.reservation)
            assert claims(core) == (0, 0, 2)
            assert (
                await worker.refused(wire.Commit, reservation=room.reservation, upto=2, checksums=sums[1:2].tobytes())
                == "UnknownHandle"
            )
            await worker.call(wire.Done, wire.Close, reservation=room.reservation)
            assert claims(core) == (0, 0, 0)


async def test_the_owners_end_leaves_a_joined_reader_its_lease(folder: Path) -> None:
    async with house(folder) as (daemon, core):
        async with session_at(daemon.path) as owner:
            opened = await owner.open()
            hit = await owner.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(HELD))
            token = owner.welcome.token
            worker_session = session_at(daemon.path, join=token)
            worker = await worker_session.__aenter__()
            await worker.call(wire.Places, wire.Ready, lease=hit.lease)
            [session] = [one for one in daemon.house.sessions if one.token == token]
        await session.done.wait()

        assert claims(core)[0] == 1
        await worker.call(wire.Done, wire.Release, lease=hit.lease)
        assert claims(core)[0] == 0
        await worker_session.__aexit__(None, None, None)


@pytest.mark.parametrize("which", ["wrong", "old"])
async def test_a_token_that_is_no_living_sessions_joins_nothing(folder: Path, which: str) -> None:
    async with house(folder) as (daemon, _):
        async with session_at(daemon.path) as gone:
            token = gone.welcome.token if which == "old" else bytes(32)
            [session] = [one for one in daemon.house.sessions if one.token == gone.welcome.token]
        await session.done.wait()

        async with connected(daemon.path) as raw:
            assert await raw.refused(wire.Hello, version=wire.VERSION, join=token) == "JoinRefused"
            assert await raw.ended()


# --- without a pidfd --------------------------------------------------------------------------------------------------------


@pytest.fixture
def calls() -> tuple[list[str], Callable[[], None]]:
    said: list[str] = []
    return said, lambda: said.append("free")


async def test_without_a_pidfd_the_end_of_the_connection_and_a_grace_decide(calls: tuple[list[str], Callable[[], None]]) -> None:
    said, free = calls
    watch = Watch(None, grace=0.0)
    watch.link()
    watch.begin([free])

    assert said == [] and watch.waiting
    watch.unlink()
    await watch.over.wait()
    assert said == ["free"] and not watch.waiting


async def test_without_a_pidfd_and_a_connection_a_grace_decides(calls: tuple[list[str], Callable[[], None]]) -> None:
    said, free = calls
    watch = Watch(None, grace=0.0)

    watch.begin([free])

    assert said == []
    await watch.over.wait()
    assert said == ["free"]


async def test_two_connections_are_both_waited_for(calls: tuple[list[str], Callable[[], None]]) -> None:
    said, free = calls
    watch = Watch(None, grace=0.0)
    watch.link()
    watch.link()
    watch.begin([free])

    watch.unlink()
    assert said == []
    watch.unlink()
    await watch.over.wait()
    assert said == ["free"]


@pytest.mark.parametrize("first", ["the connection", "the session"])
@pytest.mark.parametrize(("device", "announced"), [(True, False), (True, True), (False, False)])
async def test_the_process_is_waited_for_where_its_device_may_go_on(
    calls: tuple[list[str], Callable[[], None]], device: bool, announced: bool, first: str
) -> None:
    """Whichever end is seen first."""
    said, free = calls
    pidfd, alive = os.pipe()  # readable, as a pidfd is, when the other end is gone
    watch = Watch(pidfd, grace=0.0)
    watch.on_device = device
    watch.link()

    if first == "the session":
        watch.begin([free])
        watch.unlink(unmapped=announced)
    else:
        watch.unlink(unmapped=announced)
        watch.begin([free])

    assert said == ([] if device and not announced else ["free"])
    os.close(alive)
    await watch.over.wait()
    assert said == ["free"]


async def test_without_a_pidfd_a_device_has_the_grace_to_stop(calls: tuple[list[str], Callable[[], None]]) -> None:
    said, free = calls
    watch = Watch(None, grace=0.0)
    watch.on_device = True
    watch.link()
    watch.unlink()

    watch.begin([free])

    assert said == []
    await watch.over.wait()
    assert said == ["free"]
