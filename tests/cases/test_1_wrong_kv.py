"""Kind 1, wrong KV returned: W3 promised and not readable, W4 a prompt over three tiers, W5 a view that outlives its read.

W1 and W2 are in `test_1_identity`.
"""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest
import torch

from tests.seams import PATIENCE, Rig
from tests.service.caches import (
    LARGE,
    SIZE,
    SPEC,
    disk_of,
    durable_slots,
    is_exact,
    lower,
    opened_kv,
    placed,
    prompt,
    read,
    sink,
    small,
    stack_of,
    store,
    tensor_of,
)
from tiercache.config import Config
from tiercache.service.kv import LocalKV
from tiercache.spec import KVSpec
from tiercache.storage.contract import FULL_CHARGE
from tiercache.storage.ssd_values import Write
from tiercache.types import Tier

LONG = 60_000
"""Milliseconds that no test waits for."""
BAD = 5


def broken() -> OSError:
    """Return a disk's failure; a new one each time, as an error keeps what its traceback saw."""
    return OSError(errno.EIO, "injected")


def eight(folder: Path) -> Config:
    """Return tiers for 8 blocks of 16."""
    return small(hbm=8, dram=16, spec=LARGE, directory=folder / "ssd")


async def fetched(kv: LocalKV, tokens: list[int]) -> tuple[int, int, int]:
    """Fetch into a buffer of 0xEE; return what was promised, what was ready, and how much came, after comparing every byte."""
    out = torch.zeros(LARGE.shape(len(tokens)), dtype=torch.float32)
    out.view(torch.uint8).fill_(0xEE)
    async with kv.match(tokens) as hit:
        promised, ready = hit.tokens, await hit.ready()
        given = await hit.gather(out=out)
    valid = given.shape[2]
    assert is_exact(given, tokens, spec=LARGE)
    assert bool((out[:, :, valid:].contiguous().view(torch.uint8) == 0xEE).all()), "nothing is written that is not valid"
    return promised, ready, valid


# --- W3 -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damaged", [False, True], ids=["the disk fails", "the record is bad"])
@pytest.mark.parametrize("chunk", [None, 1], ids=["one piece", "a piece a block"])
async def test_w3_an_unreadable_page_in_the_middle(tmp_path: Path, seed: int, damaged: bool, chunk: int | None) -> None:
    """8 pages on disk, number 5 unreadable: valid is 80, and the next lookup says 80, for as long as the fault stands and after it.
    Who computed the rest can store it, and then all of it is there, also after a restart."""
    rig = Rig()
    rig.copies.chunk = chunk
    tokens = prompt(seed, 8)
    async with opened_kv(eight(tmp_path), rig, spec=LARGE) as (cache, kv):
        await store(kv, tokens)
        await sink(cache)
        slot = durable_slots(kv, tokens)[BAD]
        if damaged:
            values = disk_of(cache)._values[FULL_CHARGE]
            values.commit([Write(slot, 0, bytes(values.value_bytes))])
        else:
            rig.disk.fail("read", broken(), key=slot)

        first = await fetched(kv, tokens)
        await cache.settle()
        second = await fetched(kv, tokens)

        assert (first, second) == ((128, 80, 80), (80, 80, 80))
        assert sum(stack_of(cache).cache.stats.failures.values()) == 1
        await cache.check()
        rig.disk.release()
        assert await read(kv, tokens) == 80
        await kv.insert(tokens, tensor_of(tokens, spec=LARGE))
        assert await fetched(kv, tokens) == (128, 128, 128)
        assert await kv.flush(tokens) == 128
    async with opened_kv(eight(tmp_path), spec=LARGE) as (cache, kv):
        assert await fetched(kv, tokens) == (128, 128, 128)


async def test_w3_what_was_given_up_stays_so(tmp_path: Path, seed: int) -> None:
    """A restart right after the failure promises no more than the failure left."""
    rig = Rig()
    tokens = prompt(seed, 8)
    async with opened_kv(eight(tmp_path), rig, spec=LARGE) as (cache, kv):
        await store(kv, tokens)
        await sink(cache)
        rig.disk.fail("read", broken(), key=durable_slots(kv, tokens)[BAD])
        assert await fetched(kv, tokens) == (128, 80, 80)
    async with opened_kv(eight(tmp_path), spec=LARGE) as (_, kv):
        assert await fetched(kv, tokens) == (80, 80, 80)


async def test_w3_a_read_that_fails_once_is_tried_again(tmp_path: Path, seed: int) -> None:
    """One failure of the disk costs one more read, and nothing else."""
    rig = Rig()
    tokens = prompt(seed, 8)
    async with opened_kv(eight(tmp_path), rig, spec=LARGE) as (cache, kv):
        await store(kv, tokens)
        await sink(cache)
        slot = durable_slots(kv, tokens)[BAD]
        rig.disk.fail("read", broken(), key=slot, times=1)
        rig.disk.reads.clear()

        assert await fetched(kv, tokens) == (128, 128, 128)
        assert rig.disk.reads.count(slot) == 2
        assert not stack_of(cache).cache.stats.failures


@pytest.mark.parametrize("in_memory", [0, 3])
async def test_w3_a_disk_that_reads_nothing_is_not_promised(tmp_path: Path, seed: int, in_memory: int) -> None:
    """While no read succeeds, a lookup promises what memory holds, of every prompt, and nothing is given up."""
    rig = Rig(retry=1000.0)
    tokens, other = prompt(seed, 8), prompt(seed + 1, 2)
    async with opened_kv(eight(tmp_path), rig, spec=LARGE) as (cache, kv):
        await store(kv, other)
        await store(kv, tokens)
        await sink(cache)
        await kv.prefetch(tokens[: in_memory * SIZE])
        await cache.settle()
        rig.disk.fail("read", broken())

        found = [await fetched(kv, tokens), await fetched(kv, tokens), await fetched(kv, other)]
        held = placed(kv, tokens), placed(kv, other)

        readable = in_memory * SIZE
        assert found == [(128, readable, readable), (readable,) * 3, (0, 0, 0)]
        assert sum(held[0].values()) == 8 and held[1] == {Tier.SSD: 2}
        await cache.check()


async def test_w3_a_disk_that_reads_again_is_promised_again(tmp_path: Path, seed: int) -> None:
    """What could not be read for a while is all there afterwards."""
    rig = Rig(retry=0.02)
    tokens, other = prompt(seed, 8), prompt(seed + 1, 2)
    async with opened_kv(eight(tmp_path), rig, spec=LARGE) as (cache, kv):
        await store(kv, other)
        await store(kv, tokens)
        await sink(cache)
        rig.disk.fail("read", broken())
        assert (await fetched(kv, tokens))[1:] == (0, 0)
        rig.disk.release()

        async with asyncio.timeout(PATIENCE):
            while await read(kv, tokens) < 128 or await read(kv, other) < 32:
                await stack_of(cache).mover.change(0.05)
        await cache.check()


async def test_w3_a_page_alone_is_given_up(tmp_path: Path, seed: int) -> None:
    """With no other page beside it to tell its failure from the disk's, it is the page's, and is not promised again."""
    rig = Rig(retry=1000.0)
    tokens = prompt(seed, 1)
    async with opened_kv(eight(tmp_path), rig, spec=LARGE) as (cache, kv):
        await store(kv, tokens)
        await sink(cache)
        rig.disk.fail("read", broken())

        found = [await fetched(kv, tokens) for _ in range(2)]

        assert found == [(16, 0, 0), (0, 0, 0)] and placed(kv, tokens) == {}
        await cache.check()


async def test_w3_a_lease_holds_what_it_promised(tmp_path: Path, seed: int) -> None:
    """After the lookup all tiers are filled with others: the fetch still yields all 128."""
    tokens = prompt(seed, 8)
    async with opened_kv(small(hbm=8, dram=16, ssd=24, directory=tmp_path / "ssd", admit_ms=LONG)) as (cache, kv):
        await store(kv, tokens)
        await sink(cache)
        async with kv.match(tokens) as hit:
            for number in range(1, 12):
                await kv.insert(prompt(seed + number, 4), tensor_of(prompt(seed + number, 4)))
            assert is_exact(await hit.gather(), tokens) and hit.tokens == 128
            assert await hit.ready() == 128
        await cache.settle()
        await cache.check()


# --- W4 -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["whole", "split in HBM", "a bad block"])
async def test_w4_a_prompt_over_three_tiers_is_put_back_in_order(tmp_path: Path, seed: int, shape: str) -> None:
    """Blocks 0-3 in HBM, 4-6 in DRAM, 7-9 on SSD: block i is the oracle's block i; with block 7 unreadable there are 7."""
    rig = Rig()
    tokens = prompt(seed, 10)
    config = small(hbm=16, dram=16, spec=LARGE, directory=tmp_path / "ssd")
    async with opened_kv(config, rig, spec=LARGE) as (cache, kv):
        await store(kv, tokens)
        await lower(cache, Tier.HBM, 6)
        await lower(cache, Tier.DRAM, 3)
        assert placed(kv, tokens) == {Tier.HBM: 4, Tier.DRAM: 3, Tier.SSD: 3}
        if shape == "split in HBM":
            await store(kv, tokens[: 2 * SIZE] + prompt(seed + 1, 2))
        if shape == "a bad block":
            rig.disk.fail("read", broken(), key=durable_slots(kv, tokens)[7])
        expected = 7 if shape == "a bad block" else 10

        async with kv.match(tokens) as hit:
            promised = dict(hit.tiers)
            given = await hit.gather()
            views = [torch.stack(hit.view(block, 0)) for block in range(expected)]

        assert promised == {Tier.HBM: 4 * SIZE, Tier.DRAM: 3 * SIZE, Tier.SSD: 3 * SIZE}
        assert given.shape[2] == expected * SIZE and is_exact(given, tokens, spec=LARGE)
        assert torch.equal(torch.cat(views, dim=1).view(torch.uint8), given[0].contiguous().view(torch.uint8))
        assert await kv.prefetch(tokens) == expected * SIZE
        await cache.settle()
        assert placed(kv, tokens) == {Tier.HBM: expected}
        assert await read(kv, tokens) == expected * SIZE
        await cache.check()


# --- W5 -------------------------------------------------------------------------------------------------------------------------

RECORD = KVSpec(layers=4, kv_heads=8, head_dim=48, dtype="bfloat16", block_size=16)
"""Blocks of 98,304 bytes."""


@pytest.mark.parametrize("step", ["read", "copy"], ids=["before it is found", "found and not copied"])
@pytest.mark.parametrize("spec", [RECORD, SPEC], ids=["a record of 98 kB", "records that share a value"])
async def test_w5_a_record_is_exact_though_others_are_written_over_meanwhile(
    tmp_path: Path, seed: int, step: str, spec: KVSpec
) -> None:
    """A fetch is paused between 'found in the store' and 'copied into the host slot'; 20 other records are overwritten, deleted and
    inserted, also in its own value; then it goes on: its bytes are the oracle's, and so are all others'."""
    rig = Rig()
    tokens = prompt(seed, 1)
    others = {number: prompt(seed + number, 1) for number in range(1, 41)}
    config = small(hbm=8, dram=64, ssd=1024 if spec is SPEC else 64, spec=spec, directory=tmp_path / "ssd", promote_ms=LONG)
    async with opened_kv(config, rig, spec=spec) as (cache, kv):
        await store(kv, tokens)
        await kv.flush(tokens)  # first, so that those that are deleted lie beside it
        for number in range(1, 21):
            await store(kv, others[number])
            await kv.flush(others[number])
        await sink(cache)
        hold = rig.disk.hold(step)  # nothing else is read while it stands
        fetching = asyncio.create_task(read(kv, tokens))
        await hold.reached()

        for number in range(1, 11):
            assert await kv.delete(others[number]) == SIZE
        for number in range(21, 41):
            await store(kv, others[number])
            assert await kv.flush(others[number]) == SIZE
        for number in range(1, 6):  # what was deleted is written again, into other records' room
            await store(kv, others[number])
            assert await kv.flush(others[number]) == SIZE
        standing = not fetching.done()
        hold.release()

        assert standing and await fetching == SIZE
        await sink(cache)
        assert await read(kv, tokens) == SIZE
        there = [number for number in others if await read(kv, others[number])]
        assert there == [*range(1, 6), *range(11, 41)]
        await cache.check()
