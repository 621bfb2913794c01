"""From a device's name in a configuration to the device. CuPy is imported when a device is asked for, and never before."""

from __future__ import annotations

import importlib

from tiercache.devices import card, require_name
from tiercache.errors import InvalidConfig, MemoryRefused
from tiercache.kernels.device import Device

__all__ = ["open_device", "require_name"]


def open_device(name: str) -> Device:
    """Return the device of that name, which is not `cpu`.

    Raises InvalidConfig for a name that can't be, and where CuPy is not installed; MemoryRefused where the driver has no such card.
    """
    number = card(name)
    if number is None:
        raise InvalidConfig(f"device: {name!r} is host memory, and no device to open", field="device", value=name)
    try:
        cuda = importlib.import_module("tiercache.kernels.cuda")
    except ImportError as error:
        raise InvalidConfig(
            f"device: {name!r} needs CuPy, which can't be imported here ({error}); install tiercache with the extra 'cuda'",
            field="device",
            value=name,
        ) from error
    count = cuda.count()
    if number >= count:
        raise MemoryRefused(f"device: there is no {name!r} here; the driver has {count} cards", value=name, limit=count)
    device: Device = cuda.CudaDevice(number)
    return device
