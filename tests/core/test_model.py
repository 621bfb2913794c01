"""The core against a plain set of prompts, over random steps, with moves that end late, out of order, in part or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.core.house import DRAM, HBM, SSD, House
from tiercache.leases import Lease, Reservation
from tiercache.transfer import Discard, Transfer, Work
from tiercache.tree import path, subtree

TOKENS = st.lists(st.integers(1, 3), min_size=1, max_size=7)
NAMES = st.sampled_from(["a", "b", "c"])
MEMORY = st.sampled_from([HBM, DRAM])
TIER = st.sampled_from([HBM, DRAM, SSD])


class Life(RuleBasedStateMachine):
    """Readers, writers, deletions and moves on tiers of 4, 6 and 12 blocks; `stored` is what may be found."""

    def __init__(self) -> None:
        super().__init__()
        self.begin(House(4, 6, 12, batch_blocks=3, lease_share=0.9))
        self.stored: set[tuple[str, bytes]] = set()
        self.edition = 0

    def begin(self, house: House) -> None:
        self.house = house
        self.house.holding = True
        self.leases: list[Lease] = []
        self.writers: list[tuple[str, bytes, Reservation]] = []
        self.sessions = [self.house.session, self.house.cache.begin_session()]

    def note(self, name: str, key: bytes, blocks: int) -> None:
        self.stored |= {(name, key[: 4 * count]) for count in range(1, blocks + 1)}

    # --- readers ----------------------------------------------------------------------------------------------------------

    @rule(tokens=TOKENS, name=NAMES, who=st.integers(0, 1))
    def match(self, tokens: list[int], name: str, who: int) -> None:
        lease = self.house.cache.match(self.sessions[who], self.house.space(name), self.house.key(tokens))
        self.leases.append(lease)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.leases:
            self.house.cache.release(self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1))))

    @rule(data=st.data(), blocks=st.integers(0, 5))
    def shorten(self, data: st.DataObject, blocks: int) -> None:
        if self.leases:
            self.house.cache.shorten(data.draw(st.sampled_from(self.leases)), blocks)

    @rule(data=st.data(), to=MEMORY)
    def promote(self, data: st.DataObject, to: int) -> None:
        if self.leases:
            self.house.lift(data.draw(st.sampled_from(self.leases)), to)

    @rule(data=st.data())
    def persist(self, data: st.DataObject) -> None:
        if self.leases:
            transfer = self.house.cache.moves.plan_persist(data.draw(st.sampled_from(self.leases)).node, SSD)
            self.house.start([transfer] if transfer is not None else [])

    @rule(data=st.data())
    def distrust(self, data: st.DataObject) -> None:
        covering = [lease for lease in self.leases if lease.blocks and lease.node.alive]
        if not covering:
            return
        lease = data.draw(st.sampled_from(covering))
        block = data.draw(st.integers(0, lease.blocks - 1))
        with self.removing():
            self.house.cache.distrust(lease, block)
        self.house.start(self.house.cache.inflight.take_waste())

    # --- writers ----------------------------------------------------------------------------------------------------------

    @rule(tokens=TOKENS, name=NAMES, position=MEMORY)
    def put(self, tokens: list[int], name: str, position: int) -> None:
        self.house.put(tokens, name, position=position, edition=self.edition)
        self.note(name, self.house.key(tokens), len(tokens))

    @rule(tokens=TOKENS, name=NAMES, position=MEMORY, who=st.integers(0, 1))
    def reserve(self, tokens: list[int], name: str, position: int, who: int) -> None:
        key = self.house.key(tokens)
        room = self.house.cache.reserve(self.sessions[who], self.house.space(name), key, after=None, position=position)
        self.writers.append((name, key, room))

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        if self.writers:
            name, key, room = data.draw(st.sampled_from(self.writers))
            upto = data.draw(st.integers(room.committed, len(room.blocks)))
            before = room.committed
            done = self.house.fill(room, key, upto=upto, edition=self.edition)
            assert before <= done <= upto
            if done > before:
                self.note(name, key, room.present + done)

    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        if self.writers:
            _, _, room = self.writers.pop(data.draw(st.integers(0, len(self.writers) - 1)))
            self.house.cache.close(room)

    # --- room and moves ---------------------------------------------------------------------------------------------------

    @rule(position=TIER, want=st.integers(1, 6), drop=st.booleans())
    def make_room(self, position: int, want: int, drop: bool) -> None:
        pool = self.house.pools[position]
        want = min(want, pool.capacity)
        work = self.house.cache.moves.make_room(position, want, drop=drop)
        self.house.start(work)

    @rule(data=st.data(), fate=st.sampled_from(["well", "well", "well", "failed", "rotten"]))
    def finish(self, data: st.DataObject, fate: str) -> None:
        if not self.house.held:
            return
        work = data.draw(st.sampled_from(self.house.held))
        if isinstance(work, Transfer) and fate != "well":
            self.house.finish(work, arrived=data.draw(st.integers(0, work.count - 1)), rotten=fate == "rotten")
        else:
            self.house.finish(work)

    @rule(refusing=st.booleans())
    def disk(self, refusing: bool) -> None:
        refused = self.house.cache.moves.refusing
        if refusing:
            refused.add(SSD)
        else:
            refused.discard(SSD)

    # --- taking away ------------------------------------------------------------------------------------------------------

    @rule(tokens=TOKENS, name=NAMES)
    def delete(self, tokens: list[int], name: str) -> None:
        key = self.house.key(tokens)
        covered = self.house.cache.covered(self.house.space(name), key)
        with self.removing():
            removed = self.house.delete(tokens, name)
        if removed:
            top = key[: 4 * (covered - removed + 1)]
            self.stored -= {entry for entry in self.stored if entry[0] == name and entry[1].startswith(top)}
        self.edition += 1

    @rule(name=NAMES)
    def clear(self, name: str) -> None:
        with self.removing():
            self.house.clear(name)
        self.stored -= {entry for entry in self.stored if entry[0] == name}
        self.edition += 1

    @rule()
    def end_session(self) -> None:
        gone = self.sessions[1]
        self.house.cache.end_session(gone)
        self.leases = [lease for lease in self.leases if lease.session is not gone]
        self.writers = [writer for writer in self.writers if not writer[2].closed]
        self.sessions[1] = self.house.cache.begin_session()

    @rule()
    def kill(self) -> None:
        while late := [work for work in self.house.held if self.concerns_a_delete(work)]:
            self.house.finish(late[0])  # what was deleted is acknowledged when this has ended
        self.begin(self.house.restart())

    def concerns_a_delete(self, work: Work) -> bool:
        return isinstance(work, Discard) or any(not node.alive for node in self.house.cache.residency.owners(work.blocks))

    # --- what must be true ------------------------------------------------------------------------------------------------

    @invariant()
    def the_books_are_right_and_so_are_the_bytes(self) -> None:
        self.house.check()
        for lease in self.leases:
            self.house.compare(lease)

    @invariant()
    def nothing_is_found_that_was_deleted(self) -> None:
        for name in "abc":
            tree = self.house.space(name).tree
            for node in subtree(tree.root):
                prefix = b"".join(step.key for step in path(node))
                for end in range(len(prefix), len(prefix) - len(node.key), -4):
                    assert (name, prefix[:end]) in self.stored

    @contextmanager
    def removing(self) -> Iterator[None]:
        """What is leased and lies in memory is readable to the end of the lease, also when it leaves the tree."""
        leased = {node for lease in self.leases for node in path(lease.node) if node.copies & ~(1 << SSD)}
        yield
        assert all(node.copies & ~(1 << SSD) for node in leased)

    def teardown(self) -> None:
        """Whatever happened: when all has ended, every slot is accounted for, and everything can go."""
        house = self.house
        house.cache.moves.refusing.clear()
        house.settle()
        for session in list(house.cache.sessions):
            house.cache.end_session(session)
        house.start(house.cache.inflight.take_waste())
        house.check()
        assert house.cache.residency.buried_held == 0
        house.evict_all()
        house.check()
        assert house.in_use() == [0, 0, 0] and house.records == {}


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=300, stateful_step_count=40)
