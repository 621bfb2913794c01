"""A daemon whose disk hangs: `stuck.py STEP --config FILE …`, else as `python -m tiercache.service.daemon`.

Every call of STEP (`read`, `commit` or `sync`) stands for ever, once the file `stuck` lies beside the configuration. It says so by
making the file `standing`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from tiercache.config import Config
from tiercache.service.cli_serve import run, until_told
from tiercache.service.daemon.daemon import Daemon
from tiercache.service.stack import Seams
from tiercache.storage.ssd_values import LmdbValues, Write


def values(step: str, folder: Path) -> type[LmdbValues]:
    """Return the class that touches the disk, with one step that hangs."""

    def meet(now: str) -> None:
        if now == step and (folder / "stuck").exists():
            (folder / "standing").touch()
            threading.Event().wait()

    class StuckValues(LmdbValues):
        def read(self, key: int, copy: Callable[[memoryview], None]) -> bool:
            meet("read")
            return super().read(key, copy)

        def commit(self, writes: Sequence[Write] = (), deletes: Sequence[int] = ()) -> None:
            meet("commit")
            super().commit(writes, deletes)

        def sync(self) -> None:
            meet("sync")
            super().sync()

    return StuckValues


async def main(step: str, file: Path, socket: str) -> None:
    """Serve until told to stop."""
    seams = Seams(values=values(step, file.parent), patience=0.2)
    await until_told(Daemon(Config.from_toml(file), socket, seams=seams))


if __name__ == "__main__":
    arguments = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))
    run(lambda: main(sys.argv[1], Path(arguments["--config"]), arguments["--socket"]))
