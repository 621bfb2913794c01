"""The repository as these tests see it: its root, its packages, its text files."""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("bench", "kernels", "service", "storage")
"""The root's folders that are packages of `tiercache`, each with a link in it."""

_SKIPPED = {".git", ".hypothesis", ".venv", ".venv-sglang", "build", "dist", "shared", "htmlcov"}


def pyproject() -> dict[str, Any]:
    """Return pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def files(root: Path = ROOT) -> Iterator[Path]:
    """Yield the files of the repository; links are not followed, what was built or installed is left out."""
    for path in sorted(root.iterdir()):
        built = path.name in _SKIPPED or path.name.endswith(("_cache", ".egg-info")) or path.name == "__pycache__"
        if path.is_symlink() or (root == ROOT and built) or path.name == "__pycache__":
            continue
        if path.is_dir():
            yield from files(path)
        else:
            yield path


def sources() -> list[Path]:
    """Return the Python files of the packages."""
    return [path for path in files() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in ("tiercache", *FOLDERS)]


def copy_to(target: Path) -> Path:
    """Copy the repository with its links, and return the copy."""

    def skip(folder: str, names: list[str]) -> set[str]:
        here = Path(folder) == ROOT
        return {name for name in names if name.endswith(("__pycache__", "_cache", ".egg-info")) or (here and name in _SKIPPED)}

    return Path(shutil.copytree(ROOT, target, symlinks=True, ignore=skip))
