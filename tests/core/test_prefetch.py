"""A prefetch policy is one value, however it is said."""

from __future__ import annotations

import pytest

from tiercache.errors import InvalidInput
from tiercache.prefetch import PrefetchPolicy


@pytest.mark.parametrize(
    ("said", "seconds", "shown"),
    [
        ("wait", None, "wait"),
        ("best-effort", 0.0, "best-effort"),
        (0, 0.0, "best-effort"),
        (2, 2.0, "2 s"),
        (0.25, 0.25, "0.25 s"),
        ("0.25", 0.25, "0.25 s"),
        (PrefetchPolicy(3.0), 3.0, "3 s"),
    ],
)
def test_what_is_said_is_what_is_waited(said: object, seconds: float | None, shown: str) -> None:
    """Names, numbers and text of numbers, as a configuration, a command line and a program say them."""
    policy = PrefetchPolicy.of(said)

    assert policy.seconds == seconds and str(policy) == shown
    assert PrefetchPolicy.of(policy) is policy


@pytest.mark.parametrize("said", ["", "WAIT", "1 s", "nan", "-1", None, False, True, -1, 1e10, float("inf"), [], b"wait", 10**400])
def test_what_can_not_be_is_named(said: object) -> None:
    """The error has the name of the value, the value, and what may be."""
    with pytest.raises(InvalidInput, match=r"^patience must be 'wait', 'best-effort' or a number of seconds from 0 to") as caught:
        PrefetchPolicy.of(said, "patience")

    assert caught.value.fields == {"field": "patience", "value": said}
