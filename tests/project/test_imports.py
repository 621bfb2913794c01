"""Imports run one way, and none is heavier than what was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.tree import ROOT, copy_to

LINT = "from importlinter.cli import lint_imports_command; lint_imports_command()"


def python(code: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("statement", "unwanted"),
    [
        ("import tiercache", "torch transformers lmdb aiohttp cupy"),
        ("import tiercache; [getattr(tiercache, name) for name in tiercache.__all__]", "torch transformers cupy"),
    ],
    ids=["the package", "every public name"],
)
def test_importing_loads_no_more_than_is_needed(statement: str, unwanted: str, tmp_path: Path) -> None:
    """A tensor library takes seconds to import; the client needs none before a tensor is asked for."""
    done = python(f"import sys\n{statement}\nprint([name for name in {unwanted.split()} if name in sys.modules])", cwd=tmp_path)

    assert done.stdout.strip() == "[]", done.stderr


def test_the_import_contract_holds() -> None:
    done = python(LINT, "--no-cache", cwd=ROOT)

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("storage/planted.py", "import tiercache.service"),
        ("kernels/planted.py", "import tiercache.storage"),
        ("tiercache/types.py", "import tiercache.kernels"),
        ("tiercache/__init__.py", "import tiercache.service.cli"),
        ("service/planted.py", "from tiercache import Tier"),
        ("service/planted.py", "import lmdb"),
        ("storage/planted.py", "import cupy"),
        ("bench/planted.py", "import aiohttp"),
        ("storage/planted.py", "import torch"),
        ("tiercache/planted.py", ""),
    ],
)
def test_the_import_contract_sees_a_violation(file: str, line: str, tmp_path: Path) -> None:
    """The contract reads the linked folders too, and a core module that nobody listed breaks it."""
    tree = copy_to(tmp_path / "tree")
    with (tree / file).open("a") as source:
        source.write(f"\n{line}\n")

    done = python(LINT, "--no-cache", cwd=tree)

    assert done.returncode == 1, done.stdout + done.stderr
    assert "BROKEN" in done.stdout
