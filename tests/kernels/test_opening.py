"""Names of devices: which there are, and what is said where there is none."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from tiercache.errors import InvalidConfig, MemoryRefused
from tiercache.kernels.opening import open_device, require_name


@pytest.mark.parametrize("name", ["cpu", "cuda:0", "cuda:17"])
def test_names_that_can_be(name: str) -> None:
    """`cpu`, and a card by its number."""
    assert require_name(name) == name


@pytest.mark.parametrize("name", ["", "cuda", "cuda:", "cuda:-1", "cuda:00", "cuda:0 ", "CUDA:0", "rocm:0", "cuda:1000", 0, None])
def test_other_names_are_refused(name: object) -> None:
    """With the value and what there is."""
    with pytest.raises(InvalidConfig) as refused:
        require_name(name)
    assert repr(name) in str(refused.value) and "'cuda:0'" in str(refused.value)


def test_host_memory_is_no_device() -> None:
    """`cpu` is not opened."""
    with pytest.raises(InvalidConfig):
        open_device("cpu")


def test_a_card_that_is_not_there() -> None:
    """Without CuPy it is said what to install, with it how many cards there are."""
    with pytest.raises((InvalidConfig, MemoryRefused)) as refused:
        open_device("cuda:999")
    installed = importlib.util.find_spec("cupy") is not None
    assert ("cards" if installed else "extra 'cuda'") in str(refused.value)


def test_nothing_is_imported_before_a_device_is_asked_for() -> None:
    """Neither CuPy nor torch."""
    code = "import sys, tiercache.kernels.opening; assert not {'cupy', 'torch'} & set(sys.modules), sorted(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
