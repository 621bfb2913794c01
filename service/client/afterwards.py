"""What waits for a runner's streams: the end of a lease or a reservation whose slots on a device they may still use.

A tensor in place is gone when Python says so, and the kernels that read or write it are enqueued, not done. So its slots are given
back when an event has happened that was recorded on each stream that may use them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tiercache.errors import Closed, StoreError
from tiercache.kernels.device import Event
from tiercache.service.client.device_slots import DeviceSlots
from tiercache.storage.device_passage import Runner
from tiercache.storage.finishing import Finishing
from tiercache.storage.workers import Lane, Workers, outlive

log = logging.getLogger(__name__)


class Afterwards:
    """The streams that use the slots of one lease or reservation on a device. Any thread may call."""

    def __init__(self, workers: Workers, finishing: Finishing) -> None:
        self._workers = workers
        self._finishing = finishing
        self._runners: dict[int, Runner] = {}
        self._slots: set[DeviceSlots] = set()

    def note(self, slots: DeviceSlots | None = None) -> Runner | None:
        """Count the calling thread's current stream among them, as a user of `slots`, or of what is used already."""
        if slots is not None and slots.tensors.enqueues:
            self._slots.add(slots)
        runner = None
        for one in self._slots:
            runner = one.tensors.runner()
            self._runners[runner.pointer] = runner
        return runner

    def then(self, call: Callable[[], None]) -> None:
        """Call `call` on the loop when the streams have done what they have now; at once where there are none."""
        if not self._runners:
            call()
            return
        self._finishing.start(self._wait(self._recorded(), call))

    def wait_apart(self) -> None:
        """Keep the slots' memory till then, in a thread of its own: the client is closed, or its loop is gone."""
        if self._runners:
            threading.Thread(target=_wait_all, args=(self._recorded(), self._slots), name="tiercache-after", daemon=True).start()

    def _recorded(self) -> list[Event]:
        return [runner.stream.record() for runner in self._runners.values()]

    async def _wait(self, events: list[Event], call: Callable[[], None]) -> None:
        try:
            for event in events:
                await outlive(self._workers, Lane.RUNNER, event.wait)
        except StoreError as error:  # what they had enqueued will not happen any more
            log.warning("a runner's stream failed: %s", str(error))
        except Closed:
            self.wait_apart()
        call()


def _wait_all(events: list[Event], slots: set[DeviceSlots]) -> None:
    for event in events:
        try:
            event.wait()
        except StoreError as error:
            log.warning("a runner's stream failed: %s", str(error))
    slots.clear()
