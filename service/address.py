"""Where a daemon is found: the path of its socket, and that of the socket for descriptors beside it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from tiercache.errors import InvalidConfig

DESCRIPTORS_SUFFIX = ".fd"
LOCK_SUFFIX = ".lock"
MOST_PATH_BYTES = 107
"""What a Unix socket's address holds, without the zero at its end."""


def default_socket() -> Path:
    """Return where the daemon's socket is when nobody says: under XDG_RUNTIME_DIR, under /run/user where that exists, or in a
    folder of this user's under the temporary directory.
    """
    given = os.environ.get("XDG_RUNTIME_DIR")
    run = Path(f"/run/user/{os.getuid()}")
    if given and Path(given).is_absolute():
        folder = Path(given)
    elif run.is_dir():
        folder = run
    else:
        folder = Path(tempfile.gettempdir()) / f"tiercache-{os.getuid()}"
    return folder / "tiercache.sock"


def socket_path(text: str | os.PathLike[str] | None) -> Path:
    """Return the path of the socket that `text` names, as a path or as `unix://` and one, or of the default one for None.

    Raises InvalidConfig, naming the path, when it or that of the socket beside it is too long for an address or holds a zero.
    """
    name = os.fspath(text) if text is not None else os.fspath(default_socket())
    path = Path(name.removeprefix("unix://")).expanduser()
    size = len(os.fsencode(path)) + len(DESCRIPTORS_SUFFIX)
    if size > MOST_PATH_BYTES:
        most = MOST_PATH_BYTES - len(DESCRIPTORS_SUFFIX)
        raise InvalidConfig(
            f"socket: the path {path} is {size - len(DESCRIPTORS_SUFFIX)} bytes long; an address holds {MOST_PATH_BYTES}, and with "
            f"{DESCRIPTORS_SUFFIX!r} for the socket beside it a path may have {most}",
            field="socket",
            value=str(path),
        )
    if "\0" in str(path) or not path.name:
        raise InvalidConfig(f"socket: {str(path)!r} is no path of a file", field="socket", value=str(path))
    return path


def beside(path: Path, suffix: str) -> Path:
    """Return the path of what lies beside the socket at `path`."""
    return path.with_name(path.name + suffix)
