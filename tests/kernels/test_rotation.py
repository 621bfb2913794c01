"""What is lent goes round, and is nobody else's as long as it is held."""

from __future__ import annotations

import itertools
import threading

from tiercache.kernels.rotation import Rotation


def test_what_nobody_holds_is_lent_again() -> None:
    """As many are made as are held at once; the one that has rested longest comes first."""
    rotation = Rotation(itertools.count().__next__)
    first, second = rotation.lend(), rotation.lend()
    assert (first.thing, second.thing) == (0, 1)

    del second
    del first
    again = [rotation.lend() for _ in range(3)]

    assert [loan.thing for loan in again] == [1, 0, 2]


def test_what_somebody_still_holds_is_not_lent() -> None:
    """Two who wait for one event: it comes back when the second has gone, too."""
    rotation = Rotation(itertools.count().__next__)
    loan = rotation.lend()
    waiter = loan
    del loan

    assert rotation.lend().thing == 1
    assert waiter.thing == 0
    del waiter
    assert {rotation.lend().thing for _ in range(2)} <= {0, 1}


def test_threads_never_hold_the_same(seed: int) -> None:
    """Eight threads that lend and give back: no thing is held twice at any time."""
    rotation = Rotation(itertools.count().__next__)
    held: set[int] = set()
    turn, wrong = threading.Lock(), []

    def work() -> None:
        for _ in range(500):
            loan = rotation.lend()
            with turn:
                if loan.thing in held:
                    wrong.append(loan.thing)
                held.add(loan.thing)
            with turn:
                held.discard(loan.thing)
            del loan

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert rotation.lend().thing <= 8
