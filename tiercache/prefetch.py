"""How long a reader waits for blocks that are still on their way up from a tier that it can't read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from tiercache.checks import MOST_SECONDS
from tiercache.errors import InvalidInput

_WAIT, _BEST_EFFORT = "wait", "best-effort"


@dataclass(frozen=True, slots=True)
class PrefetchPolicy:
    """`seconds` that a reader waits: 0 takes what is readable at this moment, None waits for all that can be had."""

    seconds: float | None = None

    @classmethod
    def of(cls, value: object, name: str = "prefetch") -> Self:
        """Return what `value` says: `wait`, `best-effort`, or a number of seconds, also as text.

        Raises InvalidInput, naming `name`, the value and what is allowed.
        """
        if isinstance(value, cls):
            return value
        if value == _WAIT:
            return cls(None)
        if value == _BEST_EFFORT:
            return cls(0.0)
        try:
            # A bool is an int, and not meant.
            seconds = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else -1.0
        except (ValueError, OverflowError):
            seconds = -1.0
        if not 0 <= seconds <= MOST_SECONDS:
            raise InvalidInput(
                f"{name} must be {_WAIT!r}, {_BEST_EFFORT!r} or a number of seconds from 0 to {MOST_SECONDS:.0f}, not {value!r}",
                field=name,
                value=value,
            )
        return cls(seconds)

    def __str__(self) -> str:
        return _WAIT if self.seconds is None else f"{self.seconds:g} s" if self.seconds else _BEST_EFFORT
