"""Moves to a disk are as large as it writes in the time that is given, within bounds."""

from __future__ import annotations

from tiercache.pace import Pace


def test_a_fast_disk_is_given_the_most() -> None:
    pace = Pace(80, least=10, seconds=1.0)
    pace.took(80, 0.3)

    assert pace.blocks == 80


def test_a_slow_disk_is_given_what_it_writes_in_time() -> None:
    """At its rate, and never less than gains anything."""
    pace = Pace(80, least=10, seconds=1.0)
    pace.took(80, 2.0)
    assert pace.blocks == 40
    pace.took(40, 1.0)
    assert pace.blocks == 40

    pace.took(40, 100.0)

    assert pace.blocks == 10


def test_a_disk_that_was_slow_for_once_is_given_more_again() -> None:
    """In steps of two, by moves as large as they may be, and no further than the most."""
    pace = Pace(70, least=10, seconds=1.0)
    pace.took(70, 30.0)
    sizes = []
    for count in (9, 10, 10, 20, 40, 40, 70):
        pace.took(count, 0.4)
        sizes.append(pace.blocks)

    assert sizes == [10, 20, 20, 40, 70, 70, 70]


def test_small_moves_say_nothing_about_the_disk() -> None:
    """One that waited behind large ones is not what made them slow."""
    pace = Pace(80, least=10, seconds=1.0)
    pace.took(9, 5.0)

    assert pace.blocks == 80


def test_there_is_always_a_block() -> None:
    """A block may be larger than a transaction is meant to be."""
    pace = Pace(0, least=0, seconds=1.0)
    pace.took(1, 5.0)

    assert pace.blocks == 1
