"""Where the demo's things lie: a directory that can be kept, and a private one for sockets with a short name."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tiercache.config import Config
from tiercache.errors import DirectoryRefused, InvalidConfig
from tiercache.service.address import default_socket, socket_path


@dataclass(frozen=True, slots=True)
class Places:
    """`directory` holds the SSD tier, the daemon's configuration and its log; `run` is for the daemon's sockets alone."""

    directory: Path
    run: Path

    @classmethod
    def choose(cls, directory: Path | None) -> Self:
        """Return places of this process's own, in `directory` if it is given; nothing is made yet.

        Raises InvalidConfig when no folder for sockets has a short enough name.
        """
        name = f"tiercache-demo-{os.getpid()}-{secrets.token_hex(4)}"
        return cls((directory or Path(tempfile.gettempdir()) / name).absolute(), _run_folder(f"{name}-run"))

    @property
    def socket(self) -> Path:
        """The daemon's socket."""
        return self.run / "s"

    @property
    def config(self) -> Path:
        """The daemon's configuration."""
        return self.directory / "daemon.toml"

    @property
    def log(self) -> Path:
        """What the daemon writes to stdout and stderr."""
        return self.directory / "daemon.log"

    @property
    def tier(self) -> Path:
        """The SSD tier's directory."""
        return self.directory / "ssd"

    def prepare(self, config: Config) -> None:
        """Make the directory and write `config` for the daemon. Raises DirectoryRefused."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.config.write_text(to_toml(config), encoding="utf-8")
        except (OSError, UnicodeEncodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "its name is not UTF-8"
            raise DirectoryRefused(f"{str(self.directory)!r}: {reason}", path=str(self.directory)) from error


def to_toml(config: Config) -> str:
    """Return the part of `config` that the demo sets: tiers, directory, and how long a stop may write."""
    lines = [f"directory = {_quoted(str(config.path))}", f"drain_seconds = {config.drain_seconds}"]
    for tier in config.tiers:
        lines += ["", "[[tiers]]", f"tier = {_quoted(tier.tier)}", f"capacity = {tier.bytes}"]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    # A basic string of TOML is one of JSON, but for DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _run_folder(name: str) -> Path:
    """Return a path for a folder `name` in which the address of a socket is short enough."""
    refused: InvalidConfig | None = None
    for parent in _parents():
        try:
            socket_path(Places(parent, parent / name).socket)
        except InvalidConfig as error:
            refused = refused or error
        else:
            return parent / name
    raise refused or InvalidConfig("there is no folder that a socket could be put in", field="socket")


def _parents() -> Iterator[Path]:
    for parent in (default_socket().parent, Path(tempfile.gettempdir()).absolute(), Path("/tmp"), Path("/var/tmp")):
        if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK):
            yield parent
