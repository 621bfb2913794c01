"""Runs another program for as long as its parent lives: `python -m tiercache.bench.tied PARENT PROGRAM …`.

Our interpreter's settings are not its own. The kernel's promise stands beyond `exec`: what is run becomes this process, and
knows nothing of it.
"""

from __future__ import annotations

import os
import sys

from tiercache.service.demo.tether import tie_to


def command(*program: str) -> list[str]:
    """Return the command that runs `program` tied to this process."""
    return [sys.executable, "-P", "-m", "tiercache.bench.tied", str(os.getpid()), *program]


if __name__ == "__main__":
    tie_to(int(sys.argv[1]))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    os.execve(sys.argv[2], sys.argv[2:], kept | {"PYTHONDONTWRITEBYTECODE": "1"})
