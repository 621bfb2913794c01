"""The books of one tier's slots: who has which, what it costs, and under which generation."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tiercache.errors import AuditFailed
from tiercache.slots import Census, SlotNumbers, SlotState
from tiercache.storage.contract import FULL_CHARGE

_FEW = 32
"""Up to here a Python loop over bytes costs less than the fixed price of numpy's calls."""
_FEW_MOVED = 128
"""The same where only the state changes."""
_FREE, _HELD, _OWNED, _QUARANTINED = (int(state) for state in SlotState)


class SlotPool:
    """The slots of one tier for blocks of one geometry (the Protocol `tiercache.slots.Slots`).

    `budget` is what the slots in use may cost together, in units of which a slot costs `FULL_CHARGE` when taken; None is
    `FULL_CHARGE * capacity`, where every slot can be used at full charge. A tier whose blocks may shrink has more slots than
    its budget pays for at full charge. `generations` is the memory that the generations live in, a contiguous uint32 array of
    `capacity` items, kept as it is; None is memory of the pool's own.

    Free slots are a stack, so `take` and `give` cost the same whatever the capacity. A fresh pool gives the lowest slots
    first; later the slot that was freed last, whose bytes are likeliest to be in a cache.

    Not thread-safe: only the thread that decides calls it. Readers elsewhere read `generations` in place. For them the order
    in `_release` matters: a slot's generation grows before the slot can be taken, so a reader that finds its generation
    unchanged after its copy has copied before anyone could write.
    """

    def __init__(self, capacity: int, *, budget: int | None = None, generations: NDArray[np.uint32] | None = None) -> None:
        if capacity < 1:
            raise AuditFailed(f"a pool needs at least one slot, not {capacity}", capacity=capacity)
        own = np.zeros(capacity, np.uint32) if generations is None else generations
        if own.shape != (capacity,) or own.dtype != np.uint32 or not own.flags.c_contiguous or not own.flags.writeable:
            raise AuditFailed(
                f"generations must be {capacity} writable contiguous uint32 items, not {own.dtype} {own.shape}", capacity=capacity
            )
        self._capacity = capacity
        self._budget = FULL_CHARGE * capacity if budget is None else budget
        if self._budget < FULL_CHARGE:
            raise AuditFailed(f"a budget of {self._budget} units does not pay for one slot ({FULL_CHARGE})", budget=self._budget)
        self._used = 0
        # Bytes for single slots and the same bytes as an array for many: indexing an ndarray costs three times as much.
        self._state = bytearray(capacity)
        self._states = np.frombuffer(self._state, np.uint8)
        self._charge = bytearray(capacity)
        self._charges = np.frombuffer(self._charge, np.uint8)
        self._generations = own
        self._generation = own.data
        self._shown = own.view()
        self._shown.flags.writeable = False
        self._stack = _stack(np.arange(capacity - 1, -1, -1))

    @property
    def capacity(self) -> int:
        """How many slots there are; slots are numbered from 0."""
        return self._capacity

    @property
    def budget(self) -> int:
        """Units that the slots in use may cost together."""
        return self._budget

    @property
    def used(self) -> int:
        """Units that the slots in use cost; never above `budget`."""
        return self._used

    @property
    def free(self) -> int:
        """How many slots `take` would give now: what is free, as far as the budget pays for it at full charge."""
        return min(len(self._stack), (self._budget - self._used) // FULL_CHARGE)

    @property
    def generations(self) -> NDArray[np.uint32]:
        """One generation a slot, read-only, of the memory that was handed in."""
        return self._shown

    def detach(self) -> None:
        """Let go of the memory that was handed in, and keep the generations in memory of the pool's own from now on."""
        own = self._generations.copy()
        self._generations = own
        self._generation = own.data
        self._shown = own.view()
        self._shown.flags.writeable = False

    def take(self, count: int) -> list[int]:
        """Move up to `count` slots from FREE to HELD at full charge and return them; fewer, or none, when there are no more.

        Raises AuditFailed for a negative count.
        """
        if count < 0:
            raise AuditFailed(f"cannot take {count} slots", count=count)
        stack = self._stack
        count = min(count, len(stack), (self._budget - self._used) // FULL_CHARGE)
        if count == 0:
            return []
        self._used += FULL_CHARGE * count
        taken = stack[-count:]
        taken.reverse()
        del stack[-count:]
        if count <= _FEW:
            state, charge = self._state, self._charge
            for slot in taken:
                state[slot] = _HELD
                charge[slot] = FULL_CHARGE
            return taken.tolist()
        numbers = np.frombuffer(taken, np.uint32).astype(np.intp)  # as an index, other widths take several times as long
        self._states[numbers] = _HELD
        self._charges[numbers] = FULL_CHARGE
        return taken.tolist()

    def own(self, slots: SlotNumbers) -> None:
        """Move `slots` from HELD to OWNED. Raises AuditFailed, and changes nothing, if one is in another state."""
        self._move(slots, _HELD, _OWNED)

    def hold(self, slots: SlotNumbers) -> None:
        """Move `slots` from OWNED to HELD. Raises AuditFailed, and changes nothing, if one is in another state."""
        self._move(slots, _OWNED, _HELD)

    def give(self, slots: SlotNumbers) -> None:
        """Move `slots` from HELD to FREE, give their charge back and start their next generation.

        Raises AuditFailed, and changes nothing, if one is in another state or named twice.
        """
        self._release(slots, _HELD)

    def quarantine(self, slots: SlotNumbers) -> None:
        """Move `slots` from HELD to QUARANTINED; their charge stays. Raises AuditFailed as `own` does."""
        self._move(slots, _HELD, _QUARANTINED)

    def restore(self, slots: SlotNumbers) -> None:
        """Move `slots` from QUARANTINED to FREE as `give` does from HELD."""
        self._release(slots, _QUARANTINED)

    def claim(self, slots: SlotNumbers, charges: Sequence[int] | None = None) -> None:
        """Move `slots` from FREE to OWNED at `charges` (full when None): recovery finds them in use.

        Costs a pass over the free slots. Raises AuditFailed, and changes nothing, if a slot is in another state or named
        twice, a charge is not from 1 to `FULL_CHARGE`, or the budget does not pay for them.
        """
        numbers = self._checked(slots, _FREE)
        costs = np.full(len(numbers), FULL_CHARGE, np.int64) if charges is None else np.asarray(charges, np.int64)
        if costs.shape != numbers.shape:
            raise AuditFailed(
                f"{len(numbers)} slots were claimed with {costs.size} charges", slots=len(numbers), charges=costs.size
            )
        wrong = np.flatnonzero((costs < 1) | (costs > FULL_CHARGE))
        if len(wrong):
            raise _not_a_charge(int(numbers[wrong[0]]), int(costs[wrong[0]]))
        total = int(costs.sum())
        self._require_budget(total, f"{len(numbers)} claimed slots")
        self._used += total
        self._states[numbers] = _OWNED
        self._charges[numbers] = costs
        stack = np.frombuffer(self._stack, np.uint32)
        self._stack = _stack(stack[self._states[stack] == _FREE])

    def settle(self, slot: int, charge: int) -> None:
        """Change what `slot`, HELD or OWNED, costs to `charge` units; the difference can be taken by others at once.

        Raises AuditFailed, and changes nothing, if the slot is FREE or QUARANTINED, the charge is not from 1 to `FULL_CHARGE`,
        or the budget does not pay for a higher one.
        """
        self._require_slot(slot)
        if self._state[slot] not in (_HELD, _OWNED):
            raise self._not_in_state(slot, "HELD or OWNED")
        if not 1 <= charge <= FULL_CHARGE:
            raise _not_a_charge(slot, charge)
        difference = charge - self._charge[slot]
        self._require_budget(difference, f"a charge of {charge} for slot {slot}")
        self._used += difference
        self._charge[slot] = charge

    def generation(self, slot: int) -> int:
        """Return the slot's generation. Raises AuditFailed if there is no such slot."""
        self._require_slot(slot)
        return self._generation[slot]

    def state(self, slot: int) -> SlotState:
        """Return who has the slot. Raises AuditFailed if there is no such slot."""
        self._require_slot(slot)
        return SlotState(self._state[slot])

    def listed(self, state: SlotState) -> NDArray[np.int64]:
        """Return the numbers of all slots in `state`, ascending."""
        return np.flatnonzero(self._states == state)

    def census(self) -> Census:
        """Count all slots anew, and compare with the stack and the sum that the pool keeps."""
        counts = np.bincount(self._states, minlength=len(SlotState))
        charged = int(self._charges.sum(dtype=np.int64))
        stack = np.frombuffer(self._stack, np.uint32)
        faults = []
        if charged != self._used:
            faults.append(f"the slots in use cost {charged} units, the books say {self._used}")
        if not 0 <= self._used <= self._budget:
            faults.append(f"{self._used} units are used of {self._budget}")
        if not np.array_equal(np.sort(stack), self.listed(SlotState.FREE)):
            faults.append(f"{len(stack)} slots can be taken, {counts[_FREE]} are free, and they are not the same ones")
        unpaid = np.flatnonzero((self._states == _FREE) != (self._charges == 0))
        if len(unpaid):
            slot = int(unpaid[0])
            faults.append(f"slot {slot} is {self.state(slot).name} and costs {self._charge[slot]}")
        free, held, owned, quarantined = (int(count) for count in counts)
        return Census(free, held, owned, quarantined, charged, self._budget, tuple(faults))

    def _move(self, slots: SlotNumbers, was: int, to: int) -> None:
        if len(slots) > _FEW_MOVED:
            self._states[self._checked(slots, was)] = to
            return
        state, slot = self._state, -1
        left = iter(slots)
        try:
            for slot in left:
                # A negative number would silently mean a slot counted from the end. One that is named twice is `to` by now.
                if state[slot] != was or slot < 0:
                    break
                state[slot] = to
            else:
                return
        except IndexError:
            pass
        for moved in slots[: len(slots) - len(list(left)) - 1]:
            state[moved] = was
        self._check_few(slots, was)

    def _release(self, slots: SlotNumbers, was: int) -> None:
        # The generation grows before the slot is on the stack. The other way round, a reader could copy what the next owner
        # writes and still find the generation it started with.
        if len(slots) > _FEW:
            numbers = self._checked(slots, was)
            self._generations[numbers] += np.uint32(1)
            self._used -= int(self._charges[numbers].sum(dtype=np.int64))
            self._charges[numbers] = 0
            self._states[numbers] = _FREE
            self._stack.frombytes(numbers[::-1].astype(np.uint32).tobytes())
            return
        self._check_few(slots, was)
        for slot in reversed(slots):
            self._generation[slot] = (self._generation[slot] + 1) & 0xFFFF_FFFF
            self._used -= self._charge[slot]
            self._charge[slot] = 0
            self._state[slot] = _FREE
            self._stack.append(int(slot))

    def _check_few(self, slots: SlotNumbers, was: int) -> None:
        state, capacity = self._state, self._capacity
        for slot in slots:
            # Zero is tested too: a negative number would silently mean a slot counted from the end.
            if not 0 <= slot < capacity or state[slot] != was:
                self._require_slot(int(slot))
                raise self._not_in_state(int(slot), SlotState(was).name)
        if len(slots) > 1 and len({*slots}) != len(slots):
            raise _named_twice(np.asarray(slots))

    def _checked(self, slots: SlotNumbers, was: int) -> NDArray[np.int64]:
        numbers = np.asarray(slots, np.int64)
        if not len(numbers):
            return numbers
        if numbers.view(np.uint64).max() >= self._capacity:  # a negative number is a large one there
            self._require_slot(int(numbers[np.flatnonzero((numbers < 0) | (numbers >= self._capacity))[0]]))
        states = self._states[numbers]
        if states.tobytes().count(was) != len(numbers):
            raise self._not_in_state(int(numbers[np.flatnonzero(states != was)[0]]), SlotState(was).name)
        ordered = np.sort(numbers)
        if (ordered[1:] == ordered[:-1]).any():
            raise _named_twice(numbers)
        return numbers

    def _require_slot(self, slot: int) -> None:
        if not 0 <= slot < self._capacity:
            last = self._capacity - 1
            raise AuditFailed(
                f"slot {slot} does not exist; the slots are 0 to {last}", slot=slot, state=None, capacity=self._capacity
            )

    def _require_budget(self, more: int, what: str) -> None:
        if self._used + more > self._budget:
            message = f"{what}: {self._used} of {self._budget} units are used, {more} more do not fit"
            raise AuditFailed(message, used=self._used, budget=self._budget)

    def _not_in_state(self, slot: int, expected: str) -> AuditFailed:
        state = self.state(slot).name
        return AuditFailed(f"slot {slot} is {state}, not {expected}", slot=slot, state=state, expected=expected)


def _stack(slots: NDArray[np.integer]) -> array[int]:
    stack = array("I")
    stack.frombytes(slots.astype(np.uint32).tobytes())
    return stack


def _named_twice(slots: NDArray[np.integer]) -> AuditFailed:
    numbers, counts = np.unique(slots, return_counts=True)
    slot = int(numbers[counts > 1][0])
    return AuditFailed(f"slot {slot} is named twice in one call", slot=slot)


def _not_a_charge(slot: int, charge: int) -> AuditFailed:
    return AuditFailed(f"a charge of {charge} units for slot {slot}; charges are 1 to {FULL_CHARGE}", slot=slot, charge=charge)
