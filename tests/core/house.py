"""A small house around the core: slots with real bytes, and an executor whose copies end when the test says so.

Blocks hold the oracle's bytes. Every copy is checked at its source, every audit compares every copy with the oracle, and a
slot that was reused while somebody still read it is seen as wrong bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

from tests.oracle import oracle_block
from tiercache.audit import check
from tiercache.cache import Cache
from tiercache.errors import StoreError
from tiercache.keys import Digest, block_keys, pack_tokens, sha256
from tiercache.leases import Lease, Reservation, Session
from tiercache.pace import Pace
from tiercache.policy import LRU, PolicyFactory
from tiercache.residency import Space
from tiercache.restore import Stored, restore
from tiercache.slots import SlotState
from tiercache.spec import Geometry
from tiercache.storage.slots import SlotPool
from tiercache.transfer import Discard, Report, State, Transfer, Work
from tiercache.tree import Node, path, subtree
from tiercache.types import Tier

GEOMETRY = Geometry(1, 2, 8, 32)
HBM, DRAM, SSD = 0, 1, 2
TIERS = (Tier.HBM, Tier.DRAM, Tier.SSD)


class Record(NamedTuple):
    """What the durable tier keeps of one block beside its bytes."""

    namespace: bytes
    key: bytes
    parent: bytes
    symbol: bytes
    checksum: int


def checksum(data: bytes) -> int:
    """Return a checksum of a block's bytes, good enough for a test."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


@lru_cache(maxsize=1 << 16)
def truth(namespace: bytes, tokens: bytes, edition: int = 0) -> bytes:
    """Return the bytes of the block that ends `tokens`; another edition is other bytes for the same tokens."""
    return oracle_block(namespace + bytes(edition), tokens, GEOMETRY).tobytes()


class House:
    """A cache of HBM, DRAM and durable SSD, `page` tokens a block. Capacities are in blocks.

    While `holding`, moves are collected in `held`, and the test ends them with `finish`; otherwise they run at once.
    """

    def __init__(
        self,
        hbm: int = 8,
        dram: int = 8,
        ssd: int = 32,
        *,
        page: int = 1,
        policy: PolicyFactory = LRU,
        batch_blocks: int = 64,
        lease_share: float = 1.0,
        digest: Digest = sha256,
    ) -> None:
        self.page = page
        self.digest = digest
        self.pools = [SlotPool(hbm), SlotPool(dram), SlotPool(ssd)]
        self.cache = Cache(
            TIERS,
            dict(zip(TIERS, self.pools, strict=True)),
            durable=[Tier.SSD],
            policy=policy,
            pace=Pace(batch_blocks),
            lease_share=lease_share,
        )
        self.session = self.cache.begin_session()
        self.bytes: list[dict[int, bytes]] = [{}, {}, {}]
        self.records: dict[int, Record] = {}
        self.written = 0
        """Blocks written to the durable tier so far."""
        self.held: list[Work] = []
        self.holding = False
        self._editions: dict[tuple[bytes, bytes], int] = {}

    # --- names ------------------------------------------------------------------------------------------------------------

    def space(self, name: str = "a") -> Space:
        """Return the namespace of that name."""
        return self.cache.residency.space(hashlib.sha256(name.encode()).digest(), 4 * self.page)

    def key(self, tokens: Sequence[int]) -> bytes:
        """Return the packed key of whole blocks of `tokens`."""
        packed = pack_tokens(list(tokens), limit=1 << 22)
        return packed[: len(packed) - len(packed) % (4 * self.page)]

    def node(self, tokens: Sequence[int], name: str = "a") -> Node:
        """Return the node at which `tokens` end."""
        tree = self.space(name).tree
        node, part, total = tree.walk(self.key(tokens))
        assert total == len(tokens) // self.page and part == len(node.blocks), "no node ends there"
        return node

    def tags(self, tokens: Sequence[int], name: str = "a") -> list[int]:
        """Return the fastest tier of each cached block of `tokens`."""
        node, part, _ = self.space(name).tree.walk(self.key(tokens))
        found = [step.tag for step in path(node) for _ in step.blocks]
        count = len(found) - len(node.blocks) + part
        return [tag for tag in found[:count] if tag is not None]

    def in_use(self) -> list[int]:
        """Return how many slots of each tier are not free."""
        return [pool.capacity - pool.free for pool in self.pools]

    # --- requests ---------------------------------------------------------------------------------------------------------

    def put(self, tokens: Sequence[int], name: str = "a", *, position: int = HBM, edition: int = 0, drop: bool = True) -> int:
        """Store what is not cached of `tokens` as a writer does; return how many blocks were stored."""
        key = self.key(tokens)
        lease = self.cache.match(self.session, self.space(name), key, count=False, charged=False)
        want = len(key) // (4 * self.page) - lease.blocks
        if want and (lease.node.tag or 0) > position and not self.holding:
            self.lift(lease, position)
        for place in range(max(position, lease.node.tag or 0), SSD):
            if want > 0:
                self.room(place, want, drop=drop)
                want -= self.pools[place].free
        room = self.cache.reserve(self.session, self.space(name), key, after=lease, position=position)
        self.cache.release(lease)
        done = self.fill(room, key, edition=edition)
        self.cache.close(room)
        self.start(self.cache.inflight.take_waste())
        return done

    def fill(self, room: Reservation, key: bytes, *, upto: int | None = None, edition: int = 0) -> int:
        """Write a reservation's blocks up to `upto` (default: all) and commit them; return how many are committed in all."""
        space, stride = room.lease.space, 4 * self.page
        first, end = room.committed, len(room.blocks) if upto is None else upto
        prefixes = [key[: (room.present + block + 1) * stride] for block in range(first, end)]
        sums = []
        for prefix, (position, slot) in zip(prefixes, room.places[first:end], strict=True):
            self.bytes[position][slot] = truth(space.digest, prefix, edition)
            sums.append(checksum(self.bytes[position][slot]))
        done = self.cache.commit(room, end, sums)
        for prefix in prefixes[: done - first]:
            self._editions[space.digest, prefix] = edition
        return done

    def get(self, tokens: Sequence[int], name: str = "a") -> int:
        """Match, compare every byte with the oracle, release; return how many blocks were found."""
        with self.leased(tokens, name) as lease:
            self.compare(lease)
            return lease.blocks

    @contextmanager
    def leased(self, tokens: Sequence[int], name: str = "a", *, session: Session | None = None) -> Iterator[Lease]:
        """Hold a lease on the cached prefix of `tokens`."""
        lease = self.cache.match(session or self.session, self.space(name), self.key(tokens))
        try:
            yield lease
        finally:
            self.cache.release(lease)
            self.start(self.cache.inflight.take_waste())

    def compare(self, lease: Lease) -> None:
        """Compare what a lease covers with the oracle, in every tier that has it."""
        covered = 0
        for node in path(lease.node):
            assert node.copies or not node.alive, "a leased node has lost its bytes"
            covered += len(node.blocks)
            self._compare(node, lease.key[: covered * 4 * self.page])
        assert covered == lease.blocks

    def lift(self, lease: Lease, to: int = HBM, *, room: bool = True) -> list[Transfer]:
        """Bring a lease's path up to the tier as the promotion of a reader does; return the transfers that were planned."""
        moves = self.cache.moves
        planned: list[Transfer] = []
        while nodes := moves.slower(lease.node, to):
            if room:
                self.room(to, sum(len(node.blocks) for node in nodes), drop=False)
            transfer = moves.plan_promote(lease.node, to, most=self.pools[to].capacity)
            if transfer is None:
                break
            planned.append(transfer)
            self.start([transfer])
            if self.holding:
                break
            self.cache.charge(lease)
        return planned

    def promote(self, tokens: Sequence[int], name: str = "a", *, to: int = HBM) -> list[Transfer]:
        """Bring the cached prefix up under a lease of its own."""
        with self.leased(tokens, name) as lease:
            return self.lift(lease, to)

    def persist(self, tokens: Sequence[int], name: str = "a") -> int:
        """Write the cached prefix to the durable tier; return how many blocks the transfers took."""
        moved = 0
        with self.leased(tokens, name) as lease:
            while (transfer := self.cache.moves.plan_persist(lease.node, SSD)) is not None:
                moved += transfer.count
                self.start([transfer])
                if self.holding:
                    break
        return moved

    def demote(self, position: int, count: int) -> int:
        """Make `count` more slots of the tier free, without dropping; return how many became free at once."""
        before = self.pools[position].free
        self.room(position, before + count, drop=False)
        return self.pools[position].free - before

    def room(self, position: int, want: int, *, drop: bool) -> None:
        """Make room as the traffic does: by moving down first, then by letting go."""
        pool = self.pools[position]
        want = min(want, pool.capacity)
        for drops in (False, True) if drop else (False,):
            while pool.free < want:
                work = self.cache.moves.make_room(position, want, drop=drops)
                self.start(work)
                if not work or self.holding:
                    break

    def evict_all(self) -> None:
        """Push everything that can go down and out, tier after tier."""
        for position, pool in enumerate(self.pools):
            self.room(position, pool.capacity, drop=False)

    def delete(self, tokens: Sequence[int], name: str = "a") -> int:
        """Delete a prompt and discard its records; return how many blocks of it went."""
        removed = self.cache.delete(self.space(name), self.key(tokens))
        self.start(self.cache.inflight.take_waste())
        return removed

    def clear(self, name: str = "a") -> int:
        """Clear a namespace and discard its records."""
        removed = self.cache.clear(self.space(name))
        self.start(self.cache.inflight.take_waste())
        return removed

    # --- moves ------------------------------------------------------------------------------------------------------------

    def start(self, work: Sequence[Work]) -> None:
        """Run moves at once, or hold them."""
        self.held.extend(work)
        while self.held and not self.holding:
            self.finish(self.held[0])

    def settle(self) -> None:
        """End all held moves well, in order, and hold no more."""
        self.holding = False
        self.start([])

    def finish(self, work: Work, *, arrived: int | None = None, rotten: bool = False) -> None:
        """Run a held move now and commit it. Of a transfer, `arrived` blocks arrive; fewer than all is a failure."""
        self.held.remove(work)
        work.state = State.COPYING
        if isinstance(work, Discard):
            for slot in work.slots:
                self.records.pop(slot, None)
                self.bytes[SSD].pop(slot, None)
            self.cache.inflight.discarded(work)
            return
        count = work.count if arrived is None else arrived
        keys = self._copy(work, count)
        error = StoreError("the copy failed") if count < work.count else None
        report = Report(arrived=count, error=error, rotten=rotten, keys=keys)
        self.start(self.cache.inflight.complete(work, report))

    def _copy(self, transfer: Transfer, count: int) -> list[bytes]:
        durable = transfer.to == SSD
        keys: list[bytes] = []
        if durable:
            keys = block_keys(transfer.namespace, transfer.parent_key, transfer.symbols, transfer.stride, self.digest)
        parents = [transfer.parent_key, *keys]
        for block in range(count):
            source, slot, to = transfer.sources[block], transfer.slots_from[block], transfer.slots_to[block]
            data = self.bytes[source][slot]
            assert checksum(data) == transfer.checksums[block], "the slot was reused while it was read"
            symbol = transfer.symbols[block * transfer.stride : (block + 1) * transfer.stride]
            if source == SSD:
                assert transfer.keys is not None
                record = self.records[slot]
                assert record[:2] == (transfer.namespace, transfer.keys[block]) and record.symbol == symbol
            self.bytes[transfer.to][to] = data
            if durable:
                self.records[to] = Record(transfer.namespace, keys[block], parents[block], symbol, transfer.checksums[block])
                self.written += 1
        return keys[:count]

    # --- the end ----------------------------------------------------------------------------------------------------------

    def restart(self, *, ssd: int | None = None) -> House:
        """Return another house over the same records, as after a kill: what was not on SSD is gone."""
        residency = self.cache.residency
        hbm, dram = (pool.capacity for pool in self.pools[:SSD])
        other = House(hbm, dram, ssd or self.pools[SSD].capacity, page=self.page, digest=self.digest)
        other._editions = self._editions
        other.records, other.bytes[SSD] = dict(self.records), dict(self.bytes[SSD])
        used = {slot: node.used for node in residency.nodes if node for slot in residency.table.slots(node.blocks, SSD)}
        order = sorted(other.records, key=lambda slot: used.get(slot, 0))
        for namespace in dict.fromkeys(record.namespace for record in other.records.values()):
            slots = [slot for slot in order if other.records[slot].namespace == namespace]
            for slot in restore(other.cache, namespace, 4 * self.page, columns(slots, other.records), SSD):
                del other.records[slot], other.bytes[SSD][slot]
        return other

    def check(self) -> dict[str, int]:
        """Audit the books, and compare every copy of every block with the oracle."""
        result = check(self.cache)
        for space in self.cache.residency.spaces.values():
            prefixes = {space.tree.root: b""}
            for node in subtree(space.tree.root):
                if node.parent is not None:
                    prefixes[node] = prefixes[node.parent] + node.key
                    self._compare(node, prefixes[node])
        pool = self.pools[SSD]
        assert set(self.records).isdisjoint(pool.listed(SlotState.FREE).tolist()), "a record lies in a free slot"
        assert set(pool.listed(SlotState.OWNED).tolist()) <= set(self.records), "a durable copy has no record"
        return result

    def _compare(self, node: Node, prefix: bytes) -> None:
        table, digest, stride = self.cache.residency.table, node.space.digest, 4 * self.page
        above = len(prefix) - len(node.key)
        for position in range(len(TIERS)):
            if not node.copies >> position & 1:
                continue
            for number, slot in enumerate(table.slots(node.blocks, position)):
                tokens = prefix[: above + (number + 1) * stride]
                right = truth(digest, tokens, self._editions.get((digest, tokens), 0)) if node.alive else None
                found = self.bytes[position][slot]
                assert checksum(found) == int(table.checksum[node.blocks[number]]), f"{node}: block {number} in {TIERS[position]}"
                assert right is None or found == right, f"{node}: block {number} in {TIERS[position]} has wrong bytes"


def columns(slots: Sequence[int], records: dict[int, Record]) -> Stored:
    """Return what metadata says of `slots`, the least recently used first."""
    rows = [records[slot] for slot in slots]
    return Stored(
        slots=list(slots),
        keys=[row.key for row in rows],
        parents=[row.parent for row in rows],
        symbols=[row.symbol for row in rows],
        checksums=[row.checksum for row in rows],
        charges=[4] * len(rows),
    )
