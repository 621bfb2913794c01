"""S1: the disk is full."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MOUNT = 'mount -t tmpfs -o size=4m none "$0" && exec "$@"'
OWN_MOUNTS = (["unshare", "--map-root-user", "--mount"], ["unshare", "--mount"])
"""How a process gets mounts of its own: with a user namespace, which needs no privilege where the kernel has it; else as root."""


def ran(command: list[str]) -> None:
    """Run a process that must end by itself and say that all went well."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode >= 0, f"killed by signal {-done.returncode}: {done.stderr[-3000:]}"
    assert done.returncode == 0 and done.stdout.strip() == "well", done.stderr[-3000:]


@pytest.mark.parametrize("role", ["cache", "daemon"])
def test_s1_a_full_file_system_is_refused_and_resumes(tmp_path: Path, role: str) -> None:
    """4 MiB: no signal, what is acknowledged is durable, memory goes on, all that was stored is exact, room lets puts resume.

    An insert is into memory and is not refused for a disk: that it is full is said by what `flush` counts, and by the reason
    `StoreFull` that is counted.
    """
    said = []
    for prefix in OWN_MOUNTS:
        probe = [*prefix, "sh", "-c", MOUNT, str(tmp_path), "true"]
        try:
            tried = subprocess.run(probe, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            said.append(str(error))
            continue
        if tried.returncode == 0:
            child = [sys.executable, "-m", "tests.cases.full_disk", role, "0", str(tmp_path)]
            ran([*prefix, "sh", "-c", MOUNT, str(tmp_path), *child])
            return
        said.append(tried.stderr.strip())
    pytest.skip(f"a file system of 4 MiB can be mounted neither in a user namespace nor as root here: {'; '.join(said)}")


@pytest.mark.parametrize("role", ["cache", pytest.param("daemon", marks=pytest.mark.slow)])
def test_s1_a_file_that_can_not_grow_is_refused_and_resumes(tmp_path: Path, role: str) -> None:
    """The same with a limit on the size of files, which needs no mount: the kernel refuses to write in the same places."""
    ran([sys.executable, "-m", "tests.cases.full_disk", role, str(3 << 20), str(tmp_path)])
