"""A client's own device: named at `connect`, opened when something is asked of it, and once."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.service.client.fake import FakeDaemon
from tiercache.errors import DeviceRefused, InvalidConfig, InvalidInput, MemoryRefused
from tiercache.kernels.device import LEAST_EXPORT, Device
from tiercache.kernels.lazy import LazyDevice, LazyMemory
from tiercache.service.client.blocking import BlockingClient
from tiercache.service.client.client import connect
from tiercache.service.client.own_device import OwnDevice
from tiercache.storage.workers import InlineWorkers, Lane, ThreadWorkers


@pytest.mark.parametrize("name", ["cuda", "cuda:-1", "gpu:0", "", 0, object()])
def test_what_is_no_device_is_refused_by_the_call_that_names_it(name: object) -> None:
    with pytest.raises(InvalidConfig, match="device"):
        connect(device=name)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="device"):
        BlockingClient(device=name)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, "cpu"])
async def test_a_client_without_one_says_so(given: str | None) -> None:
    own = OwnDevice(given)

    assert not own.is_given
    with pytest.raises(DeviceRefused, match="connect"):
        await own.opened(InlineWorkers())


async def test_it_is_opened_once_and_away_from_the_loop() -> None:
    """Whoever asks, and however many at once: a context on a card costs hundreds of MiB."""
    asked: list[tuple[str, int]] = []
    device = LazyDevice(1)

    def opener(name: str) -> Device:
        asked.append((name, threading.get_ident()))
        return device

    workers = ThreadWorkers({Lane.UP: 2})
    own = OwnDevice("cuda:1", opener=opener)
    try:
        found = await asyncio.gather(*(own.opened(workers) for _ in range(4)))
    finally:
        workers.close()

    [(name, thread)] = asked
    assert found == [device] * 4 and name == "cuda:1" and thread != threading.get_ident()


async def test_one_that_can_not_be_opened_is_asked_for_again() -> None:
    """A driver may be restarted under a client that lives for weeks."""
    device = LazyDevice(1)
    answers: list[Device | None] = [None, device]

    def opener(name: str) -> Device:
        found = answers.pop(0)
        if found is None:
            raise MemoryRefused(f"there is no {name}")
        return found

    own = OwnDevice("cuda:0", opener=opener)
    with pytest.raises(MemoryRefused):
        await own.opened(InlineWorkers())

    assert await own.opened(InlineWorkers()) is device


async def test_one_that_is_open_is_taken_as_it_is() -> None:
    device = LazyDevice(1)

    assert await OwnDevice(device).opened(InlineWorkers()) is device


async def test_memory_is_opened_once_and_anew_when_the_daemon_has_begun_anew() -> None:
    """The next daemon's memory may have the handle that its predecessor's had, which a tensor in place still keeps open."""
    owner, device, workers = LazyDevice(1), LazyDevice(2), InlineWorkers()
    own, first, second = OwnDevice(device), b"boot 1", b"boot 2"
    memory = owner.allocate(LEAST_EXPORT)
    handle = owner.export(memory)
    kept = await own.memory(workers, first, handle, LEAST_EXPORT)
    assert await own.memory(workers, first, handle, LEAST_EXPORT) is kept
    del memory
    memory = owner.allocate(LEAST_EXPORT)
    memory.bytes[:] = 7
    assert owner.export(memory) == handle

    opened = await own.memory(workers, second, handle, LEAST_EXPORT)

    assert isinstance(opened, LazyMemory) and (opened.bytes == 7).all()


@pytest.mark.parametrize(("device", "lanes"), [(None, {Lane.COPY}), ("cuda:0", {Lane.COPY, Lane.UP, Lane.DOWN, Lane.RUNNER})])
async def test_only_a_client_with_a_device_has_threads_that_wait_for_it(
    device: str | None, lanes: set[Lane], fake: FakeDaemon
) -> None:
    async with connect(fake.address, device=device) as client:
        assert {state.lane for state in client.house.workers.lanes()} == lanes
