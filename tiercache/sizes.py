"""Sizes in bytes, as people write them."""

from __future__ import annotations

import re

from tiercache.errors import InvalidConfig

_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgtp", start=1):
    _UNITS[_prefix + "ib"] = 1024**_power
    _UNITS[_prefix + "b"] = 1000**_power
_PATTERN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_size(text: str | int) -> int:
    """Return the number of bytes that `text` names: `64 MiB`, `1.5GiB`, `500 MB`, `4096`.

    Raises InvalidConfig with the text when it is not such a size, or is not above zero.
    """
    if isinstance(text, bool) or not isinstance(text, (int, str)):
        raise InvalidConfig(f"a size must be a number of bytes or text such as '64 MiB', not {text!r}", value=text)
    match = _PATTERN.fullmatch(str(text))
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise InvalidConfig(f"{text!r} is not a size; write a number and one of B, KiB, MiB, GiB, TiB", value=text)
    count = int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    if count <= 0:
        raise InvalidConfig(f"a size must be above zero, not {text!r}", value=text)
    return count


def format_size(count: int) -> str:
    """Return `count` bytes as people read them: `703.1 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
