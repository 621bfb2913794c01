"""What libraries open once in a process and keep, fonts and a pipe for signals, is opened before tests are watched for leaks."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from tiercache.bench.draw import draw
from tiercache.bench.figures import Figure, Result, Spread
from tiercache.bench.plot import Plot
from tiercache.bench.served import looped


@pytest.fixture(scope="session", autouse=True)
def fonts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Draw once, and run uvloop once; return the folder."""
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
    looped(partial(asyncio.sleep, 0))
    draw(result, [Plot("any", "Any", ("any",), x="x")], folder)
    return folder
