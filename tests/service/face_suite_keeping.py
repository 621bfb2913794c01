"""What every implementation of the face promises about what is kept, and whose it is. See `face_suite`."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.seams import PATIENCE
from tests.service.caches import LARGE, SIZE, SPACE, SPEC, is_exact, kv_bytes, prompt, read, small, store, tensor_of
from tests.service.face_suite import OpenCache
from tiercache.config import Config, Share
from tiercache.errors import Closed
from tiercache.spec import KVSpec, Namespace
from tiercache.types import Tier


class KeepingSuite:
    """Flush, prefetch, pin, delete, clear, and what a restart finds."""

    async def test_what_was_flushed_is_there_after_a_restart(self, open_cache: OpenCache, tmp_path: Path, seed: int) -> None:
        """`flush` says how much is durable; a later life finds it, and `prefetch` brings it into memory before it is asked for."""
        tokens = prompt(seed, 5, 3)
        config = small(directory=tmp_path / "ssd")
        async with open_cache(config) as cache:
            kv = await cache.open(SPACE, SPEC)
            nothing = await kv.flush(tokens)
            await store(kv, tokens)
            durable = [await kv.flush(tokens[: 2 * SIZE]), await kv.flush(tokens), await kv.flush(prompt(seed + 1, 2))]

        async with open_cache(config) as cache:
            kv = await cache.open(SPACE, SPEC)
            async with kv.match(tokens[: 2 * SIZE]) as hit:
                assert hit.tiers == {Tier.SSD: 2 * SIZE}
            await cache.settle()
            fetched = await kv.prefetch(tokens)
            await cache.settle()
            async with kv.match(tokens) as hit:
                assert hit.tiers == {Tier.HBM: 5 * SIZE}
            assert await read(kv, tokens) == 5 * SIZE
            await cache.check()

        assert nothing == 0 and durable == [2 * SIZE, 5 * SIZE, 0] and fetched == 5 * SIZE

    async def test_nothing_is_durable_without_a_durable_tier(self, open_cache: OpenCache, seed: int) -> None:
        """Without SSD `flush` answers 0, truthfully."""
        async with open_cache(small(ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            await store(kv, prompt(seed, 2))

            assert await kv.flush(prompt(seed, 2)) == 0

    async def test_a_flush_says_how_much_there_is_room_for(self, open_cache: OpenCache, tmp_path: Path, seed: int) -> None:
        """Of a prompt longer than SSD the beginning is durable; two flushes at once write each block once."""
        tokens = prompt(seed, 6)
        config = small(hbm=8, dram=8, ssd=4, spec=LARGE, directory=tmp_path / "ssd")
        async with open_cache(config) as cache:
            kv = await cache.open(SPACE, LARGE)
            await store(kv, tokens)

            flushes = [asyncio.ensure_future(kv.flush(tokens[: count * SIZE])) for count in (2, 6, 3)]
            counts = [await flush for flush in flushes]

            assert counts == [2 * SIZE, 4 * SIZE, 3 * SIZE]
            assert await read(kv, tokens) == 6 * SIZE
            await cache.check()
        async with open_cache(config) as cache:
            assert await read(await cache.open(SPACE, LARGE), tokens) == 4 * SIZE

    async def test_a_pinned_prompt_stays(self, open_cache: OpenCache, seed: int) -> None:
        """Under pressure everything else goes; `ttl=0` ends the pin, and so does its time."""
        tokens = prompt(seed, 3)
        async with open_cache(small(hbm=None, dram=6, ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            await store(kv, tokens)
            pinned = [await kv.pin(tokens, ttl=3600.0), await kv.pin(tokens, ttl=3600.0)]
            for number in range(1, 4):
                await store(kv, prompt(seed + number, 3))
            kept = await read(kv, tokens)
            ended = await kv.pin(tokens, ttl=0)
            for number in range(4, 7):
                await store(kv, prompt(seed + number, 3))
            gone = await read(kv, tokens)
            await store(kv, tokens)
            await kv.pin(tokens, ttl=0.001)
            async with asyncio.timeout(PATIENCE):
                while await read(kv, tokens):
                    for number in range(7, 10):
                        await store(kv, prompt(seed + number, 3))

            assert pinned == [3 * SIZE] * 2 and (kept, ended, gone) == (3 * SIZE, 0, 0)
            assert (await cache.check())["leases"] == 0

    async def test_delete_takes_a_prompt_and_leaves_what_others_share(
        self, open_cache: OpenCache, tmp_path: Path, seed: int
    ) -> None:
        """Not found at once, not after a restart; new bytes under the old tokens are the only ones that come back."""
        one, two = prompt(seed, 4), prompt(seed, 2) + prompt(seed + 1, 3)
        config = small(directory=tmp_path / "ssd")
        async with open_cache(config) as cache:
            kv = await cache.open(SPACE, SPEC)
            await store(kv, one)
            await store(kv, two)
            await kv.flush(one)
            await kv.flush(two)

            removed = await kv.delete(one)
            again = await kv.delete(one)

            assert removed == 2 * SIZE and again == 0
            assert await read(kv, one) == 2 * SIZE and await read(kv, two) == 5 * SIZE
        async with open_cache(config) as cache:
            kv = await cache.open(SPACE, SPEC)
            assert await read(kv, one) == 2 * SIZE and await read(kv, two) == 5 * SIZE
            assert await kv.delete(two) == 5 * SIZE
            assert await read(kv, one) == 0
            renewed = -tensor_of(one)
            await kv.insert(one, renewed)
            async with kv.match(one) as hit:
                assert np.array_equal(kv_bytes(await hit.gather()), kv_bytes(renewed))
            await cache.check()

    async def test_clear_takes_one_namespace(self, open_cache: OpenCache, tmp_path: Path, seed: int) -> None:
        """Everything of it is gone, at once and after a restart, and nothing of its neighbour."""
        other = Namespace(model="m", weights="sha256:1", salt="tenant")
        tokens, more = prompt(seed, 4), prompt(seed + 1, 3)
        config = small(hbm=16, directory=tmp_path / "ssd")
        async with open_cache(config) as cache:
            kv, neighbour = await cache.open(SPACE, SPEC), await cache.open(other, SPEC)
            for each in (tokens, more):
                await store(kv, each)
                await kv.flush(each)
            await store(neighbour, tokens, space=other)
            await neighbour.flush(tokens)

            cleared = [await kv.clear(), await kv.clear()]

            assert cleared == [7 * SIZE, 0]
            assert [await read(kv, each) for each in (tokens, more)] == [0, 0]
            assert await read(neighbour, tokens, space=other) == 4 * SIZE
        async with open_cache(config) as cache:
            kv, neighbour = await cache.open(SPACE, SPEC), await cache.open(other, SPEC)
            assert await read(kv, tokens) == 0
            assert await read(neighbour, tokens, space=other) == 4 * SIZE
            await store(kv, tokens)
            assert await read(kv, tokens) == 4 * SIZE

    async def test_a_leased_prompt_outlives_its_deletion(self, open_cache: OpenCache, seed: int) -> None:
        """Who holds a lease reads on, exactly; nobody else finds it, and the slots are free with the lease."""
        tokens = prompt(seed, 4)
        async with open_cache(small(hbm=None, dram=8, ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            await store(kv, tokens)

            async with kv.match(tokens) as hit:
                assert await kv.clear() == 4 * SIZE
                missed = await read(kv, tokens)
                await store(kv, prompt(seed + 1, 4))
                assert is_exact(await hit.gather(), tokens) and hit.tokens == 4 * SIZE
                await cache.check()

            assert missed == 0
            await store(kv, prompt(seed + 2, 8))
            assert (await cache.check())["blocks"] == 8

    async def test_after_its_end_a_cache_says_closed(self, open_cache: OpenCache, seed: int) -> None:
        """Every call on what a closed cache gave out is refused by name; tensors that were read stay good."""
        tokens = prompt(seed, 2)
        async with open_cache(small(ssd=None)) as cache:
            kv = await cache.open(SPACE, SPEC)
            await store(kv, tokens)
            async with kv.match(tokens) as hit:
                tensor = await hit.gather()
        calls: list[Callable[[], Any]] = [
            lambda: kv.insert(tokens, tensor_of(tokens)),
            lambda: kv.flush(tokens),
            lambda: kv.prefetch(tokens),
            lambda: kv.pin(tokens, ttl=1.0),
            lambda: kv.delete(tokens),
            kv.clear,
            lambda: kv.match(tokens).__aenter__(),
            lambda: kv.reserve(tokens).__aenter__(),
            lambda: cache.open(SPACE, SPEC),
        ]

        for call in calls:
            with pytest.raises(Closed):
                await call()
        assert is_exact(tensor, tokens)


class IdentitySuite:
    """Namespaces and layouts that must never share a block, and layouts and tiers of every kind."""

    async def test_namespaces_share_nothing(self, open_cache: OpenCache, tmp_path: Path, seed: int) -> None:
        """One field changed at a time: the other's blocks are not found, both read back exact, also after a restart."""
        spaces = [
            SPACE,
            Namespace(model="n", weights="sha256:1"),
            Namespace(model="m", weights="sha256:2"),
            *(Namespace(model="m", weights="sha256:1", adapter=text) for text in ("", "a@1", "a@2", "é", "e\u0301")),
            *(Namespace(model="m", weights="sha256:1", salt=text) for text in ("", "a@1", "../../x", "\0")),
        ]
        tokens = prompt(seed, 2)
        config = small(hbm=len(spaces) * 2, dram=8, ssd=64, directory=tmp_path / "ssd")
        async with open_cache(config) as cache:
            for space in spaces:
                kv = await cache.open(space, SPEC)
                assert await read(kv, tokens, space=space) == 0
                await store(kv, tokens, space=space)
            for space in spaces:
                assert await read(await cache.open(space, SPEC), tokens, space=space) == 2 * SIZE
            await cache.check()
        async with open_cache(config) as cache:
            for space in spaces:
                assert await read(await cache.open(space, SPEC), tokens, space=space) == 2 * SIZE

    async def test_layouts_share_nothing(self, open_cache: OpenCache, tmp_path: Path, seed: int) -> None:
        """The same namespace under another dtype, depth, heads or block size finds nothing of the first, and each reads its own."""
        base = KVSpec(layers=4, kv_heads=2, head_dim=32, dtype="float16", block_size=16)
        specs = [
            base,
            dataclasses.replace(base, layers=5),
            dataclasses.replace(base, kv_heads=4),
            dataclasses.replace(base, block_size=32, layers=3),
            dataclasses.replace(base, dtype="float32", layers=6),
        ]
        tokens = prompt(seed, 4)
        shares = tuple(Share(block_bytes=spec.block_bytes, fraction=0.2) for spec in specs)
        config = Config.of(hbm="2 MiB", dram="2 MiB", ssd="8 MiB", directory=str(tmp_path / "ssd"), shares=shares)
        for _ in range(2):
            async with open_cache(config) as cache:
                for spec in specs:
                    kv = await cache.open(SPACE, spec)
                    if not await read(kv, tokens):
                        await store(kv, tokens)
                for spec in specs:
                    assert await read(await cache.open(SPACE, spec), tokens) == 4 * SIZE
                await cache.check()

    async def test_block_sizes_of_one_geometry_keep_apart(self, open_cache: OpenCache, seed: int) -> None:
        """Two layouts whose blocks have the same bytes share slots, but each is written and read in blocks of its own size."""
        narrow = KVSpec(layers=2, kv_heads=4, head_dim=32, dtype="float32", block_size=4)
        wide = KVSpec(layers=2, kv_heads=2, head_dim=32, dtype="float32", block_size=8)
        assert narrow.geometry == wide.geometry
        other = Namespace(model="other", weights="sha256:1")
        tokens = prompt(seed, 3)
        async with open_cache(small(hbm=32, ssd=None, spec=narrow)) as cache:
            for space, spec in ((SPACE, narrow), (other, wide)):
                kv = await cache.open(space, spec)
                await store(kv, tokens[:16], space=space)
                await store(kv, tokens, space=space)
                assert await read(kv, tokens, space=space) == 48

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"])
    @pytest.mark.parametrize(("latent", "block_size"), [(False, 16), (True, 16), (False, 1), (True, 1)])
    async def test_layouts_of_every_kind(
        self, open_cache: OpenCache, tmp_path: Path, seed: int, dtype: str, latent: bool, block_size: int
    ) -> None:
        """Every dtype, split or latent, in blocks of many tokens or of one, is exact from every tier and layer by layer."""
        width = 4096 // block_size // (8 if block_size == 1 else 1)
        head = width // {"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 1)
        spec = KVSpec(layers=3, kv_heads=1, head_dim=head, dtype=dtype, block_size=block_size, latent=latent)
        tokens = prompt(seed, 10 * block_size, block_size - 1, size=1)
        config = small(hbm=4, dram=12, ssd=64, spec=spec, directory=tmp_path / "ssd", admit_ms=60_000, promote_ms=60_000)
        async with open_cache(config) as cache:
            kv = await cache.open(SPACE, spec)
            await store(kv, tokens)
            await store(kv, prompt(seed + 1, 6 * block_size, size=1))
            assert await read(kv, tokens) == 10 * block_size
            async with kv.match(tokens) as hit:
                await hit.ready()
                layers = [torch.stack(await hit.layer(layer)) for layer in range(3)]
            assert is_exact(torch.stack(layers), tokens, spec=spec)
            await cache.check()

    @pytest.mark.parametrize("codec", ["raw", "zstd"])
    @pytest.mark.parametrize(
        "tiers",
        [(4, 8, 64), (None, 8, 64), (4, None, 64), (4, 8, None), (None, 24, None), (24, None, None)],
        ids=["HBM DRAM SSD", "DRAM SSD", "HBM SSD", "HBM DRAM", "DRAM", "HBM"],
    )
    @pytest.mark.parametrize("spec", [SPEC, LARGE], ids=["grouped", "alone"])
    async def test_tiers_of_every_kind(
        self, open_cache: OpenCache, tmp_path: Path, seed: int, tiers: tuple[int | None, ...], codec: str, spec: KVSpec
    ) -> None:
        """With any choice of tiers, what is found is exact; with SSD nothing is lost, and a restart finds all of it."""
        hbm, dram, ssd = tiers
        config = small(
            hbm=hbm, dram=dram, ssd=ssd, spec=spec, directory=tmp_path / "ssd", codec=codec, admit_ms=60_000, promote_ms=60_000
        )
        prompts = [prompt(seed + number, 3, number) for number in range(7)]
        async with open_cache(config) as cache:
            kv = await cache.open(SPACE, spec)
            for tokens in prompts:
                await store(kv, tokens)
            newest = await read(kv, prompts[-1])
            found = [await read(kv, tokens) for tokens in prompts]
            await cache.settle()
            await cache.check()

        assert newest == 3 * SIZE
        assert found == [3 * SIZE] * 7 or not (ssd or 24 in tiers)
        async with open_cache(config) as cache:
            kv = await cache.open(SPACE, spec)
            found = [await read(kv, tokens) for tokens in prompts]
            await cache.check()
        assert found == [3 * SIZE if ssd else 0] * 7

    async def test_blocks_that_compress_come_back_exact(self, open_cache: OpenCache, tmp_path: Path, seed: int) -> None:
        """Values as a model makes them take the codec's path, to the disk and back."""
        spec = KVSpec(layers=4, kv_heads=2, head_dim=64, dtype="bfloat16", block_size=16)
        tokens = prompt(seed, 6)
        data = torch.randn(spec.shape(6 * SIZE), generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        config = small(spec=spec, directory=tmp_path / "ssd", codec="zstd")
        async with open_cache(config) as cache:
            kv = await cache.open(SPACE, spec)
            await kv.insert(tokens, data)
            assert await kv.flush(tokens) == 6 * SIZE
        async with open_cache(config) as cache:
            async with (await cache.open(SPACE, spec)).match(tokens) as hit:
                assert np.array_equal(kv_bytes(await hit.gather()), kv_bytes(data))
            await cache.check()
