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
