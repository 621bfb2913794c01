"""The client's own device: what opens memory that a daemon has on the same card, and copies out of it and into it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tiercache.errors import DeviceRefused
from tiercache.kernels.device import Device
from tiercache.kernels.opening import CPU, open_device, require_name
from tiercache.storage.workers import Lane, Workers

DEVICE_LANES = {Lane.UP: 1, Lane.DOWN: 1}
"""Threads that wait for a device, where a client has one."""


class OwnDevice:
    """A device by its name, opened when something is first asked of it; or one that is open; or none, also by the name `cpu`.

    Raises InvalidConfig for a name that can't be a device's.
    """

    def __init__(self, given: str | Device | None = None, *, opener: Callable[[str], Device] = open_device) -> None:
        if given is not None and (isinstance(given, str) or not hasattr(given, "allocate")):
            given = require_name(given)
        self._given = None if given == CPU else given
        self._opener = opener
        self._opening: asyncio.Lock | None = None

    @property
    def is_given(self) -> bool:
        """Whether there is one, or its name. The client's workers have the lanes UP and DOWN then."""
        return self._given is not None

    async def opened(self, workers: Workers) -> Device:
        """Return it, opened by a worker if it is not yet: that imports a library, and makes a context on the card.

        Raises DeviceRefused where the client was given none; InvalidConfig and MemoryRefused as `open_device` does, at every
        call anew.
        """
        if self._given is None:
            raise DeviceRefused("this client has no device: the daemon's HBM tier lies on one; use connect(device='cuda:0')")
        if not isinstance(self._given, str):
            return self._given
        if self._opening is None:
            self._opening = asyncio.Lock()
        async with self._opening:
            if isinstance(self._given, str):
                self._given = await workers.run(Lane.UP, self._opener, self._given)
            return self._given
