"""Figures say what was measured: spreads from samples, ratios from references, goals from either."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiercache.bench.figures import Figure, Goal, Reference, Result, Spread
from tiercache.bench.run import Run
from tiercache.bench.store import read, read_all, write
from tiercache.bench.timing import each, in_turns


def figure(value: float, *, beside: float | None = None, goal: Goal | None = None) -> Figure:
    reference = None if beside is None else Reference("memcpy", Spread.of([beside]))
    return Figure(name="copy", at={"bytes": 4096}, unit="B/s", value=Spread.of([value]), reference=reference, goal=goal)


def test_a_spread_is_made_of_samples() -> None:
    """Median, quartiles and the 99th percentile are those of the samples, in whatever order they come."""
    samples = [float(sample) for sample in (5, 1, 4, 2, 3, 8, 7, 6)]

    assert Spread.of(samples) == Spread(median=4.5, low=3.0, high=7.0, p99=8.0, count=8)
    assert Spread.of([2.0]) == Spread(median=2.0, low=2.0, high=2.0, p99=2.0, count=1)


@pytest.mark.parametrize(
    ("found", "goal", "reached"),
    [
        (figure(8.0, beside=10.0, goal=Goal(key="copy-out", at_least=0.8)), Goal(key="copy-out", at_least=0.8), True),
        (figure(7.9, beside=10.0, goal=Goal(key="copy-out", at_least=0.8)), None, False),
        (figure(2.0, goal=Goal(key="evict", of="value", at_most=2.0)), None, True),
        (figure(2.1, goal=Goal(key="evict", of="value", at_most=2.0)), None, False),
        (figure(2.1, goal=Goal(key="copy-out", at_least=0.8)), None, None),
        (figure(2.1), None, None),
    ],
)
def test_a_goal_is_reached_or_not_or_not_judged(found: Figure, goal: Goal | None, reached: bool | None) -> None:
    """Limits include their ends; without a reference a goal of the ratio is not judged."""
    assert found.reached is reached
    assert goal is None or found.goal == goal


def test_a_reference_holds_both_sides_and_their_drift(tmp_path: Path) -> None:
    """What is taken before and after is one sample, and how far they are apart is kept."""
    taken = iter([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]])
    run = Run(folder=tmp_path, quick=True)

    with run.beside("memcpy", lambda: next(taken)) as beside:
        pass

    assert beside.reference == Reference("memcpy", Spread.of([1.0, 1.0, 1.0, 2.0, 2.0, 2.0]), 2.0)


def test_a_goal_that_no_row_has_is_refused(tmp_path: Path) -> None:
    """A key that the page would never show is an error of the program that names it."""
    run = Run(folder=tmp_path, quick=True)

    with pytest.raises(AssertionError, match="no goal has the key 'fast'"):
        run.add("copy", [1.0], "s", goal=Goal(key="fast", at_most=1.0))


def test_turns_are_taken_in_turns() -> None:
    """Every round calls each once, in the order given."""
    called: list[str] = []

    times = in_turns({"a": lambda: called.append("a"), "b": lambda: called.append("b")}, rounds=3)

    assert called == ["a", "b"] * 3
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 3, "b": 3}
    assert len(each(called.append, ["c", "d"])) == 2
    assert called[-2:] == ["c", "d"]


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    """A result comes back from its file with every value it had."""
    result = Result(
        program="copy",
        quick=False,
        command="tiercache bench copy",
        date="2026-01-02T03:04:05+00:00",
        seconds=1.5,
        commit="abc",
        machine={"cpus": 2},
        figures=[figure(8.0, beside=10.0, goal=Goal(key="copy-out", at_least=0.8)), figure(1.0)],
        notes=["nothing"],
    )

    path = write(result, tmp_path / "new")

    assert read(path) == result
    assert read_all(tmp_path / "new") == {"copy": result}
