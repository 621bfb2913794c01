"""Failures that the state machine found, each as the shortest sequence of calls that shows it."""

from __future__ import annotations

import errno
import gc
from collections.abc import Iterator

import pytest

from tests.leaks import Held
from tests.stateful.world import SHAPES, World
from tiercache.errors import InvalidStart
from tiercache.leases import Refusal
from tiercache.types import Tier


@pytest.fixture
def world() -> Iterator[World]:
    world = World(SHAPES[0], 0, held=False)
    yield world
    world.end()


def test_a_room_after_a_hit_that_was_deleted_holds_nothing_of_what_followed_it(world: World) -> None:
    """What followed a deleted prefix is gone for good even while a lease keeps the prefix itself."""
    kv, run = world.kvs[0], world.loop.run
    run(kv.insert([1, 1, 1, 2], world.tensor(0, [1, 1, 1, 2])))
    hit = run(kv.match([1, 1]).__aenter__())
    run(kv.clear())

    room = run(kv.reserve([1, 1, 1, 2, 2, 1], after=hit).__aenter__())
    found = room.present, len(room.blocks)
    run(room.__aexit__(None, None, None))
    run(hit.release())

    assert found == (2, 0)
    run(world.cache.check())


def test_an_insert_ends_when_what_it_stored_is_drained_before_the_rest_finds_room() -> None:
    """An insert never stores the same blocks again and again because draining takes them as soon as they are there.

    What it stored and what has gone again is refused like the rest: it is not there when the call returns.
    """
    world = World(SHAPES[6], 0, held=False)
    try:
        run = world.loop.run
        rooms = [
            run(world.kvs[0].reserve([2, 1, 1, 2]).__aenter__()),
            run(world.kvs[1].reserve([1, 1, 1, 2, 1, 2, 1, 2, 1, 2, 2, 1]).__aenter__()),
        ]
        prompt = [2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]

        stored = run(world.kvs[1].insert(prompt, world.tensor(1, prompt)), limit=2000)
        there = world.kvs[1]._desk.covered(world.kvs[1]._key(prompt))
        for room in rooms:
            run(room.__aexit__(None, None, None))

        assert (stored, there) == ((0, 0, 12), 0) and stored.refused_because is Refusal.DROPPED
        run(world.cache.check())
    finally:
        world.end()


def test_draining_ends_when_one_tier_drops_what_another_copies_down() -> None:
    """A path that is longer than the durable tier is not copied there and dropped again for ever."""
    world = World(SHAPES[5], 0, held=False)
    try:
        for place, prompt in enumerate([[2, 1, 1, 2, 2, 1, 2, 1, 1, 2, 1, 1], [2, 1, 2, 1, 2, 1]]):
            world.loop.run(world.kvs[place].insert(prompt, world.tensor(place, prompt)))

        world.loop.run(world.cache.settle(), limit=2000)

        world.loop.run(world.cache.check())
    finally:
        world.end()


def test_what_was_deleted_while_it_moved_between_memories_is_not_there_after_a_kill() -> None:
    """A delete is acknowledged when the record is gone, also where a promotion from DRAM still holds the blocks."""
    world = World(SHAPES[0], 0, held=True)
    try:
        kv, run = world.kvs[0], world.loop.run
        run(kv.insert([1, 1, 1, 2], world.tensor(0, [1, 1, 1, 2]), tier=Tier.DRAM))
        run(kv.flush([1, 1, 1, 2]))
        assert world.copier is not None
        world.copier.open = False
        hit = run(kv.match([1, 1, 1, 2]).__aenter__())
        world.loop.turn(10)
        run(hit.release())

        deleted = run(kv.delete([1, 1, 1, 2]))
        world.chapters[0].maybe = world.chapters[0].book.prefixes(world.key([1, 1, 1, 2]))
        world.reopen(kill=True)

        assert deleted == 4
        assert world.keys(0) == set()
    finally:
        world.end()


def test_a_hit_that_keeps_less_of_a_shared_lease_is_followed_by_another_prompt(world: World) -> None:
    """What a hit says it covers is what a room must begin with, not what others keep under the same request."""
    kv, run = world.kvs[0], world.loop.run
    run(kv.insert([1, 1, 1, 2], world.tensor(0, [1, 1, 1, 2])))
    hits = [run(kv.match([1, 1, 1, 2], request="r").__aenter__()) for _ in range(2)]
    hits[0].take(2)

    room = run(kv.reserve([1, 1, 2, 1], after=hits[0]).__aenter__())
    found = room.present, len(room.blocks)
    run(room.__aexit__(None, None, None))
    for hit in hits:
        run(hit.release())

    assert found == (2, 1)
    run(world.cache.check())


def test_a_room_follows_what_is_left_of_a_hit_whose_bytes_went_bad(world: World) -> None:
    """The blocks that a failed check took from a hit can be stored anew after it."""
    kv, run = world.kvs[0], world.loop.run
    prompt = [1, 1, 1, 2, 2, 1]
    run(kv.insert(prompt, world.tensor(0, prompt)))
    hit = run(kv.match(prompt).__aenter__())
    _, _, position, slot = next(copy for copy in world.memory_copies() if copy[1] == world.key(prompt[:4]))
    view = world.stack.stores[position].view(slot)
    assert view is not None
    view[0, 0] ^= 0xFF
    run(hit.gather())

    room = run(kv.reserve(prompt, after=hit).__aenter__())
    found = hit.tokens, room.present, len(room.blocks)
    run(room.__aexit__(None, None, None))
    run(hit.release())

    assert found == (2, 2, 2)
    run(world.cache.check())


def test_a_hit_of_one_tenant_is_nothing_to_write_after_for_another(world: World) -> None:
    """The same tokens in another namespace are another prompt."""
    run = world.loop.run
    run(world.kvs[1].insert([1, 1], world.tensor(1, [1, 1])))
    hit = run(world.kvs[1].match([1, 1]).__aenter__())

    with pytest.raises(InvalidStart):
        world.kvs[0].reserve([1, 1, 1, 2], after=hit)

    run(hit.release())


def test_what_a_session_held_when_it_ends_was_used_in_the_order_in_which_it_was_taken(world: World) -> None:
    """The claims of a session that ends are released in their order, so that the last prompt that was wanted goes last."""
    kv, run = world.kvs[0], world.loop.run
    prompts = [[one, two] for one in (1, 2) for two in (1, 2)]
    for prompt in prompts:
        run(kv.insert(prompt, world.tensor(0, prompt)))
    asked = [world.random.choice(prompts) for _ in range(40)] + prompts[::-1]
    for prompt in asked:
        run(kv.match(prompt).__aenter__())
    session = kv._desk.session
    nodes = {node.key: node for node in (lease.node for lease in session.leases)}

    world.stack.cache.end_session(session)
    used = sorted(nodes, key=lambda key: nodes[key].used)

    assert used == [world.key(prompt) for prompt in prompts[::-1]]


def test_who_waits_for_a_move_is_woken_in_the_order_of_coming(world: World) -> None:
    """The first that waited for room is the first that may take it, whatever addresses the waiters have."""
    kv, run, loop = world.kvs[0], world.loop.run, world.loop
    run(kv.insert([1, 1], world.tensor(0, [1, 1])))
    woken: list[int] = []

    async def wait(number: int) -> None:
        await world.stack.mover.change()
        woken.append(number)

    waiting = [loop.create_task(wait(number)) for number in range(40)]
    loop.turn()
    run(kv.flush([1, 1]))
    loop.turn(2)

    assert woken == list(range(40)) and all(task.done() for task in waiting)


def test_a_promotion_that_nobody_waits_for_holds_one_lease_until_it_ends(world: World) -> None:
    """What is brought up for whoever comes next is held by the promotion alone, and by nobody once that is over."""
    kv, run = world.kvs[0], world.loop.run
    prompt = [1, 1, 1, 2, 2, 1]
    run(kv.insert(prompt, world.tensor(0, prompt)))
    run(kv.flush(prompt))
    world.chapters[0].maybe = world.chapters[0].book.prefixes(world.key(prompt))
    world.reconcile()
    world.reopen(kill=False)
    kv, session = world.kvs[0], world.kvs[0]._desk.session

    hit = run(kv.match(prompt, prefetch="best-effort").__aenter__())
    ready = run(hit.ready())
    run(hit.release())
    going, held = world.promotions(), len(session.leases)
    run(world.cache.settle())

    assert ready < len(prompt) and (going, held) == (1, 1)
    assert world.promotions() == 0 and not session.leases
    run(world.cache.check())


def test_a_read_that_failed_keeps_no_memory_of_the_cache_when_that_is_closed() -> None:
    """What a failed read was to copy into is let go with the cache, not when garbage is next collected."""
    before = Held.now()
    world = World(SHAPES[0], 0, held=False)
    kv, run = world.kvs[0], world.loop.run
    prompt = [1, 1, 1, 2, 2, 1]
    run(kv.insert(prompt, world.tensor(0, prompt)))
    run(kv.flush(prompt))
    world.chapters[0].maybe = world.chapters[0].book.prefixes(world.key(prompt))
    world.reconcile()
    world.reopen(kill=False)
    gc.collect()
    gc.disable()
    try:
        world.disk.fail("read", OSError(errno.EIO, "the test lets this read fail"))
        hit = run(world.kvs[0].match(prompt).__aenter__())
        ready = run(hit.ready())
        run(hit.release())
        world.end()
        leaks = Held.now().since(before)
    finally:
        gc.enable()

    assert ready == 0
    assert not [line for line in leaks if "memfd" in line]
