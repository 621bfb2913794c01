"""The benchmarks run, measure what they name, and leave nothing behind. What they measure is not judged here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiercache.bench import tiers, tree
from tiercache.bench.__main__ import main
from tiercache.bench.calibrate import disk_rates, memcpy_rate
from tiercache.spec import KVSpec


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small block size."""
    monkeypatch.setattr(tiers, "SPECS", (KVSpec(layers=8, kv_heads=2, head_dim=64, dtype="float16"),))


@pytest.mark.usefixtures("small")
def test_tiers_measures_every_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, disk = tmp_path / "out.json", tmp_path / "disk"
    disk.mkdir()

    status = main(["tiers", "--quick", "--json", str(out), "--directory", str(disk)])

    found = json.loads(out.read_text())
    assert status == 0
    assert [figure["operation"] for figure in found["tiers"]] == [
        *("put HBM", "get HBM", "put DRAM", "get DRAM", "demote HBM→DRAM", "promote DRAM→HBM"),
        *("demote DRAM→SSD", "promote SSD→DRAM, cold"),
    ]
    assert all(figure["bytes_per_second"] > 0 for figure in found["tiers"])
    assert {capacity["tier"] for capacity in found["capacity"]} == {"HBM", "DRAM"}
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100
    assert list(disk.iterdir()) == []


def test_tree_measures_growing_trees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"

    status = main(["tree", "--quick", "--json", str(out)])

    rows = json.loads(out.read_text())["tree"]
    assert status == 0
    assert [(row["leaves"], row["edge_blocks"]) for row in rows] == [(100, 1), (1000, 1), (100, 8), (1000, 8)]
    assert all(row["tokens"] == (16 + row["leaves"] * row["edge_blocks"]) * 16 for row in rows)
    assert "index bytes a token" in capsys.readouterr().out


def test_longer_edges_cost_less_index_a_token() -> None:
    short, _, long, _ = tree.measure(quick=True)

    assert 0 < long.bytes_per_token < short.bytes_per_token


def test_references_are_rates(tmp_path: Path) -> None:
    assert memcpy_rate(1 << 20, 1 << 16, rounds=1) > 0
    disk = disk_rates(tmp_path, 1 << 20, 1 << 16)
    assert disk is None or (disk.read > 0 and disk.write > 0)
    assert list(tmp_path.iterdir()) == []
