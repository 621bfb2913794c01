"""R2: huge and malformed requests. Each gets one answer that says why; nothing changes, and the session and the daemon go on.

Where the case says a status of 4xx, a session's error reply stands for it: `Failed` with the name of a class of errors.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from operator import methodcaller
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.cases.served import Served, served
from tests.oracle import oracle_kv
from tests.service.caches import SPACE, SPEC, is_exact, prompt, read, small, store, tensor_of
from tests.service.daemon.http import get, post
from tests.service.daemon.raw import connected, daemon_of, packed, session_at, whole
from tiercache import errors
from tiercache.config import Limits
from tiercache.errors import InvalidTokens, TierCacheError
from tiercache.service import wire
from tiercache.service.client.blocking import BlockingClient
from tiercache.service.client.client import connect
from tiercache.spec import KVSpec, Namespace

MOST = 1024
BLOCKS = 4


@pytest.fixture
def folder() -> Iterator[Path]:
    """A new folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="tc") as name:
        yield Path(name)


def say(*parts: object) -> bytes:
    return msgspec.msgpack.encode(parts)


# --- frames ---------------------------------------------------------------------------------------------------------------

MODEL, TWICE = msgspec.msgpack.encode({"model": "m"}), b"\x82\xa5model\xa1m\xa5model\xa1n"
LAID_OUT = msgspec.msgpack.encode(msgspec.to_builtins(SPEC))
MANY = b"\xde\x00\x11" + b"\xa5model\xa1m" * 17

FRAMES: dict[str, tuple[bytes, int]] = {
    "nothing": (b"", 0),
    "no msgpack": (b"\xc1\xc1\xc1", 0),
    "JSON": (b'["release", 4, 1]', 0),
    "cut-off JSON": (b'["release", 4', 0),
    "not an array": (msgspec.msgpack.encode({"type": "match"}), 0),
    "a map with a key twice": (TWICE, 0),
    "unknown type": (say("nonsense", 4), 4),
    "type of a reply": (say("welcome", 5, 1, b"", 1, b"", "", {}), 5),
    "a number where text is due": (say(7, 6), 6),
    "truncated": (say("covered", 7, 1, [1, None, 0, b"1234"])[:-3], 0),
    "too few fields": (say("covered", 8, 1), 8),
    "too many fields": (say("release", 9, 1, 2, 3), 9),
    "beyond 64 bits": (b"\x93\xa7release\x0e\xcf" + b"\xff" * 8 + b"\xc1", 0),
    "nested ten thousand deep": (b"\x95\xa4open\x11" + b"\x81\xa1a" * 10_000 + b"\xc0\x80\x00", 0),
    "arrays ten thousand deep": (b"\x93\xa7release\x12" + b"\x91" * 10_000 + b"\xc0", 0),
    "more behind it": (say("check", 18) + b"\x00", 0),
    "a namespace's key twice": (b"\x95\xa4open\x13" + TWICE + LAID_OUT + b"\x00", 19),
    "a layout's key twice": (b"\x95\xa4open\x14" + MODEL + b"\x82\xa6layers\x04\xa6layers\x05" + b"\x00", 20),
    "a selection's key twice": (b"\x93\xaainvalidate\x16" + TWICE, 22),
    "a key seventeen times": (b"\x95\xa4open\x15" + MANY + LAID_OUT + b"\x00", 21),
}


@pytest.mark.parametrize("name", FRAMES)
async def test_r2_frame_that_is_none(folder: Path, name: str) -> None:
    """Cut off, nested, of another type, with a key twice: InvalidFrame under the frame's number where it has one."""
    data, number = FRAMES[name]
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        failed = await raw.garbage(data)

        assert (failed.id, failed.kind) == (number, "InvalidFrame") and failed.message
        assert (await raw.call(wire.Audited, wire.Check)).faults == []


async def test_r2_every_cut_of_a_frame(folder: Path) -> None:
    """A frame that ends anywhere before its end is answered, and the whole one does what it says."""
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        frame = wire.encoder.encode(wire.Covered(id=7, kv=opened.kv, prompt=whole(prompt(1, 1))))
        for end in range(len(frame)):
            assert (await raw.garbage(frame[:end])).kind == "InvalidFrame"

        await raw.ws.send_bytes(frame)
        assert await raw.frame() == wire.Count(id=7, count=0)


VALUES: dict[str, Any] = {
    "-1": -1,
    "2^31": 2**31,
    "2^32+5": 2**32 + 5,
    "2^63": 2**63,
    "1.0": 1.0,
    "true": True,
    "text": "5",
    "null": None,
    "nested": [[1, 2], [3, 4]],
    "NaN": math.nan,
}
GOOD: dict[type[wire.Request], dict[str, Any]] = {
    wire.Hello: {"version": wire.VERSION},
    wire.Open: {"namespace": msgspec.to_builtins(SPACE), "spec": msgspec.to_builtins(SPEC), "shard": 0},
    wire.Match: {"kv": 1, "prompt": whole(prompt(1, 2)), "request": None},
    wire.Ready: {"lease": 1},
    wire.InPlace: {"lease": 1},
    wire.Take: {"lease": 1, "blocks": 1},
    wire.Release: {"lease": 1},
    wire.Distrust: {"lease": 1, "block": 0},
    wire.Reserve: {"kv": 1, "prompt": whole(prompt(1, 2)), "after": None, "tier": None, "wait": False},
    wire.Commit: {"reservation": 1, "upto": 0, "checksums": b""},
    wire.Close: {"reservation": 1},
    wire.Use: {"reservation": 1},
    wire.Covered: {"kv": 1, "prompt": whole(prompt(1, 2))},
    wire.Flush: {"kv": 1, "prompt": whole(prompt(1, 2))},
    wire.Prefetch: {"kv": 1, "prompt": whole(prompt(1, 2))},
    wire.Pin: {"kv": 1, "prompt": whole(prompt(1, 2)), "ttl": 0.0},
    wire.Delete: {"kv": 1, "prompt": whole(prompt(1, 2))},
    wire.Clear: {"kv": 1},
}
INTEGERS = {"-1", "2^31", "2^32+5", "2^63"}
FITTING = {
    ("match", "request"): {"text", "null"},
    ("match", "in_place"): {"true"},
    ("reserve", "after"): {"null"},
    ("reserve", "tier"): {"null"},
    ("reserve", "wait"): {"true"},
    ("pin", "ttl"): {"1.0"},
    ("open", "model"): {"text"},
    ("open", "weights"): {"text"},
    ("open", "adapter"): {"text", "null"},
    ("open", "salt"): {"text", "null"},
}
"""Which of the values are good ones, by type and field."""


def places(kind: type[wire.Request], parts: list[Any]) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield the way to each field of a frame, those of its maps and its prompt too, and what it is called."""
    names = kind.__struct_fields__
    for number, part in enumerate(parts[2:], 2):
        yield (number,), names[number - 1]
        if isinstance(part, dict):
            yield from (((number, name), name) for name in part)
        elif isinstance(part, list):
            yield from (((number, inner), f"prompt {name}") for inner, name in enumerate(wire.Prompt.__struct_fields__))


@pytest.mark.parametrize("kind", GOOD, ids=lambda kind: kind.__name__)
async def test_r2_value_in_any_field_of_any_frame(folder: Path, kind: type[wire.Request]) -> None:
    """In each field in turn, token ids too: an error of a name that exists, never the daemon's own, and the books are right."""
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        await raw.open()
        plain = wire.encoder.encode(kind(id=9, **GOOD[kind]))
        for way, field in places(kind, msgspec.msgpack.decode(plain)):
            for name, value in VALUES.items():
                if field == "prompt number" and name in INTEGERS:
                    continue  # what a prompt is called is the client's choice
                frame = holder = msgspec.msgpack.decode(plain)
                for step in way[:-1]:
                    holder = holder[step]
                holder[way[-1]] = value
                await raw.ws.send_bytes(msgspec.msgpack.encode(frame))
                answer = await raw.frame()

                if name in FITTING.get((frame[0], field), ()) or (field, name) == ("prompt base", "null"):
                    assert not isinstance(answer, wire.Failed), (field, name, answer)
                    continue
                assert isinstance(answer, wire.Failed), (field, name, answer)
                assert answer.kind == wire.UNKNOWN_BASE or issubclass(getattr(errors, answer.kind), TierCacheError)
                assert answer.kind != "TierCacheError" and answer.message, (field, name, answer)
        assert (await raw.call(wire.Audited, wire.Check)).faults == []
        assert (await raw.call(wire.Count, wire.Covered, kv=1, prompt=whole(prompt(1, 2)))).count == 0


@pytest.mark.parametrize("name", VALUES)
async def test_r2_value_in_place_of_a_number_of_a_frame(folder: Path, name: str) -> None:
    """The answer comes under the number where it is an integer, else under 0."""
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        await raw.ws.send_bytes(say("release", VALUES[name], 1))

        answer = await raw.frame()

        assert isinstance(answer, wire.Failed) and answer.id == (VALUES[name] if name in INTEGERS else 0)
        assert answer.kind == ("UnknownHandle" if name in INTEGERS else "InvalidFrame")
        assert (await raw.call(wire.Audited, wire.Check)).faults == []


async def test_r2_token_ids_on_the_wire(folder: Path) -> None:
    """Four bytes are one id: what is above 31 bits is refused at its position, half of one, too, and 2^32+5 can't be said as 5."""
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        for value in (-1, 2**31):
            tail = packed([7]) + (value & 0xFFFFFFFF).to_bytes(4, "little")
            answer = await raw.call(wire.Failed, wire.Match, kv=opened.kv, prompt=wire.Prompt(1, None, 0, tail))
            assert answer.kind == "InvalidTokens" and "position 1" in answer.message
        wide = (2**32 + 5).to_bytes(8, "little")
        assert await raw.refused(wire.Match, kv=opened.kv, prompt=wire.Prompt(1, None, 0, wide[:5])) == "InvalidFrame"
        assert (await raw.call(wire.Audited, wire.Check)).faults == []


# --- too long -------------------------------------------------------------------------------------------------------------


async def test_r2_too_many_tokens_is_an_answer(folder: Path) -> None:
    """Up to twice the limit a frame is read, and the session goes on."""
    async with daemon_of(folder, small(max_tokens=MOST)) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        tokens = list(range(2 * MOST))

        assert await raw.refused(wire.Match, kv=opened.kv, prompt=whole(tokens[: MOST + 1])) == "InvalidTokens"
        assert await raw.refused(wire.Match, kv=opened.kv, prompt=whole(tokens)) == "InvalidTokens"
        first = whole(tokens[:MOST])
        await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=first)
        grown = wire.Prompt(2, first.number, 4 * MOST, b"\0\0\0\0")
        assert await raw.refused(wire.Match, kv=opened.kv, prompt=grown) == "InvalidTokens"
        assert (await raw.call(wire.Audited, wire.Check)).faults == []


async def test_r2_frame_above_the_cap_ends_the_session_alone(folder: Path) -> None:
    """Such a frame is not read; the sessions beside it go on."""
    async with daemon_of(folder, small(max_tokens=MOST)) as daemon, session_at(daemon.path) as other:
        async with session_at(daemon.path) as raw:
            await raw.ws.send_bytes(bytes(raw.welcome.limits["frame"] + 1))

            await raw.ended()
            assert raw.ws.close_code == 1009
        await other.open()


async def test_r2_a_million_token_ids(folder: Path, seed: int) -> None:
    """Taken in one request, found whole; one more than the limit is refused by name before it is sent, and the session goes on."""
    spec = KVSpec(layers=1, kv_heads=1, head_dim=8, dtype="int8", block_size=256)
    tokens = list(range(seed % 1000, seed % 1000 + 1_000_000))
    size = len(tokens) // 256 * 256
    data = torch.from_numpy(oracle_kv(SPACE, spec, tokens).reshape(-1)).view(torch.int8).reshape(spec.shape(len(tokens)))
    async with (
        served(folder, small(hbm=None, dram=4096, ssd=None, spec=spec)) as daemon,
        connect(daemon.address, deadline=60.0) as client,
    ):
        kv = await client.open(SPACE, spec)
        outcome = await kv.insert(tokens, data)
        before = client.stats()
        async with kv.match(np.array([*tokens, *range(256)])) as hit:
            found, exact = hit.tokens, is_exact(await hit.gather(), tokens, spec=spec)
        after = client.stats()
        with pytest.raises(InvalidTokens, match="1048577 token ids; the limit is 1048576"):
            kv.match(range((1 << 20) + 1))

        assert outcome == (size, 0, 0) and found == size and exact
        assert after.sent - before.sent < 4096 and not after.misses
        assert (await client.check())["leases"] == 0 and client.stats().sessions == 1


# --- through the clients --------------------------------------------------------------------------------------------------

BAD: dict[str, Any] = {
    "-1": [5, -1],
    "2^31": [2**31],
    "2^32+5": [5, 2**32 + 5],
    "2^63": [2**63],
    "1.0": [1.0],
    "True": [True],
    "text": ["5"],
    "None": [None],
    "nested": [[1, 2], [3, 4]],
    "NaN": [math.nan],
    "-1, array": np.array([5, -1]),
    "2^31, array": np.array([2**31]),
    "2^32+5, array": np.array([2**32 + 5]),
    "2^63, array": np.array([2**63], np.uint64),
    "1.0, array": np.array([1.0]),
    "True, array": np.array([True]),
    "text, array": np.array(["5"]),
    "None, array": np.array([None]),
    "nested, array": np.array([[1, 2], [3, 4]]),
    "NaN, array": np.array([math.nan]),
    "-1, tensor": torch.tensor([-1]),
    "2^31, tensor": torch.tensor([2**31]),
    "nested, tensor": torch.tensor([[1, 2]]),
    "NaN, tensor": torch.tensor([math.nan]),
    "1.0, machine array": array("d", [1.0]),
    "-1, machine array": array("q", [-1]),
    "too many": range(MOST + 1),
    "too many, array": np.arange(MOST + 1),
}


@asynccontextmanager
async def unchanged(folder: Path, seed: int) -> AsyncIterator[Served]:
    """A daemon that holds one prompt, and must hold it and nothing else in the end, with its books right."""
    known = prompt(seed, BLOCKS)
    async with served(folder, small(ssd=None, max_tokens=MOST)) as daemon, connect(daemon.address, deadline=60.0) as client:
        kv = await client.open(SPACE, SPEC)
        await store(kv, known)
        before = await client.check()
        yield daemon
        assert await client.check() == before
        assert await read(kv, known) == len(known)
        assert (await daemon.stats())["counts"]["failures"] == {}


def calls(kv: Any, bad: Any, *, enter: str) -> list[Callable[[], Any]]:
    """Return every call of a face that takes token ids, made with these."""
    return [
        lambda: methodcaller(enter)(kv.match(bad)),
        lambda: methodcaller(enter)(kv.reserve(bad)),
        lambda: kv.insert(bad, tensor_of([])),
        lambda: kv.flush(bad),
        lambda: kv.prefetch(bad),
        lambda: kv.pin(bad, ttl=1.0),
        lambda: kv.delete(bad),
    ]


async def test_r2_async_client(folder: Path, seed: int) -> None:
    """Each value in each form, at every call that takes token ids: InvalidTokens at once; nothing is sent, and it is no miss."""
    async with unchanged(folder, seed) as daemon, connect(daemon.address, deadline=60.0) as client:
        kv = await client.open(SPACE, SPEC)
        asked = client.stats().requests
        for name, bad in BAD.items():
            for call in calls(kv, bad, enter="__aenter__"):
                with pytest.raises(InvalidTokens):
                    print(name, await call())

        assert client.stats().requests == asked and not client.stats().misses


async def test_r2_blocking_client(folder: Path, seed: int) -> None:
    """The same through the client without async."""

    def ask(address: str) -> None:
        with BlockingClient(address, deadline=60.0) as client:
            kv = client.open(SPACE, SPEC)
            asked = client.stats().requests
            for name, bad in BAD.items():
                for call in calls(kv, bad, enter="__enter__"):
                    with pytest.raises(InvalidTokens):
                        print(name, call())
            assert client.stats().requests == asked and not client.stats().misses

    async with unchanged(folder, seed) as daemon:
        await asyncio.get_running_loop().run_in_executor(None, ask, daemon.address)


# --- the admin part -------------------------------------------------------------------------------------------------------


async def spoken(path: Path, request: bytes) -> tuple[int, bytes]:
    """Send bytes as they are and return the status of the answer, and all of it, once the daemon has closed the connection."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        async with asyncio.timeout(20):
            writer.write(request)
            answer = await reader.read()
    finally:
        writer.close()
    return int(answer.split(b" ", 2)[1]), answer


HEAD = b"POST /v1/clear HTTP/1.1\r\nHost: d\r\nConnection: close\r\n"
LENGTHS = {
    "longer than the body": (HEAD + b"Content-Length: 50\r\n\r\n{}", 408),
    "shorter than the body": (HEAD + b"Content-Length: 1\r\n\r\n{}", 400),
    "negative": (HEAD + b"Content-Length: -2\r\n\r\n{}", 400),
    "no number": (HEAD + b"Content-Length: two\r\n\r\n{}", 400),
    "two of them": (HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
    "in chunks, above the limit": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n11170\r\n" + b" " * 70_000 + b"\r\n0\r\n\r\n", 413),
    "above the limit": (HEAD + b"Content-Length: 99999999999\r\n\r\n{}", 413),
}


@pytest.mark.parametrize("name", LENGTHS)
async def test_r2_wrong_content_length(folder: Path, name: str) -> None:
    """The answer is a 4xx; a body that never comes is not waited for longer than an idle connection; nothing is cleared."""
    request, status = LENGTHS[name]
    config = small(limits=Limits(idle_seconds=0.2))
    async with daemon_of(folder, config) as daemon, connect(f"unix://{daemon.path}", deadline=60.0) as client:
        kv = await client.open(SPACE, SPEC)
        await store(kv, prompt(1, BLOCKS))

        found, answer = await spoken(daemon.path, request)

        assert found == status and answer.partition(b"\r\n\r\n")[2]
        assert await read(kv, prompt(1, BLOCKS)) == BLOCKS * SPEC.block_size
        assert (await get(daemon.path, "/health"))[0] == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{" * 10_000, 400),
        (b'{"a":' * 10_000, 400),
        (b'{"namespace": "aa", "namespace": null}', 400),
        (b'{"namespace": NaN}', 400),
        (b'{"namespace": 1.0}', 400),
        (b'{"namespace": "\xff"}', 400),
        (b'{"namespace"', 400),
        (b" " * (64 * 1024 + 1), 413),
        (b" " * (1 << 20), 413),
    ],
    ids=["open", "nested", "key twice", "NaN", "number", "no UTF-8", "cut off", "above the limit", "far above the limit"],
)
async def test_r2_body_that_is_none(folder: Path, body: bytes, status: int) -> None:
    """A 4xx that says why; nothing is cleared, and the next request is answered."""
    async with daemon_of(folder) as daemon, connect(f"unix://{daemon.path}", deadline=60.0) as client:
        kv = await client.open(SPACE, SPEC)
        await store(kv, prompt(1, BLOCKS))

        found, text = await post(daemon.path, "/v1/clear", body)

        assert found == status and text
        assert await read(kv, prompt(1, BLOCKS)) == BLOCKS * SPEC.block_size
        assert (await post(daemon.path, "/v1/check"))[1]["faults"] == []


async def test_r2_connection_without_a_session_is_left_alone_by_its_frames(folder: Path) -> None:
    """Before hello every frame is refused, whatever it asks for; hello is still taken afterwards."""
    async with daemon_of(folder) as daemon, connected(daemon.path) as raw:
        for data, number in FRAMES.values():
            assert (await raw.garbage(data)).id == number
        await raw.hello()
        await raw.open(Namespace(model="m", weights="w"))
