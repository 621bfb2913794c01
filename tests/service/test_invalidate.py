"""A model, an adapter or a tenant is forgotten: every copy, those in flight too, at once and for good."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.seams import Rig
from tests.service.caches import (
    LARGE,
    SIZE,
    SPACE,
    SPEC,
    is_exact,
    lower,
    opened,
    opened_kv,
    prompt,
    read,
    reservations,
    sink,
    small,
    stack_of,
    store,
    tensor_of,
)
from tiercache.config import Share
from tiercache.errors import InvalidSpec, StoreError
from tiercache.service.face import Extent
from tiercache.service.inprocess import TierCache
from tiercache.spec import ANY, Namespace, Selection
from tiercache.types import Tier

SPACES = {
    "plain": Namespace(model="m", weights="w1"),
    "other weights": Namespace(model="m", weights="w2"),
    "other model": Namespace(model="n", weights="w1"),
    "adapter": Namespace(model="m", weights="w1", adapter="a@1"),
    "newer adapter": Namespace(model="m", weights="w1", adapter="a@2"),
    "empty adapter": Namespace(model="m", weights="w1", adapter=""),
    "tenant": Namespace(model="m", weights="w1", salt="t"),
    "tenant's adapter": Namespace(model="m", weights="w1", adapter="a@1", salt="t"),
    "empty salt": Namespace(model="m", weights="w1", salt=""),
}
SELECTIONS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "a model": ({"model": "n"}, {"other model"}),
    "weights": ({"weights": "w2"}, {"other weights"}),
    "weights of a model": ({"model": "m", "weights": "w2"}, {"other weights"}),
    "an adapter of all tenants": ({"adapter": "a@1"}, {"adapter", "tenant's adapter"}),
    "an adapter of none": ({"adapter": "a@1", "salt": None}, {"adapter"}),
    "a tenant": ({"salt": "t"}, {"tenant", "tenant's adapter"}),
    "a tenant without adapters": ({"salt": "t", "adapter": None}, {"tenant"}),
    "an empty adapter": ({"adapter": ""}, {"empty adapter"}),
    "no adapter": ({"adapter": None}, {"plain", "other weights", "other model", "tenant", "empty salt"}),
    "no salt": ({"salt": None}, {"plain", "other weights", "other model", "adapter", "newer adapter", "empty adapter"}),
    "nobody": ({"model": "a@1"}, set()),
}


async def left(cache: TierCache, tokens: list[int]) -> set[str]:
    """Return which of the namespaces still have the prompt, after comparing its bytes."""
    found = set()
    for name, space in SPACES.items():
        if await read(await cache.open(space, SPEC), tokens, space=space):
            found.add(name)
    return found


def all_free(cache: TierCache) -> bool:
    """Return whether no tier holds anything."""
    return all(pool.free == pool.capacity for pool in stack_of(cache).cache.residency.slots)


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("known", ["open", "nobody has opened its layout since the start", "nobody has opened it"])
async def test_exactly_what_is_named_is_forgotten(tmp_path: Path, seed: int, name: str, known: str) -> None:
    """None is a value and '' another; what is not named may be anything; a restart finds the rest and nothing of it."""
    fields, going = SELECTIONS[name]
    tokens = prompt(seed, 2)
    gone: list[Extent] = []
    again: list[Extent] = []
    remain: set[str] = set()

    async def forget(cache: TierCache) -> tuple[list[Extent], set[str], list[Extent]]:
        return await cache.invalidate(**fields), await left(cache, tokens), await cache.invalidate(**fields)

    config = small(hbm=32, dram=32, ssd=64, directory=tmp_path / "ssd")
    async with opened(config) as cache:
        for space in SPACES.values():
            kv = await cache.open(space, SPEC)
            await store(kv, tokens, space=space)
            assert await kv.flush(tokens) == 2 * SIZE
        if known == "open":
            gone, remain, again = await forget(cache)
            await cache.check()
    async with opened(config) as cache:
        if known != "open":
            if known == "nobody has opened it":  # but a neighbour of the same layout, whose stack has it in its tree
                await cache.open(Namespace(model="neighbour", weights="w"), SPEC)
            assert len(cache.stacks) == (known == "nobody has opened it")
            gone, remain, again = await forget(cache)

        assert {extent.namespace for extent in gone} == {SPACES[one] for one in going} and again == []
        assert all((extent.blocks, extent.tokens, extent.spec) == (2, 2 * SIZE, SPEC) for extent in gone)
        assert all(extent.digest == extent.namespace.digest(SPEC) for extent in gone if extent.namespace)
        assert remain == set(SPACES) - going
        assert await left(cache, tokens) == remain
        await cache.check()


def test_a_selection_names_something_that_can_be() -> None:
    """Nothing at all is no selection of everything; what no namespace can be is refused, and a salt is never shown."""
    secret = "tenant-\ud800-secret"
    for fields in ({}, {"model": None}, {"weights": None}, {"salt": 5}, {"adapter": b"a"}, {"salt": secret}, {"model": ANY}):
        with pytest.raises(InvalidSpec) as caught:
            Selection(**fields)
        assert "secret" not in str(caught.value) and "secret" not in repr(caught.value.fields)

    assert "hidden" not in repr(Selection(salt="hidden")) + repr(Namespace(model="m", weights="w", salt="hidden"))


async def test_layouts_that_nobody_has_opened_are_reached(tmp_path: Path, seed: int) -> None:
    """One layout open since the restart and one not: both are forgotten, and what stays in the one not opened is found."""
    tokens, other = prompt(seed, 2), replace(SPACE, weights="other")
    shares = (Share(block_bytes=SPEC.block_bytes, fraction=0.5), Share(block_bytes=LARGE.block_bytes, fraction=0.5))
    config = small(hbm=32, dram=32, ssd=256, spec=LARGE, directory=tmp_path / "ssd", shares=shares)
    spaces = [(SPACE, SPEC), (SPACE, LARGE), (other, LARGE)]
    async with opened(config) as cache:
        for space, spec in spaces:
            kv = await cache.open(space, spec)
            await store(kv, tokens, space=space)
            await kv.flush(tokens)
    async with opened(config) as cache:
        kv = await cache.open(SPACE, SPEC)
        assert await read(kv, tokens) == 2 * SIZE

        held = await cache.extents(lambda digest, space: space is not None and space.weights == SPACE.weights)
        gone = await cache.invalidate(weights=SPACE.weights)

        assert held == gone and {(extent.namespace, extent.spec) for extent in gone} == set(spaces[:2])
        assert len(cache.stacks) == 1, "nothing is opened for it"
        assert [await read(await cache.open(space, spec), tokens, space=space) for space, spec in spaces] == [0, 0, 2 * SIZE]
        await cache.check()
    async with opened(config) as cache:
        assert [await read(await cache.open(space, spec), tokens, space=space) for space, spec in spaces] == [0, 0, 2 * SIZE]


async def test_the_disk_of_what_nobody_opened_can_be_filled_anew(tmp_path: Path, seed: int) -> None:
    """The slots of what was forgotten unopened are free, and its bytes never come back in somebody else's prompt."""
    config = small(hbm=8, dram=8, ssd=16, directory=tmp_path / "ssd")
    other = replace(SPACE, salt="t")
    async with opened_kv(config) as (_, kv):
        for number in range(4):
            await store(kv, prompt(seed + number, 4))
            await kv.flush(prompt(seed + number, 4))
    async with opened(config) as cache:
        [gone] = await cache.invalidate(model=SPACE.model)
        kv = await cache.open(other, SPEC)
        for number in range(4):
            await store(kv, prompt(seed + number, 4), space=other)
            assert await kv.flush(prompt(seed + number, 4)) == 4 * SIZE
        await sink(cache)

        assert gone.blocks == 16
        assert [await read(kv, prompt(seed + number, 4), space=other) for number in range(4)] == [4 * SIZE] * 4
        assert await read(await cache.open(SPACE, SPEC), prompt(seed, 4)) == 0
        await cache.check()


# --- what is in flight ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["demotion to DRAM", "demotion to SSD", "promotion", "flush"])
@pytest.mark.parametrize("after", [False, True], ids=["before the copy", "after it"])
async def test_a_move_held_open_brings_nothing_back(tmp_path: Path, seed: int, way: str, after: bool) -> None:
    """Gone at once, gone when the move has ended, gone after a restart; the neighbour's prompt is untouched by it all."""
    tokens, other = prompt(seed, 4), replace(SPACE, salt="t")
    config, rig = small(directory=tmp_path / "ssd"), Rig()
    async with opened_kv(config, rig) as (cache, kv):
        neighbour = await cache.open(other, SPEC)
        await store(neighbour, tokens, space=other, tier=Tier.DRAM)
        await neighbour.flush(tokens)
        await store(kv, tokens)
        core = stack_of(cache).cache
        tasks: list[asyncio.Task[Any]] = []
        if way == "promotion":
            await sink(cache)
            hold = rig.copies.hold("blocks", to=1, after=after)
            tasks.append(asyncio.create_task(kv.prefetch(tokens)))
        elif way == "flush":
            hold = rig.copies.hold("put", after=after)
            tasks.append(asyncio.create_task(kv.flush(tokens)))
        else:
            if way == "demotion to SSD":
                await lower(cache, Tier.HBM)
            position = 1 if way == "demotion to SSD" else 0
            hold = rig.copies.hold("put" if position else "blocks", to=position + 1, after=after)
            stack_of(cache).mover.start(core.moves.make_room(position, core.residency.slots[position].capacity))
        await hold.reached()

        forgetting = asyncio.create_task(cache.invalidate(salt=None))
        await asyncio.sleep(0)
        at_once = await read(kv, tokens)
        hold.release()
        [gone] = await forgetting
        await asyncio.gather(*tasks)
        await cache.settle()

        assert (at_once, gone.blocks) == (0, 4)
        assert await read(kv, tokens) == 0
        assert await read(neighbour, tokens, space=other) == 4 * SIZE
        await cache.check()
        assert [extent.namespace for extent in await cache.extents(lambda *_: True)] == [other]
    async with opened(config) as cache:
        assert await read(await cache.open(SPACE, SPEC), tokens) == 0
        assert await read(await cache.open(other, SPEC), tokens, space=other) == 4 * SIZE


async def test_an_insert_held_open_brings_nothing_back(tmp_path: Path, seed: int) -> None:
    """The first block of a prompt follows nothing that a clear could take away: the writer is refused all the same."""
    tokens = prompt(seed, 4)
    config, rig = small(directory=tmp_path / "ssd"), Rig()
    async with opened_kv(config, rig) as (cache, kv):
        hold = rig.threads.hold("_scatter")
        inserting = asyncio.create_task(kv.insert(tokens, tensor_of(tokens)))
        await hold.reached()

        gone = await cache.invalidate(model=SPACE.model)
        hold.release()
        outcome = await inserting

        assert gone == [] and outcome == (0, 0, 4 * SIZE)
        assert await read(kv, tokens) == 0 and await kv.flush(tokens) == 0
        assert all_free(cache)
        await cache.check()
        await store(kv, tokens)
        assert await read(kv, tokens) == 4 * SIZE
        await kv.clear()
    async with opened_kv(config) as (_, kv):
        assert await read(kv, tokens) == 0


async def test_a_room_brings_nothing_back(seed: int) -> None:
    """Committed in part before, or not at all: what is committed after comes to nothing, and new writers are not kept waiting."""
    one, two = prompt(seed, 4), prompt(seed + 1, 3)
    async with opened_kv(small(hbm=16, dram=16, ssd=None)) as (cache, kv):
        async with kv.reserve(one) as first, kv.reserve(two) as second:
            for room, tokens in ((first, one), (second, two)):
                data = tensor_of(tokens)
                for number, block in enumerate(room.blocks):
                    block.copy_(data[:, :, number * SIZE : (number + 1) * SIZE])
            assert await first.commit(2 * SIZE) == 2 * SIZE

            [gone] = await cache.invalidate(weights=SPACE.weights)
            await store(kv, two)  # at once, though a doomed writer holds the same blocks

            committed = [await first.commit(4 * SIZE), await second.commit(3 * SIZE)]
            assert gone.tokens == 2 * SIZE
            assert [await read(kv, one), await read(kv, two)] == [0, 3 * SIZE]
        assert committed == [2 * SIZE, 0]
        assert reservations(cache) == 0
        assert await cache.check() == {"nodes": 1, "blocks": 3, "leases": 0}


async def test_an_insert_that_waits_brings_nothing_back(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waited for another writer of the same blocks when they were forgotten does not store them when that one has gone."""
    tokens = prompt(seed, 3)
    async with opened_kv(small(ssd=None)) as (cache, kv):
        waiting = asyncio.Event()
        traffic = stack_of(cache).traffic
        wait_for = traffic.wait_for

        async def seen(*args: Any) -> bool:
            waiting.set()
            return await wait_for(*args)

        monkeypatch.setattr(traffic, "wait_for", seen)
        async with kv.reserve(tokens):
            inserting = asyncio.create_task(kv.insert(tokens, tensor_of(tokens)))
            await waiting.wait()
            await cache.invalidate(model=SPACE.model)
        outcome = await inserting

        assert outcome == (0, 0, 3 * SIZE)
        assert await read(kv, tokens) == 0
        assert (await kv.insert(tokens, tensor_of(tokens))).stored == 3 * SIZE


async def test_what_was_computed_after_an_older_hit_is_refused(seed: int) -> None:
    """A runner that matched before and writes after it has computed with what was to be forgotten, also if it found nothing."""
    tokens, other = prompt(seed, 4), prompt(seed + 1, 4)
    async with opened_kv(small(hbm=16, dram=16, ssd=None)) as (cache, kv):
        await store(kv, tokens[: 2 * SIZE])
        async with kv.match(tokens) as found, kv.match(other) as nothing, kv.match(tokens) as third:
            await cache.invalidate(salt=None)
            await store(kv, tokens[: 2 * SIZE])
            blocks = []
            for hit, asked in ((found, tokens), (nothing, other)):
                async with kv.reserve(asked, after=hit) as room:
                    blocks.append(len(room.blocks))
            assert is_exact(await third.gather(), tokens) and third.tokens == 2 * SIZE

        assert blocks == [0, 0]
        assert [await read(kv, tokens), await read(kv, other)] == [2 * SIZE, 0]
        async with kv.match(tokens) as hit, kv.reserve(tokens, after=hit) as room:
            assert len(room.blocks) == 2
        await cache.check()


async def test_what_is_stored_meanwhile_stays(tmp_path: Path, seed: int) -> None:
    """While the disk forgets, the namespace is in use again; only what was there before goes."""
    old, new = prompt(seed, 4), prompt(seed + 1, 4)
    config, rig = small(hbm=16, dram=16, directory=tmp_path / "ssd"), Rig()
    async with opened_kv(config, rig) as (cache, kv):
        await store(kv, old)
        await kv.flush(old)
        hold = rig.copies.hold("discard")
        forgetting = asyncio.create_task(cache.invalidate(model=SPACE.model))
        await hold.reached()
        await store(kv, new)
        assert await kv.flush(new) == 4 * SIZE
        pending = not forgetting.done()
        hold.release()

        assert pending and [extent.blocks for extent in await forgetting] == [4]
        assert [await read(kv, old), await read(kv, new)] == [0, 4 * SIZE]
    async with opened_kv(config) as (_, kv):
        assert [await read(kv, old), await read(kv, new)] == [0, 4 * SIZE]


async def test_a_held_hit_is_exact_until_its_release(tmp_path: Path, seed: int) -> None:
    """Its bytes are read on, though others fill every slot; when it ends, every tier is free."""
    tokens, other = prompt(seed, 4), replace(SPACE, salt="t")
    async with opened_kv(small(directory=tmp_path / "ssd")) as (cache, kv):
        neighbour = await cache.open(other, SPEC)
        await store(kv, tokens)
        await kv.flush(tokens)
        async with kv.match(tokens) as hit:
            view = hit.view(1, 0)[0].view(torch.uint8)
            [gone] = await cache.invalidate(model=SPACE.model, salt=None)
            for number in range(4):
                await neighbour.insert(prompt(seed + number, 4), tensor_of(prompt(seed + number, 4), space=other))
            given = await hit.gather()

            assert gone.blocks == 4 and is_exact(given, tokens)
            assert torch.equal(view, given[0, 0, SIZE : 2 * SIZE].view(torch.uint8))
            assert await read(kv, tokens) == 0
            del view
        await neighbour.clear()
        await cache.settle()
        assert all_free(cache)
        await cache.check()


# --- when it can't be ---------------------------------------------------------------------------------------------------------


async def test_a_disk_that_does_not_forget_is_no_success(tmp_path: Path, seed: int) -> None:
    """Not found any more, but the caller is told that a restart may bring it back; asked again when the disk works, it is done."""
    tokens = prompt(seed, 4)
    config, rig = small(directory=tmp_path / "ssd"), Rig(forgetting=0.05)
    async with opened_kv(config, rig) as (cache, kv):
        await store(kv, tokens)
        await kv.flush(tokens)
        rig.copies.fail("discard", StoreError("the disk is gone"), times=1_000)

        with pytest.raises(StoreError, match="restart may bring it back"):
            await cache.invalidate(model=SPACE.model)
        assert await read(kv, tokens) == 0
        rig.release()
        await cache.settle()
        assert await cache.invalidate(model=SPACE.model) == []
    async with opened_kv(config) as (_, kv):
        assert await read(kv, tokens) == 0


async def test_a_caller_that_goes_away_stops_nothing(tmp_path: Path, seed: int) -> None:
    """What has begun to be forgotten is forgotten."""
    tokens = prompt(seed, 4)
    config, rig = small(directory=tmp_path / "ssd"), Rig()
    async with opened(config) as cache:
        kv = await cache.open(SPACE, SPEC)
        await store(kv, tokens)
        await kv.flush(tokens)
    async with opened(config, rig) as cache:
        hold = rig.threads.hold("forget_closed")
        forgetting = asyncio.create_task(cache.invalidate(model=SPACE.model))
        await hold.reached()
        opening = asyncio.create_task(cache.open(SPACE, SPEC))
        forgetting.cancel()
        await asyncio.wait([forgetting])
        hold.release()

        assert forgetting.cancelled()
        assert await read(await opening, tokens) == 0, "who opens meanwhile waits, and finds nothing"
        await cache.check()
