"""matplotlib opens its fonts once and keeps them: it does so here, before a test is watched for what it leaves open."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiercache.bench.draw import draw
from tiercache.bench.figures import Figure, Result, Spread
from tiercache.bench.plot import Plot


@pytest.fixture(scope="session", autouse=True)
def fonts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draw once; return the folder."""
    figures = [Figure(name="any", at={"x": x}, unit="s", value=Spread.of([1e-3 * x])) for x in (1, 2)]
    result = Result(
        program="fonts",
        quick=True,
        command="",
        date="2026-01-01",
        seconds=1.0,
        commit="",
        machine={"processor": "·", "cpus": 1},
        figures=figures,
    )
    folder = tmp_path_factory.mktemp("fonts")
    draw(result, [Plot("any", "Any", ("any",), x="x")], folder)
    return folder
