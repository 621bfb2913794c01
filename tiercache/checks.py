"""Checks of a caller's values, with errors that name the value and the limit."""

from __future__ import annotations

from tiercache.errors import InvalidInput

MOST_SECONDS = 10.0**9
"""Some thirty years: what a timer can be set to."""


def integer(value: object, low: int, high: int, name: str, error: type[InvalidInput] = InvalidInput) -> int:
    """Return `value` if it is an integer (and no bool) from `low` to `high`; raise `error`, naming all three, if not."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise error(f"{name} must be an integer from {low} to {high}, not {value!r}", field=name, value=value, low=low, high=high)
    return value


def seconds(value: object, name: str) -> float:
    """Return `value` if it is a number (and no bool) of seconds from 0 to MOST_SECONDS; raise InvalidInput, naming it, if not."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_SECONDS:
        raise InvalidInput(f"{name} must be a number of seconds from 0 on, not {value!r}", field=name, value=value)
    return float(value)


def hashable(value: object, name: str) -> None:
    """Raise InvalidInput, naming the type, if `value` can't be a key."""
    try:
        hash(value)
    except TypeError as error:
        raise InvalidInput(f"{name} must be hashable, not a {type(value).__name__}", field=name) from error
