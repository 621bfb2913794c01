"""What the text of the repository promises: no machine's paths, docstrings everywhere, files of one sitting."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project.tree import ROOT, files, sources

LINES = 500
"""More than this is not read in one sitting."""

# Paths of one machine, and hosts that packages or weights come from: a reader elsewhere has others.
FOREIGN = re.compile(
    r"(?<![\w.~$}])/(work|root|workspace)/|/tmp/[a-z]/|pypi\.org|pythonhosted|pytorch\.org|huggingface\.co|npmjs|anaconda\.org|debian\.org"
)


def text_files() -> Iterator[tuple[Path, str]]:
    for path in files():
        try:
            yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def test_no_text_names_a_machine_or_a_registry() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in text_files()
        if path != Path(__file__).resolve()
        for number, line in enumerate(text.splitlines(), start=1)
        if FOREIGN.search(line)
    ]

    assert found == []


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_public_name_has_a_docstring(path: Path) -> None:
    tree = ast.parse(path.read_text())

    assert path.name == "__init__.py" or ast.get_docstring(tree), "the module has no docstring"
    assert [f"{node.name} (line {node.lineno})" for node in public(tree) if not ast.get_docstring(node)] == []


def public(tree: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """Yield the public functions and classes of `tree` and of its public classes."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        marks = {ast.unparse(mark).split(".")[-1] for mark in node.decorator_list}
        if marks & {"overload", "setter", "override"}:
            continue
        yield node
        if isinstance(node, ast.ClassDef):
            yield from public(node)


def test_files_are_read_in_one_sitting() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for path, text in text_files()
        if path.suffix == ".py" and (count := text.count("\n")) > LINES
    }

    assert long == {}
