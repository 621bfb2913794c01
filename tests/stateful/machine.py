"""A state machine over the face in one process: every call in any order, against a plain model, audited after each step."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.stateful.steps import ASKS, MOST, PICKS, PLACES, PROMPTS, TAKING, Ask, Held, Steps
from tests.stateful.world import block_bytes
from tiercache.errors import LeaseReleased
from tiercache.types import Tier

HOW = st.sampled_from(["gather", "gather", "out", "layer", "view", "ready", "within"])


class FaceMachine(Steps):
    """Calls run to their end one after the other; only what the cache does in the background overlaps them."""

    # --- writing ----------------------------------------------------------------------------------------------------------

    @rule(which=PLACES, asks=st.lists(ASKS, min_size=1, max_size=3), tier=st.sampled_from([None, None, None, Tier.DRAM]))
    def insert(self, which: int, asks: list[Ask], tier: Tier | None) -> None:
        for ask in asks:
            self.store(which, self.prompt(which % 2, ask), 0, tier)
            self.world.reconcile()

    @rule(which=PLACES, blocks=st.integers(1, 5))
    def insert_filler(self, which: int, blocks: int) -> None:
        self.fillers += 1
        self.store(which, [100 + self.fillers, 0] * blocks, 0, None)

    @precondition(lambda self: self.hits)
    @rule(pick=PICKS, chunks=PROMPTS)
    def insert_after_hit(self, pick: int, chunks: list[int]) -> None:
        held = self.hits[pick % len(self.hits)]
        prompt = (held.prompt[: held.hit.tokens] + chunks)[:MOST]
        covered = self.book(held.place).longest(self.world.key(prompt)) * self.size
        if covered >= held.hit.tokens:  # not deleted meanwhile
            self.store(held.place, prompt, held.hit.tokens, None)

    @precondition(lambda self: len(self.rooms) < 2)
    @rule(which=PLACES, ask=ASKS, fill=st.integers(0, 4))
    def reserve(self, which: int, ask: Ask, fill: int) -> None:
        prompt = self.prompt(which % 2, ask)
        self.enter(self.world.kvs[which].reserve(prompt), which % 2, prompt)
        self.fill(self.rooms[-1], fill, 0, 1)

    @precondition(lambda self: self.hits and len(self.rooms) < 2)
    @rule(pick=PICKS, chunks=PROMPTS, fill=st.integers(0, 4))
    def reserve_after_hit(self, pick: int, chunks: list[int], fill: int) -> None:
        held = self.hits[pick % len(self.hits)]
        prompt = (held.prompt[: held.hit.tokens] + chunks)[:MOST]
        self.enter(self.world.kvs[held.place].reserve(prompt, after=held.hit), held.place, prompt)
        assert self.rooms[-1].present >= held.hit.tokens or not len(self.rooms[-1].room.blocks)
        self.fill(self.rooms[-1], fill, 0, 1)

    @precondition(lambda self: self.rooms)
    @rule(pick=PICKS, count=st.integers(0, 6), slack=st.integers(0, 1), ahead=st.integers(0, 2))
    def commit(self, pick: int, count: int, slack: int, ahead: int) -> None:
        """Fill some more blocks in place and hand them over."""
        self.fill(self.rooms[pick % len(self.rooms)], count, slack, ahead)

    @precondition(lambda self: self.rooms)
    @rule(pick=PICKS)
    def leave(self, pick: int) -> None:
        self.part(self.rooms[pick % len(self.rooms)])

    # --- reading ----------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.hits) < 4)
    @rule(which=PLACES, ask=ASKS, request=st.sampled_from([None, None, "r"]), how=HOW)
    def match(self, which: int, ask: Ask, request: str | None, how: str) -> None:
        place = which % 2
        prompt = self.prompt(place, ask)
        longest = self.book(place).longest(self.world.key(prompt)) * self.size
        free = self.alone()
        hit = self.world.kvs[which].match(prompt, request=request)
        self.run(hit.__aenter__())
        if request is None:
            assert hit.tokens <= longest and (not free or hit.tokens == longest)
            assert sum(hit.tiers.values()) == hit.tokens
            assert all(fast > slow for fast, slow in pairwise(hit.tiers))
        sound = min((len(key) // 4 - self.size for key in self.rotten_in(place, prompt)), default=1 << 20)
        self.hits.append(Held(hit, place, prompt, hit.tokens, sound))
        self.note("match", place, prompt, dict(hit.tiers), hit.tokens)
        self.read_hit(self.hits[-1], how)

    @rule(which=PLACES, asks=st.lists(ASKS, min_size=1, max_size=3))
    def look_up(self, which: int, asks: list[Ask]) -> None:
        """Match, read and release in one step, as a runner does."""
        for ask in asks:
            self.note("look up", self.run(self.look(which, self.prompt(which % 2, ask))))
            self.world.reconcile()

    @precondition(lambda self: self.hits)
    @rule(how=HOW)
    def read(self, how: str) -> None:
        """Read everything that is held."""
        for held in self.hits:
            self.read_hit(held, how)
            self.world.reconcile()

    @precondition(lambda self: self.hits)
    @rule(pick=PICKS, tokens=st.integers(0, 13))
    def take(self, pick: int, tokens: int) -> None:
        held = self.hits[pick % len(self.hits)]
        before = held.hit.tokens
        kept = held.hit.take(tokens)
        assert kept == held.hit.tokens == min(tokens, before) // self.size * self.size
        held.tokens, held.readable = kept, min(held.readable, kept)
        self.note("take", kept)

    @precondition(lambda self: self.hits)
    @rule(pick=PICKS)
    def release(self, pick: int) -> None:
        held = self.hits.pop(pick % len(self.hits))
        self.run(held.hit.release())
        with pytest.raises(LeaseReleased):
            _ = held.hit.tokens
        self.note("release")

    @rule(which=PLACES, ask=ASKS)
    def prefetch(self, which: int, ask: Ask) -> None:
        chunks = self.prompt(which % 2, ask)
        longest = self.book(which % 2).longest(self.world.key(chunks)) * self.size
        done = self.run(self.world.kvs[which].prefetch(chunks))
        assert done <= longest or not self.quiet(which % 2)
        self.note("prefetch", done)

    @rule(which=PLACES, ask=ASKS, ttl=st.sampled_from([0.0, 50.0, 100.0]))
    def pin(self, which: int, ask: Ask, ttl: float) -> None:
        chunks = self.prompt(which % 2, ask)
        longest = self.book(which % 2).longest(self.world.key(chunks)) * self.size
        done = self.run(self.world.kvs[which].pin(chunks, ttl=ttl))
        assert done <= longest
        self.pins = [pin for pin in self.pins if pin != (which, chunks)] + ([(which, chunks)] if ttl else [])
        self.note("pin", done)

    @rule(seconds=st.sampled_from([0.6, 3.0, 120.0]))
    def pass_time(self, seconds: float) -> None:
        self.world.loop.wait(seconds)
        if seconds > 100:
            self.pins.clear()

    # --- keeping and taking away ------------------------------------------------------------------------------------------

    @rule(which=PLACES, ask=ASKS)
    def flush(self, which: int, ask: Ask) -> None:
        place = which % 2
        chunks = self.prompt(place, ask)
        key = self.world.key(chunks)
        chapter, longest = self.world.chapters[place], self.book(place).longest(key)
        done = self.run(self.world.kvs[which].flush(chunks))
        acked = self.book(place).prefixes(key, upto=done // self.size)
        if self.quiet(place):
            assert done <= longest * self.size
            assert self.world.trimmed or acked <= self.world.durable_keys(place), "more was acknowledged than is durable"
            if self.world.shape.ample and not self.failed:
                assert done == longest * self.size
        chapter.acked |= acked
        self.note("flush", done)

    @rule(which=PLACES, ask=ASKS, how=st.sampled_from(["delete"] * 5 + ["clear", "invalidate", "all"]))
    def take_away(self, which: int, ask: Ask, how: str) -> None:
        match how:
            case "delete":
                self.delete(which, self.prompt(which % 2, ask))
            case "clear":
                self.clear(which)
            case _:
                self.invalidate([0, 1] if how == "all" else [which % 2])

    @rule(position=st.integers(0, 2), want=st.integers(1, 8), drop=st.booleans())
    def squeeze(self, position: int, want: int, drop: bool) -> None:
        """Make room as if somebody needed it; in an ample tier at the bottom nobody does."""
        stack = self.world.stack
        position, drop = (position % stack.memory, False) if self.world.shape.ample else (position % len(stack.stores), drop)

        async def make_room() -> None:
            stack.mover.start(stack.cache.moves.make_room(position, want, drop=drop))

        self.run(make_room())
        self.note("squeeze", position, want)

    @rule()
    def settle(self) -> None:
        self.run(self.world.cache.settle())
        for chapter in self.world.chapters:
            chapter.ghosts.clear()

    # --- going away -------------------------------------------------------------------------------------------------------

    @rule(
        which=PLACES,
        ask=ASKS,
        what=st.sampled_from(["insert", "flush", "prefetch", "delete", "match", "reserve", "invalidate"]),
        turns=st.integers(0, 12),
    )
    def cancel(self, which: int, ask: Ask, what: str, turns: int) -> None:
        """Begin a call, let a few turns pass, and cancel it."""
        work = self.call(which, self.prompt(which % 2, ask), what)
        task = self.world.loop.create_task(work)
        self.world.loop.turn(max(turns, what in TAKING))  # one that has not begun takes nothing away
        task.cancel()
        with suppress(asyncio.CancelledError):
            self.world.loop.finish(task)
        self.note("cancel", what, task.cancelled())

    @rule(
        kill=st.booleans(),
        settle=st.booleans(),
        which=PLACES,
        ask=ASKS,
        after=st.sampled_from(["", "", "delete", "flush", "insert"]),
    )
    def restart(self, kill: bool, settle: bool, which: int, ask: Ask, after: str) -> None:
        """Start anew, perhaps right after a call has returned: what it acknowledged holds."""
        match after:
            case "delete":
                self.delete(which, self.prompt(which % 2, ask))
            case "flush":
                self.flush(which, ask)
            case "insert":
                self.store(which, self.prompt(which % 2, ask), 0, None)
        self.world.reconcile()
        self.reopen(kill, settle)

    @rule(pick=PICKS, byte=PICKS, leased=st.booleans())
    def corrupt(self, pick: int, byte: int, leased: bool) -> None:
        """Change one byte of a block in memory, as a stray write would; with `leased` of one that a hit covers."""
        world = self.world
        copies = world.memory_copies()
        if leased:
            copies = [copy for copy in copies if any(self.covers(held, copy[0], copy[1]) for held in self.hits)]
        if not copies:
            return
        place, key, position, slot = copies[pick % len(copies)]
        view = world.stack.stores[position].view(slot)
        assert view is not None
        expected = block_bytes(world.chapters[place].digest, key, world.spec)
        at = byte * 37 % view.shape[1]
        view[byte % view.shape[0], at] ^= 0xFF
        if np.array_equal(view, expected):  # corrupted twice is sound
            world.rotten.pop((position, slot), None)
        else:
            world.rotten[position, slot] = place, key
        world.spoilt.add((place, key))
        for held in self.hits:
            if self.covers(held, place, key):
                held.sound = min(held.sound, len(key) // 4 - self.size)
        self.note("corrupt", position, len(key))
