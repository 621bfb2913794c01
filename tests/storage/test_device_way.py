"""Ways that share a stage: the next one's stream begins after the last one's, and nobody waits for that on the host."""

from __future__ import annotations

import numpy as np

from tiercache.kernels.device import Stream
from tiercache.kernels.host import empty_bytes
from tiercache.kernels.lazy import LazyDevice
from tiercache.storage.device_way import Way
from tiercache.storage.staging import Stage
from tiercache.storage.workers import Lane

SIZE = 64


def test_a_stage_goes_to_another_way_behind_its_event(seed: int) -> None:
    """The second stream is ready first, and still does not write into the stage before the first has read it."""
    device = LazyDevice(seed)
    first, second = Way(device, Lane.DOWN), Way(device, Lane.UP)
    stage = Stage(device.allocate(SIZE), empty_bytes(SIZE))
    ours, theirs, found = (np.full(SIZE, value, np.uint8) for value in (1, 2, 0))
    device.choose = lambda ready: ready[-1]
    device.held = True

    def there_and_back(stream: Stream) -> None:
        stream.write(ours, stage.memory, 0)
        stream.read(stage.memory, 0, found)

    first.enqueue(stage, there_and_back)
    second.enqueue(stage, lambda stream: stream.write(theirs, stage.memory, 0))
    device.held = False
    second.end().wait()
    first.end().wait()

    assert found.tobytes() == ours.tobytes()
    assert stage.memory.bytes.tobytes() == theirs.tobytes()  # type: ignore[attr-defined]
