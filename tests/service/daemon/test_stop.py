"""How a daemon begins and stops."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.seams import Rig
from tests.service.caches import SPEC, prompt, small
from tests.service.daemon.http import get
from tests.service.daemon.raw import PATIENCE, daemon_of, fetched, names_in, session_at, stored, whole
from tiercache.errors import DirectoryLocked, MemoryRefused
from tiercache.service import wire
from tiercache.service.daemon.daemon import Daemon, serve
from tiercache.spec import KVSpec
from tiercache.storage import huge_pages


def config_file(folder: Path) -> Path:
    path = folder / "c.toml"
    path.write_text(
        f'directory = "{folder / "kv"}"\ndrain_seconds = 20\n'
        '[[tiers]]\ntier = "DRAM"\ncapacity = "256 KiB"\n[[tiers]]\ntier = "SSD"\ncapacity = "64 MiB"\n'
    )
    return path


async def started(folder: Path, *more: str, environment: dict[str, str] | None = None) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tiercache.service.daemon",
        "--config",
        config_file(folder),
        "--socket",
        folder / "d.sock",
        *more,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | (environment or {}),
    )


async def logged(process: asyncio.subprocess.Process, what: str) -> None:
    assert process.stderr is not None
    async with asyncio.timeout(PATIENCE):
        while line := await process.stderr.readline():
            if what in line.decode():
                return
    raise AssertionError(f"the daemon ended without {what!r}")


async def ended(process: asyncio.subprocess.Process) -> tuple[int | None, str]:
    async with asyncio.timeout(PATIENCE):
        _, said = await process.communicate()
    return process.returncode, said.decode()


async def test_systemd_is_told(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as systemd:
        systemd.bind(str(folder / "notify"))
        process = await started(folder, environment={"NOTIFY_SOCKET": str(folder / "notify")})
        await logged(process, '"serving"')
        process.terminate()
        assert (await ended(process))[0] == 0

        said = []
        while True:
            try:
                said += systemd.recv(4096).decode().splitlines()
            except BlockingIOError:
                break
        assert [line for line in said if not line.startswith("STATUS=")] == ["READY=1", "STOPPING=1"]


@pytest.mark.parametrize(
    ("text", "arguments", "code", "says"),
    [
        ('tires = 4\n[[tiers]]\ntier = "DRAM"\ncapacity = "1 MiB"\n', [], 2, "tires"),
        ('[[tiers]]\ntier = "DRAM"\ncapacity = "much"\n', [], 2, "much"),
        ('[[tiers]]\ntier = "DRAM"\ncapacity = "1 MiB"\n', ["--socket", "/tmp/" + "s" * 120], 2, "107"),
        ('[[tiers]]\ntier = "DRAM"\ncapacity = "1 MiB"\n', ["--admin", "127.0.0.1:1"], 2, "admin_token_file"),
        ('[[tiers]]\ntier = "DRAM"\ncapacity = "900 TiB"\n', [], 1, "900.9 TiB"),
    ],
    ids=["unknown key", "no size", "long path", "admin without a token", "too much memory"],
)
def test_what_cannot_be_ends_with_a_message_that_names_it(
    folder: Path, text: str, arguments: list[str], code: int, says: str
) -> None:
    (folder / "c.toml").write_text(text)
    command = [sys.executable, "-m", "tiercache.service.daemon", "--config", "c.toml", "--socket", str(folder / "d.sock")]

    done = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)

    assert done.returncode == code, done.stderr
    assert says in done.stderr and "Traceback" not in done.stderr
    assert names_in(folder) == ["c.toml"]


async def test_health_says_starting_while_memory_is_allocated(folder: Path) -> None:
    """The socket is there first. Whoever asks for a session, or for figures, is told to come again."""
    rig = Rig()
    hold = rig.threads.hold("allocate")
    daemon = Daemon(small(), folder / "d.sock", seams=rig.seams())
    starting = asyncio.ensure_future(daemon.__aenter__())
    try:
        await hold.reached()

        assert await get(daemon.path, "/health") == (503, {"status": "starting", "reasons": []})
        assert (await get(daemon.path, "/v1/stats"))[0] == 503
        assert (await get(daemon.path, wire.SESSION_PATH))[0] == 503
        assert (await get(daemon.path, "/metrics"))[0] == 200
    finally:
        rig.release()
        await starting
        assert (await get(daemon.path, "/health"))[1]["status"] == "ok"
        await daemon.stop()


async def test_a_start_that_is_called_off_leaves_nothing(folder: Path) -> None:
    rig = Rig()
    hold = rig.threads.hold("allocate")
    daemon = Daemon(small(directory=folder / "kv"), folder / "d.sock", seams=rig.seams())
    starting = asyncio.ensure_future(daemon.__aenter__())
    await hold.reached()

    starting.cancel()
    rig.release()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await daemon.stop()

    assert set(names_in(folder)) <= {"kv"}
    async with daemon_of(folder, small(directory=folder / "kv")):
        pass


async def test_a_start_that_fails_leaves_nothing(folder: Path) -> None:
    with pytest.raises(MemoryRefused):
        async with serve(small(dram=1 << 40), folder / "d.sock"):
            pass

    assert names_in(folder) == []


async def test_a_directory_has_one_daemon(folder: Path) -> None:
    async with daemon_of(folder, small(directory=folder / "kv")) as daemon, session_at(daemon.path) as raw:
        with pytest.raises(DirectoryLocked):
            async with serve(small(directory=folder / "kv"), folder / "other.sock"):
                pass
        await raw.open()
    assert names_in(folder) == ["kv"]


async def test_idle_sessions_and_requests_that_wait_do_not_hold_up_the_stop(folder: Path) -> None:
    """Ten sessions that say nothing, one with a lease in place and a reservation, one in the middle of a flush that is durable."""
    tokens = prompt(1, 4)
    rig = Rig()
    daemon = Daemon(small(directory=folder / "kv"), folder / "d.sock", seams=rig.seams())
    await daemon.__aenter__()
    idle = [session_at(daemon.path) for _ in range(10)]
    for session in idle:
        await session.__aenter__()
    async with session_at(daemon.path) as raw:
        opened = await raw.open()
        await stored(raw, opened, await fetched(raw), tokens)
        hit = await raw.call(wire.Leased, wire.Match, kv=opened.kv, prompt=whole(tokens))
        await raw.call(wire.Done, wire.InPlace, lease=hit.lease)
        await raw.call(wire.Reserved, wire.Reserve, kv=opened.kv, prompt=whole(prompt(2, 2)))
        flush = await raw.send(wire.Flush, kv=opened.kv, prompt=whole(tokens))
        await raw.call(wire.Count, wire.Covered, kv=opened.kv, prompt=whole(tokens))
        stopping = asyncio.ensure_future(daemon.stop())

        answer = await raw.reply(flush)

        assert isinstance(answer, wire.Count) and answer.count == 4
        assert await raw.ended()
        await stopping
    for session in idle:
        await session.__aexit__(None, None, None)
    assert names_in(folder) == ["kv"]


async def test_a_draining_daemon_takes_no_more_sessions_and_says_so(folder: Path) -> None:
    """It is asked while its last blocks go to disk."""
    tokens, rig = prompt(1, 4), Rig()
    spec: KVSpec = SPEC
    async with daemon_of(folder, small(directory=folder / "kv"), rig) as daemon:
        async with session_at(daemon.path) as raw:
            opened = await raw.open(spec=spec)
            await stored(raw, opened, await fetched(raw), tokens)
        hold = rig.copies.hold(kind="put")
        stopping = asyncio.ensure_future(daemon.stop())
        await hold.reached()

        assert await get(daemon.path, "/health") == (503, {"status": "draining", "reasons": []})
        assert (await get(daemon.path, wire.SESSION_PATH))[0] == 503
        rig.release()
        await stopping
        daemon.cache.check = _nothing_to_check  # type: ignore[method-assign]


async def _nothing_to_check() -> dict[str, int]:
    return {}


async def test_a_page_that_the_kernel_takes_long_for_holds_up_no_stop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large pages come behind a start, at the lowest priority: the daemon and its loop don't wait for one to end."""
    entered, leave = threading.Event(), threading.Event()
    libc = huge_pages._libc()

    class Slow:
        mmap, munmap = libc.mmap, libc.munmap

        @staticmethod
        def madvise(*_: int) -> int:
            entered.set()
            assert leave.wait(60)
            return 0

    monkeypatch.setattr(huge_pages, "_libc", Slow)
    try:
        async with asyncio.timeout(PATIENCE):
            async with daemon_of(folder, small(dram=1024)):
                while not entered.is_set():  # noqa: ASYNC110 - it is set in a thread
                    await asyncio.sleep(0.001)
            assert not leave.is_set()
    finally:
        leave.set()
