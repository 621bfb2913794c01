"""What no client of ours sends: each is answered with an error that names it, and the daemon lives on with its books right."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.service.caches import SPACE, SPEC, prompt, small
from tests.service.daemon.raw import Raw, connected, daemon_of, fetched, session_at, stored, whole
from tiercache.config import Limits
from tiercache.service import wire

NAMED = msgspec.to_builtins(SPACE)
LAID_OUT = msgspec.to_builtins(SPEC)


def say(*parts: object) -> bytes:
    return msgspec.msgpack.encode(parts)


async def test_text_is_no_frame(folder: Path) -> None:
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        await raw.ws.send_str("hello")

        assert isinstance(failed := await raw.frame(), wire.Failed) and failed.kind == "InvalidFrame"
        await raw.open()


async def test_nothing_comes_before_hello_and_hello_comes_once(folder: Path) -> None:
    async with daemon_of(folder) as daemon, connected(daemon.path) as raw:
        assert await raw.refused(wire.Check) == "InvalidFrame"
        await raw.hello()
        assert await raw.refused(wire.Hello, version=wire.VERSION) == "InvalidFrame"
        await raw.open()


@pytest.mark.parametrize("frame", [say("hello", 3, wire.VERSION - 1, None), say("hello", 3, 9, None, "a field of the future")])
async def test_another_version_is_told_so_and_the_session_ends(folder: Path, frame: bytes) -> None:
    async with daemon_of(folder) as daemon:
        async with connected(daemon.path) as raw:
            failed = await raw.garbage(frame)

            assert (failed.id, failed.kind) == (3, "VersionMismatch")
            assert await raw.ended()
        async with session_at(daemon.path) as raw:
            await raw.open()


PROMPTS = {
    "above 31 bits": (wire.Prompt(1, None, 0, b"\0\0\0\0\0\0\0\x80"), "InvalidTokens"),
    "half a token": (wire.Prompt(1, None, 0, b"123456"), "InvalidFrame"),
    "kept of nothing": (wire.Prompt(1, None, 4, b"1234"), "InvalidFrame"),
    "an unknown base": (wire.Prompt(1, 77, 4, b"1234"), wire.UNKNOWN_BASE),
    "more kept than there is": (wire.Prompt(2, 1, 400, b""), "InvalidFrame"),
    "half a token kept": (wire.Prompt(2, 1, 2, b""), "InvalidFrame"),
    "less than nothing kept": (wire.Prompt(2, 1, -4, b""), "InvalidFrame"),
}


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("kind", [wire.Match, wire.Reserve, wire.Covered, wire.Flush, wire.Prefetch, wire.Delete])
async def test_a_prompt_that_is_none(folder: Path, kind: type[Any], name: str) -> None:
    """It changes nothing: the prompt that had the number is still there."""
    bad, error = PROMPTS[name]
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        await raw.call(wire.Count, wire.Covered, kv=opened.kv, prompt=whole([1, 2, 3]))

        assert await raw.refused(kind, kv=opened.kv, prompt=bad) == error
        await raw.call(wire.Count, wire.Covered, kv=opened.kv, prompt=wire.Prompt(3, 1, 12, b""))


SPACES = {
    "an unknown field": ({**NAMED, "colour": "red"}, LAID_OUT, 0, "InvalidSpec"),
    "a missing field": ({"model": "m"}, LAID_OUT, 0, "InvalidSpec"),
    "a number for a name": ({**NAMED, "model": 5}, LAID_OUT, 0, "InvalidSpec"),
    "an unknown dtype": (NAMED, {**LAID_OUT, "dtype": "float12"}, 0, "InvalidSpec"),
    "no layers": (NAMED, {**LAID_OUT, "layers": 0}, 0, "InvalidSpec"),
    "true layers": (NAMED, {**LAID_OUT, "layers": True}, 0, "InvalidSpec"),
    "a list of layers": (NAMED, {**LAID_OUT, "layers": [1]}, 0, "InvalidSpec"),
    "two ranks": ({**NAMED, "world": 2}, LAID_OUT, 0, "UnsupportedSpec"),
    "another shard": (NAMED, LAID_OUT, 1, "UnsupportedSpec"),
    "a block larger than a tier": (NAMED, {**LAID_OUT, "head_dim": 1 << 20}, 0, "TierTooSmall"),
}


@pytest.mark.parametrize("name", SPACES)
async def test_a_namespace_that_cannot_be(folder: Path, name: str) -> None:
    space, spec, shard, error = SPACES[name]
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        assert await raw.refused(wire.Open, namespace=space, spec=spec, shard=shard) == error
        await raw.open()


USES: dict[str, Callable[[Raw, int], Any]] = {
    "ready": lambda raw, number: raw.refused(wire.Ready, lease=number),
    "in place": lambda raw, number: raw.refused(wire.InPlace, lease=number),
    "take": lambda raw, number: raw.refused(wire.Take, lease=number, blocks=1),
    "release": lambda raw, number: raw.refused(wire.Release, lease=number),
    "distrust": lambda raw, number: raw.refused(wire.Distrust, lease=number, block=0),
    "reserve after": lambda raw, number: raw.refused(wire.Reserve, kv=1, prompt=whole(prompt(1, 4)), after=number),
    "commit": lambda raw, number: raw.refused(wire.Commit, reservation=number, upto=0, checksums=b""),
    "close": lambda raw, number: raw.refused(wire.Close, reservation=number),
    "use": lambda raw, number: raw.refused(wire.Use, reservation=number),
}


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("whose", ["another's", "nobody's", "ended"])
async def test_a_number_that_is_not_this_sessions(folder: Path, name: str, whose: str) -> None:
    tokens = prompt(1, 4)
    async with daemon_of(folder) as daemon, session_at(daemon.path) as owner, session_at(daemon.path) as other:
        opened = await owner.open()
        await other.open()
        await stored(owner, opened, await fetched(owner), tokens)
        hit = await owner.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(tokens))
        room = await owner.call(wire.Reserved, wire.Reserve, kv=opened.kv, prompt=whole(prompt(2, 2)))
        lease = name in ("ready", "in place", "take", "release", "distrust", "reserve after")
        number = hit.lease if lease else room.reservation
        raw = other
        if whose == "nobody's":
            number = 1 << 40
        elif whose == "ended":
            raw = owner
            await owner.call(wire.Done, wire.Release, lease=hit.lease)
            await owner.call(wire.Done, wire.Close, reservation=room.reservation)

        assert await USES[name](raw, number) == "UnknownHandle"
        if whose != "ended":
            await owner.call(wire.Places, wire.Ready, lease=hit.lease)
            await owner.call(wire.Done, wire.Close, reservation=room.reservation)


async def test_a_namespace_that_was_not_opened(folder: Path) -> None:
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        assert await raw.refused(wire.Match, kv=1, prompt=whole([1])) == "UnknownHandle"
        assert await raw.refused(wire.Clear, kv=-1) == "UnknownHandle"


async def test_commits_that_cannot_be(folder: Path) -> None:
    """Backwards, too far, twice, with checksums that do not fit: nothing is committed by them."""
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        tokens = prompt(1, 4)
        room = await raw.call(wire.Reserved, wire.Reserve, kv=opened.kv, prompt=whole(tokens))
        at = {"reservation": room.reservation}

        assert await raw.refused(wire.Commit, **at, upto=5, checksums=bytes(40)) == "InvalidStart"
        assert await raw.refused(wire.Commit, **at, upto=-1, checksums=b"") == "InvalidStart"
        assert await raw.refused(wire.Commit, **at, upto=2, checksums=bytes(15)) == "InvalidInput"
        assert (await raw.call(wire.Count, wire.Covered, kv=opened.kv, prompt=whole(tokens))).count == 0
        await raw.call(wire.Count, wire.Commit, **at, upto=2, checksums=bytes(16))
        assert await raw.refused(wire.Commit, **at, upto=2, checksums=bytes(16)) == "InvalidInput"
        assert await raw.refused(wire.Commit, **at, upto=1, checksums=b"") == "InvalidStart"
        await raw.call(wire.Done, wire.Close, **at)
        assert await raw.refused(wire.Commit, **at, upto=3, checksums=bytes(8)) == "UnknownHandle"


async def test_wrong_checksums_never_become_a_hit(folder: Path) -> None:
    """The writer's checksum is the guard: what does not have it goes when it is first read."""
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        tokens = prompt(1, 2)
        room = await raw.call(wire.Reserved, wire.Reserve, kv=opened.kv, prompt=whole(tokens))
        await raw.call(wire.Count, wire.Commit, reservation=room.reservation, upto=2, checksums=bytes(16))
        await raw.call(wire.Done, wire.Close, reservation=room.reservation)
        hit = await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(tokens))

        await raw.call(wire.Done, wire.Distrust, lease=hit.lease, block=0)

        assert (await raw.call(wire.Count, wire.Covered, kv=opened.kv, prompt=whole(tokens))).count == 0


async def test_values_that_cannot_be(folder: Path) -> None:
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        named = {"kv": opened.kv, "prompt": whole(prompt(1, 2))}
        hit = await raw.call(wire.Leased, wire.Match, **named)

        assert await raw.refused(wire.Reserve, **named, tier="TAPE") == "InvalidInput"
        assert await raw.refused(wire.Reserve, **named, tier="SSD") == "InvalidConfig"
        assert await raw.refused(wire.Pin, **named, ttl=-1.0) == "InvalidInput"
        assert await raw.refused(wire.Pin, **named, ttl=float("nan")) == "InvalidInput"
        assert await raw.refused(wire.Take, lease=hit.lease, blocks=-1) == "InvalidInput"
        assert await raw.refused(wire.Distrust, lease=hit.lease, block=0) == "InvalidInput"


async def test_a_lease_on_another_prompt_is_not_what_a_reservation_follows(folder: Path) -> None:
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        await stored(raw, opened, await fetched(raw), prompt(1, 2))
        hit = await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(prompt(1, 2)))

        assert await raw.refused(wire.Reserve, kv=opened.kv, prompt=whole(prompt(2, 4)), after=hit.lease) == "InvalidStart"


async def test_limits_are_errors_and_what_is_there_goes_on(folder: Path) -> None:
    """Sessions, leases, reservations: one more than allowed is refused, and with one less it is taken again."""
    config = small(limits=Limits(sessions=2, leases=2, reservations=1))
    async with daemon_of(folder, config) as daemon, session_at(daemon.path) as raw, session_at(daemon.path):
        opened = await raw.open()
        named = {"kv": opened.kv, "prompt": whole(prompt(1, 2))}
        async with connected(daemon.path) as third:
            assert await third.refused(wire.Hello, version=wire.VERSION) == "LimitReached"

        one = await raw.call(wire.Leased, wire.Match, **named)
        await raw.call(wire.Leased, wire.Match, **named)
        assert await raw.refused(wire.Match, **named) == "LimitReached"
        assert await raw.refused(wire.Pin, **named, ttl=5.0) == "LimitReached"
        await raw.call(wire.Done, wire.Release, lease=one.lease)
        await raw.call(wire.Leased, wire.Match, **named)
        room = await raw.call(wire.Reserved, wire.Reserve, **named)
        assert await raw.refused(wire.Reserve, **named) == "LimitReached"
        await raw.call(wire.Done, wire.Close, reservation=room.reservation)
        await raw.call(wire.Reserved, wire.Reserve, **named)


async def test_requests_that_wait_are_bounded(folder: Path) -> None:
    config = small(limits=Limits(requests=1))
    tokens = prompt(1, 2)
    async with daemon_of(folder, config) as daemon, session_at(daemon.path) as one, session_at(daemon.path) as two:
        opened, there = await one.open(), await two.open()
        room = await one.call(wire.Reserved, wire.Reserve, kv=opened.kv, prompt=whole(tokens))
        waiting = await two.send(wire.Reserve, kv=there.kv, prompt=whole(tokens), wait=True)

        assert await two.refused(wire.Check) == "LimitReached"
        await two.call(wire.Count, wire.Covered, kv=there.kv, prompt=whole(tokens))
        await one.call(wire.Done, wire.Close, reservation=room.reservation)
        assert isinstance(await two.reply(waiting), wire.Reserved)


async def test_descriptors_are_for_tokens(folder: Path) -> None:
    """A wrong token, one of an ended session, and bytes that ask for nothing get no descriptor."""
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        async with session_at(daemon.path) as gone:
            old = gone.welcome.token
            [session] = [one for one in daemon.house.sessions if one.token == old]
        await session.done.wait()

        assert (await fetched(raw, token=b"guessed")).names == {}
        assert (await fetched(raw, token=old)).names == {}
        assert len((await fetched(raw)).names) == 5


async def test_a_session_can_go_while_a_request_waits(folder: Path) -> None:
    """Whoever drops the connection in the middle of a wait leaves nothing behind."""
    tokens = prompt(1, 2)
    async with daemon_of(folder) as daemon, session_at(daemon.path) as one:
        opened = await one.open()
        await one.call(wire.Reserved, wire.Reserve, kv=opened.kv, prompt=whole(tokens))
        async with session_at(daemon.path) as two:
            there = await two.open()
            await two.send(wire.Reserve, kv=there.kv, prompt=whole(tokens), wait=True)
            await two.call(wire.Count, wire.Covered, kv=there.kv, prompt=whole(tokens))
            [session] = [held for held in daemon.house.sessions if held.token == two.welcome.token]
        async with asyncio.timeout(20):
            await session.done.wait()

        [core] = [stack.cache for stack in daemon.cache.stacks]
        assert sum(len(account.reservations) for account in core.sessions) == 1
