"""The documentation names what is there, and its links lead somewhere."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.project.tree import ROOT
from tiercache import errors
from tiercache.config import Config

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def test_the_reference_lists_every_setting() -> None:
    page = (ROOT / "docs/reference/configuration.md").read_text()

    assert [field.name for field in msgspec.structs.fields(Config) if f"`{field.name}`" not in page] == []


def test_the_reference_lists_every_error() -> None:
    page = (ROOT / "docs/reference/errors.md").read_text()
    names = [name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__]

    assert [name for name in names if f"`{name}`" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]

    assert [target for target in targets if target and not (page.parent / target).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "tier"), [(1, "HBM"), (2, "DRAM")])
def test_the_tutorial_prints_what_it_says(steps: int, tier: str, tmp_path: Path) -> None:
    """The first program as it stands, then with the second piece put before the match."""
    page = (ROOT / "docs/tutorial/first-hit.md").read_text()
    program, *pieces = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    before, match, after = program.partition("        longer =")
    script = tmp_path / "first_hit.py"
    script.write_text(before + "".join(pieces[: steps - 1]) + match + after)

    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert f"<Tier.{tier}: " in done.stdout
    assert "".join(f"    {line}\n" for line in done.stdout.splitlines()) in page
