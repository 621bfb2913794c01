"""A client lets the daemon forget a model, an adapter or a tenant: also what nobody has opened, and for good."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.seams import Rig
from tests.service.caches import LARGE, SIZE, SPACE, SPEC, is_exact, prompt, read, small, store, tensor_of
from tests.service.client.daemons import own_process, running
from tests.service.daemon.http import get, post
from tests.service.daemon.raw import daemon_of
from tiercache.errors import InvalidSpec, Refused, StoreError
from tiercache.service.client.blocking import BlockingClient
from tiercache.service.client.client import BackOff, connect
from tiercache.service.daemon.logs import Lines

AT_ONCE = BackOff(first=0.01, most=0.05)
SECRET = "the-salt-of-a-tenant"
TENANT = replace(SPACE, salt=SECRET)


async def test_a_kill_right_after_the_reply_brings_nothing_back(tmp_path: Path, seed: int) -> None:
    """One namespace is forgotten while it is open, another by a client that opened nothing after a restart; each reply is followed
    by kill -9."""
    adapter = replace(SPACE, adapter="a@1")
    tokens = prompt(seed, 4)
    config = small(hbm=16, dram=16, ssd=64, spec=LARGE, directory=tmp_path / "kv")
    with own_process(config) as daemon:
        async with connect(daemon.address, deadline=60.0, back_off=AT_ONCE) as client:
            await client.connected()
            for space in (SPACE, TENANT, adapter):
                kv = await client.open(space, LARGE)
                await store(kv, tokens, space=space)
                assert await kv.flush(tokens) == 4 * SIZE
            [first] = await client.invalidate(salt=SECRET)
            daemon.kill()
        daemon.start()
        async with connect(daemon.address, deadline=60.0, back_off=AT_ONCE) as client:
            await client.connected()
            second = await client.invalidate(adapter="a@1")
            daemon.kill()
        daemon.start()
        async with connect(daemon.address, deadline=60.0, back_off=AT_ONCE) as client:
            await client.connected()
            found = [await read(await client.open(space, LARGE), tokens, space=space) for space in (SPACE, TENANT, adapter)]
            await client.check()

    assert (first.namespace, first.spec, first.blocks, first.tokens) == (TENANT, LARGE, 4, 4 * SIZE)
    assert first.digest == TENANT.digest(LARGE)
    assert [extent.namespace for extent in second] == [adapter]
    assert found == [4 * SIZE, 0, 0]


async def test_other_sessions_claims_come_to_nothing(seed: int) -> None:
    """Another session's room commits nothing, its hit stays exact, and its next match finds nothing; its adapter's prompt stays."""
    tokens, more, adapter = prompt(seed, 3), prompt(seed + 1, 2), replace(SPACE, adapter="a@1")
    async with (
        running(small(ssd=None)) as (_, address),
        connect(address, deadline=60.0) as client,
        connect(address, deadline=60.0) as operator,
    ):
        kv = await client.open(SPACE, SPEC)
        await store(kv, tokens)
        neighbour = await client.open(adapter, SPEC)
        await store(neighbour, tokens, space=adapter)
        async with kv.match(tokens) as hit, kv.reserve(more) as room:
            for number, block in enumerate(room.blocks):
                block.copy_(tensor_of(more)[:, :, number * SIZE : (number + 1) * SIZE])
            gone = await operator.invalidate(model=SPACE.model, weights=SPACE.weights, adapter=None, salt=None)
            committed = await room.commit(2 * SIZE)
            exact = is_exact(await hit.gather(), tokens)

        assert [extent.tokens for extent in gone] == [3 * SIZE]
        assert (committed, exact) == (0, True)
        assert [await read(kv, tokens), await read(kv, more)] == [0, 0]
        assert await read(neighbour, tokens, space=adapter) == 3 * SIZE
        assert await operator.check() == {"nodes": 1, "blocks": 3, "leases": 0}


async def test_no_answer_is_no_success(short_path: Path, seed: int) -> None:
    """A daemon that is away, one whose disk does not forget, and a call that names nothing: each is raised."""
    tokens = prompt(seed, 2)
    async with connect(f"unix://{short_path}/nobody", back_off=AT_ONCE) as client:
        with pytest.raises(Refused, match="has forgotten"):
            await client.invalidate(model="m")
    rig = Rig(forgetting=0.05)
    async with (
        daemon_of(short_path, small(directory=short_path / "kv"), rig) as daemon,
        connect(f"unix://{daemon.path}", deadline=60.0) as client,
    ):
        kv = await client.open(SPACE, SPEC)
        await store(kv, tokens)
        await kv.flush(tokens)
        rig.copies.fail("discard", StoreError("the disk is gone"), times=1_000)
        with pytest.raises(StoreError, match="restart may bring it back"):
            await client.invalidate(model="m")
        rig.copies.release()
        for fields in ({}, {"model": None}):
            with pytest.raises(InvalidSpec):
                await client.invalidate(**fields)  # type: ignore[arg-type]
        assert await read(kv, tokens) == 0


def test_blocking_callers_have_it_too(seed: int) -> None:
    """The same arguments, the same answer."""
    tokens = prompt(seed, 2)
    with own_process(small(ssd=None)) as daemon, BlockingClient(daemon.address, deadline=60.0, back_off=AT_ONCE) as client:
        client.connected()
        kv = client.open(TENANT, SPEC)
        kv.insert(tokens, tensor_of(tokens, space=TENANT))
        [gone] = client.invalidate(salt=SECRET, adapter=None)
        with kv.match(tokens) as hit:
            found = hit.tokens

    assert (gone.namespace, gone.tokens, found) == (TENANT, 2 * SIZE, 0)


async def test_a_salt_is_in_no_log_and_no_metric(short_path: Path, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Opened, stored, refused, forgotten: what the daemon writes of it names no tenant, nor does the answer to an operator."""
    caplog.set_level("DEBUG")
    tokens = prompt(seed, 2)
    async with (
        daemon_of(short_path, small(directory=short_path / "kv")) as daemon,
        connect(f"unix://{daemon.path}", deadline=60.0) as client,
    ):
        kv = await client.open(TENANT, SPEC)
        await store(kv, tokens, space=TENANT)
        await kv.flush(tokens)
        with pytest.raises(InvalidSpec):
            await client.open(TENANT, replace(SPEC, block_size=8, layers=7))
        _, shown = await post(daemon.path, "/v1/clear", b'{"salt": "%s", "preview": true}' % SECRET.encode())
        await client.invalidate(salt=SECRET)
        said = [await get(daemon.path, path) for path in ("/metrics", "/v1/stats", "/v1/tree", "/health")]

    assert shown["namespaces"][0]["salted"] is True
    assert SECRET not in str(shown) + str(said)
    assert caplog.records and not any(SECRET in Lines().format(record) + repr(vars(record)) for record in caplog.records)
