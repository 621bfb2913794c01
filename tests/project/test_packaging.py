"""What is built is what lies on the disk: five folders, one import package."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.project.tree import FOLDERS, ROOT, copy_to, pyproject


def folder_of(package: str) -> Path:
    """Return the real folder of `package`, not the link to it."""
    _, *rest = package.split(".")
    return ROOT.joinpath(*rest) if rest else ROOT / "tiercache"


def packages_on_disk() -> set[str]:
    roots = {"tiercache": ROOT / "tiercache"} | {f"tiercache.{name}": ROOT / name for name in FOLDERS}
    found = set()
    for name, root in roots.items():
        for folder in (root, *(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())):
            inside = folder.relative_to(root).parts
            if not {"__pycache__", *FOLDERS} & set(inside) and any(folder.glob("*.py")):
                found.add(".".join((name, *inside)))
    return found


def test_packages_are_the_folders_on_disk() -> None:
    """A folder that is not listed would be missing from the wheel, without a word."""
    assert set(pyproject()["tool"]["setuptools"]["packages"]) == packages_on_disk()


def test_package_dir_names_the_real_folders() -> None:
    tool = pyproject()["tool"]["setuptools"]

    assert {name: ROOT / folder for name, folder in tool["package-dir"].items()} == {
        name: folder_of(name) for name in tool["packages"]
    }


@pytest.mark.parametrize("package", pyproject()["tool"]["setuptools"]["packages"])
def test_every_package_has_an_init(package: str) -> None:
    assert (folder_of(package) / "__init__.py").is_file()


@pytest.mark.parametrize("name", FOLDERS)
def test_each_folder_is_linked(name: str) -> None:
    """The links serve what reads the tree without building it: type checkers, import-linter, coverage."""
    link = ROOT / "tiercache" / name
    if not link.exists():
        pytest.skip("unpacked from an archive that holds no links")

    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"


def test_no_folder_is_importable_by_its_own_name(tmp_path: Path) -> None:
    """`kernels` is another published package, and ours must not be found in its place."""
    code = f"import importlib.util as u, tiercache; print([n for n in {FOLDERS} if u.find_spec(n)])"

    found = run(sys.executable, "-c", code, cwd=tmp_path)

    assert found.strip() == "[]"


def test_a_wheel_holds_the_packages_and_nothing_else(tmp_path: Path) -> None:
    """Every file of every package is in the wheel, the types marker, kernels' sources and the web page too."""
    pytest.importorskip("setuptools")
    tree = copy_to(tmp_path / "tree")
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"

    run(sys.executable, "-c", build, cwd=tree)

    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == {
        f"{package.replace('.', '/')}/{path.name}"
        for package in pyproject()["tool"]["setuptools"]["packages"]
        for path in folder_of(package).iterdir()
        if path.is_file()
    }


def run(*command: str, cwd: Path) -> str:
    """Run `command` without the checkout on its path, and return what it printed; a failure shows what it said."""
    done = subprocess.run(command, cwd=cwd, env=os.environ | {"PYTHONSAFEPATH": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
