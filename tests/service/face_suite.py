"""What every implementation of the face promises (`tiercache.service.face`), as tests that know nothing behind it: the calls.

What is kept, and whose it is, is in `face_suite_keeping`.

What a reader waits for is in `face_suite_prefetch`.

A test module inherits the classes and gives the fixture `open_cache`: a function from a configuration to an async context
manager with an `Opened`. Opening the same directory again is a restart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import numpy as np
import pytest
import torch

from tests.service.caches import SIZE, SPACE, SPEC, is_exact, kv_bytes, prompt, read, small, store, tensor_of
from tiercache.errors import InvalidInput, InvalidStart, InvalidTensor, LeaseReleased
from tiercache.service.face import KV
from tiercache.spec import KVSpec, Namespace
from tiercache.types import Tier


class Opened(Protocol):
    """A cache as these tests use it."""

    async def open(self, space: Namespace, spec: KVSpec) -> KV:
        """Return the KV of a namespace."""
        ...

    async def check(self) -> Mapping[str, int]:
        """Audit the books; return how many leases live, among others."""
        ...

    async def settle(self) -> None:
        """Wait until nothing moves."""
        ...

    async def matches(self) -> int:
        """Return how many matches were counted."""
        ...


OpenCache = Callable[..., AbstractAsyncContextManager[Opened]]
"""Called with a Config, and with a Rig where something is to be held; what is held is let go before the end."""


class ReadingSuite:
    """Match, and what a hit gives."""

    async def test_a_match_is_the_longest_cached_prefix(self, open_cache: OpenCache, seed: int) -> None:
        """Longer, shorter and diverging prompts find whole blocks of what they share, and exactly those bytes."""
        tokens = prompt(seed, 5)
        other = tokens[: 3 * SIZE + 5] + prompt(seed + 1, 2)
        async with open_cache(small(ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            await store(kv, tokens)

            prompts = [tokens, prompt(seed, 7, 3), tokens[: 2 * SIZE + 3], other, prompt(seed + 1, 2)]
            found = [await read(kv, asked) for asked in prompts]

            assert found == [5 * SIZE, 5 * SIZE, 2 * SIZE, 3 * SIZE, 0]
            assert (await cache.check())["leases"] == 0

    async def test_a_hit_says_what_it_found_and_where(self, open_cache: OpenCache, seed: int) -> None:
        """`tokens` and `tiers` are there with the lease, `ready` after the promotion."""
        async with open_cache(small(ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            await store(kv, prompt(seed, 5))

            async with kv.match(prompt(seed, 6)) as hit:
                promised = hit.tokens, dict(hit.tiers)
                ready = await hit.ready()

            assert promised == (5 * SIZE, {Tier.HBM: 5 * SIZE})
            assert ready == 5 * SIZE

    async def test_a_layer_is_the_callers_own(self, open_cache: OpenCache, seed: int) -> None:
        """Each layer's K and V are the oracle's, and writing to them changes nothing in the cache."""
        tokens = prompt(seed, 3)
        expected = tensor_of(tokens)
        async with open_cache(small(ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            await store(kv, tokens)

            async with kv.match(tokens) as hit:
                layers = [await hit.layer(layer) for layer in range(SPEC.layers)]

            for layer, (k, v) in enumerate(layers):
                assert k.shape == v.shape == (3 * SIZE, SPEC.kv_heads, SPEC.head_dim)
                assert np.array_equal(kv_bytes(torch.stack((k, v))[None]), kv_bytes(expected[layer : layer + 1]))
                k.zero_()
                v.zero_()
            assert await read(kv, tokens) == 3 * SIZE

    async def test_a_layer_comes_to_where_the_caller_wants_it(self, open_cache: OpenCache, seed: int) -> None:
        """Layers fill the leading part of one larger tensor, and leave the rest; another shape or type is refused by name."""
        tokens = prompt(seed, 3)
        out = torch.full(SPEC.shape(5 * SIZE), 7.5, dtype=torch.float16)
        async with open_cache(small(ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            await store(kv, tokens)

            async with kv.match(tokens) as hit:
                for layer in range(SPEC.layers):
                    k, v = await hit.layer(layer, out=out[layer])
                    assert (k.data_ptr(), v.data_ptr()) == (out[layer, 0].data_ptr(), out[layer, 1].data_ptr())
                    assert k.shape == v.shape == (3 * SIZE, SPEC.kv_heads, SPEC.head_dim)
                wrongs: list[Any] = [out, out[0, :, :SIZE], out[0].to(torch.float32), out[0].transpose(1, 3), [1]]
                for wrong in wrongs:
                    with pytest.raises(InvalidTensor, match="out"):
                        await hit.layer(0, out=wrong)

            assert is_exact(out[:, :, : 3 * SIZE], tokens)
            assert bool((out[:, :, 3 * SIZE :] == 7.5).all())

    async def test_a_view_is_in_place(self, open_cache: OpenCache, seed: int) -> None:
        """Every layer of every block can be read where it lies, also of a prompt that spilled into the next tier."""
        tokens = prompt(seed, 6)
        expected = tensor_of(tokens)
        async with open_cache(small(hbm=4, dram=4, ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            await store(kv, tokens)

            async with kv.match(tokens) as hit:
                assert await hit.ready() == 6 * SIZE
                for block in range(6):
                    for layer in range(SPEC.layers):
                        seen = torch.stack(hit.view(block, layer))[None]
                        part = expected[layer : layer + 1, :, block * SIZE : (block + 1) * SIZE]
                        assert np.array_equal(kv_bytes(seen), kv_bytes(part))

    async def test_gather_fills_the_leading_part_of_a_larger_tensor(self, open_cache: OpenCache, seed: int) -> None:
        """What is returned lies in `out`; what comes after it is as it was."""
        tokens = prompt(seed, 3)
        out = torch.full(SPEC.shape(5 * SIZE), 7.5, dtype=torch.float16)
        async with open_cache(small(ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            await store(kv, tokens)

            async with kv.match(tokens) as hit:
                given = await hit.gather(out=out)

            assert given.data_ptr() == out.data_ptr() and given.shape[2] == 3 * SIZE
            assert is_exact(out[:, :, : 3 * SIZE], tokens)
            assert bool((out[:, :, 3 * SIZE :] == 7.5).all())

    async def test_take_keeps_the_first_tokens(self, open_cache: OpenCache, seed: int) -> None:
        """`take` rounds down to whole blocks, never grows, and what it gave up is not read any more."""
        tokens = prompt(seed, 4)
        async with open_cache(small(ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            await store(kv, tokens)

            async with kv.match(tokens) as hit:
                taken = [hit.take(1 << 20), hit.take(3 * SIZE + 5), hit.take(4 * SIZE)]
                tensor = await hit.gather()
                with pytest.raises(InvalidInput):
                    hit.view(3, 0)
                nothing = hit.take(SIZE - 1)

            assert taken == [4 * SIZE, 3 * SIZE, 3 * SIZE] and nothing == 0
            assert is_exact(tensor, tokens) and tensor.shape[2] == 3 * SIZE
            assert (await cache.check())["leases"] == 0

    async def test_a_released_hit_gives_nothing(self, open_cache: OpenCache, seed: int) -> None:
        """After its end, and before its beginning, every method says so; one release too many is an error and no more."""
        tokens = prompt(seed, 2)
        async with open_cache(small(ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            await store(kv, tokens)
            ended = kv.match(tokens)
            async with ended:
                await ended.release()

            for hit in (ended, kv.match(tokens)):
                for call in (hit.ready, hit.gather, hit.release, lambda hit=hit: hit.layer(0)):
                    with pytest.raises(LeaseReleased):
                        await call()
                with pytest.raises(LeaseReleased):
                    hit.view(0, 0)
                with pytest.raises(LeaseReleased):
                    hit.take(SIZE)
                with pytest.raises(LeaseReleased):
                    _ = hit.tokens
            with pytest.raises(LeaseReleased):
                await ended.__aenter__()
            assert (await cache.check())["leases"] == 0
            assert await read(kv, tokens) == 2 * SIZE

    async def test_a_request_asks_once(self, open_cache: OpenCache, seed: int) -> None:
        """A second match under one name, while the first is held, shares its lease and is not counted."""
        tokens = prompt(seed, 3)
        async with open_cache(small(ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            await store(kv, tokens)
            before = await cache.matches()

            async with kv.match(tokens, request="r1") as first, kv.match(tokens, request="r1") as second:
                shared = (await cache.check())["leases"]
                assert first.tokens == second.tokens == 3 * SIZE
                await first.release()
                still = (await cache.check())["leases"]
                assert is_exact(await second.gather(), tokens)
            async with kv.match(tokens, request="r1"), kv.match(tokens, request="r2"):
                apart = (await cache.check())["leases"]

            assert (shared, still, apart) == (1, 1, 2)
            assert await cache.matches() - before == 3
            assert (await cache.check())["leases"] == 0

    async def test_one_name_for_two_prompts_is_two_leases(self, open_cache: OpenCache, seed: int) -> None:
        """A name that comes back with another prompt never gives the bytes of the first."""
        one, two = prompt(seed, 3), prompt(seed + 1, 2)
        async with open_cache(small(ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            await store(kv, one)
            await store(kv, two)

            async with kv.match(one, request="r") as first, kv.match(two, request="r") as second:
                assert is_exact(await first.gather(), one) and first.tokens == 3 * SIZE
                assert is_exact(await second.gather(), two) and second.tokens == 2 * SIZE


class WritingSuite:
    """Insert, reserve and commit."""

    @pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 31, 33])
    async def test_whole_blocks_are_stored(self, open_cache: OpenCache, seed: int, count: int) -> None:
        """A prompt of any length stores its whole blocks and nothing else, and is found as such."""
        tokens = prompt(seed, 3)[:count]
        async with open_cache(small(ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)

            outcome = await kv.insert(tokens, tensor_of(tokens))

            assert outcome == (count // SIZE * SIZE, 0, 0)
            assert await read(kv, tokens) == count // SIZE * SIZE
            assert (await cache.check())["blocks"] == count // SIZE

    async def test_insert_says_what_became_of_it(self, open_cache: OpenCache, seed: int) -> None:
        """Stored, present and refused add up to the whole blocks after `start`; the same insert five times stores once."""
        tokens = prompt(seed, 6)
        async with open_cache(small(hbm=4, dram=4, ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            first = await kv.insert(tokens[: 2 * SIZE], tensor_of(tokens[: 2 * SIZE]))
            again = [await kv.insert(tokens[: 2 * SIZE], tensor_of(tokens[: 2 * SIZE])) for _ in range(4)]
            longer = await kv.insert(tokens, tensor_of(tokens))
            async with kv.match(tokens) as held:
                assert held.tokens == 6 * SIZE
                crowded = prompt(seed + 1, 5)
                refused = await kv.insert(crowded, tensor_of(crowded))

            assert first == (2 * SIZE, 0, 0) and again == [(0, 2 * SIZE, 0)] * 4
            assert longer == (4 * SIZE, 2 * SIZE, 0)
            assert refused == (2 * SIZE, 0, 3 * SIZE)
            assert await read(kv, tokens) == 6 * SIZE
            assert await read(kv, crowded) == 2 * SIZE
            await cache.check()

    async def test_insert_goes_on_from_a_hit(self, open_cache: OpenCache, seed: int) -> None:
        """With `start=hit.tokens` only the rest is handed over; a start inside the cached part is as good."""
        tokens = prompt(seed, 6, 7)
        async with open_cache(small(ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            await store(kv, tokens[: 3 * SIZE])

            async with kv.match(tokens) as hit:
                first = await kv.insert(tokens, tensor_of(tokens, start=hit.tokens), start=hit.tokens)
            second = await kv.insert(tokens, tensor_of(tokens, start=SIZE), start=SIZE)

            assert first == (3 * SIZE, 0, 0) and second == (0, 5 * SIZE, 0)
            assert await read(kv, tokens) == 6 * SIZE

    async def test_a_long_prompt_spills_into_the_next_tier(self, open_cache: OpenCache, seed: int) -> None:
        """What the fastest tier can't hold goes to the next one; what none can hold is refused; all of it reads in order."""
        tokens = prompt(seed, 14)
        async with open_cache(small(hbm=4, dram=6, ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)

            outcome = await kv.insert(tokens, tensor_of(tokens))

            assert outcome == (10 * SIZE, 0, 4 * SIZE)
            async with kv.match(tokens) as hit:
                assert hit.tiers == {Tier.HBM: 4 * SIZE, Tier.DRAM: 6 * SIZE}
            assert await read(kv, tokens) == 10 * SIZE

    async def test_an_insert_can_name_its_tier(self, open_cache: OpenCache, seed: int) -> None:
        """`tier=` puts the blocks there, though a faster tier has room."""
        tokens = prompt(seed, 2)
        async with open_cache(small(ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            await store(kv, tokens, tier=Tier.DRAM)

            async with kv.match(tokens) as hit:
                assert hit.tiers == {Tier.DRAM: 2 * SIZE}
                assert is_exact(await hit.gather(), tokens)

    async def test_blocks_are_written_in_place_and_committed_in_parts(self, open_cache: OpenCache, seed: int) -> None:
        """Only what was committed is found, as soon as it was; leaving gives the rest back."""
        tokens = prompt(seed, 6)
        data = tensor_of(tokens)
        async with open_cache(small(ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            await store(kv, tokens[: 2 * SIZE])

            async with kv.match(tokens) as hit, kv.reserve(tokens, after=hit) as room:
                assert (room.present, room.pending, len(room.blocks)) == (2 * SIZE, 0, 4)
                for number, block in enumerate(room.blocks[:3]):
                    block.copy_(data[:, :, (2 + number) * SIZE : (3 + number) * SIZE])
                counts = [await room.commit(3 * SIZE), await room.commit(3 * SIZE + 5), await room.commit(5 * SIZE)]
                found = await read(kv, tokens)

            assert counts == [3 * SIZE, 3 * SIZE, 5 * SIZE] and found == 5 * SIZE
            assert await read(kv, tokens) == 5 * SIZE
            assert await cache.check() == {"nodes": 3, "blocks": 5, "leases": 0}
            for call in (lambda: room.present, lambda: room.blocks):
                with pytest.raises(LeaseReleased):
                    call()
            with pytest.raises(LeaseReleased):
                await room.commit(6 * SIZE)

    async def test_what_is_not_committed_is_not_found(self, open_cache: OpenCache, seed: int) -> None:
        """A room that is left, also by an exception, leaves nothing behind, and the same blocks can be written by the next."""
        tokens = prompt(seed, 4)
        async with open_cache(small(ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)

            async def stumble() -> None:
                async with kv.reserve(tokens) as room:
                    room.blocks[0].fill_(1)
                    raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await stumble()

            assert await cache.check() == {"nodes": 0, "blocks": 0, "leases": 0}
            assert await read(kv, tokens) == 0
            await store(kv, tokens)
            assert await read(kv, tokens) == 4 * SIZE

    async def test_the_second_writer_of_a_block_is_told(self, open_cache: OpenCache, seed: int) -> None:
        """`pending` says how much of the prompt the first one holds; what diverges before that is not pending."""
        tokens, other = prompt(seed, 4), prompt(seed, 2) + prompt(seed + 1, 2)
        async with open_cache(small(ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)

            async with (
                kv.reserve(tokens),
                kv.reserve(tokens) as second,
                kv.reserve(other) as third,
                kv.reserve(prompt(seed + 2, 2)) as fourth,
            ):
                assert (second.pending, len(second.blocks)) == (4 * SIZE, 0)
                assert (third.pending, len(third.blocks)) == (2 * SIZE, 0)
                assert (fourth.pending, len(fourth.blocks)) == (0, 2)
            async with kv.reserve(tokens) as later:
                assert (later.pending, len(later.blocks)) == (0, 4)
            await cache.check()

    async def test_an_insert_waits_for_the_writer_before_it(self, open_cache: OpenCache, seed: int) -> None:
        """What the first writer commits is present then, what it leaves out is stored, and nothing is there twice."""
        tokens = prompt(seed, 4)
        data = tensor_of(tokens)
        async with open_cache(small(ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            async with kv.reserve(tokens) as room:
                waiting = asyncio.create_task(kv.insert(tokens, data))
                for number, block in enumerate(room.blocks):
                    block.copy_(data[:, :, number * SIZE : (number + 1) * SIZE])
                await room.commit(3 * SIZE)

            outcome = await waiting

            assert outcome == (SIZE, 3 * SIZE, 0)
            assert await read(kv, tokens) == 4 * SIZE
            assert (await cache.check())["blocks"] == 4

    async def test_a_commit_outside_the_room_is_refused(self, open_cache: OpenCache, seed: int) -> None:
        """`upto` before what is committed or after the room's end names the range, and the room goes on."""
        tokens = prompt(seed, 3)
        data = tensor_of(tokens)
        async with open_cache(small(ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            async with kv.reserve(tokens) as room:
                for number, block in enumerate(room.blocks):
                    block.copy_(data[:, :, number * SIZE : (number + 1) * SIZE])
                await room.commit(2 * SIZE)
                for upto in (SIZE, 5 * SIZE, -1, True, 48.0):
                    with pytest.raises(InvalidStart, match=f"not {upto}"):
                        await room.commit(upto)  # type: ignore[arg-type]
                assert await room.commit(3 * SIZE) == 3 * SIZE

            assert await read(kv, tokens) == 3 * SIZE
