"""The data directory: one live owner, a local file system, a known format."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from pathlib import Path

import msgspec

from tiercache.errors import DirectoryLocked, DirectoryRefused

log = logging.getLogger(__name__)

FORMAT = 1
"""The number of the directory's format. A change that this version's readers can't read gets the next one."""
LOCK, RECORD, METADATA, BLOCKS = "lock", "format.json", "metadata", "blocks"
_ASIDE = "set-aside-"
ASIDE_KEPT = 2
"""Folders of files set aside that are kept, the latest ones: each may be as large as the tier, and only a person empties them."""
_MOUNTS = Path("/proc/self/mountinfo")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
# A mapped file is only coherent, and flock only exclusive, on this machine. FUSE by name: ext4 and ntfs come that way too.
_REMOTE = frozenset(
    (
        "9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4",
        "ocfs2", "orangefs", "smb3", "smbfs",
        "fuse.beegfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.davfs2", "fuse.gcsfuse", "fuse.glusterfs", "fuse.juicefs",
        "fuse.mount.davfs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs",
    )
)  # fmt: skip


class FormatRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the directory says of itself. `boot` is the machine's boot while a writer that does not sync is at work, else None."""

    format: int
    boot: str | None = None


class DataDirectory:
    """The directory at `path`, created with mode 0700 if absent, owned by this object until `close`.

    Ownership is an exclusive flock on the file `lock` in it: it follows the file, so no alias of the path gets around it, and
    it goes with its process however that dies. `aside` is the folder that what can't be used was moved to, or None.

    With `sync=False` nothing is ordered on disk until the end, so that a loss of power can leave files that LMDB may crash on
    when it reads them: the directory is marked with the machine's boot, and one marked with an earlier boot is set aside.

    Raises DirectoryLocked, naming the holder's process id, while another owner lives, and DirectoryRefused for a path on a
    network file system, one that is no directory, or one that can't be written.
    """

    def __init__(self, path: Path, *, sync: bool = True, mounts: Path = _MOUNTS, boot: Path = _BOOT) -> None:
        self.path = path
        self.aside: Path | None = None
        self._boot = _boot(boot)
        self._sync = sync
        _refuse_remote(path, mounts)
        try:
            make_private(path)
            self._lock: int | None = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _refused(path, error) from error
        try:
            self._own(self._lock)
            self._settle()
        except OSError as error:
            self._unlock()
            raise _refused(path, error) from error
        except BaseException:
            self._unlock()
            raise

    @property
    def metadata(self) -> Path:
        """Where the metadata environment lies."""
        return self.path / METADATA

    @property
    def blocks(self) -> Path:
        """Where the data environments lie, a folder for each geometry."""
        return self.path / BLOCKS

    def set_aside(self, *names: str, why: str) -> Path:
        """Move the entries `names`, relative to the directory, into a folder in it, say so in the log, and return that folder.

        One folder takes what one owner sets aside. Only `ASIDE_KEPT` folders are kept: older ones are deleted, which is said in
        the log, too. The format record goes last: a move that was cut short is then taken up by the next owner.
        """
        try:
            target = self.aside
            if target is None or any((target / name).exists() for name in names):
                number = 1 + max(self._set_aside(), default=0)
                target = self.path / f"{_ASIDE}{number}"
                target.mkdir(mode=0o700)
            for name in sorted(names, key=lambda name: name == RECORD):
                if (self.path / name).exists():
                    make_private((target / name).parent)
                    os.rename(self.path / name, target / name)
            sync_folder(self.path)
        except OSError as error:
            raise _refused(self.path, error) from error
        log.warning("%s: %s; what it held is kept in %s", self.path, why, target.name)
        self.aside = target
        for number in sorted(self._set_aside())[:-ASIDE_KEPT]:
            try:
                shutil.rmtree(self.path / f"{_ASIDE}{number}")
                log.warning("%s: %s%d is deleted; only the last %d are kept", self.path, _ASIDE, number, ASIDE_KEPT)
            except OSError as error:  # it is in nobody's way
                log.warning("%s: %s%d can't be deleted: %s", self.path, _ASIDE, number, error)
        return target

    def close(self) -> None:
        """Note that all is on disk, and let the next owner in. May be called twice."""
        if self._lock is not None:
            try:
                if not self._sync:
                    os.sync()
                    self._write_record(None)
            except OSError:
                pass  # a full or broken disk: the mark stays, and at worst what was never synced is set aside after a reboot
            finally:
                self._unlock()

    def _set_aside(self) -> list[int]:
        taken = [entry.name.removeprefix(_ASIDE) for entry in self.path.glob(f"{_ASIDE}*")]
        return [int(text) for text in taken if text.isascii() and text.isdecimal() and text == str(int(text))]

    def _own(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            text = os.pread(lock, 32, 0).decode(errors="replace").strip()
            pid = int(text) if text.isdecimal() else None
            holder = "another process" if pid is None else f"process {pid}"
            raise DirectoryLocked(f"{self.path} is in use by {holder}", path=str(self.path), pid=pid) from error
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)

    def _settle(self) -> None:
        found = self._read_record()
        known = found is not None and found.format == FORMAT and found.boot in (None, self._boot)
        if not known and any((self.path / name).exists() for name in (RECORD, METADATA, BLOCKS)):
            self.set_aside(METADATA, BLOCKS, RECORD, why=self._why(found))
        wanted = None if self._sync else self._boot
        if known and found is not None and found.boot == wanted:
            return
        if known and found is not None and wanted is None:
            os.sync()  # a writer of this boot was killed before its clean end: what it wrote may not be on disk yet
        self._write_record(wanted)

    def _why(self, found: FormatRecord | None) -> str:
        if found is None:
            return f"{RECORD} can't be read"
        if found.format != FORMAT:
            return f"it has format {found.format}, and this version reads {FORMAT}"
        return "it was written without syncing, and the machine has started anew since"

    def _read_record(self) -> FormatRecord | None:
        try:
            return msgspec.json.decode((self.path / RECORD).read_bytes(), type=FormatRecord)
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def _write_record(self, boot: str | None) -> None:
        draft = self.path / f"{RECORD}.new"
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, msgspec.json.encode(FormatRecord(format=FORMAT, boot=boot)))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(draft, self.path / RECORD)
        sync_folder(self.path)

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def make_private(folder: Path) -> None:
    """Make a folder and those above it that are absent, all of them for this user alone, whatever the umask is.

    With `parents=True` those above would get what the umask leaves; in one that others may change they could replace the folder.
    """
    if not folder.is_dir():
        make_private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def file_system(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """Return the type of the file system that holds `path`, or would once it is created; None when `mounts` can't tell."""
    real = os.path.realpath(path)
    found, depth = None, -1
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, rest = before.split(" "), after.split(" ")
        if len(fields) < 5 or not rest[0]:
            continue
        point = _unescape(fields[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        # Of two mounts on one point the later one covers the earlier.
        if inside and len(point) >= depth:
            found, depth = rest[0], len(point)
    return found


def _unescape(text: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text


def _refuse_remote(path: Path, mounts: Path) -> None:
    kind = file_system(path, mounts)
    if kind is not None and kind in _REMOTE:
        raise DirectoryRefused(f"{path} lies on {kind}, a network file system; use a local disk", path=str(path), file_system=kind)


def _refused(path: Path, error: OSError) -> DirectoryRefused:
    return DirectoryRefused(f"{path} can't be used: {error.strerror or error}", path=str(path), errno=error.errno)


def _boot(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return "unknown"


def sync_folder(path: Path) -> None:
    """Make the entries of the folder `path` safe from a loss of power. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
