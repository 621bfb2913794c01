"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import tiercache
from tiercache.sizes import format_size

_LIBRARIES = ("numpy", "lmdb", "uvloop", "torch")


def machine(folder: Path) -> dict[str, str | int | float]:
    """Return the processor, memory, system and libraries, and the file system that `folder` lies on."""
    found: dict[str, str | int | float] = {
        "processor": _processor(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory": format_size(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        "system": f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}",
        "python": platform.python_version(),
        "file system": file_system(folder),
        "load before": round(os.getloadavg()[0], 2),
    }
    for library in _LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the commit that is measured, with `+` if files differ from it, or the version where there is no repository."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return tiercache.__version__
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results", ":!docs")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return tiercache.__version__


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def file_system(folder: Path) -> str:
    """Return the type of the mount that holds `folder`: the longest mount point that is a beginning of its path."""
    path, kind, longest = folder.resolve(), "unknown", -1
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, point, found, *_ = line.split()
        if path.is_relative_to(point.encode().decode("unicode_escape")) and len(point) >= longest:
            kind, longest = found, len(point)
    return kind
