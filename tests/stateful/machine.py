"""A state machine over the face in one process: every call in any order, against a plain model, audited after each step."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.stateful.steps import PICKS, PLACES, PROMPTS, TAILS, Held, Steps, alike
from tests.stateful.world import block_bytes
from tiercache.errors import LeaseReleased
from tiercache.service import tensors
from tiercache.service.hit import Hit
from tiercache.service.room import Room
from tiercache.types import Tier


class FaceMachine(Steps):
    """Calls run to their end one after the other; only what the cache does in the background overlaps them."""

    # --- writing ----------------------------------------------------------------------------------------------------------

    @rule(which=PLACES, chunks=PROMPTS, tail=TAILS, tier=st.sampled_from([None, None, None, Tier.DRAM]))
    def insert(self, which: int, chunks: list[int], tail: list[int], tier: Tier | None) -> None:
        self.store(which, chunks + tail, 0, tier)

    @rule(which=PLACES, blocks=st.integers(1, 5))
    def insert_filler(self, which: int, blocks: int) -> None:
        self.fillers += 1
        self.store(which, [100 + self.fillers, 0] * blocks, 0, None)

    @precondition(lambda self: self.hits)
    @rule(pick=PICKS, chunks=PROMPTS)
    def insert_after_hit(self, pick: int, chunks: list[int]) -> None:
        held = self.hits[pick % len(self.hits)]
        prompt = held.prompt[: held.hit.tokens] + chunks
        covered = self.book(held.place).longest(self.world.key(prompt)) * self.size
        if covered >= held.hit.tokens:  # not deleted meanwhile
            self.store(held.place, prompt, held.hit.tokens, None)

    @precondition(lambda self: len(self.rooms) < 2)
    @rule(which=PLACES, chunks=PROMPTS, tail=TAILS)
    def reserve(self, which: int, chunks: list[int], tail: list[int]) -> None:
        self.enter(self.world.kvs[which].reserve(chunks + tail), which % 2, chunks + tail)

    @precondition(lambda self: self.hits and len(self.rooms) < 2)
    @rule(pick=PICKS, chunks=PROMPTS)
    def reserve_after_hit(self, pick: int, chunks: list[int]) -> None:
        held = self.hits[pick % len(self.hits)]
        prompt = held.prompt[: held.hit.tokens] + chunks
        self.enter(self.world.kvs[held.place].reserve(prompt, after=held.hit), held.place, prompt)

    @precondition(lambda self: self.rooms)
    @rule(pick=PICKS, count=st.integers(0, 6), slack=st.integers(0, 1), ahead=st.integers(0, 2))
    def commit(self, pick: int, count: int, slack: int, ahead: int) -> None:
        """Fill some more blocks in place and hand them over."""
        writing = self.rooms[pick % len(self.rooms)]
        place, blocks = writing.place, writing.room.blocks
        end = min(writing.committed + count, len(blocks))
        expected = self.world.tensor(place, writing.prompt)
        for number in range(writing.filled, min(end + ahead, len(blocks))):
            at = writing.present + number * self.size
            blocks[number].copy_(expected[:, :, at : at + self.size])
            writing.filled = number + 1
        upto = writing.present + end * self.size + slack
        key = self.world.key(writing.prompt)[: (upto // self.size) * 4 * self.size]
        self.world.chapters[place].maybe |= self.book(place).prefixes(key)
        done = self.run(writing.room.commit(upto))
        assert writing.present + writing.committed * self.size <= done <= upto
        if done == upto - slack and self.quiet(place) and end > writing.committed:
            assert self.book(place).prefixes(key) <= self.world.keys(place)
        writing.committed = end
        self.note("commit", place, upto, done)
        if done < upto - slack:  # what it follows is gone
            self.leave(pick)

    @precondition(lambda self: self.rooms)
    @rule(pick=PICKS)
    def leave(self, pick: int) -> None:
        writing = self.rooms.pop(pick % len(self.rooms))
        self.run(writing.room.__aexit__(None, None, None))
        with pytest.raises(LeaseReleased):
            _ = writing.room.present
        self.note("leave")

    # --- reading ----------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.hits) < 4)
    @rule(which=PLACES, chunks=PROMPTS, tail=TAILS, request=st.sampled_from([None, None, "r"]))
    def match(self, which: int, chunks: list[int], tail: list[int], request: str | None) -> None:
        place, prompt = which % 2, chunks + tail
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
        self.note("match", place, prompt, hit.tokens, dict(hit.tiers))

    @rule(which=PLACES, chunks=PROMPTS)
    def look_up(self, which: int, chunks: list[int]) -> None:
        """Match, read and release in one step, as a runner does."""
        self.note("look up", self.run(self.look(which, chunks)))

    @precondition(lambda self: self.hits)
    @rule(pick=PICKS, how=st.sampled_from(["ready", "gather", "gather", "out", "layer", "view"]))
    def read(self, pick: int, how: str) -> None:
        held = self.hits[pick % len(self.hits)]
        world, hit = self.world, held.hit
        count = held.readable
        match how:
            case "ready":
                count = self.run(hit.ready())
                if len(self.hits) == 1 and not (self.rooms or self.pins or self.failed) and self.world.shape.ample:
                    assert count >= min(hit.tokens, held.sound), "not all is readable though there is room"
            case "gather" | "out":
                out = tensors.empty(self.world.spec, len(held.prompt) + 1) if how == "out" else None
                found = self.run(hit.gather(out))
                count = found.shape[2]
                world.same(held.place, held.prompt, found)
            case "layer":
                for layer in range(world.spec.layers):
                    parts = self.run(hit.layer(layer))
                    count = parts[0].shape[0]
                    expected = world.tensor(held.place, held.prompt[:count])[layer]
                    if held.sound >= count:
                        assert alike(parts, expected), "a wrong byte in a layer"
            case "view":
                count = self.run(hit.ready())
                for block in range(min(count, held.sound) // self.size):
                    parts = hit.view(block, 1)
                    expected = world.tensor(held.place, held.prompt)[1, :, block * self.size : (block + 1) * self.size]
                    assert alike(parts, expected), "a wrong byte in place"
        assert min(held.readable, held.sound) <= count <= held.tokens, "a leased token is gone"
        held.readable = count
        self.note(how, held.place, count)

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

    @rule(which=PLACES, chunks=PROMPTS)
    def prefetch(self, which: int, chunks: list[int]) -> None:
        longest = self.book(which % 2).longest(self.world.key(chunks)) * self.size
        done = self.run(self.world.kvs[which].prefetch(chunks))
        assert done <= longest or not self.quiet(which % 2)
        self.note("prefetch", done)

    @rule(which=PLACES, chunks=PROMPTS, ttl=st.sampled_from([0.0, 50.0, 100.0]))
    def pin(self, which: int, chunks: list[int], ttl: float) -> None:
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

    @rule(which=PLACES, chunks=PROMPTS)
    def flush(self, which: int, chunks: list[int]) -> None:
        place, key = which % 2, self.world.key(chunks)
        chapter, longest = self.world.chapters[place], self.book(place).longest(key)
        done = self.run(self.world.kvs[which].flush(chunks))
        acked = self.book(place).prefixes(key, upto=done // self.size)
        if self.quiet(place):
            assert done <= longest * self.size and acked <= self.world.durable_keys(place)
            if self.world.shape.ample and not self.failed:
                assert done == longest * self.size
        chapter.acked |= acked
        self.note("flush", done)

    @rule(which=PLACES, chunks=PROMPTS)
    def delete(self, which: int, chunks: list[int]) -> None:
        place = which % 2
        chapter, key = self.world.chapters[place], self.world.key(chunks)
        doomed, count = self.book(place).doomed(key)
        exact = self.quiet(place)
        self.forget(place, doomed, key)
        done = self.run(self.world.kvs[which].delete(chunks))
        if exact and self.quiet(place):
            assert done == count * self.size
            assert not doomed & self.world.keys(place), "what was deleted is still found"
            chapter.ghosts.clear()
        self.note("delete", done)

    @rule(which=PLACES)
    def clear(self, which: int) -> None:
        place = which % 2
        chapter, exact = self.world.chapters[place], self.quiet(place)
        count = len(self.book(place).keys)
        self.forget(place, set(self.book(place).keys))
        done = self.run(self.world.kvs[which].clear())
        if exact and self.quiet(place):
            assert done == count * self.size and not self.world.keys(place)
            chapter.ghosts.clear()
        self.note("clear", done)

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
        chunks=PROMPTS,
        what=st.sampled_from(["insert", "flush", "prefetch", "delete", "match", "reserve"]),
        turns=st.integers(0, 12),
    )
    def cancel(self, which: int, chunks: list[int], what: str, turns: int) -> None:
        """Begin a call, let a few turns pass, and cancel it."""
        work = self.call(which, chunks, what)
        task = self.world.loop.create_task(work)
        self.world.loop.turn(max(turns, what == "delete"))  # one that has not begun takes nothing away
        task.cancel()
        with suppress(asyncio.CancelledError):
            self.world.loop.finish(task)
        self.note("cancel", what, task.cancelled())

    @rule(kill=st.booleans(), settle=st.booleans())
    def reopen(self, kill: bool, settle: bool) -> None:
        if settle:
            self.finish_jobs()
            self.run(self.world.cache.settle())
            self.world.reconcile()
        claims: list[Hit | Room] = [*(held.hit for held in self.hits), *(writing.room for writing in self.rooms)]
        self.hits, self.rooms, self.pins = [], [], []
        self.world.reopen(kill=kill)
        self.abandon_jobs()
        for claim in claims:
            with pytest.raises(LeaseReleased):
                _ = claim.tokens
        self.note("reopen", kill, [len(chapter.book.keys) for chapter in self.world.chapters])

    @rule(which=PLACES, chunks=PROMPTS, what=st.sampled_from(["delete", "clear", "flush", "insert"]))
    def kill_after(self, which: int, chunks: list[int], what: str) -> None:
        """End the process right after a call has returned: what it acknowledged holds."""
        match what:
            case "delete":
                self.delete(which, chunks)
            case "clear":
                self.clear(which)
            case "flush":
                self.flush(which, chunks)
            case _:
                self.insert(which, chunks, [], None)
        self.world.reconcile()
        self.reopen(kill=True, settle=False)

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
