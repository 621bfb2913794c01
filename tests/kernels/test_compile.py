"""Every kernel compiles for every architecture that is supported, and spills nothing."""

from __future__ import annotations

import pytest

from tiercache.errors import Refused
from tiercache.kernels.compile import ARCHITECTURES, compile_report, table
from tiercache.kernels.launch import NAMES, SOURCE


def test_every_kernel_compiles_everywhere_and_spills_nothing() -> None:
    """All kernels on all architectures; registers few enough for full blocks of threads; the table is printed."""
    costs = compile_report()
    print(table(costs))

    assert {(one.architecture, one.kernel) for one in costs} == {(where, name) for where in ARCHITECTURES for name in NAMES}
    assert all(one.spilled == 0 and one.shared == 0 and 0 < one.registers <= 64 for one in costs)


def test_a_fault_in_the_source_is_named() -> None:
    """What the compiler says is in the error."""
    source = SOURCE.read_text(encoding="utf-8").replace("const unsigned int block = row / planes;", "")

    with pytest.raises(Refused, match=r"does not compile for sm_90: (.|\n)*block"):
        compile_report(["sm_90"], source)


def test_spills_are_seen() -> None:
    """A kernel that needs more registers than it may have is reported with what it spills."""
    source = (
        SOURCE.read_text(encoding="utf-8")
        + """
KERNEL void __launch_bounds__(1024, 2) greedy(float* at) {
    float held[64];
    for (int i = 0; i < 64; ++i) held[i] = at[i * 1024 + threadIdx.x];
    __syncthreads();
    for (int turn = 0; turn < 9; ++turn)
        for (int i = 0; i < 64; ++i) held[i] = held[i] * held[(i + 7) % 64] + at[i];
    for (int i = 0; i < 64; ++i) at[i * 1024 + threadIdx.x] = held[i];
}
"""
    )

    assert next(one.spilled for one in compile_report(["sm_90"], source) if one.kernel == "greedy") > 0
