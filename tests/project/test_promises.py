"""What is promised names what proves it: codes are those of the code, tests are there, metrics are described."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.project.tree import ROOT
from tiercache.service.health import Code

FAILURES, GUARANTEES = ROOT / "docs/reference/failures.md", ROOT / "docs/explanation/guarantees.md"
PLANTED = ROOT / "docs/explanation/planted-faults.md"
CASES = [
    f"{kind}{number}" for kind, count in zip("wtmsrqap", (5, 5, 9, 5, 5, 5, 2, 2), strict=True) for number in range(1, count + 1)
]
_TEST = re.compile(r"`(tests/[\w/.-]+\.py)(?:::(\w+))?`")


def codes_in(page: Path) -> list[str]:
    """Return the first column of the tables whose first column is a code."""
    return re.findall(r"^\| `([a-z]+_?[a-z_]*)` \|", page.read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("page", [FAILURES, ROOT / "docs/how-to/operate.md"], ids=lambda page: page.name)
def test_the_codes_of_the_page_are_those_of_the_code(page: Path) -> None:
    """Each code has a row; in the reference exactly one, and no row is of a code that is not there."""
    found = (
        codes_in(page)
        if page == FAILURES
        else re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", page.read_text(), re.M)))
    )

    assert sorted(found) == sorted(Code)


def test_every_code_is_proven() -> None:
    """Each appears in the table of failures, in a row that names a test."""
    rows = [line for line in FAILURES.read_text().splitlines() if _TEST.search(line)]

    assert [code for code in Code if not any(f"`{code}`" in row for row in rows)] == []


@pytest.mark.parametrize("page", [FAILURES, GUARANTEES], ids=lambda page: page.name)
def test_tests_that_are_named_are_there(page: Path) -> None:
    """A promise whose test was moved or renamed is one that nobody keeps."""
    named = _TEST.findall(page.read_text())
    missing = [f"{path}::{name}" for path, name in named if not (ROOT / path).is_file() or (name and name not in names_in(path))]

    assert len(named) > 20 and missing == []


def test_every_promise_names_a_test() -> None:
    """A row of the guarantees without one is an intention."""
    rows = [
        line
        for line in GUARANTEES.read_text().splitlines()
        if line.startswith("| ") and not re.match(r"\| (promise|fault|---)", line)
    ]

    assert rows and [row for row in rows if not _TEST.search(row)] == []


def test_every_planted_fault_names_a_test() -> None:
    """A row of an edit that no test notices any more, because it was renamed, is of no use; nor one of a file that is gone."""
    known = {name for path in (ROOT / "tests").rglob("*.py") for name in names_in(str(path.relative_to(ROOT)))}
    rows = re.findall(r"^\| `([\w./-]+)` \| .* \| (`.+`) \|$", PLANTED.read_text(), flags=re.MULTILINE)
    wrong = [
        (file, test)
        for file, tests in rows
        for test in tests.strip("`").split("`, `")
        if not (ROOT / file).is_file() or not (test in known or (ROOT / test).is_file())
    ]

    assert len(rows) > 200 and wrong == []


@pytest.mark.parametrize("case", CASES)
def test_every_case_has_a_test_that_is_promised(case: str) -> None:
    """Each of the 38 faults is a test named by its number, and all of its tests are in the table."""
    named = {
        (f"tests/cases/{path.name}", name)
        for path in (ROOT / "tests/cases").glob("test_*.py")
        for name in names_in(f"tests/cases/{path.name}")
        if re.match(rf"test_{case}[a-z]?_", name)
    }

    assert named and named <= set(_TEST.findall(GUARANTEES.read_text()))


def names_in(path: str) -> set[str]:
    """Return the names of the test functions in a file."""
    tree = ast.parse((ROOT / path).read_text())
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[:5] == "test_"
    }
