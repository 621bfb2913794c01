"""What a daemon says of how it does: over HTTP, to Prometheus, and on a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.project.tree import ROOT
from tests.seams import PATIENCE, FakeClock, Rig
from tests.service.ailing import compared
from tests.service.caches import prompt, small
from tests.service.client.fake import until
from tests.service.daemon.http import get
from tests.service.daemon.raw import daemon_of, fetched, session_at, stored, whole
from tests.service.daemon.test_ends import child
from tests.service.daemon.test_stop import ended, logged, started
from tiercache.errors import DirectoryRefused, MemoryRefused, StoreError
from tiercache.service import wire
from tiercache.service.daemon.daemon import Daemon, serve
from tiercache.service.health import Code


async def told(daemon: Daemon) -> tuple[int, str, dict[str, dict[str, Any]]]:
    """Return what /health says: the HTTP status, its own, and the reasons by code."""
    status, found = await get(daemon.path, "/health")
    assert set(found) == {"status", "reasons"}
    assert all(set(reason) == {"code", "message", "since_seconds"} for reason in found["reasons"])
    return status, found["status"], {reason["code"]: reason for reason in found["reasons"]}


async def samples(daemon: Daemon) -> dict[str, float]:
    """Return what Prometheus would scrape."""
    _, text = await get(daemon.path, "/metrics")
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


async def gauges(daemon: Daemon) -> set[str]:
    """Return the codes whose gauge is 1; each code has a gauge."""
    found = {code: (await samples(daemon))[f'tiercache_ailment{{code="{code}"}}'] for code in Code}
    assert set(found.values()) <= {0.0, 1.0}
    return {code for code, value in found.items() if value}


@contextlib.asynccontextmanager
async def filled(folder: Path, rig: Rig) -> AsyncIterator[tuple[Daemon, Any, Any]]:
    """A daemon with an SSD tier, a session on it, and four blocks in memory."""
    async with daemon_of(folder, small(directory=folder / "kv"), rig) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        await stored(raw, opened, await fetched(raw), prompt(1, 4))
        yield daemon, raw, opened


async def flushed(raw: Any, opened: Any) -> int:
    return int((await raw.call(wire.Count, wire.Flush, kv=opened.kv, prompt=whole(prompt(1, 4)))).count)


async def test_a_daemon_that_is_well_says_ok(folder: Path) -> None:
    """No reason, every gauge at 0, all threads alive, and figures of the disk."""
    async with filled(folder, Rig()) as (daemon, _, _):
        assert await told(daemon) == (200, "ok", {})
        assert await gauges(daemon) == set()
        found = await samples(daemon)
        _, stats = await get(daemon.path, "/v1/stats")

    assert found['tiercache_state{state="ok"}'] == 1.0
    assert [found[f'tiercache_workers{{lane="{lane}",state="alive"}}'] for lane in ("copy", "read", "write")] == [2, 2, 4]
    assert found['tiercache_worker_deaths_total{lane="write"}'] == 0 and found["tiercache_disk_free_bytes"] > 0
    assert stats["health"] == {"status": "ok", "reasons": []}
    assert 0 < stats["disk"]["data_bytes"] <= stats["disk"]["limit_bytes"] == found["tiercache_disk_limit_bytes"]
    assert stats["stacks"][0]["troubles"] == []


async def test_the_reference_describes_every_metric(folder: Path) -> None:
    """What is scraped has a row in the page, under the name that it is scraped by."""
    page = (ROOT / "docs/reference/admin.md").read_text()
    async with filled(folder, Rig()) as (daemon, _, _):
        await get(daemon.path, "/health")
        _, text = await get(daemon.path, "/metrics")
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]

    assert len(names) >= 30 and [name for name in names if f"`{name}`" not in page] == []


async def test_a_full_disk_is_degraded_and_no_reason_to_restart(folder: Path) -> None:
    """200, a code, what failed and since when; the same in stats and metrics; gone when the next flush succeeds."""
    clock = FakeClock()
    rig = Rig(clock=clock)
    async with filled(folder, rig) as (daemon, raw, opened):
        rig.disk.fail("commit", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        assert await flushed(raw, opened) == 0
        clock.advance(12.5)

        status, said, reasons = await told(daemon)
        _, stats = await get(daemon.path, "/v1/stats")

        assert (status, said, set(reasons)) == (200, "degraded", {"disk_full"})
        assert reasons["disk_full"]["since_seconds"] == 12.5 and "StoreFull" in reasons["disk_full"]["message"]
        assert await gauges(daemon) == {"disk_full"}
        assert (await samples(daemon))['tiercache_state{state="degraded"}'] == 1.0
        assert stats["health"]["reasons"][0]["code"] == "disk_full" and stats["status"] == "serving"
        [trouble] = stats["stacks"][0]["troubles"]
        assert (trouble["tier"], trouble["act"], trouble["error"], trouble["since_seconds"]) == ("SSD", "write", "StoreFull", 12.5)
        rig.disk.release()
        stack = daemon.cache.stacks[0]
        await until(lambda: not stack.cache.moves.refusing)
        assert await flushed(raw, opened) == 4
        assert await told(daemon) == (200, "ok", {})
        assert await gauges(daemon) == set()


async def test_a_disk_that_hangs_is_told_and_holds_up_no_answer(folder: Path) -> None:
    """The file system itself hangs, and a write of 30 s: health, stats, metrics and a session all answer."""
    clock = FakeClock()
    rig = Rig(clock=clock)
    async with filled(folder, rig) as (daemon, raw, opened):
        await compared(daemon.cache)
        write, room = rig.disk.hold("commit"), rig.disk.hold("room")
        async with asyncio.timeout(PATIENCE):
            number = await raw.send(wire.Flush, kv=opened.kv, prompt=whole(prompt(1, 4)))
            await write.reached()
            assert await told(daemon) == (200, "ok", {})
            await room.reached()
            clock.advance(31.0)

            _, found = await get(daemon.path, "/health")
            values = await samples(daemon)
            _, stats = await get(daemon.path, "/v1/stats")
            hit = await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(prompt(1, 4)))

        assert sorted(reason["code"] for reason in found["reasons"]) == ["disk_slow", "disk_slow"]
        assert "a write to SSD has been running for 31 s" in str(found) and "has not said for 31 s" in str(found)
        assert values['tiercache_worker_call_seconds{lane="write"}'] == 31.0
        assert values['tiercache_workers{lane="write",state="busy"}'] == 1.0
        assert {lane["lane"]: lane["longest_seconds"] for lane in stats["workers"]}["write"] == 31.0
        assert hit.tiers == {"HBM": 4}
        rig.disk.release()
        answer = await raw.reply(number)
        assert isinstance(answer, wire.Count) and answer.count == 4
        await until(lambda: daemon.cache.disk_watch is not None and not daemon.cache.disk_watch.asked_for)
        assert await told(daemon) == (200, "ok", {})


async def test_a_dead_thread_is_told_and_counted(folder: Path) -> None:
    """The request is answered, the next one is done, and the count stays when the reason has gone."""
    clock = FakeClock()
    rig = Rig(clock=clock)
    async with filled(folder, rig) as (daemon, raw, opened):
        rig.threads.kill("_put")
        async with asyncio.timeout(PATIENCE):
            assert await flushed(raw, opened) == 0

        status, said, reasons = await told(daemon)
        assert (status, said, set(reasons)) == (200, "degraded", {"worker_died"}) and await gauges(daemon) == {"worker_died"}
        assert await flushed(raw, opened) == 4
        clock.advance(61.0)
        assert await told(daemon) == (200, "ok", {})
        values = await samples(daemon)
        assert values['tiercache_worker_deaths_total{lane="write"}'] == 1.0
        assert values['tiercache_workers{lane="write",state="alive"}'] == 4.0


async def test_a_quarantine_that_grows_is_told_until_the_process_ends(folder: Path) -> None:
    """A client that dropped its session and lives on may still write its slots: two of 24, more than 5 %."""
    async with daemon_of(folder, small(hbm=24, dram=24)) as daemon, session_at(daemon.path) as raw:
        await stored(raw, await raw.open(), await fetched(raw), prompt(1, 2))
        async with child(daemon, "commit", mapped=True) as client:
            await client.drop()

            status, said, reasons = await told(daemon)

            assert (status, said, set(reasons)) == (200, "degraded", {"quarantine"})
            assert "2 of 24 slots of HBM (limit 5%) are kept from use" in reasons["quarantine"]["message"]
            assert await gauges(daemon) == {"quarantine"}
            await client.kill()
        assert await told(daemon) == (200, "ok", {})


async def test_in_process_and_over_http_the_same_is_said(folder: Path) -> None:
    """`TierCache.health` and /health have one source."""
    rig = Rig(clock=FakeClock())
    async with filled(folder, rig) as (daemon, raw, opened):
        rig.disk.fail("sync", OSError(errno.EIO, os.strerror(errno.EIO)))
        assert await flushed(raw, opened) == 0

        health = await daemon.cache.health()
        _, found = await get(daemon.path, "/health")

        assert found["status"] == health.status == "degraded"
        assert found["reasons"] == [
            {"code": one.code, "message": one.message, "since_seconds": one.since_seconds} for one in health.ailments
        ]


async def test_starting_draining_and_failed_are_503(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe is told to wait, or to give up, by the status alone; a start that fails says so until the socket goes."""
    rig = Rig()
    hold = rig.threads.hold("allocate")
    daemon = Daemon(small(directory=folder / "kv"), folder / "d.sock", seams=rig.seams())
    starting = asyncio.ensure_future(daemon.__aenter__())
    await hold.reached()
    assert await told(daemon) == (503, "starting", {})
    assert await gauges(daemon) == set()
    rig.release()
    await starting
    assert await told(daemon) == (200, "ok", {})
    await daemon.stop()

    said = []
    failing = Daemon(small(dram=1 << 40), folder / "d.sock")
    close = failing.cache.close

    async def ask_and_close() -> None:
        said.append((await told(failing))[:2])
        await close()

    monkeypatch.setattr(failing.cache, "close", ask_and_close)
    with pytest.raises(MemoryRefused):
        await failing.__aenter__()
    assert said == [(503, "failed")]


@pytest.mark.parametrize("error", [DirectoryRefused("no", errno=errno.EACCES), StoreError("torn", broken=False)], ids=str)
async def test_a_daemon_that_can_not_have_its_disk(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A mistake ends the start and leaves nothing; a disk that fails is told, and sessions are served from memory."""

    def refuse(*_: object, **__: object) -> None:
        raise type(error)(str(error), **getattr(error, "fields", {}))

    monkeypatch.setattr("tiercache.service.tiers.SsdTier", refuse)
    config = small(directory=folder / "kv")
    if isinstance(error, DirectoryRefused):
        with pytest.raises(DirectoryRefused):
            async with serve(config, folder / "d.sock"):
                pass
        return
    async with daemon_of(folder, config) as daemon, session_at(daemon.path) as raw:
        opened = await raw.open()
        assert await stored(raw, opened, await fetched(raw), prompt(1, 4)) == 4
        status, said, reasons = await told(daemon)

        assert (status, said, set(reasons)) == (200, "degraded", {"ssd_unavailable"})
        assert await flushed(raw, opened) == 0


async def test_a_real_daemon_tells_what_it_set_aside_until_its_next_start(folder: Path) -> None:
    """In a process of its own, with metadata that can't be read: it serves, says so, and is well after a restart."""
    (folder / "kv" / "metadata").mkdir(parents=True)
    (folder / "kv" / "format.json").write_text('{"format": 1}')
    (folder / "kv" / "metadata" / "data.mdb").write_bytes(b"\xa5" * 65536)
    for expected in ({"data_set_aside"}, set()):
        process = await started(folder)
        await logged(process, '"serving"')
        try:
            _, found = await get(folder / "d.sock", "/health")
        finally:
            process.terminate()
            code, _ = await ended(process)
        assert code == 0
        assert {reason["code"] for reason in found["reasons"]} == expected
    assert (folder / "kv" / "set-aside-1" / "metadata" / "data.mdb").read_bytes() == b"\xa5" * 65536


async def test_a_loop_that_was_late_is_told(folder: Path) -> None:
    """What the heartbeat finds is among the reasons."""
    async with filled(folder, Rig()) as (daemon, _, _):
        daemon._beat(61.0)
        _, status, reasons = await told(daemon)

        assert status == "degraded" and list(reasons) == ["loop_lag"]
