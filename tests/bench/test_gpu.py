"""`bench gpu` without a card: all of it runs on the lazy device, says so, and reports no figure; with nothing but what it needs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.kernels.host_kernels import compiled, compiler, host_mapped
from tests.project.tree import ROOT
from tiercache.bench.__main__ import main
from tiercache.bench.figures import Figure, Goal, Reference, Spread
from tiercache.bench.gpu import PARTS
from tiercache.bench.gpu_bench import Check
from tiercache.bench.gpu_kernels import _shapes
from tiercache.bench.gpu_parts import GpuResult, show
from tiercache.bench.gpu_rates import SIZES
from tiercache.bench.gpu_rig import MAPPED
from tiercache.kernels.compile import ARCHITECTURES, compile_report

SPARE = "aiohttp lmdb matplotlib prometheus_client torch transformers typer uvloop zstandard"
"""What a machine with a card need not have."""


def ran(*arguments: str, cwd: Path, spare: str = SPARE) -> subprocess.CompletedProcess[str]:
    """Run the script from a plain checkout, without the packages that it can do without, in it and in what it starts."""
    block = cwd / "site" / "sitecustomize.py"
    block.parent.mkdir()
    block.write_text(
        "import sys\nclass Absent:\n    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {spare.split()!r}:\n            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    command = [sys.executable, str(ROOT / "bench" / "gpu.py"), *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment | {"PYTHONPATH": str(block.parent)}, capture_output=True, text=True, check=False
    )


def test_a_dry_run_does_all_of_it_from_a_plain_checkout(tmp_path: Path) -> None:
    """Every part comes to its end, every check holds, no figure is given, and nothing but the document is left."""
    done = ran("--dry-run", "--json", "out.json", cwd=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    checks = {check["what"]: check for check in found["checks"]}
    assert all(checks[f"part {name} came to its end"]["passed"] for name in PARTS)
    assert [check for check in found["checks"] if not check["passed"]] == []
    assert found["figures"] == [] and found["dry_run"] and "dry run: no figure" in found["notes"]
    assert "gather (block bytes 262144)" in checks and checks["gather (block bytes 262144)"]["detail"] == "dry run: no figure"
    assert done.stdout.splitlines()[-1] == f"{len(checks)} of {len(checks)} checks held"
    assert "dry run: no figure" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"site", "out.json"}


def test_one_part_of_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line's way to it, one part alone, a seed that is repeated."""
    status = main(["gpu", "--dry-run", "--parts", "order", "--seed", "7", "--json", str(tmp_path / "out.json")])

    found = json.loads((tmp_path / "out.json").read_text())
    assert status == 0
    assert found["seed"] == 7 and found["program"] == "gpu"
    assert any("order" in check["what"] for check in found["checks"])
    assert "dry run: no figure" in capsys.readouterr().out


def test_without_a_card_it_says_so(tmp_path: Path) -> None:
    """Exit status 2, nothing measured, and what is missing."""
    if importlib.util.find_spec("cupy") is not None:
        pytest.skip("CuPy is installed, and there may be a card")
    done = ran("--parts", "order", cwd=tmp_path)

    assert done.returncode == 2
    assert done.stdout == ""
    assert "cupy" in done.stderr


def test_a_check_that_fails_is_the_exit_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that can't run is a check that failed, with what it said; the others are kept."""
    monkeypatch.setattr("tiercache.bench.gpu_parts.LIMIT", 0.01)

    status = main(["gpu", "--dry-run", "--parts", "order", "--json", str(tmp_path / "out.json")])

    found = json.loads((tmp_path / "out.json").read_text())
    assert status == 1
    assert [check["what"] for check in found["checks"] if not check["passed"]] == ["part order came to its end"]


def test_the_table_is_short_and_marks_what_missed(capsys: pytest.CaptureFixture[str]) -> None:
    """A row a way with its shares by size of a block, a line for each other figure, the counts last; no line over 120."""
    figures = [
        Figure(
            name=name,
            at={"block bytes": size},
            unit="B/s",
            value=Spread.of([rate]),
            reference=Reference("pinned copy to the host", Spread.of([50e9])),
            goal=Goal(key="gpu-down", at_least=0.9) if size > 1 << 17 else None,
        )
        for name in ("gather and copy down", "gather and copy down, no neighbours")
        for size, rate in zip(SIZES, range(int(15e9), int(50e9), int(5e9)), strict=True)
    ]
    whole = Figure(name="promotion, whole", at={"tokens": 8192}, unit="s", value=Spread.of([0.05]))
    shown = GpuResult(
        program="gpu",
        quick=False,
        command="",
        date="2026-01-01",
        seconds=1.0,
        commit="",
        machine={},
        notes=["a note"],
        figures=[*figures, whole],
        dry_run=False,
        seed=7,
        card={"card": "a card"},
        checks=[Check("one", True), Check("other", False, "why")],
    )

    show(Console(width=120), shown)

    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 120
    assert re.search(r"gather and copy down +0\.30 +0\.40 +0\.50 ! +0\.60 ! +0\.70 ! +0\.80 ! +0\.90 *\n", out)
    assert "promotion, whole (tokens 8,192): 50 ms\n" in out
    assert out.splitlines()[-4:] == [
        "FAILED: other: why",
        "a card, 2026-01-01, 1 s, seed 7",
        "1 of 2 checks held",
        "2 of 10 goals reached",
    ]


def test_the_mapped_kernels_compile_everywhere_and_spill_nothing() -> None:
    """As those of the product."""
    costs = compile_report(source=MAPPED.read_text(encoding="utf-8"))

    assert {(one.architecture, one.kernel) for one in costs} == {
        (where, name) for where in ARCHITECTURES for name in ("mapped_down", "mapped_up")
    }
    assert all(one.spilled == 0 and one.registers <= 64 for one in costs)


def test_the_mapped_kernels_agree_with_the_reference(tmp_path: Path, seed: int) -> None:
    """The source itself, run on the host: slots of the host get the blocks, or give them, and nothing beside them changes."""
    if compiler() is None:
        pytest.skip("there is no C++ compiler to run the kernels on the host with")
    kernels = compiled(tmp_path, MAPPED)

    for number, shape in enumerate(_shapes(seed, 40, whole=True)):
        host_mapped(kernels, shape.planes, shape.slots, min(shape.unit, 4096), shape.chosen, seed=seed + number)
