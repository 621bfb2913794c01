"""Folders whose paths leave room for a socket's name."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """A new folder with a short path."""
    with tempfile.TemporaryDirectory(prefix="tc") as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon on the loop of its test is late when the test, or the machine, is busy: that alone ails it from a minute on."""
    monkeypatch.setattr("tiercache.service.lateness.LAG_SECONDS", 60.0)
