"""Checks of a caller's values, with errors that name the value and the limit."""

from __future__ import annotations

from tiercache.errors import InvalidInput


def integer(value: object, low: int, high: int, name: str, error: type[InvalidInput] = InvalidInput) -> int:
    """Return `value` if it is an integer (and no bool) from `low` to `high`; raise `error`, naming all three, if not."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise error(f"{name} must be an integer from {low} to {high}, not {value!r}", field=name, value=value, low=low, high=high)
    return value
