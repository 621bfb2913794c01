"""The page of results: every figure of the last full runs, goals first. Made from the results' files and from nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tiercache.bench.figures import Figure, Result
from tiercache.bench.goals import GOALS, Row
from tiercache.bench.show import conditions, kinds, quantity, spread

_HEAD = """\
# Benchmarks

Made by `make bench` from the files in `bench/results/`; nothing here is written by hand. What the figures mean for a choice, where
the time goes and why a goal is missed: [performance](../explanation/performance.md).

A ratio is a median over that of its reference, which was taken just before and just after it, or in turns with it, in the same
run. Brackets hold quartiles. A reference's drift is its median after over its median before.
"""


def page(results: Mapping[str, Result], plots: Mapping[str, Sequence[str]], *, pictures: str) -> str:
    """Return the page in Markdown. `plots` are the stems of each program's pictures, which lie at `pictures`."""
    parts = [_HEAD, _machines(results.values()), _goals([figure for result in results.values() for figure in result.figures])]
    parts += [_program(result, plots.get(name, ()), pictures) for name, result in results.items()]
    return "\n".join(parts)


def _machines(results: Iterable[Result]) -> str:
    lines = ["## Runs", "", "| program | command | date | commit | took | machine |", "| --- | --- | --- | --- | --- | --- |"]
    for result in results:
        machine = ", ".join(f"{name} {value}" for name, value in result.machine.items())
        quick = " (quick)" if result.quick else ""
        cells = (
            f"{result.program}{quick}",
            f"`{result.command}`",
            result.date,
            result.commit,
            quantity(result.seconds, "s"),
            machine,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join((*lines, ""))


def _goals(figures: Sequence[Figure]) -> str:
    lines = ["## Goals", "", "| what | beside | goal | found | |", "| --- | --- | --- | --- | --- |"]
    lines += [_goal(row, [figure for figure in figures if figure.goal and figure.goal.key == row.key]) for row in GOALS]
    return "\n".join((*lines, ""))


def _goal(row: Row, figures: Sequence[Figure]) -> str:
    judged = [figure for figure in figures if figure.reached is not None]
    if not judged:
        return f"| {row.what} | {row.reference} | {row.goal} | not measured | |"
    found = [_found(figure) for figure in judged]
    several = len({figure.name for figure in judged}) > 1
    named = [f"{figure.name}: {conditions(figure)}" if several else conditions(figure) for figure in judged]
    where = [f"{text} ({name})" for text, name in zip(found, named, strict=True)]
    shown = found[0] if len(set(found)) == 1 else "; ".join(where)
    reached = sum(figure.reached is True for figure in judged)
    word = "reached" if reached == len(judged) else "missed" if not reached else f"reached by {reached} of {len(judged)}"
    return f"| {row.what} | {row.reference} | {row.goal} | {shown} | {word} |"


def _found(figure: Figure) -> str:
    assert figure.goal is not None
    if figure.goal.of == "value":
        return quantity(figure.value.median, figure.unit)
    assert figure.ratio is not None
    return f"{figure.ratio:.3g}"


def _program(result: Result, plots: Sequence[str], pictures: str) -> str:
    lines = [f"## {result.program.capitalize()}", ""]
    lines += [f"![{stem}]({pictures}/{stem}.svg)\n" for stem in plots]
    lines += [f"* {note}" for note in result.notes] + [""] * bool(result.notes)
    for (name, keys), group in kinds(result.figures).items():
        lines += [f"### {result.program}: {name}", "", *_table(group, keys), ""]
    return "\n".join(lines)


def _table(figures: Sequence[Figure], keys: Sequence[str]) -> list[str]:
    heads = [*keys, "median [quartiles]", "p99", "reference", "drift", "ratio"]
    rows = [f"| {' | '.join(heads)} |", "| " + " | ".join(["---"] * len(heads)) + " |"]
    for figure in figures:
        cells = [str(value) if not isinstance(value, int) else f"{value:,}" for value in figure.at.values()]
        p99 = quantity(figure.value.p99, figure.unit) if figure.value.count >= 100 else ""
        reference = f"{quantity(figure.reference.value.median, figure.unit)} {figure.reference.name}" if figure.reference else ""
        drift = f"{figure.reference.drift:.2f}" if figure.reference else ""
        ratio = f"{figure.ratio:.3g}" if figure.ratio is not None else ""
        rows.append(f"| {' | '.join((*cells, spread(figure.value, figure.unit), p99, reference, drift, ratio))} |")
    return rows
