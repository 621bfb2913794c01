"""The benchmarks run, measure what they name, and leave nothing behind. What they measure is not judged here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiercache.bench.__main__ import main
from tiercache.bench.calibrate import disk_rates, memcpy_rate
from tiercache.bench.programs import NAMES, load
from tiercache.bench.store import read


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_program_measures_draws_and_leaves_nothing(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A quick run gives figures that are more than nothing, draws every plot that it announces, and empties its folder."""
    out, disk = tmp_path / "out", tmp_path / "disk"
    disk.mkdir()

    status = main([name, "--quick", "--out", str(out), "--directory", str(disk)])

    result = read(out / f"{name}.json")
    assert status == 0
    assert result.quick
    assert result.figures
    assert all(figure.value.median > 0 for figure in result.figures)
    stems = {plot.stem for plot in load(name).plots}
    assert {path.name for path in out.iterdir()} == {
        f"{name}.json",
        *(f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")),
    }
    assert list(disk.iterdir()) == []
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 120


def test_references_are_rates(tmp_path: Path) -> None:
    assert memcpy_rate(1 << 20, 1 << 16, rounds=1) > 0
    disk = disk_rates(tmp_path, 1 << 20, 1 << 16)
    assert disk is None or (disk.read > 0 and disk.write > 0)
    assert list(tmp_path.iterdir()) == []
