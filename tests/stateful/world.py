"""One cache in a virtual loop, and everything that must be true of it between two turns."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tests.oracle import oracle_block, oracle_kv
from tests.seams import Disk
from tests.stateful.book import Book, blocks_of
from tests.stateful.loop import HeldCopier, LoopClock, TurnWorkers, VirtualLoop
from tiercache.changes import Change, Reason
from tiercache.clock import Clock
from tiercache.config import Config
from tiercache.keys import pack_tokens
from tiercache.service import tensors
from tiercache.service.inprocess import TierCache
from tiercache.service.kv import LocalKV
from tiercache.service.stack import Seams, Stack
from tiercache.spec import KVSpec, Namespace
from tiercache.storage.copier import Copier
from tiercache.storage.layouts import block_first_slot_bytes
from tiercache.storage.lmdb_env import PAGE
from tiercache.storage.ssd_layout import SsdLayout
from tiercache.storage.workers import InlineWorkers, Workers
from tiercache.types import Identity

if TYPE_CHECKING:
    import torch

SPACES = tuple(Namespace(model="m", weights="w", salt=salt) for salt in ("a", "b"))
_FORGETTING = (Reason.EVICT, Reason.DROP, Reason.UNTRUSTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How large the tiers of a cache are, in blocks (0: no such tier; SSD rounds up), and what its blocks are."""

    hbm: int
    dram: int
    ssd: int
    head_dim: int = 128
    codec: str = "raw"
    low: float = 0.02
    high: float = 0.05
    drain: int = 30
    write: str = "back"
    ample: bool = False
    """Whether the SSD tier holds all that a run can insert."""

    @property
    def spec(self) -> KVSpec:
        return KVSpec(layers=2, kv_heads=1, head_dim=self.head_dim, dtype="float32", block_size=2)

    def config(self, directory: Path) -> Config:
        geometry = self.spec.geometry
        layout = SsdLayout.of(geometry, capacity_bytes=1 << 30, batch_bytes=1, packed=False)
        return Config.of(
            hbm=self.hbm * geometry.block_bytes or None,
            dram=self.dram * block_first_slot_bytes(geometry) or None,
            ssd=-(-self.ssd // layout.group) * layout.raw_pages * PAGE or None,
            directory=str(directory),
            codec=self.codec,
            lease_share=1.0,
            write_policy=self.write,
            watermark_low=self.low,
            watermark_high=self.high,
            drain_seconds=float(self.drain),
            batch_bytes=4 * geometry.block_bytes,
        )


SHAPES = (
    Shape(hbm=4, dram=6, ssd=250, ample=True),
    Shape(hbm=4, dram=6, ssd=12, head_dim=512, low=0.3, high=0.5),
    Shape(hbm=4, dram=6, ssd=14, drain=0),
    Shape(hbm=0, dram=6, ssd=250, ample=True, drain=0, low=0.3, high=0.5, write="through"),
    Shape(hbm=6, dram=8, ssd=40, head_dim=512, codec="zstd", write="selective"),
    Shape(hbm=4, dram=6, ssd=3, head_dim=512, low=0.3, high=0.5),
    Shape(hbm=4, dram=6, ssd=0, low=0.3, high=0.5),
)


@lru_cache(maxsize=4096)
def block_bytes(digest: bytes, key: bytes, spec: KVSpec) -> NDArray[np.uint8]:
    """Return what the block that ends `key` must hold."""
    return oracle_block(digest, key, spec.geometry)


@dataclass(slots=True)
class Chapter:
    """What the model knows of one namespace."""

    digest: bytes
    book: Book
    maybe: set[bytes] = field(default_factory=set)
    """What inserts that still run, or were cancelled, may yet bring."""
    ghosts: set[bytes] = field(default_factory=set)
    """What is out of the tree while its record may still be on disk."""
    acked: set[bytes] = field(default_factory=set)
    """What a flush said to be durable."""
    deleting: bytes = b""
    """The prompt that this step deletes."""


class _Errors(logging.Handler):
    """Keeps what is logged as an error: nothing here is one that the house expects."""

    def __init__(self, found: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._found = found

    def emit(self, record: logging.LogRecord) -> None:
        self._found.append(record.getMessage())


class World:
    """A cache of one shape in a directory of its own, with what it must hold. `held` puts a HeldCopier into it."""

    def __init__(self, shape: Shape, seed: int, *, held: bool) -> None:
        self.shape, self.spec = shape, shape.spec
        self.random = Random(seed)
        self.loop = VirtualLoop()
        self.loop.on_idle = self.let_go
        self.loop.timers_first = lambda: not self.copier_holds() or self.random.random() < 0.5
        self._errors = _Errors(self.loop.faults)
        logging.getLogger("tiercache").addHandler(self._errors)
        self._root = tempfile.TemporaryDirectory(prefix="tiercache-stateful-")
        self._runs = 0
        self.directory = Path(self._root.name) / "0"
        self._held = held
        self.disk = Disk()
        self.unread = False
        """Whether reads of the disk failed since the opening: what can't be read is given up."""
        self.copier: HeldCopier | None = None
        self.chapters = [Chapter(space.digest(self.spec), Book(4 * self.spec.block_size)) for space in SPACES]
        self.forgotten: Counter[bytes] = Counter()
        self.reasons: Counter[Reason] = Counter()
        self.rotten: dict[tuple[int, int], tuple[int, bytes]] = {}
        """(position, slot) → (space, key) of what was corrupted in place and not yet found."""
        self.trimmed = 0
        """Times that a durable copy made room for another in this step."""
        self.spoilt: set[tuple[int, bytes]] = set()
        """What was ever corrupted since the opening: a copy under way may have taken it along."""
        self.open()

    # --- beginning and end ------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Open the cache on the present directory, and both namespaces of it, the first one twice."""
        # Time here goes on by itself: a copy that is held is no disk that hangs, and a delete is to see its end.
        seams = Seams(
            clock=LoopClock(self.loop), workers=self._workers, copier=self._hold, values=self.disk.values(), forgetting=1e9
        )
        self.cache = TierCache(self.shape.config(self.directory), seams=seams)
        self.loop.run(self.cache.__aenter__())
        self.kvs: list[LocalKV] = [self.loop.run(self.cache.open(SPACES[which], self.spec)) for which in (0, 1, 0)]
        self.stack.cache.residency.listeners.append(self._changed)
        self.rotten.clear()
        self.spoilt.clear()
        self.unread = False
        self.reasons.clear()

    def close(self) -> None:
        if self.copier is not None:
            self.copier.open = True
            while self.copier.held:
                self.copier.release(0)
        self.loop.run(self.cache.close(), limit=200_000)
        self.disk.release()
        self.kvs.clear()

    def reopen(self, *, kill: bool) -> None:
        """Close and open; or, with `kill`, open what the directory holds now, as if the process had ended here."""
        bottom = [self.durable_keys(place) for place in range(len(SPACES))]
        before = [set(chapter.book.keys) for chapter in self.chapters]
        ghosts = [chapter.ghosts | chapter.maybe for chapter in self.chapters]
        durable = self.shape.ssd > 0
        directory = self.directory
        if kill and durable:
            self._runs += 1
            directory = Path(self._root.name) / str(self._runs)
            shutil.copytree(self.directory, directory)
        self.close()
        self.directory = directory
        self.open()
        for place, chapter in enumerate(self.chapters):
            found = self.keys(place)
            most = before[place] | (ghosts[place] if kill else chapter.maybe)
            assert found <= most, f"came back from nowhere: {len(found - most)} blocks"
            if kill or not self.forgotten[chapter.digest]:
                if kill or not self.shape.drain:
                    assert found >= bottom[place], f"{len(bottom[place] - found)} durable blocks are lost"
                if self.shape.ample:
                    assert found >= chapter.acked, f"{len(chapter.acked - found)} acknowledged blocks are lost"
                    if self.shape.drain and not kill:
                        assert found >= before[place], f"{len(before[place] - found)} blocks were not written down"
            chapter.book.keys = found
            chapter.acked &= found
            chapter.ghosts.clear()
            chapter.maybe.clear()
        self.forgotten.clear()
        self.check_disk()

    def end(self) -> None:
        try:
            self.close()
            assert not self.loop.faults, self.loop.faults
        finally:
            logging.getLogger("tiercache").removeHandler(self._errors)
            self.loop.close()
            self._root.cleanup()

    def _workers(self, config: Config, clock: Clock) -> Workers:
        return TurnWorkers(self.loop, self.random) if self._held else InlineWorkers()

    def _hold(self, inner: Copier) -> Copier:
        if not self._held:
            return inner
        self.copier = HeldCopier(inner)
        return self.copier

    def copier_holds(self) -> bool:
        return self.copier is not None and bool(self.copier.held)

    def let_go(self) -> bool:
        """Release one held copy, because nothing else can happen."""
        if self.copier is None or not self.copier.held:
            return False
        self.copier.release(self.random.randrange(len(self.copier.held)))
        return True

    # --- what there is ----------------------------------------------------------------------------------------------------

    @property
    def stack(self) -> Stack:
        [stack] = self.cache.stacks
        return stack

    @property
    def memory(self) -> int:
        return self.stack.memory

    def key(self, tokens: list[int]) -> bytes:
        packed = pack_tokens(tokens, limit=1 << 20)
        return packed[: len(packed) - len(packed) % (4 * self.spec.block_size)]

    def tensor(self, place: int, tokens: list[int], start: int = 0) -> torch.Tensor:
        """Return what `tokens[start:]` must hold."""
        whole = tensors.empty(self.spec, len(tokens))
        tensors.planes_for_writing(whole, self.spec)[:] = self.expected(place, tokens)
        return whole[:, :, start:]

    def expected(self, place: int, tokens: list[int]) -> NDArray[np.uint8]:
        return oracle_kv(self.chapters[place].digest, self.spec, tokens)

    def same(self, place: int, tokens: list[int], found: torch.Tensor) -> None:
        """Fail unless `found` is the KV of the first tokens, byte for byte."""
        count = found.shape[2]
        planes = tensors.planes_for_reading(found, self.spec)
        assert np.array_equal(planes, self.expected(place, tokens[:count])), "a wrong byte was handed out"

    def same_block(self, place: int, tokens: list[int], view: object) -> None:
        """Fail unless `view` is the block that ends `tokens`."""
        expected = block_bytes(self.chapters[place].digest, self.key(tokens), self.spec)
        assert np.array_equal(view, expected), "a leased block was overwritten"  # type: ignore[arg-type]

    def keys(self, place: int) -> set[bytes]:
        return {key for key, _, _ in blocks_of(self.kvs[place]._desk.space)}

    def memory_copies(self) -> list[tuple[int, bytes, int, int]]:
        """Return every copy in memory: namespace, key, position and slot."""
        table = self.stack.cache.residency.table
        return [
            (place, key, position, int(table.slot[position, block]))
            for place in range(len(SPACES))
            for key, node, block in blocks_of(self.kvs[place]._desk.space)
            for position in range(self.memory)
            if node.copies >> position & 1
        ]

    def durable_keys(self, place: int) -> set[bytes]:
        """Return what the durable tier holds by the books of the cache."""
        if not self.shape.ssd:
            return set()
        bit = 1 << self.memory
        return {key for key, node, _ in blocks_of(self.kvs[place]._desk.space) if node.copies & bit}

    def idle(self) -> bool:
        """Whether no cancelled insert still writes."""
        return not any(task.get_name().startswith("tiercache-finish") for task in asyncio.all_tasks(self.loop))

    def promotions(self) -> int:
        """Return how many promotions go on: each may hold a lease of its own for blocks that its reader no longer waits for."""
        return sum(task.get_name() == "tiercache-promote" for task in asyncio.all_tasks(self.loop))

    # --- what must be true ------------------------------------------------------------------------------------------------

    def reconcile(self) -> None:
        """Compare the trees with the books, and let the model forget what the cache said it forgot."""
        if not (self.spoilt or self.unread):
            assert not self.reasons[Reason.UNTRUSTED], "a block was distrusted that nobody touched"
        for place, chapter in enumerate(self.chapters):
            found, book = self.keys(place), chapter.book
            extra, lost = found - book.keys, book.keys - found
            assert extra <= chapter.maybe, f"{len(extra - chapter.maybe)} blocks are there that nobody stored"
            # What was forgotten a moment before may have made the deleted prompt an only child further up.
            tops = lost & book.prefixes(chapter.deleting)
            unsaid = {key for key in lost if not any(key.startswith(top) for top in tops)}
            assert len(unsaid) <= self.forgotten[chapter.digest], f"{len(unsaid)} blocks left without a word"
            assert not tops or self.forgotten[chapter.digest], "a delete took more than its own"
            chapter.deleting = b""
            book.keys = found
            chapter.ghosts |= lost
            chapter.acked &= found
        self.forgotten.clear()
        self.trimmed = 0

    def check(self) -> None:
        """Audit the books, and compare every byte in memory with the oracle."""
        assert not self.loop.faults, self.loop.faults
        self.stack.check()  # not through the face, which would let what is under way go on
        table = self.stack.cache.residency.table
        rotten: dict[tuple[int, int], tuple[int, bytes]] = {}
        for place, chapter in enumerate(self.chapters):
            for key, node, block in blocks_of(self.kvs[place]._desk.space):
                for position in range(self.memory):
                    if node.copies >> position & 1:
                        slot = int(table.slot[position, block])
                        view = self.stack.stores[position].view(slot)
                        if not np.array_equal(view, block_bytes(chapter.digest, key, self.spec)):  # type: ignore[arg-type]
                            assert (place, key) in self.spoilt, f"wrong bytes at {position}, {slot}"
                            rotten[position, slot] = place, key
        self.rotten = rotten

    def check_disk(self) -> None:
        """Read every record and compare it with the oracle."""
        if not self.shape.ssd:
            return
        residency, position = self.stack.cache.residency, self.memory
        store = self.stack.stores[position]
        into = np.empty((self.spec.geometry.planes, self.spec.geometry.unit_bytes), np.uint8)
        for place, chapter in enumerate(self.chapters):
            keys = {}
            for key, node, block in blocks_of(self.kvs[place]._desk.space):
                if node.copies >> position & 1:
                    keys[key] = residency.table.key[block].tobytes()
                    symbol = key[-chapter.book.stride :]
                    parent = keys.get(key[: -chapter.book.stride], bytes(32))
                    slot, checksum = int(residency.table.slot[position, block]), int(residency.table.checksum[block])
                    store.fetch(slot, Identity(chapter.digest, 0, 0, keys[key], parent, symbol, checksum), into)
                    assert np.array_equal(into, block_bytes(chapter.digest, key, self.spec)), "wrong bytes on disk"

    def _changed(self, change: Change) -> None:
        if change.reason is Reason.TRIM:
            self.trimmed += 1
        if change.after is None:
            self.reasons[change.reason] += len(change.blocks)
            if change.reason in _FORGETTING:
                self.forgotten[change.namespace] += len(change.blocks)

    def held_by_nobody(self) -> bool:
        """Whether no lease and no reservation is there."""
        return not any(session.leases or session.reservations for session in self.stack.cache.sessions)


def changes(world: World) -> dict[str, Any]:
    """Return the counters, for the log of a run."""
    stats = world.stack.cache.stats
    return {"moved": sorted((str(word), count) for word, count in stats.moved.items()), "failures": sorted(stats.failures.items())}
