"""The nine steps by which the RadixAttention article explains its tree, over three tiers.

Zheng et al., "SGLang: Efficient Execution of Structured Language Model Programs", figure 3. What leaves the tree for want of
room there only moves down here, and comes back without being computed again. `pytest -s` prints the tree after each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

import numpy as np
import torch

from tests.oracle import oracle_block, oracle_kv
from tiercache import Config, KVSpec, Namespace, Tier, TierCache
from tiercache.changes import Reason
from tiercache.draw import draw
from tiercache.keys import pack_tokens
from tiercache.service.kv import LocalKV
from tiercache.tree import Node, path, subtree
from tiercache.types import Identity

SPEC = KVSpec(layers=2, kv_heads=2, head_dim=64, dtype="float32", block_size=16)
SPACE = Namespace(model="chat", weights="sha256:1")
DIGEST = SPACE.digest(SPEC)
STRIDE = 4 * SPEC.block_size
HBM, DRAM = 20, 18  # slots


class House:
    """One cache, the prompts by name, and what must be true after each step."""

    def __init__(self, cache: TierCache, kv: LocalKV) -> None:
        self.cache = cache
        self.kv = kv
        self._names: dict[bytes, tuple[str, int, int]] = {}

    def begin_again(self, cache: TierCache, kv: LocalKV) -> None:
        """Go on with another cache over the same directory."""
        self.cache, self.kv = cache, kv

    def text(self, name: str, blocks: int) -> list[int]:
        """Return `blocks` blocks of tokens that no other text begins with."""
        first = 1 + 1000 * len(self._names)
        tokens = list(range(first, first + blocks * SPEC.block_size))
        packed = pack_tokens(tokens, limit=1 << 20)
        for block in range(blocks):
            self._names[packed[block * STRIDE : (block + 1) * STRIDE]] = (name, block, blocks)
        return tokens

    async def turn(self, *, prompt: list[int], reply: list[int]) -> Mapping[Tier, int]:
        """Do what a runner does for one request, and return how many blocks of the prompt were found, by tier.

        The runner reads what is cached, computes the rest of the prompt and the reply, and stores those.
        """
        tokens = prompt + reply
        kv = torch.from_numpy(oracle_kv(DIGEST, SPEC, tokens).view(np.float32)).reshape(SPEC.shape(len(tokens)))
        async with self.kv.match(prompt) as hit:
            found = {tier: count // SPEC.block_size for tier, count in hit.tiers.items()}
            cached = await hit.gather()
            assert cached.shape[2] == hit.tokens, "all that was promised is readable"
            assert torch.equal(cached.view(torch.int32), kv[:, :, : hit.tokens].view(torch.int32)), "and is what was computed once"
            assert all(node.holds == 1 for node in path(hit.lease.node)), "the hit holds its path"
            await self.cache.settle()
            if len(tokens) > hit.tokens:
                stored = await self.kv.insert(tokens, kv[:, :, hit.tokens :], start=hit.tokens)
                assert stored == (len(tokens) - hit.tokens, 0, 0), "what was computed is stored, all of it"
        await self.cache.settle()
        return found

    async def expect(self, step: str, drawing: str) -> None:
        """Compare the tree with its drawing, the books with the tree, and every copy of every block with the oracle."""
        [stack] = self.cache.stacks
        space = stack.cache.residency.space(DIGEST, STRIDE)
        drawn = draw(space, stack.cache.tiers, label=self._label)
        print(f"\n{step}\n{drawn}")
        assert drawn == dedent(drawing).strip()
        assert (await self.cache.check())["leases"] == 0
        for node in subtree(space.tree.root):
            self._compare(node)

    def used(self) -> dict[Tier, int]:
        """Return how many slots of each tier are in use."""
        [stack] = self.cache.stacks
        return {tier: pool.capacity - pool.free for tier, pool in zip(stack.cache.tiers, stack.cache.residency.slots, strict=True)}

    def copied(self, source: Tier, target: Tier) -> int:
        """Return how many blocks were copied from tier to tier so far."""
        [stack] = self.cache.stacks
        return stack.cache.stats.copied[source, target]

    def computed(self) -> int:
        """Return how many blocks were computed and stored so far."""
        [stack] = self.cache.stacks
        return stack.cache.stats.total(Reason.INSERT)

    def _label(self, node: Node) -> str:
        parts: list[str] = []
        for start in range(0, len(node.key), STRIDE):
            name, block, blocks = self._names[node.key[start : start + STRIDE]]
            if block == 0 or start == 0:
                end = min(blocks, block + (len(node.key) - start) // STRIDE)
                parts.append(name if end - block == blocks else f"{name} [{block}:{end}]")
        return ", ".join(parts)

    def _compare(self, node: Node) -> None:
        [stack] = self.cache.stacks
        table = stack.cache.residency.table
        tokens = b"".join(step.key for step in path(node))
        chain = [block for step in path(node) for block in step.blocks]
        before = len(chain) - len(node.blocks)
        for place, block in enumerate(node.blocks):
            end = before + place + 1
            truth = oracle_block(DIGEST, tokens[: end * STRIDE], SPEC.geometry)
            for position, store in enumerate(stack.stores):
                if not node.copies >> position & 1:
                    continue
                slot = int(table.slot[position, block])
                found = store.view(slot)
                if found is None:
                    found = np.empty((SPEC.geometry.planes, SPEC.geometry.unit_bytes), dtype=np.uint8)
                    parent = table.key[chain[end - 2]].tobytes() if end > 1 else bytes(32)
                    symbol, checksum = tokens[(end - 1) * STRIDE : end * STRIDE], int(table.checksum[block])
                    store.fetch(slot, Identity(DIGEST, 0, 0, table.key[block].tobytes(), parent, symbol, checksum), found)
                assert np.array_equal(found, truth), f"block {end - 1} in {store.tier}"


async def test_the_nine_steps_of_radix_attention(tmp_path: Path) -> None:
    """Two chats, a few-shot batch and self-consistency samples share one tree: nothing is computed twice, no byte is wrong."""
    config = Config.of(
        hbm=HBM * SPEC.block_bytes,
        dram=DRAM * SPEC.block_bytes,
        ssd="4 MiB",
        directory=str(tmp_path),
        watermark_low=0,
        watermark_high=0,  # only what a step needs moves
        admit_ms=600_000,
        promote_ms=600_000,
    )
    async with TierCache(config) as cache:
        house = House(cache, await cache.open(SPACE, SPEC))

        await house.expect("1. The tree is empty.", "root")

        system = house.text("system", 4)
        ask, answer = house.text("A ask 1", 3), house.text("A answer 1", 1)
        chat_a = system + ask
        found = await house.turn(prompt=chat_a, reply=answer)
        chat_a += answer

        assert found == {}
        await house.expect(
            "2. The first turn of chat A becomes one edge.",
            """
            root
            └─ [HBM] 8 blocks  system, A ask 1, A answer 1
            """,
        )

        ask, answer = house.text("A ask 2", 1), house.text("A answer 2", 1)
        found = await house.turn(prompt=chat_a + ask, reply=answer)
        chat_a += ask + answer

        assert found == {Tier.HBM: 8}
        await house.expect(
            "3. Its second turn extends it.",
            """
            root
            └─ [HBM] 8 blocks  system, A ask 1, A answer 1
               └─ [HBM] 2 blocks  A ask 2, A answer 2
            """,
        )

        ask, answer = house.text("B ask 1", 1), house.text("B answer 1", 1)
        chat_b = system + ask
        found = await house.turn(prompt=chat_b, reply=answer)
        chat_b += answer

        assert found == {Tier.HBM: 4}
        await house.expect(
            "4. Chat B shares the system prompt only: the edge is split.",
            """
            root
            └─ [HBM] 4 blocks  system
               ├─ [HBM] 4 blocks  A ask 1, A answer 1
               │  └─ [HBM] 2 blocks  A ask 2, A answer 2
               └─ [HBM] 2 blocks  B ask 1, B answer 1
            """,
        )

        found = await house.turn(prompt=chat_b, reply=(turn := house.text("B turn 2", 4)))
        chat_b += turn
        assert found == {Tier.HBM: 6}
        assert house.used() == {Tier.HBM: 16, Tier.DRAM: 0, Tier.SSD: 0}
        found = await house.turn(prompt=chat_b, reply=(turn := house.text("B turn 3", 6)))
        chat_b += turn

        assert found == {Tier.HBM: 10}
        assert house.used() == {Tier.HBM: HBM, Tier.DRAM: 2, Tier.SSD: 0}
        await house.expect(
            "5. Chat B goes on while HBM is short: the leaf of chat A, the least recently used one, is demoted.",
            """
            root
            └─ [HBM] 4 blocks  system
               ├─ [HBM] 4 blocks  A ask 1, A answer 1
               │  └─ [DRAM] 2 blocks  A ask 2, A answer 2
               └─ [HBM] 2 blocks  B ask 1, B answer 1
                  └─ [HBM] 4 blocks  B turn 2
                     └─ [HBM] 6 blocks  B turn 3
            """,
        )

        examples = house.text("examples", 2)
        found = await house.turn(prompt=examples, reply=house.text("query 1", 2))

        assert found == {}
        assert house.used() == {Tier.HBM: HBM, Tier.DRAM: 6, Tier.SSD: 0}
        await house.expect(
            "6. A few-shot query shares nothing: it becomes a branch of its own, and more of chat A goes down.",
            """
            root
            ├─ [HBM] 4 blocks  system
            │  ├─ [DRAM] 4 blocks  A ask 1, A answer 1
            │  │  └─ [DRAM] 2 blocks  A ask 2, A answer 2
            │  └─ [HBM] 2 blocks  B ask 1, B answer 1
            │     └─ [HBM] 4 blocks  B turn 2
            │        └─ [HBM] 6 blocks  B turn 3
            └─ [HBM] 4 blocks  examples, query 1
            """,
        )

        found = await house.turn(prompt=examples, reply=house.text("query 2", 4))
        assert found == {Tier.HBM: 2}
        question = examples + house.text("query 3", 2)
        found = await house.turn(prompt=question, reply=[])

        assert found == {Tier.HBM: 2}
        assert house.used() == {Tier.HBM: HBM, Tier.DRAM: 12, Tier.SSD: 0}
        await house.expect(
            "7. More queries share its examples: the edge is split. The last turn of chat B goes down from its tail.",
            """
            root
            ├─ [HBM] 4 blocks  system
            │  ├─ [DRAM] 4 blocks  A ask 1, A answer 1
            │  │  └─ [DRAM] 2 blocks  A ask 2, A answer 2
            │  └─ [HBM] 2 blocks  B ask 1, B answer 1
            │     └─ [HBM] 4 blocks  B turn 2
            │        └─ [DRAM] 2 blocks  B turn 3 [0:2]
            │           └─ [DRAM] 4 blocks  B turn 3 [2:6]
            └─ [HBM] 2 blocks  examples
               ├─ [HBM] 2 blocks  query 1
               ├─ [HBM] 4 blocks  query 2
               └─ [HBM] 2 blocks  query 3
            """,
        )

        computed, copied = house.computed(), house.copied(Tier.DRAM, Tier.HBM)
        found = await house.turn(prompt=chat_a, reply=[])

        assert found == {Tier.HBM: 4, Tier.DRAM: 6}
        assert (house.computed() - computed, house.copied(Tier.DRAM, Tier.HBM) - copied) == (0, 6)
        assert house.used() == {Tier.HBM: HBM, Tier.DRAM: DRAM, Tier.SSD: 0}
        await house.expect(
            "8. Chat A returns: what was demoted is promoted, not computed. Chat B makes room, from its leaf upwards.",
            """
            root
            ├─ [HBM] 4 blocks  system
            │  ├─ [HBM] (+DRAM) 4 blocks  A ask 1, A answer 1
            │  │  └─ [HBM] (+DRAM) 2 blocks  A ask 2, A answer 2
            │  └─ [DRAM] 2 blocks  B ask 1, B answer 1
            │     └─ [DRAM] 4 blocks  B turn 2
            │        └─ [DRAM] 2 blocks  B turn 3 [0:2]
            │           └─ [DRAM] 4 blocks  B turn 3 [2:6]
            └─ [HBM] 2 blocks  examples
               ├─ [HBM] 2 blocks  query 1
               ├─ [HBM] 4 blocks  query 2
               └─ [HBM] 2 blocks  query 3
            """,
        )

        found = await house.turn(prompt=question, reply=house.text("sample 1", 2))
        assert found == {Tier.HBM: 4}
        found = await house.turn(prompt=question, reply=house.text("sample 2", 4))

        assert found == {Tier.HBM: 4}
        assert house.used() == {Tier.HBM: HBM, Tier.DRAM: DRAM, Tier.SSD: 0}
        await house.expect(
            "9. Self-consistency samples need room: the other few-shot queries go down, and DRAM gives up what HBM has, too.",
            """
            root
            ├─ [HBM] 4 blocks  system
            │  ├─ [HBM] 4 blocks  A ask 1, A answer 1
            │  │  └─ [HBM] 2 blocks  A ask 2, A answer 2
            │  └─ [DRAM] 2 blocks  B ask 1, B answer 1
            │     └─ [DRAM] 4 blocks  B turn 2
            │        └─ [DRAM] 2 blocks  B turn 3 [0:2]
            │           └─ [DRAM] 4 blocks  B turn 3 [2:6]
            └─ [HBM] 2 blocks  examples
               ├─ [DRAM] 2 blocks  query 1
               ├─ [DRAM] 4 blocks  query 2
               └─ [HBM] 2 blocks  query 3
                  ├─ [HBM] 2 blocks  sample 1
                  └─ [HBM] 4 blocks  sample 2
            """,
        )

    async with TierCache(config) as cache:
        house.begin_again(cache, await cache.open(SPACE, SPEC))

        await house.expect(
            "And after a restart: all of it is on SSD, runs of only children as one edge.",
            """
            root
            ├─ [SSD] 2 blocks  examples
            │  ├─ [SSD] 2 blocks  query 3
            │  │  ├─ [SSD] 4 blocks  sample 2
            │  │  └─ [SSD] 2 blocks  sample 1
            │  ├─ [SSD] 4 blocks  query 2
            │  └─ [SSD] 2 blocks  query 1
            └─ [SSD] 4 blocks  system
               ├─ [SSD] 6 blocks  A ask 1, A answer 1, A ask 2, A answer 2
               └─ [SSD] 12 blocks  B ask 1, B answer 1, B turn 2, B turn 3
            """,
        )
        assert await house.turn(prompt=chat_b, reply=[]) == {Tier.SSD: 16}
