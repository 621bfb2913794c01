"""The page and the plots are made of results alone, and the same results make the same bytes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tiercache.bench.__main__ import main, write_page
from tiercache.bench.draw import draw
from tiercache.bench.figures import Figure, Goal, Reference, Result, Spread, Unit
from tiercache.bench.page import page
from tiercache.bench.plot import Plot
from tiercache.bench.show import quantity

ROOT = Path(__file__).resolve().parents[2]
RATE = Reference("memcpy", Spread.of([10e9]), 1.02)
COPY_OUT = Goal(key="copy-out", at_least=0.8)


def get(block_bytes: int, rate: float) -> Figure:
    return Figure(name="get", at={"block bytes": block_bytes}, unit="B/s", value=Spread.of([rate]), reference=RATE, goal=COPY_OUT)


RESULT = Result(
    program="tiers",
    quick=False,
    command="tiercache bench tiers",
    date="2026-01-02T03:04:05+00:00",
    seconds=61.0,
    commit="abc",
    machine={"processor": "a processor", "cpus": 2},
    figures=[get(65536, 9e9), get(1 << 20, 5e9)],
    notes=["No raw disk."],
)


def test_the_page_judges_goals_by_all_their_figures() -> None:
    """A goal is said to be reached by so many of its figures, with every ratio, or not to be measured."""
    text = page({"tiers": RESULT}, {"tiers": ["tiers-get"]}, pictures="../results")

    assert "| 0.9 (block bytes 64.0 KiB); 0.5 (block bytes 1.0 MiB) | reached by 1 of 2 |" in text
    assert "| evict one block at 100,000 leaves | the same at 1,000 leaves | ≤ 2 times | not measured | |" in text
    assert "![tiers-get](../results/tiers-get.svg)" in text
    assert "* No raw disk." in text
    assert "| 65,536 | 9 GB/s |  | 10 GB/s memcpy | 1.02 | 0.9 |" in text


def test_plots_are_the_same_bytes_for_the_same_result(tmp_path: Path) -> None:
    """Files differ only where results do, so that a repository does not grow by drawing again."""
    plot = Plot("get", "Get", ("get",), x="block bytes", of="ratio", limit=0.8)

    first = draw(RESULT, [plot], tmp_path / "a")
    second = draw(RESULT, [plot], tmp_path / "b")

    assert [path.name for path in first] == ["get.svg"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
        assert one.with_suffix(".png").read_bytes() == other.with_suffix(".png").read_bytes()


def test_long_labels_leave_room_for_the_lines(tmp_path: Path) -> None:
    """Side by side they would be wider than the picture, and what is drawn would have none (matplotlib warns of it)."""
    named = [f"retrieve from disk, cold, of somebody else {number}" for number in range(6)]
    figures = [
        Figure(name="get", at={"x": x, "by": name}, unit="B/s", value=Spread.of([x * 1e9])) for name in named for x in (1, 2)
    ]
    result = msgspec.structs.replace(RESULT, figures=figures)

    assert len(draw(result, [Plot("long", "Long", ("get",), x="x", series=("by",))], tmp_path)) == 1


def test_a_plot_without_figures_is_not_drawn(tmp_path: Path) -> None:
    """What was not measured leaves no empty picture."""
    assert draw(RESULT, [Plot("put", "Put", ("put",), x="block bytes")], tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0, "s", "0 s"),
        (1.5e-9, "s", "1.5 ns"),
        (6.54e-6, "s", "6.54 µs"),
        (0.0123, "s", "12.3 ms"),
        (61.0, "s", "61 s"),
        (9.99e8, "B/s", "999 MB/s"),
        (1.234e9, "B/s", "1.23 GB/s"),
        (34.5, "B", "34.5 B"),
        (1 << 20, "B", "1.0 MiB"),
        (12345.6, "1/s", "12,346/s"),
        (0.1234, "1", "0.123"),
    ],
)
def test_quantities_have_three_digits_and_a_unit(value: float, unit: Unit, text: str) -> None:
    """The unit is the largest that leaves a number of at least one."""
    assert quantity(value, unit) == text


def test_the_committed_page_is_made_of_the_committed_results(tmp_path: Path) -> None:
    """Nothing in the page was written or left behind by hand."""
    results = ROOT / "bench" / "results"
    committed = ROOT / "docs" / "reference" / "benchmarks.md"

    write_page(tmp_path / "benchmarks.md", results, pictures="../../bench/results")

    assert (tmp_path / "benchmarks.md").read_text(encoding="utf-8") == committed.read_text(encoding="utf-8")


def test_a_page_without_results_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A page needs the folder of the results, and says so before anything is measured."""
    with pytest.raises(SystemExit) as ended:
        main(["tree", "--quick", "--page", "page.md"])

    assert ended.value.code == 2
    assert "--out" in capsys.readouterr().err
