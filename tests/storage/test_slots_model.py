"""The slot pool against a plain dictionary, over random steps, right and wrong ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tiercache.errors import AuditFailed
from tiercache.slots import SlotNumbers, SlotState
from tiercache.storage.contract import FULL_CHARGE
from tiercache.storage.slots import SlotPool

FREE, HELD, OWNED, QUARANTINED = SlotState
STEPS: dict[str, tuple[Callable[[SlotPool, SlotNumbers], None], SlotState, SlotState]] = {
    "own": (SlotPool.own, HELD, OWNED),
    "hold": (SlotPool.hold, OWNED, HELD),
    "give": (SlotPool.give, HELD, FREE),
    "quarantine": (SlotPool.quarantine, HELD, QUARANTINED),
    "restore": (SlotPool.restore, QUARANTINED, FREE),
    "claim": (SlotPool.claim, FREE, OWNED),
}


class Books(RuleBasedStateMachine):
    """Random steps on a pool and on a plain dictionary of (state, charge, generation) by slot."""

    @initialize(capacity=st.integers(1, 150), tight=st.booleans())
    def start(self, capacity: int, tight: bool) -> None:
        self.budget = max(FULL_CHARGE, FULL_CHARGE * capacity * 3 // 4 if tight else FULL_CHARGE * capacity)
        self.pool = SlotPool(capacity, budget=self.budget)
        self.model = dict.fromkeys(range(capacity), (FREE, 0, 0))

    def used(self) -> int:
        return sum(charge for _, charge, _ in self.model.values())

    def choose(self, state: SlotState, data: st.DataObject) -> list[int]:
        known = [slot for slot, (found, _, _) in self.model.items() if found is state]
        share = data.draw(st.sampled_from([0, 1, 2, len(known) // 2, len(known)]))
        return data.draw(st.permutations(known))[:share]

    @rule(count=st.integers(0, 160))
    def take(self, count: int) -> None:
        free = sum(state is FREE for state, _, _ in self.model.values())
        taken = self.pool.take(count)
        assert len(taken) == len({*taken}) == min(count, free, (self.budget - self.used()) // FULL_CHARGE)
        for slot in taken:
            state, _, generation = self.model[slot]
            assert state is FREE
            self.model[slot] = (HELD, FULL_CHARGE, generation)

    @rule(step=st.sampled_from(sorted(STEPS)), data=st.data())
    def step(self, step: str, data: st.DataObject) -> None:
        move, was, to = STEPS[step]
        slots = self.choose(was, data)
        if step == "claim":
            charges = [1 + slot % FULL_CHARGE for slot in slots]
            if self.used() + sum(charges) > self.budget:
                return
            self.pool.claim(slots, charges)
        else:
            move(self.pool, slots)
        for slot in slots:
            _, charge, generation = self.model[slot]
            charge = 1 + slot % FULL_CHARGE if step == "claim" else charge
            self.model[slot] = (to, 0, generation + 1) if to is FREE else (to, charge, generation)

    @rule(step=st.sampled_from(sorted(STEPS)), data=st.data())
    def wrong_step(self, step: str, data: st.DataObject) -> None:
        move, was, _ = STEPS[step]
        others = [slot for slot, (state, _, _) in self.model.items() if state is not was]
        if others:
            with pytest.raises(AuditFailed):
                move(self.pool, [*self.choose(was, data), data.draw(st.sampled_from(others))])

    @rule(charge=st.integers(1, FULL_CHARGE), data=st.data())
    def settle(self, charge: int, data: st.DataObject) -> None:
        known = [slot for slot, (state, _, _) in self.model.items() if state in (HELD, OWNED)]
        if not known:
            return
        slot = data.draw(st.sampled_from(known))
        state, old, generation = self.model[slot]
        if self.used() - old + charge <= self.budget:
            self.pool.settle(slot, charge)
            self.model[slot] = (state, charge, generation)

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        pool, model = self.pool, self.model
        states = [state for state, _, _ in model.values()]
        assert [pool.state(slot) for slot in model] == states
        assert pool.generations.tolist() == [generation for _, _, generation in model.values()]
        assert pool.used == self.used() <= pool.budget
        assert pool.free == min(states.count(FREE), (self.budget - self.used()) // FULL_CHARGE)
        assert pool.census()[:5] == (*(states.count(state) for state in SlotState), self.used())
        assert pool.census().faults == ()


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30)
