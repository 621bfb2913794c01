"""Compiles `blocks.cu` for real architectures with NVRTC, without a device, and says what each kernel costs.

`python -m tiercache.kernels.compile` prints the table. NVRTC is the library of that name that PyPI has as `nvidia-cuda-nvrtc`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tiercache.errors import Refused
from tiercache.kernels.launch import OPTIONS, SOURCE

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


class Cost(NamedTuple):
    """What one kernel takes on one architecture: registers a thread, bytes of shared memory, bytes spilled by a thread."""

    architecture: str
    kernel: str
    registers: int
    shared: int
    spilled: int


def compile_report(architectures: Sequence[str] = ARCHITECTURES, source: str | None = None) -> list[Cost]:
    """Compile the kernels, or `source`, for each architecture and return what each costs.

    Raises Refused when there is no NVRTC, or when it refuses the source; the compiler's own words are in the message.
    """
    nvrtc = _library()
    code = SOURCE.read_text(encoding="utf-8") if source is None else source
    return [cost for architecture in architectures for cost in _costs(architecture, _compile(nvrtc, code, architecture))]


def _library() -> ctypes.CDLL:
    found = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (found.submodule_search_locations or [])] if found is not None else []
    files = sorted(file for folder in folders for file in folder.glob("**/libnvrtc.so.*") if ".alt." not in file.name)
    if not files:
        raise Refused("NVRTC is not installed: it comes with nvidia-cuda-nvrtc")
    # Its builtins lie beside it, and it opens them by name.
    for builtins in files[-1].parent.glob("libnvrtc-builtins.so.*"):
        if ".alt." not in builtins.name:
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(files[-1]))


def _compile(nvrtc: ctypes.CDLL, source: str, architecture: str) -> str:
    program = ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), SOURCE.name.encode(), 0, None, None):
        raise Refused("NVRTC takes no program")
    try:
        options = [f"--gpu-architecture={architecture}", "--ptxas-options=-v", *OPTIONS]
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
        size = ctypes.c_size_t()
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    said = log.value.decode(errors="replace")
    if failed:
        raise Refused(f"{SOURCE.name} does not compile for {architecture}: {said.strip()}", architecture=architecture)
    return said


def _costs(architecture: str, log: str) -> Iterator[Cost]:
    kernel, spilled = "", 0
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            kernel, spilled = entry[1], 0
        elif spills := _SPILLS.search(line):
            spilled = int(spills[1]) + int(spills[2])
        elif used := _REGISTERS.search(line):
            shared = _SHARED.search(line)
            yield Cost(architecture, kernel, int(used[1]), int(shared[1]) if shared else 0, spilled)


def table(costs: Sequence[Cost]) -> str:
    """Return the costs as a table of text."""
    lines = [f"{'':8}{'kernel':14}{'registers':>10}{'shared':>8}{'spilled':>9}"]
    lines += [f"{one.architecture:8}{one.kernel:14}{one.registers:10}{one.shared:8}{one.spilled:9}" for one in costs]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table(compile_report()))
