"""Failures that the state machine found, each as the shortest sequence of calls that shows it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stateful.world import SHAPES, World


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
    """An insert never stores the same blocks again and again because draining takes them as soon as they are there."""
    world = World(SHAPES[6], 0, held=False)
    try:
        run = world.loop.run
        rooms = [
            run(world.kvs[0].reserve([2, 1, 1, 2]).__aenter__()),
            run(world.kvs[1].reserve([1, 1, 1, 2, 1, 2, 1, 2, 1, 2, 2, 1]).__aenter__()),
        ]
        prompt = [2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]

        stored = run(world.kvs[1].insert(prompt, world.tensor(1, prompt)), limit=2000)
        for room in rooms:
            run(room.__aexit__(None, None, None))

        assert stored == (4, 0, 8)
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
