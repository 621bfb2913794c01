"""One way between a device and the host: what is enqueued there by way of stages, in order, and waited for by events."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tiercache.kernels.device import Device, Event, Stream
from tiercache.storage.staging import Stage
from tiercache.storage.workers import Lane


class Way:
    """A stream of its own that works by way of stages, and the lane that waits for it."""

    def __init__(self, device: Device, lane: Lane) -> None:
        self.lane = lane
        self._stream = device.stream()
        self._turn = threading.Lock()

    def enqueue(self, stage: Stage, work: Callable[[Stream], None]) -> Event:
        """Have `work` enqueue what it needs of `stage`, and return the event after it; what failed half-way is over on raising."""
        with self._turn:
            if stage.after is not None:
                self._stream.wait(stage.after)
            try:
                work(self._stream)
            except BaseException:
                stage.after = self._stream.record()
                stage.after.wait()  # what was enqueued before the failure still runs, on slots and memory of others by then
                raise
            stage.after = self._stream.record()
            return stage.after

    def end(self) -> Event:
        """Return the event after all that the stream has now."""
        with self._turn:
            return self._stream.record()
