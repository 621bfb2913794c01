"""What a daemon does wrong is a counted miss, what a caller does wrong an error before anything is sent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracle import oracle_kv
from tests.service.client.fake import SIZE, SPACE, SPEC, FakeDaemon, serving, turn, until
from tiercache.errors import (
    AuditFailed,
    Closed,
    InvalidConfig,
    InvalidInput,
    InvalidSpec,
    InvalidStart,
    InvalidTensor,
    InvalidTokens,
    JoinRefused,
    LeaseLost,
    NoShare,
    Refused,
    SpecMismatch,
    StaleHandle,
    UnsupportedSpec,
)
from tiercache.leases import Refusal
from tiercache.service import wire
from tiercache.service.client.client import BackOff, Client, connect
from tiercache.service.client.connection import Connection
from tiercache.service.client.remote_kv import RemoteKV
from tiercache.service.face import Stored
from tiercache.spec import Namespace
from tiercache.types import Tier

TOKENS = list(range(4 * SIZE))
AT_ONCE = BackOff(first=0.001, most=0.002)


def kv_of(tokens: list[int]) -> torch.Tensor:
    planes = oracle_kv(SPACE, SPEC, tokens)
    return torch.from_numpy(planes.reshape(-1)).view(torch.float16).reshape(SPEC.shape(len(tokens)))


def is_exact(tensor: torch.Tensor, tokens: list[int]) -> bool:
    found = tensor.contiguous().view(torch.uint8).numpy().reshape(SPEC.geometry.planes, -1)
    return np.array_equal(found, oracle_kv(SPACE, SPEC, tokens[: tensor.shape[2]]))


def wait_for(pid: int) -> int:
    return os.waitpid(pid, 0)[1]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


async def all_calls(kv: RemoteKV) -> list[object]:
    """Make every call of a runner; return what became of it."""
    async with kv.match(TOKENS) as hit:
        read: list[object] = [hit.tokens, await hit.ready()]
    async with kv.match(TOKENS, request="r") as first, kv.match(TOKENS, request="r") as second:
        read += [first.tokens, second.take(SIZE)]
    async with kv.reserve(TOKENS) as room:
        read += [room.present, room.pending, room.tokens, len(room.blocks), await room.commit(0)]
    return [
        *read,
        await kv.insert(TOKENS, kv_of(TOKENS)),
        await kv.flush(TOKENS),
        await kv.prefetch(TOKENS),
        await kv.pin(TOKENS, ttl=1.0),
        await kv.delete(TOKENS),
        await kv.clear(),
    ]


MISSES: list[object] = [0, 0, 0, 0, 0, 0, 0, 0, 0, Stored(0, 0, 4 * SIZE), 0, 0, 0, 0, 0]


async def test_without_a_daemon_everything_is_a_miss(short_path: Path) -> None:
    """Nothing is raised, each miss is counted, and the caller's tensors are as good as they were."""
    async with connect(f"unix://{short_path}/nobody", back_off=AT_ONCE) as client:
        kv = await client.open(SPACE, SPEC)

        assert await all_calls(kv) == MISSES
        async with kv.match(TOKENS) as hit:
            assert (await hit.gather()).shape == SPEC.shape(0)
            assert [part.shape for part in await hit.layer(0)] == [(0, 1, 32)] * 2
            with pytest.raises(InvalidInput):
                hit.view(0, 0)
        with pytest.raises(Refused):
            await client.check()
        assert client.stats().misses.keys() == {"away"} and client.boot is None


@pytest.mark.parametrize(
    ("name", "answer", "reason"),
    [
        ("no msgpack", lambda asked: b"\xc1", "malformed"),
        ("cut off", lambda asked: wire.encoder.encode(wire.Done(id=asked.id))[:-1], "malformed"),
        ("unknown", lambda asked: wire.encoder.encode(["surprise", asked.id]), "malformed"),
        ("a request", wire.encoder.encode, "malformed"),
        ("another answer", lambda asked: wire.Audited(id=asked.id, counts={}, faults=[]), "malformed"),
        ("refusal", lambda asked: wire.Failed(id=asked.id, kind="LimitReached", message="no"), "LimitReached"),
        ("nonsense", lambda asked: wire.Failed(id=asked.id, kind="__class__", message="no"), "__class__"),
        ("base", lambda asked: wire.Failed(id=asked.id, kind=wire.UNKNOWN_BASE, message="no"), wire.UNKNOWN_BASE),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_wrong_answer_is_a_miss(fake: FakeDaemon, name: str, answer: Callable[[Any], Any], reason: str) -> None:
    """To every request of a namespace; a frame that can't be read ends the session, as nobody knows whose answer it was."""
    del name
    kinds = (wire.Match, wire.Reserve, wire.Flush, wire.Prefetch, wire.Pin, wire.Delete, wire.Clear)
    async with connect(fake.address, back_off=AT_ONCE) as client:
        kv = await client.open(SPACE, SPEC)
        fake.answers |= dict.fromkeys(kinds, answer)

        assert await all_calls(kv) == MISSES
        assert client.stats().misses[reason] >= 1


@pytest.mark.parametrize(
    "places",
    [b"x", wire.pack_places([0], [99], [0], [0]), wire.pack_places([7], [0], [0], [0])],
    ids=["no places", "no such slot", "no such tier"],
)
async def test_places_that_can_not_be_are_a_miss(fake: FakeDaemon, places: bytes) -> None:
    """Nothing outside of what is mapped is touched."""
    fake.answers[wire.Match] = lambda asked: wire.Leased(
        id=asked.id, lease=1, blocks=1, tiers={"DRAM": 1, "FUTURE": 1}, lifting=False, places=places
    )
    fake.answers[wire.Reserve] = lambda asked: wire.Reserved(id=asked.id, reservation=1, present=0, pending=0, places=places)
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        async with kv.match(TOKENS) as hit:
            assert hit.tokens == SIZE and await hit.ready() == 0
            assert (await hit.gather()).shape[2] == 0
        outcome = await kv.insert(TOKENS, kv_of(TOKENS))
        assert outcome == (0, 0, 4 * SIZE) and outcome.refused_because is Refusal.UNREACHED
        assert client.stats().misses["malformed"] == 2


@pytest.mark.parametrize(
    "at",
    [
        wire.ArenaAt("DRAM", "block-first", 0, 0, 1 << 40, 16, 0),
        wire.ArenaAt("DRAM", "block-first", 0, 0, 8192, 2, 0),
        wire.ArenaAt("DRAM", "block-first", 0, 1, 8192, 1, 0),
        wire.ArenaAt("DRAM", "block-first", 0, -4096, 8192, 1, 0),
        wire.ArenaAt("DRAM", "block-first", 0, 0, 8192, 1, 4096),
        wire.ArenaAt("DRAM", "block-first", 0, 0, 8192, 0, 0),
        wire.ArenaAt("DRAM", "spiral", 0, 0, 8192, 1, 0),
        wire.ArenaAt("DRAM", "block-first", 5, 0, 8192, 1, 0),
        wire.ArenaAt("TAPE", "block-first", 0, 0, 8192, 1, 0),
    ],
)
async def test_an_arena_that_can_not_be_is_a_miss(fake: FakeDaemon, at: wire.ArenaAt) -> None:
    """The client maps only what lies within what it was handed."""
    fake.answers[wire.Open] = lambda asked: wire.Opened(id=asked.id, kv=1, tiers=[at.tier], arenas=[at])
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)

        assert await all_calls(kv) == MISSES
        assert client.stats().misses.keys() == {"unmapped"}


async def test_silence_is_a_miss_and_is_waited_for_once(fake: FakeDaemon) -> None:
    """After a deadline without any sign of life the next calls do not wait; the first sign ends that."""
    async with connect(fake.address, deadline=0.05) as client:
        kv = await client.open(SPACE, SPEC)
        fake.answers[wire.Flush] = lambda asked: None
        first = await kv.flush(TOKENS)
        asked = len(fake.asked)
        rest = await all_calls(kv)
        unasked = len(fake.asked) - asked
        await fake.say(wire.Draining(seconds=1.0))
        while fake.count(wire.Prefetch) == 0:
            await kv.prefetch(TOKENS)
            await turn()

        assert first == 0 and rest == MISSES and unasked == 0
        assert client.stats().misses.keys() == {"slow"}


async def test_an_answer_after_the_deadline_is_given_back(fake: FakeDaemon) -> None:
    """A lease and a reservation that nobody waits for any more end at once."""
    async with connect(fake.address, deadline=0.05) as client:
        kv = await client.open(SPACE, SPEC)
        fake.answers[wire.Match] = lambda asked: None
        async with kv.match(TOKENS) as hit:
            assert hit.tokens == 0
        [asked] = [request for request in fake.asked if isinstance(request, wire.Match)]

        await fake.say(wire.Leased(id=asked.id, lease=77, blocks=1, tiers={}, lifting=False, places=b""))
        await fake.until(wire.Release)

        assert [request.lease for request in fake.asked if isinstance(request, wire.Release)] == [77]


async def test_a_caller_that_is_cancelled_leaves_nothing(fake: FakeDaemon) -> None:
    """Whether the answer comes before or after the cancellation."""
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        fake.answers[wire.Match] = lambda asked: None
        fake.answers[wire.Reserve] = lambda asked: None
        for call, kind in (
            (kv.match(TOKENS), wire.Match),
            (kv.match(TOKENS, request=1), wire.Match),
            (kv.reserve(TOKENS), wire.Reserve),
        ):
            before = fake.count(kind)
            task = asyncio.create_task(call.__aenter__())
            await fake.until(kind, before + 1)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            asked = [request for request in fake.asked if isinstance(request, kind)][-1]
            if isinstance(asked, wire.Match):
                await fake.say(wire.Leased(id=asked.id, lease=asked.id, blocks=0, tiers={}, lifting=False, places=b""))
            else:
                await fake.say(wire.Reserved(id=asked.id, reservation=asked.id, present=0, pending=0, places=b""))
        await fake.until(wire.Release, 2)
        await fake.until(wire.Close, 1)


async def test_a_daemon_of_another_version_is_a_miss(fake: FakeDaemon) -> None:
    """It says so in its welcome, or refuses by name."""
    welcome = fake.answers.get(wire.Hello, fake._plain)
    for answer in (
        lambda asked: wire.Welcome(
            **{field: getattr(welcome(asked), field) for field in wire.Welcome.__struct_fields__} | {"version": 99}
        ),
        lambda asked: wire.Failed(id=asked.id, kind="VersionMismatch", message="99"),
    ):
        fake.answers[wire.Hello] = answer
        async with connect(fake.address, back_off=AT_ONCE) as client:
            kv = await client.open(SPACE, SPEC)

            assert await all_calls(kv) == MISSES
            assert client.stats().misses.keys() <= {"version", "VersionMismatch"}


async def test_a_token_that_is_refused_is_an_error(fake: FakeDaemon) -> None:
    """Trying again is no use, and without it nothing of what the caller wants can work."""
    fake.answers[wire.Hello] = lambda asked: wire.Failed(id=asked.id, kind="JoinRefused", message="old")

    with pytest.raises(JoinRefused, match="old"):
        async with connect(fake.address, join=b"old"):
            raise AssertionError


@pytest.mark.parametrize("kind", [NoShare, SpecMismatch, UnsupportedSpec])
async def test_a_layout_that_is_refused_is_an_error_when_it_is_opened(fake: FakeDaemon, kind: type[Exception]) -> None:
    """By name, as in one process."""
    fake.answers[wire.Open] = lambda asked: wire.Failed(id=asked.id, kind=kind.__name__, message="not here")
    async with connect(fake.address) as client:
        with pytest.raises(kind, match="not here"):
            await client.open(SPACE, SPEC)


async def test_a_wrong_value_is_an_error_and_is_not_sent(fake: FakeDaemon) -> None:
    """All of what the face checks, with a daemon that would take it."""
    fake.limits["tokens"] = 100
    good = kv_of(TOKENS)
    async with connect(fake.address) as client:
        with pytest.raises(UnsupportedSpec):
            await client.open(Namespace(model="m", weights="w", world=2), SPEC)
        kv = await client.open(SPACE, SPEC)
        asked = len(fake.asked)
        for tokens in ([-1], [2**31], [2**32 + 5], [1.0], [True], "5", None, [[1]], [0] * 101):
            for call in (kv.match, kv.reserve):
                with pytest.raises(InvalidTokens):
                    call(tokens)
            with pytest.raises(InvalidTokens):
                await kv.flush(tokens)
        for start in (-1, 5, 80, True, 1.0):
            with pytest.raises(InvalidStart):
                await kv.insert(TOKENS, good, start=start)  # type: ignore[arg-type]
        for tensor in (None, good[:3], good.float(), good.numpy().astype("f8")):
            with pytest.raises(InvalidTensor):
                await kv.insert(TOKENS, tensor)
        with pytest.raises(InvalidConfig, match="the tiers in memory are DRAM"):
            await kv.insert(TOKENS, good, tier=Tier.SSD)
        for ttl in (-1.0, True, "1", float("nan"), float("inf")):
            with pytest.raises(InvalidInput):
                await kv.pin(TOKENS, ttl=ttl)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match="request must be hashable, not a list"):
            kv.match(TOKENS, request=[1])
        for space, spec in ((None, SPEC), (SPACE, None), (SPEC, SPACE)):
            with pytest.raises(InvalidSpec):
                await client.open(space, spec)  # type: ignore[arg-type]

        assert len(fake.asked) == asked and not client.stats().misses


@pytest.mark.parametrize("address", ["tcp://x:1", "http://x", "unix:///" + "x" * 107, "unix:///a\0b", "unix:///"])
def test_an_address_that_can_not_be_is_an_error(address: Any) -> None:
    """It is named."""
    with pytest.raises(InvalidInput):
        connect(address)


@pytest.mark.parametrize("deadline", [0, -1.0, float("nan"), float("inf")])
def test_a_deadline_that_can_not_be_is_an_error(deadline: float) -> None:
    with pytest.raises(InvalidInput):
        connect("unix:///x", deadline=deadline)


async def test_faults_of_the_daemons_books_are_told(fake: FakeDaemon) -> None:
    """`check` is for operators: it raises."""
    fake.answers[wire.Check] = lambda asked: wire.Audited(id=asked.id, counts={}, faults=["one", "two"])
    async with connect(fake.address) as client:
        with pytest.raises(AuditFailed, match="one; two"):
            await client.check()


async def test_a_client_is_entered_once(fake: FakeDaemon) -> None:
    """Before, after and twice are errors by name."""
    client = connect(fake.address)
    with pytest.raises(Closed):
        await client.open(SPACE, SPEC)
    async with client:
        with pytest.raises(Closed):
            await client.__aenter__()
    await client.close()
    with pytest.raises(Closed):
        await client.__aenter__()
    with pytest.raises(Closed):
        await client.open(SPACE, SPEC)


async def test_a_new_session_is_made_in_the_background(fake: FakeDaemon) -> None:
    """Namespaces open themselves in it; a hit of the old one reads 0 tokens and raises StaleHandle where it would copy."""
    fake.holds(TOKENS, [3, 4, 5, 6])
    async with connect(fake.address, back_off=AT_ONCE) as client:
        kv = await client.open(SPACE, SPEC)
        async with kv.match(TOKENS) as hit, kv.match(TOKENS, request="r"):
            before = await hit.gather()
            [view, _] = hit.view(1, 2)
            kept = raw(view)
            await fake.hang_up()
            await until(lambda: client.boot is None)
            missed = await kv.flush(TOKENS)
            await client.connected()

            assert hit.tokens == 4 * SIZE and await hit.ready() == 0
            for call in (hit.gather, lambda: hit.layer(0)):
                with pytest.raises(StaleHandle):
                    await call()
            with pytest.raises(StaleHandle):
                hit.view(0, 0)
            assert is_exact(before, TOKENS) and raw(view) == kept
            async with kv.match(TOKENS, request="r") as again:
                assert is_exact(await again.gather(), TOKENS)
        assert missed == 0 and client.stats().sessions == 2
        async with kv.reserve(TOKENS, after=None) as room:
            assert room.present == 0
    assert raw(view) == kept


@pytest.mark.parametrize("there", [0, 1, 2], ids=["none left", "one left", "both left"])
async def test_what_was_deleted_while_an_insert_copied_is_not_counted(fake: FakeDaemon, there: int) -> None:
    """Two blocks were there at the reserve, and the commit takes nothing: the counts say what is there afterwards."""
    fake.answers[wire.Reserve] = lambda asked: wire.Reserved(
        id=asked.id, reservation=1, present=2, pending=0, places=wire.pack_places([0, 0], [0, 1], [0, 0], [0, 0])
    )
    fake.answers[wire.Commit] = lambda asked: wire.Count(id=asked.id, count=0)
    fake.answers[wire.Covered] = lambda asked: wire.Count(id=asked.id, count=there)
    async with connect(fake.address) as client:
        outcome = await (await client.open(SPACE, SPEC)).insert(TOKENS, kv_of(TOKENS))

    assert outcome == (0, there * SIZE, (4 - there) * SIZE) and outcome.refused_because is Refusal.DROPPED


@pytest.mark.parametrize(
    ("word", "reason"), [("leased", Refusal.LEASED), ("a reason of tomorrow", Refusal.NO_ROOM)], ids=["known", "unknown"]
)
async def test_the_daemons_reason_is_the_clients(fake: FakeDaemon, word: str, reason: Refusal) -> None:
    """A word that this client does not know says no more than that there was no room."""
    fake.answers[wire.Reserve] = lambda asked: wire.Reserved(
        id=asked.id, reservation=1, present=1, pending=0, places=b"", refusal=word
    )
    async with connect(fake.address) as client:
        outcome = await (await client.open(SPACE, SPEC)).insert(TOKENS, kv_of(TOKENS))

    assert outcome == (0, SIZE, 3 * SIZE) and outcome.refused_because is reason


async def test_an_insert_without_an_answer_says_so(fake: FakeDaemon) -> None:
    """To the reserve, and to the commit: what the daemon did not say it took is refused."""
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        fake.answers[wire.Reserve] = lambda asked: wire.Failed(id=asked.id, kind="LimitReached", message="no")
        first = await kv.insert(TOKENS, kv_of(TOKENS))
        fake.answers[wire.Reserve] = lambda asked: wire.Reserved(
            id=asked.id, reservation=1, present=2, pending=0, places=wire.pack_places([0, 0], [0, 1], [0, 0], [0, 0])
        )
        fake.answers[wire.Commit] = lambda asked: wire.Failed(id=asked.id, kind="UnknownHandle", message="no")
        second = await kv.insert(TOKENS, kv_of(TOKENS))

    assert (first, second) == ((0, 0, 4 * SIZE), (0, 2 * SIZE, 2 * SIZE))
    assert first.refused_because is second.refused_because is Refusal.UNREACHED


async def test_a_start_that_is_not_cached(fake: FakeDaemon) -> None:
    """Everything is refused, within one session and after a reconnect alike: who asked can't have known."""
    async with connect(fake.address, back_off=AT_ONCE) as client:
        kv = await client.open(SPACE, SPEC)
        part = kv_of(TOKENS)[:, :, 2 * SIZE :]
        before = await kv.insert(TOKENS, part, start=2 * SIZE)
        await fake.hang_up()
        await until(lambda: client.boot is None)
        await client.connected()

        outcome = await kv.insert(TOKENS, part, start=2 * SIZE)
        assert before == outcome == (0, 0, 2 * SIZE)
        assert before.refused_because is outcome.refused_because is Refusal.DROPPED


async def test_a_session_that_ends_with_the_reply_to_an_open(fake: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply has come, and before its reader runs the session is over: a miss, and the next session opens anew."""
    plain = Connection._take
    ends = ["the daemon is gone"]

    def take(connection: Connection, message: bytes) -> None:
        plain(connection, message)
        if ends and isinstance(wire.answers.decode(message), wire.Opened):
            connection.end(ends.pop())

    monkeypatch.setattr(Connection, "_take", take)
    fake.answers[wire.Flush] = lambda asked: wire.Count(id=asked.id, count=4)
    async with connect(fake.address, back_off=AT_ONCE) as client:
        kv = await client.open(SPACE, SPEC)
        missed = dict(client.stats().misses)
        await until(lambda: client.boot is None)
        await client.connected()

        assert ends == [] and missed == {"away": 1}
        assert await kv.flush(TOKENS) == 4 * SIZE


async def test_a_lease_that_was_lost(fake: FakeDaemon) -> None:
    """The notice ends what can be read; nothing is raised but by `view`."""
    fake.holds(TOKENS, [0, 1, 2, 3])
    async with connect(fake.address) as client:
        kv = await client.open(SPACE, SPEC)
        async with kv.match(TOKENS) as hit:
            assert await hit.ready() == 4 * SIZE
            await fake.say(wire.Lost(lease=hit.claim.lease or 0, reason="session"))
            await until(lambda: hit.claim.gone is not None)

            assert await hit.ready() == 0 and (await hit.gather()).shape[2] == 0
            with pytest.raises(LeaseLost):
                hit.view(0, 0)


def test_a_forked_child_is_refused(short_path: Path) -> None:
    """It would write into its parent's connection; its copies of the descriptors no longer hold that connection open."""

    async def scenario(client: Client) -> int:
        kv = await client.open(SPACE, SPEC)
        pid = os.fork()
        if pid == 0:
            try:
                kv.match(TOKENS)
            except Closed:
                os._exit(17)
            os._exit(1)
        status = wait_for(pid)
        async with kv.match(TOKENS) as hit:
            assert hit.tokens == 0
        return os.waitstatus_to_exitcode(status)

    async def main() -> int:
        daemon = FakeDaemon(short_path)
        try:
            async with serving(daemon), connect(daemon.address) as client:
                return await scenario(client)
        finally:
            daemon.close()

    assert asyncio.run(main()) == 17
