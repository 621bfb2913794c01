"""The core under long walks of weighted steps, where leases, moves, splits and removals meet far more often than in short ones.

Prompts are few and share beginnings; the seed says which walk it is. After each step the books are audited, every byte is compared
with the oracle, and what was written down of a node's whereabouts must be what one would write down now.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from tests.core.house import DRAM, HBM, SSD, House
from tiercache.leases import Lease, Quarantine, Reservation
from tiercache.table import rows
from tiercache.transfer import Discard, Transfer
from tiercache.tree import Node, path

STEPS = 400
TRUNKS = ([1] * 9, [1, 1, *[2] * 7], [1, 1, 2, *[3] * 6], [2] * 9, [1, 1, 1, 1, *[3] * 5])


class Walk:
    """One house, what is claimed in it, and the dice."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        sizes = dice.choice([4, 6, 10]), dice.choice([6, 10]), dice.choice([12, 20])
        share, batch = dice.choice([1.0, 0.9, 0.5]), dice.choice([2, 3, 64])
        self.house = House(*sizes, batch_blocks=batch, lease_share=share)
        self.house.holding = True
        self.sessions = [self.house.session, *(self.house.cache.begin_session() for _ in range(2))]
        self.leases: list[Lease] = []
        self.writers: list[tuple[bytes, Reservation]] = []
        self.quarantines: list[Quarantine] = []
        self.edition = 0
        self.taken: Counter[str] = Counter()

    def go(self, steps: int) -> None:
        """Take so many steps, and wind up."""
        calls: dict[Callable[[], None], float] = {
            self.match: 18, self.release: 8, self.shorten: 4, self.share: 3, self.hand_over: 2, self.promote: 14, self.persist: 6,
            self.distrust: 1, self.put: 10, self.reserve: 8, self.commit: 10, self.close: 5, self.quarantine: 1, self.restore: 1,
            self.make_room: 8, self.finish: 30, self.disk: 1, self.delete: 2, self.clear: 0.4, self.end_session: 1,
        }  # fmt: skip
        for call in self.dice.choices(list(calls), list(calls.values()), k=steps):
            call()
            self.check()
        self.wind_up()

    # --- the dice ---------------------------------------------------------------------------------------------------------

    def tokens(self) -> list[int]:
        return self.dice.choice(TRUNKS)[: self.dice.randint(1, 9)]

    def name(self) -> str:
        return self.dice.choice("aaab")

    def lease(self) -> Lease | None:
        return self.dice.choice(self.leases) if self.leases else None

    # --- readers ----------------------------------------------------------------------------------------------------------

    def match(self) -> None:
        space, key = self.house.space(self.name()), self.house.key(self.tokens())
        count, charged = self.dice.random() < 0.5, self.dice.random() < 0.7
        lease = self.house.cache.match(self.dice.choice(self.sessions), space, key, count=count, charged=charged)
        if self.dice.random() < 0.75:
            self.leases.append(lease)
        else:
            self.house.cache.release(lease)

    def release(self) -> None:
        if self.leases:
            self.house.cache.release(self.leases.pop(self.dice.randrange(len(self.leases))))

    def shorten(self) -> None:
        if lease := self.lease():
            self.house.cache.shorten(lease, self.dice.randint(0, 8))

    def share(self) -> None:
        if lease := self.lease():
            self.leases.append(self.house.cache.share(lease, self.dice.choice(self.sessions)))

    def hand_over(self) -> None:
        if lease := self.lease():
            self.house.cache.hand_over(lease, self.dice.choice(self.sessions))

    def promote(self) -> None:
        if lease := self.lease():
            self.house.lift(lease, self.dice.choice([HBM, HBM, DRAM]))

    def persist(self) -> None:
        if lease := self.lease():
            planned = self.house.cache.moves.plan_persist(lease.node, SSD)
            self.house.start([planned] if planned is not None else [])

    def distrust(self) -> None:
        if (lease := self.lease()) and lease.blocks:
            self.house.cache.distrust(lease, self.dice.randrange(lease.blocks))
            self.house.start(self.house.cache.inflight.take_waste())

    # --- writers ----------------------------------------------------------------------------------------------------------

    def put(self) -> None:
        position, drop = self.dice.choice([HBM, DRAM]), self.dice.random() < 0.5
        self.house.put(self.tokens(), self.name(), position=position, edition=self.edition, drop=drop)

    def reserve(self) -> None:
        key, after = self.house.key(self.tokens()), self.lease()
        if after is not None and not key.startswith(after.key[: 4 * after.blocks]):
            after = None
        space = self.house.space(self.name()) if after is None else after.space
        session, position = self.dice.choice(self.sessions), self.dice.choice([HBM, DRAM])
        self.writers.append((key, self.house.cache.reserve(session, space, key, after=after, position=position)))

    def commit(self) -> None:
        if self.writers:
            key, room = self.dice.choice(self.writers)
            self.house.fill(room, key, upto=self.dice.randint(room.committed, len(room.blocks)), edition=self.edition)

    def close(self) -> None:
        if self.writers:
            self.house.cache.close(self.writers.pop(self.dice.randrange(len(self.writers)))[1])

    def quarantine(self) -> None:
        if self.writers:
            self.quarantines.append(self.house.cache.quarantine(self.writers.pop()[1]))

    def restore(self) -> None:
        if self.quarantines:
            self.house.cache.restore(self.quarantines.pop())

    # --- room, moves, and what is taken away ------------------------------------------------------------------------------

    def make_room(self) -> None:
        position = self.dice.choice([HBM, DRAM, SSD])
        want = self.dice.randint(1, self.house.pools[position].capacity)
        drop, spare, past = (self.dice.random() < 0.4 for _ in range(3))
        self.house.start(self.house.cache.moves.make_room(position, want, drop=drop, spare=spare, past=past))

    def finish(self) -> None:
        if self.house.held:
            work = self.dice.choice(self.house.held)
            if isinstance(work, Discard) or self.dice.random() > 0.2:
                self.taken[work.reason.name if isinstance(work, Transfer) else "DISCARD"] += 1
                self.house.finish(work)
            else:
                self.house.finish(work, arrived=self.dice.randrange(work.count), rotten=self.dice.random() < 0.25)

    def disk(self) -> None:
        refusing = self.house.cache.moves.refusing
        refusing.symmetric_difference_update({SSD})

    def delete(self) -> None:
        self.house.delete(self.tokens(), self.name())
        self.edition += 1

    def clear(self) -> None:
        self.house.clear(self.name())
        self.edition += 1

    def end_session(self) -> None:
        place = self.dice.choice([1, 2])
        self.house.cache.end_session(self.sessions[place])
        self.sessions[place] = self.house.cache.begin_session()
        self.leases = [lease for lease in self.leases if not lease.released]
        self.writers = [(key, room) for key, room in self.writers if not room.closed]

    # --- what must be true ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.house.check()
        residency = self.house.cache.residency
        for node, told in residency.whereabouts.items():
            assert told == self.where(node)
        for lease in self.leases:
            self.house.compare(lease)
            for node in path(lease.node):
                if node.tag in (HBM, DRAM) and node not in residency.doubtful:
                    residency.whereabouts[node] = self.where(node)

    def where(self, node: Node) -> bytes:
        """Return where a node's blocks lie, as a daemon tells it."""
        residency, tag = self.house.cache.residency, node.tag
        assert tag is not None and residency.nodes[node.number] is node, "nobody can ask for it any more"
        slots = residency.table.slots(node.blocks, tag)
        generations = residency.slots[tag].generations[slots].tolist()
        return repr((tag, slots, generations, residency.table.checksum[rows(node.blocks)].tolist())).encode()

    def wind_up(self) -> None:
        """When all has ended every slot is accounted for, nothing is held, and everything can go."""
        house, cache, residency = self.house, self.house.cache, self.house.cache.residency
        cache.moves.refusing.clear()
        house.settle()
        for session in list(cache.sessions):
            cache.end_session(session)
        for kept in list(cache.quarantines):
            cache.restore(kept)
        house.start(cache.inflight.take_waste())
        house.check()
        assert residency.held == [0, 0, 0] and residency.buried_held == 0 and not residency.doubtful
        house.evict_all()
        house.check()
        assert house.in_use() == [0, 0, 0] and house.records == {} and not residency.whereabouts


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_wherever_a_walk_leads_the_books_are_right(first: int) -> None:
    """Ten walks, in which every kind of move has ended well under leases."""
    taken: Counter[str] = Counter()
    for seed in range(first, first + 10):
        walk = Walk(seed)
        walk.go(STEPS)
        taken += walk.taken

    assert min(taken[kind] for kind in ("COPY", "DEMOTE", "PROMOTE", "DISCARD")) > 5
