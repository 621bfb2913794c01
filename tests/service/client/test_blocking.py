"""The blocking client beside the suite of all faces: threads, forks, and a loop that dies."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from tests.service.caches import LARGE, SPACE, is_exact, prompt, small, tensor_of
from tests.service.client.daemons import Process, own_process
from tiercache.errors import Closed, InvalidTokens, LeaseReleased
from tiercache.service.client.blocking import BlockingClient
from tiercache.service.client.client import BackOff

SIZE = LARGE.block_size
AT_ONCE = BackOff(first=0.01, most=0.05)


class Local(set[int]):
    """Something that can be referred to weakly."""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Process]:
    """A daemon for all tests here: each has tokens of its own."""
    with own_process(small(hbm=32, dram=64, ssd=None, spec=LARGE)) as running:
        yield running


@pytest.fixture
def client(daemon: Process) -> Iterator[BlockingClient]:
    """A client with a session."""
    with BlockingClient(daemon.address, deadline=30.0, back_off=AT_ONCE) as made:
        made.connected()
        yield made


def test_several_threads_share_a_client(client: BlockingClient, seed: int) -> None:
    """Each reads what it or another wrote, exactly, while the others do the same."""
    kv = client.open(SPACE, LARGE)

    def work(number: int) -> int:
        tokens = prompt(seed + number % 3, 4)
        kv.insert(tokens, tensor_of(tokens, spec=LARGE))
        with kv.match(tokens) as hit:
            assert is_exact(hit.gather(), tokens, spec=LARGE)
            assert hit.ready() == hit.tokens
            hit.view(0, 0)
            hit.view(1, 0)
            return hit.tokens

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(24))) == [4 * SIZE] * 24
    assert not client.stats().misses


def test_blocks_are_written_in_place(client: BlockingClient, seed: int) -> None:
    """Room, commit in parts, and what the end of a hit and a room says."""
    tokens = prompt(seed, 3)
    data = tensor_of(tokens, spec=LARGE)
    kv = client.open(SPACE, LARGE)
    with kv.match(tokens) as hit, kv.reserve(tokens, after=hit) as room:
        for number, block in enumerate(room.blocks):
            block.copy_(data[:, :, number * SIZE : (number + 1) * SIZE])
        counts = room.present, room.pending, room.tokens, room.commit(SIZE), room.commit(3 * SIZE)
    with kv.match(tokens) as again:
        kept = again.take(2 * SIZE)
        again.release()
        with pytest.raises(LeaseReleased):
            again.gather()

    assert counts == (0, 0, 3 * SIZE, SIZE, 3 * SIZE) and kept == 2 * SIZE
    with pytest.raises(LeaseReleased):
        _ = room.present
    with pytest.raises(InvalidTokens):
        kv.match([-1])
    assert client.check()["leases"] == 0


def test_an_error_that_was_caught_keeps_nothing_of_who_caught_it(client: BlockingClient, seed: int) -> None:
    """What a caller's frame held, a block in place perhaps, goes with the frame and waits for no collection."""
    kv = client.open(SPACE, LARGE)

    def ask() -> weakref.ref[set[int]]:
        local = Local()
        with kv.match(prompt(seed, 1)) as hit:
            hit.release()
            with suppress(LeaseReleased):
                hit.gather()
        return weakref.ref(local)

    gc.collect()
    gc.disable()
    try:
        kept = ask()
        deadline = time.monotonic() + 20.0
        while kept() is not None and time.monotonic() < deadline:  # the client's thread may still be in the call that failed
            time.sleep(0.01)
        gone = kept() is None
    finally:
        gc.enable()

    assert gone


def test_after_its_end_it_says_closed(daemon: Process, seed: int) -> None:
    """And before its beginning, and for a hit that is left later."""
    client = BlockingClient(daemon.address, deadline=30.0)
    with pytest.raises(Closed):
        client.open(SPACE, LARGE)
    with client:
        kv = client.open(SPACE, LARGE)
        hit = kv.match(prompt(seed, 1)).__enter__()
        with pytest.raises(Closed):
            client.__enter__()
    hit.__exit__(None, None, None)
    client.close()

    for call in (client.check, lambda: kv.match([1]), lambda: kv.flush([1]), client.__enter__):
        with pytest.raises(Closed):
            call()


def test_who_waits_when_the_thread_ends_is_told(daemon: Process) -> None:
    """Nobody waits for a loop that is gone, now or later."""
    with BlockingClient(daemon.address, deadline=30.0, back_off=AT_ONCE) as client:
        client.connected()
        waiting = threading.Event()

        async def for_ever() -> None:
            waiting.set()
            await asyncio.Event().wait()

        def wait() -> type[BaseException] | None:
            try:
                client.run(for_ever())
            except Closed as error:
                return type(error)
            return None

        with ThreadPoolExecutor(1) as pool:
            outcome = pool.submit(wait)
            waiting.wait()
            portal = client._portal
            assert portal is not None and portal._loop is not None
            portal._loop.call_soon_threadsafe(portal._loop.stop)
            assert outcome.result() is Closed
        with pytest.raises(Closed):
            client.check()


def test_a_call_in_its_own_thread_is_refused(client: BlockingClient) -> None:
    """It would wait for itself."""

    async def inside() -> str:
        try:
            client.check()
        except Closed as error:
            return str(error)
        return ""

    assert "own thread" in client.run(inside())


def test_a_forked_child_is_refused_and_its_parent_goes_on(client: BlockingClient, seed: int) -> None:
    """Every call says so, leaving and closing do nothing, and the child can make a client itself."""
    tokens = prompt(seed, 2)
    kv = client.open(SPACE, LARGE)
    kv.insert(tokens, tensor_of(tokens, spec=LARGE))
    with kv.match(tokens) as hit:
        view = hit.view(0, 0)
        pid = os.fork()
        if pid == 0:
            try:
                code = 0
                for call in (client.check, lambda: kv.match(tokens), hit.ready, lambda: hit.view(0, 0), lambda: kv.flush(tokens)):
                    try:
                        call()
                        code = 2
                    except Closed:
                        pass
                hit.__exit__(None, None, None)
                del view
                client.close()
                os._exit(code)
            finally:
                os._exit(3)
        status = os.waitpid(pid, 0)[1]

        assert os.waitstatus_to_exitcode(status) == 0
        assert is_exact(hit.gather(), tokens, spec=LARGE) and client.check()["leases"] == 1
        del view
    assert client.check()["leases"] == 0
