"""What tests of the services share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tiercache.storage import device_bus


@pytest.fixture
def kept() -> Iterator[None]:
    """End a test whose device had not ended: what is kept for that until the process ends is given back."""
    yield
    device_bus._KEPT.clear()
    gc.collect()
