"""What the rules of the state machine share: claims, the calls that several rules make, and what is checked after each step."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from tests.stateful.book import Book
from tests.stateful.world import SHAPES, SPACES, Shape, World, changes
from tiercache.errors import LeaseReleased
from tiercache.keys import unpack_tokens
from tiercache.service import tensors
from tiercache.service.face import Extent, Stored
from tiercache.service.hit import Hit
from tiercache.service.room import Room
from tiercache.types import Tier

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
CHUNKS = {"a": [1, 1], "b": [1, 2], "c": [2, 1]}
LONG = ("aaaaaa", "aaabca", "aabcaa", "abcabc", "aaaaab", "baaaaa", "baabbb", "cabaaa")
"""Prompts begin one of these, a block a letter: so few that most share a beginning, and that what is asked for is often there."""
PROMPTS = st.builds(
    lambda letters, length: [token for letter in letters[:length] for token in CHUNKS[letter]],
    st.sampled_from(LONG),
    st.sampled_from([3, 4, 5, 6, 2, 1, 0]),
)
PICKS = st.integers(0, 99)


class Ask(NamedTuple):
    """What a step asks for: a prompt, or one that is there (`known` picks it), or what continues that one."""

    chunks: list[int]
    tail: list[int]
    known: int | None
    longer: bool


ASKS = st.builds(Ask, PROMPTS, st.sampled_from([[], [], [2]]), st.one_of(PICKS, PICKS, st.none()), st.booleans())
PLACES = st.integers(0, 2)
"""Which of the three handles; the first and the last are of one namespace."""
TAKING = ("delete", "invalidate")
"""Calls that take away at once, at their first step."""
MOST = 12
"""Tokens of the longest prompt: as many as fit the memory of every shape."""


@dataclass(slots=True)
class Held:
    """A hit that is held, what it was asked for, and how many leading tokens it has shown to be readable."""

    hit: Hit
    place: int
    prompt: list[int]
    tokens: int
    sound: int
    """From this token on something was corrupted in place."""
    readable: int = 0


@dataclass(slots=True)
class Writing:
    """A room that is held, and what it is for."""

    room: Room
    place: int
    prompt: list[int]
    present: int
    committed: int = 0
    filled: int = 0
    """Blocks that were written; those after the committed ones are nobody else's to touch."""


class Steps(RuleBasedStateMachine):
    """A world, what is held in it, and the model's view of each call."""

    held: ClassVar[bool] = False
    steps: ClassVar[int] = 0
    log: ClassVar[list[Any] | None] = None

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.hits: list[Held] = []
        self.rooms: list[Writing] = []
        self.pins: list[tuple[int, list[int]]] = []
        self.fillers = 0
        self.failed = False
        self.opened = False

    @initialize(shape=st.sampled_from(SHAPES), seed=st.integers(0, 1 << 16), prompts=st.lists(PROMPTS, max_size=4))
    def begin(self, shape: Shape, seed: int, prompts: list[list[int]]) -> None:
        self.world = World(shape, seed, held=self.held)
        self.opened = True
        self.note("begin", SHAPES.index(shape), seed)
        for number, prompt in enumerate(prompts):
            self.store(number % 3, prompt, 0, None)
            self.everything_holds()

    def teardown(self) -> None:
        if self.opened:
            self.note("end", changes(self.world))
            try:
                self.drop_claims()
            finally:
                self.world.end()
                self.rooms.clear()
                self.hits.clear()

    @invariant()
    def everything_holds(self) -> None:
        if not self.opened:
            return
        self.world.reconcile()
        self.world.check()
        self.check_claims()
        self.end_maybes()
        type(self).steps += 1

    def check_claims(self) -> None:
        """See that everything that is leased or reserved is where it was, byte for byte."""
        world = self.world
        for held in self.hits:
            places = world.stack.readable(held.hit.lease)[: held.hit.tokens // self.size]
            assert len(places) * self.size >= min(held.readable, held.sound), "a leased token is gone"
            for block, place in enumerate(places[: held.sound // self.size]):
                view = world.stack.stores[place.position].view(place.slot)
                world.same_block(held.place, held.prompt[: (block + 1) * self.size], view)
        for writing in self.rooms:
            blocks = writing.room.blocks
            for number in range(writing.committed, writing.filled):
                end = writing.present + (number + 1) * self.size
                expected = world.tensor(writing.place, writing.prompt[:end])[:, :, end - self.size :]
                assert alike(blocks[number], expected), "a reserved slot was written by somebody else"
        if self.quiet(0):
            claims = len({id(held.hit.lease) for held in self.hits}) + len(self.rooms) + sum(kv._desk.pins for kv in world.kvs)
            sessions = {kv._desk.session for kv in world.kvs}
            found = sum(len(session.leases) for session in sessions)
            assert claims <= found <= claims + self.world.promotions(), "a lease outlives its claim"

    # --- calls ------------------------------------------------------------------------------------------------------------

    def store(self, which: int, prompt: list[int], start: int, tier: Tier | None) -> None:
        place, key = which % 2, self.world.key(prompt)
        chapter, book, whole = self.world.chapters[place], self.book(place), len(key) // (4 * self.size)
        before, alone, first = book.longest(key), self.alone(), start // self.size
        chapter.maybe |= book.prefixes(key)
        done = self.run(self.world.kvs[which].insert(prompt, self.world.tensor(place, prompt, start), start=start, tier=tier))
        self.check_stored(done, whole - first)
        if self.quiet(place):
            assert done.present == (before - first) * self.size
            assert done.stored == (whole - before) * self.size - done.refused
            assert book.prefixes(key, upto=whole - done.refused // self.size) <= self.world.keys(place)
            if alone and self.world.shape.ample:
                assert not done.refused, "an insert was refused though nobody holds anything"
        self.note("insert", place, prompt, start, done)

    def check_stored(self, done: Stored, blocks: int) -> None:
        assert min(done) >= 0 and sum(done) == blocks * self.size and all(count % self.size == 0 for count in done)

    def enter(self, room: Room, place: int, prompt: list[int]) -> None:
        self.run(room.__aenter__())
        whole = len(prompt) - len(prompt) % self.size
        assert room.present + room.pending <= whole and room.present <= room.tokens <= whole
        assert not (room.pending and len(room.blocks))
        self.rooms.append(Writing(room, place, prompt, room.present))
        self.note("reserve", place, prompt, room.present, room.pending, len(room.blocks))

    def fill(self, writing: Writing, count: int, slack: int, ahead: int) -> None:
        """Hand `count` more blocks over, having written `ahead` more than that."""
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
            self.part(writing)

    def part(self, writing: Writing) -> None:
        """Leave a room; what was not committed goes back."""
        self.rooms.remove(writing)
        self.run(writing.room.__aexit__(None, None, None))
        with pytest.raises(LeaseReleased):
            _ = writing.room.present
        self.note("leave")

    def read_hit(self, held: Held, how: str) -> None:
        """Read a hit in one of the ways that there are, and compare what it gives with the oracle."""
        world, hit, count = self.world, held.hit, held.readable
        match how:
            case "ready" | "within":
                promised, alone = hit.tokens, len(self.hits) == 1 and self.quiet(held.place) and not world.promotions()
                count = self.run(hit.ready(within="best-effort" if how == "within" else None))
                assert count >= min(hit.tokens, held.sound), "a hit covers what it did not wait for"
                if how == "ready" and alone and not (self.rooms or self.pins or self.failed) and world.shape.ample:
                    assert count >= min(promised, held.sound), "not all is readable though there is room"
            case "gather" | "out":
                out = tensors.empty(world.spec, len(held.prompt) + 1) if how == "out" else None
                found = self.run(hit.gather(out))
                count = found.shape[2]
                world.same(held.place, held.prompt, found)
            case "layer":
                for layer in range(world.spec.layers):
                    parts = self.run(hit.layer(layer))
                    count = parts[0].shape[0]
                    expected = world.tensor(held.place, held.prompt[:count])[layer]
                    assert held.sound < count or alike(parts, expected), "a wrong byte in a layer"
            case "view":
                count = self.run(hit.ready())
                for block in range(min(count, held.sound) // self.size):
                    parts = hit.view(block, 1)
                    expected = world.tensor(held.place, held.prompt)[1, :, block * self.size : (block + 1) * self.size]
                    assert alike(parts, expected), "a wrong byte in place"
        assert min(held.readable, held.sound) <= count <= held.tokens, "a leased token is gone"
        held.readable = count
        self.note(how, held.place, count)

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

    def invalidate(self, places: list[int]) -> None:
        """Clear namespaces by what their names say."""
        chapters = [self.world.chapters[place] for place in places]
        exact = all(map(self.quiet, places))
        counts = {chapter.digest: len(chapter.book.keys) for chapter in chapters if chapter.book.keys}
        done = self.run(self.invalidated(places))
        if exact and all(map(self.quiet, places)):
            assert {extent.digest: extent.blocks for extent in done} == counts
            assert not any(map(self.world.keys, places)), "what was invalidated is still found"
            for chapter in chapters:
                chapter.ghosts.clear()
        self.note("invalidate", places, [extent.blocks for extent in done])

    def invalidated(self, places: list[int]) -> Coroutine[Any, Any, list[Extent]]:
        for place in places:
            self.forget(place, set(self.book(place).keys))
        if len(places) == len(SPACES):
            return self.world.cache.invalidate(model=SPACES[0].model)
        return self.world.cache.invalidate(salt=SPACES[places[0]].salt)

    def reopen(self, kill: bool, settle: bool) -> None:
        """Close and open, or kill and open; with `settle` when all that moved has come to its end."""
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

    def forget(self, place: int, doomed: set[bytes], key: bytes = b"") -> None:
        """Take `doomed` out of the model, for the prompt `key`; until that is acknowledged it may come back after a kill."""
        chapter = self.world.chapters[place]
        chapter.deleting = key
        chapter.book.keys -= doomed
        chapter.acked -= doomed
        chapter.ghosts |= doomed

    def call(self, which: int, prompt: list[int], what: str) -> Coroutine[Any, Any, Any]:
        """Return a call that may be cut short, or run beside others; the model is told what may come of it."""
        place, kv, key = which % 2, self.world.kvs[which], self.world.key(prompt)
        chapter = self.world.chapters[place]
        match what:
            case "insert":
                chapter.maybe |= self.book(place).prefixes(key)
                return kv.insert(prompt, self.world.tensor(place, prompt))
            case "delete":
                doomed, _ = self.book(place).doomed(key)
                self.forget(place, doomed, key)
                return kv.delete(prompt)
            case "invalidate":
                return self.going(place)
            case "match":
                return self.look(which, prompt)
            case "hasty":
                return self.look(which, prompt, prefetch="best-effort")
            case "reserve":
                return self.visit(which, prompt)
            case "flush":
                return kv.flush(prompt)
            case _:
                return kv.prefetch(prompt)

    def going(self, place: int) -> Coroutine[Any, Any, int]:
        work = self.invalidated([place])

        async def going() -> int:
            await work
            return 0

        return going()

    async def look(self, which: int, prompt: list[int], *, prefetch: str | None = None) -> int:
        async with self.world.kvs[which].match(prompt, prefetch=prefetch) as hit:
            found = await hit.gather()
            assert found.shape[2] <= hit.tokens
            self.world.same(which % 2, prompt, found)
            return int(found.shape[2])

    async def visit(self, which: int, prompt: list[int]) -> int:
        async with self.world.kvs[which].reserve(prompt) as room:
            await asyncio.sleep(0)
            return len(room.blocks)

    # --- inside -----------------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        return self.world.spec.block_size

    def book(self, place: int) -> Book:
        return self.world.chapters[place].book

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.world.loop.run(work)

    def alone(self) -> bool:
        """Whether nobody holds anything, and nothing has failed."""
        return not (self.hits or self.rooms or self.pins or self.failed) and self.world.held_by_nobody()

    def quiet(self, place: int) -> bool:
        """Whether the model knows exactly what is there: nothing was forgotten in this step, and no cancelled call goes on."""
        return self.world.idle() and not self.world.forgotten

    def prompt(self, place: int, ask: Ask) -> list[int]:
        """Return the tokens that `ask` means now."""
        keys = sorted(self.book(place).keys)
        if ask.known is None or not keys:
            return ask.chunks + ask.tail
        known = unpack_tokens(keys[ask.known % len(keys)])
        return (known + ask.chunks)[:MOST] + ask.tail if ask.longer else known + ask.tail

    def covers(self, held: Held, place: int, key: bytes) -> bool:
        """Return whether the prompt of `held` begins with the block that ends `key`."""
        return held.place == place and self.world.key(held.prompt).startswith(key)

    def rotten_in(self, place: int, prompt: list[int]) -> list[bytes]:
        key = self.world.key(prompt)
        return [other for where, other in self.world.rotten.values() if where == place and key.startswith(other)]

    def end_maybes(self) -> None:
        """Forget what cancelled calls might bring, once none of them goes on."""
        if self.world.idle():
            for chapter in self.world.chapters:
                chapter.maybe.clear()

    def finish_jobs(self) -> None:
        """Let every call that runs come to its end; here none does."""

    def abandon_jobs(self) -> None:
        """See that calls which a close overtook have ended; here there are none."""

    def drop_claims(self) -> None:
        for writing in self.rooms:
            self.run(writing.room.__aexit__(None, None, None))
        for held in self.hits:
            self.run(held.hit.__aexit__(None, None, None))

    def note(self, *words: object) -> None:
        if self.log is not None:
            self.log.append(words)


def alike(found: Iterable[torch.Tensor], expected: torch.Tensor) -> bool:
    """Return whether the tensors hold the same bytes: as numbers, many of them would differ from themselves."""
    return all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(found, expected, strict=True))
