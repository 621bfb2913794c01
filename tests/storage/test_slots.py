"""The slot pool: every legal step changes the books as the picture says, every other one is refused and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tiercache.errors import AuditFailed
from tiercache.slots import Slots, SlotState
from tiercache.storage.contract import FULL_CHARGE
from tiercache.storage.slots import SlotPool

FREE, HELD, OWNED, QUARANTINED = SlotState
MANY = 300
"""More than the pool treats one by one."""


def pool_in(state: SlotState, count: int) -> tuple[SlotPool, list[int]]:
    """A pool with room to spare, of which `count` slots are in `state`."""
    pool = SlotPool(count + 5)
    slots = pool.take(count)
    for slot in slots:
        put_into(pool, slot, state)
    return pool, slots


def put_into(pool: SlotPool, slot: int, state: SlotState) -> int:
    """Bring `slot` from any state to `state`, by legal steps through FREE and HELD, and return it."""
    if pool.state(slot) is QUARANTINED:
        pool.restore([slot])
    if pool.state(slot) is FREE:
        pool.claim([slot])
    if pool.state(slot) is OWNED:
        pool.hold([slot])
    if state is FREE:
        pool.give([slot])
    if state is OWNED:
        pool.own([slot])
    if state is QUARANTINED:
        pool.quarantine([slot])
    return slot


def books(pool: SlotPool) -> tuple[object, ...]:
    """All that a refused call must leave as it was."""
    states = [pool.state(slot) for slot in range(pool.capacity)]
    return states, pool.generations.tolist(), pool.free, pool.used, pool.census()


STEPS: dict[str, tuple[Callable[[SlotPool, Sequence[int]], None], SlotState, SlotState]] = {
    "own": (SlotPool.own, HELD, OWNED),
    "hold": (SlotPool.hold, OWNED, HELD),
    "give": (SlotPool.give, HELD, FREE),
    "quarantine": (SlotPool.quarantine, HELD, QUARANTINED),
    "restore": (SlotPool.restore, QUARANTINED, FREE),
    "claim": (SlotPool.claim, FREE, OWNED),
}


def test_the_pool_is_what_the_core_asks_for() -> None:
    """SlotPool fulfils the Protocol (a type checker holds the signatures)."""
    pool: Slots = SlotPool(3)

    assert (pool.capacity, pool.free, pool.used, pool.budget) == (3, 3, 0, 3 * FULL_CHARGE)


def test_take_gives_the_lowest_first_and_never_more_than_there_is() -> None:
    """A fresh pool hands out 0, 1, 2 …; at the end it gives fewer than asked, then none."""
    pool = SlotPool(5)

    taken = [pool.take(2), pool.take(0), pool.take(9), pool.take(1)]

    assert taken == [[0, 1], [], [2, 3, 4], []]
    assert pool.free == 0


@pytest.mark.parametrize("count", [1, 3, MANY])
@pytest.mark.parametrize("step", STEPS)
def test_a_step_moves_slots_from_its_state_to_the_next(step: str, count: int) -> None:
    """Each step takes all its slots to one state, and the slots that are free again can all be taken again."""
    move, was, to = STEPS[step]
    pool, slots = pool_in(was, count)

    move(pool, slots)

    assert {pool.state(slot) for slot in slots} == {to}
    assert pool.census().faults == ()
    assert pool.free == pool.capacity - (0 if to is FREE else count)
    assert sorted(pool.take(pool.capacity)) == ([*range(count + 5)] if to is FREE else [*range(count, count + 5)])


@pytest.mark.parametrize("count", [1, 3, MANY])
@pytest.mark.parametrize(("step", "state"), [(step, state) for step in STEPS for state in SlotState if state is not STEPS[step][1]])
def test_a_step_from_another_state_is_refused_by_name(step: str, state: SlotState, count: int) -> None:
    """One slot in the wrong state refuses the whole call, which names slot, state and expected state and changes nothing."""
    move, was, _ = STEPS[step]
    pool, slots = pool_in(was, count + 6)
    wrong = put_into(pool, slots[0], state)
    before = books(pool)

    with pytest.raises(AuditFailed) as caught:
        move(pool, [*slots[1:count], wrong])

    assert (caught.value.fields["slot"], caught.value.fields["state"], caught.value.fields["expected"]) == (
        wrong,
        state.name,
        was.name,
    )
    assert all(word in str(caught.value) for word in (f"slot {wrong}", state.name, was.name))
    assert books(pool) == before


@pytest.mark.parametrize("count", [2, MANY])
@pytest.mark.parametrize("step", STEPS)
def test_a_slot_named_twice_is_refused(step: str, count: int) -> None:
    """Two ranges that meet in one slot free it once or not at all: the call is refused and changes nothing."""
    move, was, _ = STEPS[step]
    pool, slots = pool_in(was, count)
    before = books(pool)

    with pytest.raises(AuditFailed, match=f"slot {slots[1]} is named twice"):
        move(pool, [*slots[: count // 2 + 1], *slots[1:]] if count == 2 else [*slots, slots[1]])

    assert books(pool) == before


@pytest.mark.parametrize("slot", [-1, 10, 2**40])
@pytest.mark.parametrize("count", [1, MANY])
@pytest.mark.parametrize("step", STEPS)
def test_a_slot_that_does_not_exist_is_refused(step: str, count: int, slot: int) -> None:
    """A number outside of the pool is refused by name; a negative one never means the last slot."""
    move, was, _ = STEPS[step]
    pool, slots = pool_in(was, count + 5)
    slot = pool.capacity if slot == 10 else slot
    before = books(pool)

    with pytest.raises(AuditFailed, match=f"slot {slot} does not exist"):
        move(pool, [*slots[: count - 1], slot])

    assert books(pool) == before


@pytest.mark.parametrize("slot", [-1, 4])
def test_questions_about_a_slot_that_does_not_exist_are_refused(slot: int) -> None:
    """Generation, state and settling answer for slots of the pool alone."""
    pool = SlotPool(4)
    pool.take(4)

    for ask in (pool.generation, pool.state, lambda number: pool.settle(number, 1)):
        with pytest.raises(AuditFailed, match=f"slot {slot} does not exist"):
            ask(slot)


@pytest.mark.parametrize("kind", [list, tuple, np.asarray, lambda slots: np.asarray(slots, np.uint32)])
@pytest.mark.parametrize("count", [0, 1, 3, MANY])
def test_slots_may_come_as_arrays(count: int, kind: Callable[[list[int]], Sequence[int]]) -> None:
    """Lists, tuples and integer arrays of any length are taken alike, none at all included."""
    pool = SlotPool(MANY + 1)
    slots = kind(pool.take(count))

    pool.own(slots)
    pool.hold(slots)
    pool.quarantine(slots)
    pool.restore(slots)
    pool.claim(slots)

    assert pool.listed(OWNED).tolist() == [*range(count)]
    assert pool.census().faults == ()


@pytest.mark.parametrize("count", [1, 3, MANY])
def test_a_generation_grows_when_the_slot_becomes_free_and_only_then(count: int) -> None:
    """Taking, owning, holding and quarantining keep the generation; giving and restoring start the next one."""
    pool = SlotPool(MANY + 1)
    slots = pool.take(count)
    pool.own(slots)
    pool.hold(slots)
    kept = {pool.generation(slot) for slot in slots}
    pool.give(slots)
    given = {pool.generation(slot) for slot in slots}
    again = pool.take(count)
    pool.quarantine(again)
    quarantined = {pool.generation(slot) for slot in again}

    pool.restore(again)

    assert (kept, given, quarantined) == ({0}, {1}, {1})
    assert pool.generations.tolist() == [2] * count + [0] * (pool.capacity - count)


@pytest.mark.parametrize("count", [1, MANY])
def test_a_generation_starts_over_after_its_last(count: int) -> None:
    """After 2**32 - 1 comes 0, without an error or a warning."""
    memory = np.full(MANY, 2**32 - 1, np.uint32)
    pool = SlotPool(MANY, generations=memory)

    pool.give(pool.take(count))

    assert memory.tolist() == [0] * count + [2**32 - 1] * (MANY - count)


def test_generations_live_in_the_memory_handed_in() -> None:
    """What others map is what the pool writes; the pool's own property can't be written."""
    page = np.zeros(16, np.uint32)
    page[2:6] = 40
    pool = SlotPool(4, generations=page[2:6])

    pool.give(pool.take(1))

    assert page.tolist() == [0, 0, 41, 40, 40, 40, *[0] * 10]
    assert np.shares_memory(pool.generations, page)
    with pytest.raises(ValueError, match="read-only"):
        pool.generations[0] = 1


@pytest.mark.parametrize(
    "memory",
    [np.zeros(3, np.uint32), np.zeros(4, np.uint64), np.zeros(8, np.uint32)[::2], np.frombuffer(bytes(16), np.uint32)],
    ids=["short", "wide", "strided", "read-only"],
)
def test_memory_for_generations_that_does_not_fit_is_refused(memory: np.ndarray) -> None:
    """Generations need one writable contiguous uint32 item a slot."""
    with pytest.raises(AuditFailed, match="4 writable contiguous uint32 items"):
        SlotPool(4, generations=memory)


def test_a_copying_reader_sees_that_its_slot_was_reused() -> None:
    """A reader that is slower than its lease finds another generation after its copy, and hands nothing out."""
    pool = SlotPool(1)
    memory = bytearray(b"old!")
    pool.own(pool.take(1))
    before = pool.generations[0]
    copy = bytes(memory[:2])
    pool.hold([0])
    pool.give([0])
    pool.take(1)
    memory[:] = b"new!"
    copy += bytes(memory[2:])

    after = pool.generations[0]

    assert copy == b"olw!"
    assert after != before


def test_a_smaller_record_pays_for_others() -> None:
    """With more slots than the budget pays for at full charge, what settled blocks save can be taken by others."""
    pool = SlotPool(8, budget=5 * FULL_CHARGE)
    first = pool.take(8)

    for slot in first[:4]:
        pool.settle(slot, 3)

    assert len(first) == 5
    assert (pool.used, pool.free) == (16, 1)
    assert pool.take(2) == [5]
    assert pool.free == 0


def test_charges_are_given_back_once_and_whole() -> None:
    """Whatever a slot was settled to is what comes back; at the end all slots fit again."""
    pool = SlotPool(10)
    for _ in range(5):
        slots = pool.take(3)
        pool.settle(slots[0], 1)
        pool.settle(slots[0], 2)
        pool.own(slots)
        pool.settle(slots[1], 3)
        pool.hold(slots)
        pool.give(slots)

    assert (pool.used, pool.free, pool.census().faults) == (0, 10, ())
    assert len(pool.take(11)) == 10


@pytest.mark.parametrize(
    ("state", "charge", "message"),
    [
        (FREE, 2, "FREE"),
        (QUARANTINED, 2, "QUARANTINED"),
        (HELD, 0, "charge of 0"),
        (OWNED, FULL_CHARGE + 1, "charge of 5"),
        (HELD, -1, "-1"),
    ],
)
def test_a_charge_that_cannot_be_is_refused(state: SlotState, charge: int, message: str) -> None:
    """Free and quarantined slots have nothing to settle, and a charge is 1 to FULL_CHARGE."""
    pool, slots = pool_in(state, 1)
    before = books(pool)

    with pytest.raises(AuditFailed, match=message):
        pool.settle(slots[0], charge)

    assert books(pool) == before


def test_a_charge_never_goes_above_the_budget() -> None:
    """A slot that was settled can't be charged in full again once its savings are used."""
    pool = SlotPool(4, budget=2 * FULL_CHARGE)
    cheap, other = pool.take(2)
    pool.settle(cheap, 2)
    pool.settle(other, 2)
    pool.take(1)
    before = books(pool)

    with pytest.raises(AuditFailed, match="8 of 8 units"):
        pool.settle(cheap, FULL_CHARGE)

    assert books(pool) == before


@pytest.mark.parametrize("count", [3, MANY])
def test_recovery_claims_slots_by_number(count: int) -> None:
    """Claimed slots are owned at their charges and are not handed out; the others still are."""
    pool = SlotPool(2 * count)
    numbers = [*range(1, 2 * count, 2)]

    pool.claim(numbers, [1 + number % FULL_CHARGE for number in numbers])

    assert pool.used == sum(1 + number % FULL_CHARGE for number in numbers)
    assert sorted(pool.take(2 * count)) == [*range(0, 2 * count, 2)]
    assert pool.census().faults == ()


@pytest.mark.parametrize(("slots", "charges"), [([0, 1], [4]), ([0, 1], [4, 0]), ([0, 1], [4, 5]), ([0, 1, 2], None)])
def test_a_claim_that_does_not_add_up_is_refused(slots: list[int], charges: list[int] | None) -> None:
    """As many charges as slots, each a charge, and all within the budget; else nothing is claimed."""
    pool = SlotPool(4, budget=2 * FULL_CHARGE)
    before = books(pool)

    with pytest.raises(AuditFailed):
        pool.claim(slots, charges)

    assert books(pool) == before


def test_a_negative_count_is_refused() -> None:
    """A negative count is no count from the other end."""
    with pytest.raises(AuditFailed, match="-1"):
        SlotPool(3).take(-1)


@pytest.mark.parametrize(("capacity", "budget"), [(0, None), (-1, None), (3, FULL_CHARGE - 1)])
def test_a_pool_that_can_hold_nothing_is_refused(capacity: int, budget: int | None) -> None:
    """A pool has a slot, and a budget that pays for one."""
    with pytest.raises(AuditFailed):
        SlotPool(capacity, budget=budget)


def test_the_census_sees_books_that_are_wrong() -> None:
    """Each kind of damage to the pool's own books is reported in words."""
    lost, doubled, unpaid = SlotPool(4), SlotPool(4), SlotPool(4)
    lost._stack.pop()
    doubled._stack.append(doubled._stack[0])
    unpaid._charge[unpaid.take(1)[0]] = 0

    assert "can be taken" in " ".join(lost.census().faults)
    assert "can be taken" in " ".join(doubled.census().faults)
    assert "slot 0 is HELD and costs 0" in " ".join(unpaid.census().faults)
    assert "the books say 4" in " ".join(unpaid.census().faults)


def test_a_detached_pool_goes_on_in_memory_of_its_own() -> None:
    """What was handed in is let go of, as it is."""
    shared = np.zeros(4, np.uint32)
    pool = SlotPool(4, generations=shared)
    pool.give(pool.take(1))
    pool.detach()

    pool.give(pool.take(1))

    assert shared.tolist() == [1, 0, 0, 0]
    assert pool.generations.tolist() == [2, 0, 0, 0] and pool.census().faults == ()
