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

_SKIPPED = {".git", ".hypothesis", "build", "dist", "shared", "htmlcov"}


def _is_made(name: str) -> bool:
    """Return whether a name in the repository's root is of what was built or installed, such as the environments of peers."""
    return name in _SKIPPED or name.startswith(".venv") or name.endswith(("__pycache__", "_cache", ".egg-info"))


def pyproject() -> dict[str, Any]:
    """Return pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def files(root: Path = ROOT) -> Iterator[Path]:
    """Yield the files of the repository; links are not followed, what was built or installed is left out."""
    for path in sorted(root.iterdir()):
        if path.is_symlink() or (root == ROOT and _is_made(path.name)) or path.name == "__pycache__":
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
        return {name for name in names if name == "__pycache__" or (Path(folder) == ROOT and _is_made(name))}

    return Path(shutil.copytree(ROOT, target, symlinks=True, ignore=skip))
