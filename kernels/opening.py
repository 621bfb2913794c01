"""From a device's name in a configuration to the device. CuPy is imported when a device is asked for, and never before."""

from __future__ import annotations

import importlib
import re

from tiercache.errors import InvalidConfig, MemoryRefused
from tiercache.kernels.device import Device

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


def open_device(name: str) -> Device:
    """Return the device of that name, which is not `cpu`.

    Raises InvalidConfig for a name that can't be, and where CuPy is not installed; MemoryRefused where the driver has no such card.
    """
    found = _CUDA.fullmatch(require_name(name))
    if found is None:
        raise InvalidConfig(f"device: {name!r} is host memory, and no device to open", field="device", value=name)
    try:
        cuda = importlib.import_module("tiercache.kernels.cuda")
    except ImportError as error:
        raise InvalidConfig(
            f"device: {name!r} needs CuPy, which can't be imported here ({error}); install tiercache with the extra 'cuda'",
            field="device",
            value=name,
        ) from error
    count, number = cuda.count(), int(found[1])
    if number >= count:
        raise MemoryRefused(f"device: there is no {name!r} here; the driver has {count} cards", value=name, limit=count)
    device: Device = cuda.CudaDevice(number)
    return device
