"""Runs a command for as long as its parent lives: `python -m tiercache.service.demo.tether PARENT serve …`."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from tiercache.service import cli

_PR_SET_PDEATHSIG = 1
ORPHANED = 1


def tie_to(parent: int) -> None:
    """Let the kernel send SIGTERM to this process when its parent, process `parent`, ends however it does.

    Exits when that has ended already. The kernel means the thread that forked us: it has to live as long as its process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:  # it ended before it was watched
        sys.exit(ORPHANED)


if __name__ == "__main__":
    tie_to(int(sys.argv.pop(1)))
    cli.main()
