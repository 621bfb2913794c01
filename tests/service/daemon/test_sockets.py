"""Sockets on disk: nobody else's, a dead daemon's replaced, a live one's left alone."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.caches import small
from tests.service.daemon.raw import daemon_of, names_in, session_at
from tiercache.errors import InvalidConfig, SocketRefused
from tiercache.service.address import default_socket, socket_path
from tiercache.service.daemon.daemon import Daemon
from tiercache.service.daemon.sockets import Sockets


@pytest.fixture(params=[0o000, 0o022, 0o777], ids=["umask 000", "umask 022", "umask 777"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


class Watched(socket.socket):
    """A socket that notes the mode of its file the moment it is there."""

    modes: list[int]

    def bind(self, address: object) -> None:
        super().bind(address)  # type: ignore[arg-type]
        self.modes.append(stat.S_IMODE(os.lstat(str(address)).st_mode))


def test_sockets_are_this_users_from_the_first_instant(folder: Path, umask: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Watched.modes = []
    monkeypatch.setattr(socket, "socket", Watched)

    sockets = Sockets.open(folder / "d.sock")

    assert len(Watched.modes) == 2 and all(mode & 0o077 == 0 for mode in Watched.modes)
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert {name: mode for name, mode in found.items() if name.startswith("d.sock") and not name.endswith("lock")} == {
        "d.sock": 0o600,
        "d.sock.fd": 0o600,
    }
    assert found["d.sock.lock"] & 0o077 == 0
    sockets.close()
    assert names_in(folder) == []


async def test_a_new_folder_is_this_users_alone(folder: Path) -> None:
    async with Daemon(small(), folder / "new" / "er" / "d.sock"):
        assert stat.S_IMODE((folder / "new" / "er").stat().st_mode) == 0o700


def test_a_folder_that_others_may_change_is_refused(folder: Path) -> None:
    """Somebody could put a socket of his in the place of ours."""
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)

    with pytest.raises(SocketRefused, match="others"):
        Sockets.open(folder / "open" / "d.sock")
    assert list((folder / "open").iterdir()) == []


@pytest.mark.parametrize("left", ["both", "sessions", "descriptors"])
async def test_what_a_dead_daemon_left_is_replaced(folder: Path, left: str) -> None:
    for name in ("d.sock", "d.sock.fd") if left == "both" else ("d.sock",) if left == "sessions" else ("d.sock.fd",):
        dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET if name.endswith("fd") else socket.SOCK_STREAM)
        dead.bind(str(folder / name))
        dead.close()
    (folder / "d.sock.lock").touch()

    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        await raw.open()


async def test_a_live_daemons_socket_is_left_alone(folder: Path) -> None:
    async with daemon_of(folder) as daemon, session_at(daemon.path) as raw:
        with pytest.raises(SocketRefused, match="a daemon lives there"):
            async with Daemon(small(), folder / "d.sock"):
                pass
        async with session_at(daemon.path) as another:
            await another.open()
        await raw.open()
    assert names_in(folder) == []


async def test_another_programs_socket_is_left_alone(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(folder / "d.sock"))
        other.listen()

        with pytest.raises(SocketRefused, match="another program"):
            Sockets.open(folder / "d.sock")
        assert names_in(folder) == ["d.sock"]


def test_what_is_no_socket_is_left_alone(folder: Path) -> None:
    (folder / "d.sock").write_text("a letter")

    with pytest.raises(SocketRefused, match="no socket"):
        Sockets.open(folder / "d.sock")
    assert (folder / "d.sock").read_text() == "a letter"


def test_closing_removes_only_what_is_ours(folder: Path) -> None:
    """Somebody removed our socket and made another one of that name."""
    sockets = Sockets.open(folder / "d.sock")
    (folder / "d.sock").unlink()
    (folder / "d.sock").write_text("another's")

    sockets.close()
    sockets.close()

    assert names_in(folder) == ["d.sock"]


def test_a_path_that_no_address_holds_is_refused_by_name(folder: Path) -> None:
    longest = folder / ("s" * (104 - len(str(folder)) - 1))
    assert len(str(longest)) == 104
    Sockets.open(socket_path(longest)).close()

    for more in ("s", "ssss"):
        with pytest.raises(InvalidConfig, match="107") as caught:
            socket_path(f"{longest}{more}")
        assert caught.value.fields["field"] == "socket" and str(longest) in str(caught.value)


def test_the_default_follows_the_environment(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """XDG_RUNTIME_DIR, else /run/user where it exists, else a folder of this user's under the temporary directory."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    assert default_socket() == folder / "tiercache.sock"
    assert socket_path(None) == folder / "tiercache.sock"

    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(Path, "is_dir", lambda path: False)
    assert default_socket().parent.name == f"tiercache-{os.getuid()}"
    monkeypatch.setattr(Path, "is_dir", lambda path: True)
    assert default_socket() == Path(f"/run/user/{os.getuid()}/tiercache.sock")


def test_a_socket_may_be_named_as_clients_name_it(folder: Path) -> None:
    assert socket_path(f"unix://{folder}/d.sock") == folder / "d.sock"
