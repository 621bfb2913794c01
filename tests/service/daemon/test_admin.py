"""The admin part over HTTP."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from tests.seams import Rig
from tests.service.caches import SPACE, SPEC, prompt, small
from tests.service.daemon.http import ask, get, post
from tests.service.daemon.raw import daemon_of, fetched, names_in, session_at, stored, whole
from tiercache.errors import InvalidConfig, StoreError
from tiercache.service import wire
from tiercache.service.daemon.admin import MOST_BODY
from tiercache.service.daemon.daemon import Daemon
from tiercache.service.daemon.logs import Lines, Words


@contextlib.asynccontextmanager
async def busy(folder: Path) -> AsyncIterator[Daemon]:
    """A daemon with one namespace of four blocks, two in HBM alone and two matched once."""
    async with daemon_of(folder, small(directory=folder / "kv")) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        await stored(raw, opened, await fetched(raw), prompt(1, 4))
        await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole([*prompt(1, 2), *prompt(9, 1)]))
        await raw.refused(wire.Release, lease=99)
        yield daemon


async def test_health_is_ok(folder: Path) -> None:
    async with busy(folder) as daemon:
        assert await get(daemon.path, "/health") == (200, {"status": "ok", "reasons": []})


async def test_health_says_what_is_wrong(folder: Path) -> None:
    """A disk that refuses is a reason, and not a reason to restart: the status is 200."""
    rig = Rig(retry=1000.0)
    async with daemon_of(folder, small(directory=folder / "kv"), rig) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        await stored(raw, opened, await fetched(raw), prompt(1, 2))
        rig.copies.fail("put", StoreError("no space left on device"))
        assert (await raw.call(wire.Count, wire.Flush, kv=opened.kv, prompt=whole(prompt(1, 2)))).count == 0

        status, found = await get(daemon.path, "/health")

        assert (status, found["status"]) == (200, "degraded") and "SSD" in found["reasons"][0]["message"]
        daemon.cache.stacks[0].cache.moves.refusing.clear()


async def test_stats_count_what_happened(folder: Path) -> None:
    async with busy(folder) as daemon:
        status, found = await get(daemon.path, "/v1/stats")

        assert status == 200
        [stack] = found["stacks"]
        assert (stack["matches"], stack["asked"], stack["missed"], stack["blocks"]) == (1, 3, 1, 4)
        assert [(tier["tier"], tier["queries"], tier["hits"]) for tier in stack["tiers"]] == [
            ("HBM", 3, 2),
            ("DRAM", 1, 0),
            ("SSD", 1, 0),
        ]
        assert found["counts"]["failures"] == {"UnknownHandle": 1}
        assert found["sessions"][0]["leases"] == 1


async def test_namespaces_are_named(folder: Path) -> None:
    """By digest, with their blocks, and the names and layouts they were opened with."""
    digest = SPACE.digest(SPEC).hex()
    async with busy(folder) as daemon:
        _, found = await get(daemon.path, "/v1/namespaces")
        [space] = found["namespaces"]
        assert (space["digest"], space["blocks"], space["namespace"]["model"]) == (digest, 4, "m")
        assert space["spec"]["layers"] == SPEC.layers


async def test_the_tree_is_drawn(folder: Path) -> None:
    digest = SPACE.digest(SPEC).hex()
    async with busy(folder) as daemon:
        _, found = await get(daemon.path, "/v1/tree")
        _, text = await get(daemon.path, f"/v1/tree?format=text&namespace={digest[:8]}&limit=1")

        [tree] = found["trees"]
        assert tree["namespace"] == digest and "[HBM] 2 blocks  leased" in tree["tree"]
        assert text.splitlines()[:2] == [digest, "root"] and "1 more nodes" in text


@pytest.mark.parametrize(
    "target", ["/v1/tree?namespace=zz", "/v1/tree?limit=0", "/v1/tree?limit=-1", "/v1/tree?limit=x", "/v1/tree?format=svg"]
)
async def test_questions_that_cannot_be_are_400(folder: Path, target: str) -> None:
    async with busy(folder) as daemon:
        status, found = await get(daemon.path, target)

        assert (status, found["error"]) == (400, "InvalidInput")


async def test_check_and_clear(folder: Path) -> None:
    """What is to go is named by digest, or fields, or both; null is a value; a preview removes nothing, and no salt is shown."""
    digest = SPACE.digest(SPEC).hex()
    described = {"digest": digest, "model": "m", "weights": "sha256:1", "adapter": None, "salted": False}
    all_of_it = {"blocks": 4, "namespaces": [{**described, "blocks": 4, "tokens": 4 * SPEC.block_size}]}
    nothing = {"blocks": 0, "namespaces": []}
    async with busy(folder) as daemon:

        async def clear(**fields: object) -> object:
            status, found = await post(daemon.path, "/v1/clear", msgspec.json.encode(fields))
            return found if status == 200 else status

        assert (await post(daemon.path, "/v1/check"))[1]["counts"]["blocks"] == 4
        for body in (b"{", b'{"namespace": 5}', b'{"name": "x"}', b"[" * 10_000, b'{"namespace": "zz"}', b'{"model": null}'):
            assert (await post(daemon.path, "/v1/clear", body))[0] == 400
        for other in ({"model": "n"}, {"adapter": ""}, {"salt": "t"}, {"model": "m", "weights": "w"}):
            assert await clear(**other) == nothing
        assert await clear(preview=True) == all_of_it
        assert await clear(namespace=digest[:8].upper(), adapter=None, preview=True) == all_of_it
        assert await clear(namespace=digest, adapter="a") == nothing
        assert await clear(namespace=digest[:12], model="m", weights="sha256:1", adapter=None, salt=None) == all_of_it
        assert await clear() == nothing


async def test_metrics_are_what_happened_and_only_grow(folder: Path) -> None:
    async with busy(folder) as daemon:
        status, first = await get(daemon.path, "/metrics")
        _, second = await get(daemon.path, "/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})

        lines = dict(line.rsplit(" ", 1) for line in first.splitlines() if not line.startswith("#"))
        size = SPEC.block_bytes
        assert status == 200
        assert lines['tiercache_state{state="ok"}'] == "1.0"
        assert lines[f'tiercache_tier_queries_blocks_total{{block_bytes="{size}",tier="HBM"}}'] == "3.0"
        assert lines[f'tiercache_tier_hits_blocks_total{{block_bytes="{size}",tier="HBM"}}'] == "2.0"
        assert lines[f'tiercache_missed_blocks_total{{block_bytes="{size}"}}'] == "1.0"
        assert lines['tiercache_requests_total{type="Match"}'] == "1.0"
        assert lines['tiercache_request_failures_total{kind="UnknownHandle"}'] == "1.0"
        assert second.endswith("# EOF\n")
        assert "sha256:1" not in first, "names of namespaces are without bound, and no labels"


async def test_the_openapi_document_names_every_route(folder: Path) -> None:
    async with busy(folder) as daemon:
        status, document = await get(daemon.path, "/openapi.json")
        _, page = await get(daemon.path, "/")

        assert status == 200
        for path, verbs in document["paths"].items():
            assert path in page
            for verb in verbs:
                answer = await (get(daemon.path, path) if verb == "get" else post(daemon.path, path))
                assert answer[0] == 200, path


async def test_the_openapi_document_names_every_refusal(folder: Path) -> None:
    """Who may not enter, who is one too many, and on the way in of a body what is too long or does not come."""
    async with busy(folder) as daemon:
        _, document = await get(daemon.path, "/openapi.json")
        refused, _ = await post(daemon.path, "/v1/clear", b" " * (MOST_BODY + 1))

    assert refused == 413
    for path, verbs in document["paths"].items():
        for verb, operation in verbs.items():
            expected = {"401", "403", "429"} | ({"408", "413"} if path == "/v1/clear" else set())
            expected |= {"400"} if verb == "post" or path.startswith("/v1/") else set()
            assert set(operation["responses"]) - {"200", "503"} == expected, path


async def test_what_is_not_there_is_404_and_a_session_wants_a_websocket(folder: Path) -> None:
    async with busy(folder) as daemon:
        assert (await get(daemon.path, "/nothing"))[0] == 404
        assert (await get(daemon.path, wire.SESSION_PATH))[0] == 400


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_tcp_carries_admin_for_who_has_the_token_and_no_session(folder: Path) -> None:
    token, port = "a-token-that-is-long", free_port()
    (folder / "token").write_text(token + "\n")
    (folder / "token").chmod(0o600)
    config = small(admin=f"127.0.0.1:{port}", admin_token_file=str(folder / "token"))

    async with daemon_of(folder, config):

        async def over_tcp(target: str, *, given: str | None) -> int:
            headers = {} if given is None else {"Authorization": given}
            return (await ask(aiohttp.TCPConnector(), "GET", f"http://127.0.0.1:{port}{target}", headers=headers))[0]

        assert await over_tcp("/health", given=f"Bearer {token}") == 200
        assert await over_tcp("/metrics", given=f"Bearer {token}") == 200
        for wrong in (None, "Bearer", f"Bearer {token}x", f"Basic {token}", "Bearer ä"):
            assert await over_tcp("/health", given=wrong) == 401
        assert await over_tcp(wire.SESSION_PATH, given=f"Bearer {token}") == 404


@pytest.mark.parametrize(("mode", "text"), [(0o644, "a-token-that-is-long"), (0o600, "short"), (0o600, "")])
async def test_a_token_file_that_is_no_secret_is_refused(folder: Path, mode: int, text: str) -> None:
    (folder / "token").write_text(text)
    (folder / "token").chmod(mode)

    with pytest.raises(InvalidConfig, match="admin_token_file"):
        async with Daemon(small(admin="127.0.0.1:0", admin_token_file=str(folder / "token")), folder / "d.sock"):
            pass
    assert names_in(folder) == ["token"]


async def test_logs_hold_no_prompt(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each line is one JSON object; neither what was asked for nor by whom in words."""
    caplog.set_level("DEBUG", logger="tiercache")
    async with busy(folder) as daemon:
        await get(daemon.path, "/v1/stats")
    records = [record for record in caplog.records if record.name.startswith("tiercache")]
    lines = [Lines().format(record) for record in records]
    words = [Words().format(record) for record in records]

    assert len(lines) >= 4 and all(line.startswith('{"time":') for line in lines)
    assert not any(str(token) in line for line in [*lines, *words] for token in prompt(1, 4))
    assert any(line.split(" ", 1)[1].startswith("serving socket=") for line in words)
