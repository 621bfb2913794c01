"""The data directory: one live owner, a local file system, a known format."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tiercache.errors import DirectoryLocked, DirectoryRefused
from tiercache.storage.directory import FORMAT, DataDirectory, file_system

HOLDER = """
import sys
from pathlib import Path
from tiercache.storage.directory import DataDirectory
held = DataDirectory(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def hold(path: Path) -> subprocess.Popen[str]:
    """Return a process that owns `path`."""
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def end(holder: subprocess.Popen[str]) -> None:
    holder.kill()
    holder.communicate()


def fill(path: Path) -> None:
    """Put something in the places of metadata and blocks."""
    for name in ("metadata", "blocks/1x2x4-64/raw"):
        (path / name).mkdir(parents=True)
        (path / name / "data.mdb").write_bytes(name.encode())


def test_a_new_directory_is_its_owners_alone(tmp_path: Path) -> None:
    """It is created with mode 0700, whatever the umask, and says its format."""
    old = os.umask(0)
    try:
        directory = DataDirectory(tmp_path / "a" / "b")
    finally:
        os.umask(old)
    directory.close()

    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    assert all(stat.S_IMODE(entry.stat().st_mode) == 0o600 for entry in (tmp_path / "a" / "b").iterdir())
    assert json.loads((tmp_path / "a" / "b" / "format.json").read_text())["format"] == FORMAT


def test_a_second_owner_is_refused_by_any_path(tmp_path: Path) -> None:
    """The path itself, a link to it and a path through a link name the same directory and the same holder."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "up").symlink_to(tmp_path)
    first = DataDirectory(tmp_path / "real")

    for path in (tmp_path / "real", tmp_path / "link", tmp_path / "up" / "real"):
        with pytest.raises(DirectoryLocked, match=f"process {os.getpid()}") as caught:
            DataDirectory(path)
        assert caught.value.fields["pid"] == os.getpid()
    first.close()
    first.close()
    DataDirectory(tmp_path / "link").close()


def test_a_dead_owner_never_blocks(tmp_path: Path) -> None:
    """While another process lives it is named; once it was killed the directory opens at once."""
    holder = hold(tmp_path)
    try:
        with pytest.raises(DirectoryLocked, match=f"process {holder.pid}"):
            DataDirectory(tmp_path)
    finally:
        end(holder)

    DataDirectory(tmp_path).close()


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "9p", "fuse.sshfs", "ceph"])
def test_a_network_file_system_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    """The directory is refused before anything is created in it, and the message names the type."""
    mounts = tmp_path / "mountinfo"
    point = str(tmp_path / "a share").replace(" ", "\\040")
    mounts.write_text(
        f"22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n23 22 0:44 / {point} rw shared:7 master:2 - {kind} server:/x rw\n"
    )

    with pytest.raises(DirectoryRefused, match=kind) as caught:
        DataDirectory(tmp_path / "a share" / "cache", mounts=mounts)

    assert caught.value.fields["file_system"] == kind
    assert not (tmp_path / "a share").exists()
    DataDirectory(tmp_path / "a share beside it", mounts=mounts).close()


def test_the_last_mount_on_a_point_counts(tmp_path: Path) -> None:
    """A local file system mounted over a network share is local; of two points the longer one counts."""
    mounts = tmp_path / "mountinfo"
    lines = [("/", "ext4"), ("/data", "nfs"), ("/data", "xfs"), ("/data/deep", "nfs4")]
    mounts.write_text("".join(f"22 1 8:1 / {point} rw - {kind} source rw\n" for point, kind in lines) + "garbage\n\n")

    assert [file_system(Path(path), mounts) for path in ("/else", "/data/x", "/data/deep/x", "/data/deeper")] == [
        "ext4",
        "xfs",
        "nfs4",
        "xfs",
    ]
    assert file_system(Path("/data"), tmp_path / "absent") is None


def test_this_machines_mounts_are_understood(tmp_path: Path) -> None:
    """The real table says something of a real path."""
    assert file_system(tmp_path)


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """A file in the directory's place, one on the way, and a place where nothing can be created are refused with the cause."""
    (tmp_path / "file").write_text("mine")

    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/tiercache")):
        with pytest.raises(DirectoryRefused, match=str(path)):
            DataDirectory(path)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_write_permission_is_refused(tmp_path: Path) -> None:
    """Permission denied is a refusal, not a traceback of the system's."""
    (tmp_path / "d").mkdir(mode=0o500)

    with pytest.raises(DirectoryRefused, match="Permission denied"):
        DataDirectory(tmp_path / "d")


def other_format(path: Path) -> None:
    (path / "format.json").write_text(json.dumps({"format": FORMAT + 1, "new": True}))


def older_format(path: Path) -> None:
    (path / "format.json").write_text(json.dumps({"format": FORMAT - 1}))


def garbage(path: Path) -> None:
    (path / "format.json").write_bytes(b"\xff\x00{")


def nothing(path: Path) -> None:
    (path / "format.json").unlink(missing_ok=True)


@pytest.mark.parametrize("spoil", [other_format, older_format, garbage, nothing])
def test_another_format_is_set_aside_whole(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    """Nothing of it is destroyed or served, what is not ours stays, and the next start is an ordinary one."""
    DataDirectory(tmp_path).close()
    fill(tmp_path)
    (tmp_path / "notes.txt").write_text("not ours")
    spoil(tmp_path)

    directory = DataDirectory(tmp_path)

    assert directory.aside == tmp_path / "set-aside-1"
    assert (tmp_path / "set-aside-1" / "metadata" / "data.mdb").read_bytes() == b"metadata"
    assert (tmp_path / "set-aside-1" / "blocks/1x2x4-64/raw/data.mdb").read_bytes() == b"blocks/1x2x4-64/raw"
    assert not directory.metadata.exists() and not directory.blocks.exists()
    assert (tmp_path / "notes.txt").read_text() == "not ours"
    directory.close()
    again = DataDirectory(tmp_path)
    assert again.aside is None
    again.close()


def test_setting_aside_goes_on_after_a_kill(tmp_path: Path) -> None:
    """A move that was cut short after its first folder is completed by the next owner, into a folder of its own."""
    DataDirectory(tmp_path).close()
    fill(tmp_path)
    other_format(tmp_path)
    (tmp_path / "set-aside-1").mkdir()
    (tmp_path / "metadata").rename(tmp_path / "set-aside-1" / "metadata")

    DataDirectory(tmp_path).close()

    assert (tmp_path / "set-aside-2" / "blocks/1x2x4-64/raw/data.mdb").exists()
    assert (tmp_path / "set-aside-2" / "format.json").exists()


@pytest.mark.parametrize(("clean", "rebooted", "kept"), [(True, True, True), (False, False, True), (False, True, False)])
def test_what_was_never_synced_does_not_outlive_a_reboot(tmp_path: Path, clean: bool, rebooted: bool, kept: bool) -> None:
    """Without sync, files of a writer that had no clean end are used in the same boot and set aside in the next."""
    boot = tmp_path / "boot_id"
    boot.write_text("one\n")
    directory = DataDirectory(tmp_path / "d", sync=False, boot=boot)
    fill(tmp_path / "d")
    if clean:
        directory.close()
    else:
        directory._unlock()  # as a kill does
    if rebooted:
        boot.write_text("two\n")

    for sync in (True, False):
        again = DataDirectory(tmp_path / "d", sync=sync, boot=boot)
        assert (again.metadata / "data.mdb").exists() is kept
        again.close()


def test_a_refused_start_holds_nothing(tmp_path: Path) -> None:
    """A start that fails after it took the lock gives it back."""
    (tmp_path / "format.json").mkdir()

    with pytest.raises(DirectoryRefused):
        DataDirectory(tmp_path)

    (tmp_path / "format.json").rmdir()
    DataDirectory(tmp_path).close()
