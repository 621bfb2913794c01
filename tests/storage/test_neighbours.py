"""Neighbouring slots are brought together, whatever the order they come in."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tiercache.storage.neighbours import Run, neighbours

places = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 24)), unique=True, max_size=40)


@given(places=places, together=st.none() | st.integers(1, 7))
def test_runs_are_the_slots_in_order_and_as_few_as_can_be(places: list[tuple[int, int]], together: int | None) -> None:
    """The order is of all places, the runs name its slots one after the other, and no two of them could be one."""
    order, runs = neighbours([position for position, _ in places], [slot for _, slot in places], together=together)

    assert sorted(order) == list(range(len(places)))
    assert [places[place] for place in order] == [(run.position, run.first + step) for run in runs for step in range(run.length)]
    if together is not None:
        assert all(run.first // together == (run.first + run.length - 1) // together for run in runs)
    for run, after in pairwise(runs):
        touching = run.position == after.position and run.first + run.length == after.first
        assert not touching or (together is not None and after.first % together == 0)


def test_a_prompts_slots_are_neighbours_as_a_set() -> None:
    """Slots that a pool gives backwards, or in two heaps, are one run each."""
    assert neighbours([1] * 5, [9, 8, 3, 7, 2]) == ([4, 2, 3, 1, 0], [Run(1, 2, 2), Run(1, 7, 3)])
