"""Names of devices, as a configuration gives them."""

from __future__ import annotations

import re

from tiercache.errors import InvalidConfig

CPU = "cpu"
"""The name that stands for no device: host memory in its place."""
_CUDA = re.compile(r"cuda:(0|[1-9][0-9]{0,2})")


def require_name(name: object, field: str = "device") -> str:
    """Return a name that could be a device's, or `cpu`. Raises InvalidConfig, naming `field`, for any other."""
    if not isinstance(name, str) or (name != CPU and _CUDA.fullmatch(name) is None):
        raise InvalidConfig(
            f"{field}: {name!r} is no device; use 'cpu', or a card by its number such as 'cuda:0'", field=field, value=name
        )
    return name


def card(name: str) -> int | None:
    """Return the number of a card by its name; None for `cpu`. Raises InvalidConfig for a name that can't be."""
    found = _CUDA.fullmatch(require_name(name))
    return None if found is None else int(found[1])
