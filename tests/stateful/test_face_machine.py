"""The face under calls in any order: thousands of steps against a plain model, the books audited after each."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.stateful.machine import FaceMachine
from tests.stateful.overlap import OverlapMachine

EXAMPLES = 80
STEPS = 30
EXECUTED = 1000
"""Steps that each machine takes at least: two thousand together."""
MACHINES = pytest.mark.parametrize("machine", [FaceMachine, OverlapMachine], ids=["one after the other", "overlapping"])


def run(machine: type[FaceMachine], examples: int, **more: Any) -> int:
    """Run `machine` and return how many steps it took."""
    machine.steps = 0
    rules = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        deadline=None,
        print_blob=True,
        database=None,
        suppress_health_check=list(HealthCheck),
        **more,
    )
    run_state_machine_as_test(machine, settings=rules)
    print(f"{machine.steps} steps")
    return machine.steps


@MACHINES
def test_whatever_is_called_the_cache_agrees_with_the_model(machine: type[FaceMachine]) -> None:
    """No order of calls, cancellations, restarts and corrupted bytes makes a wrong byte, a lost lease or a wrong book."""
    steps = run(machine, EXAMPLES)

    assert steps >= EXECUTED


@pytest.mark.slow
@pytest.mark.timeout(1800)
@MACHINES
def test_whatever_is_called_at_length_the_cache_agrees_with_the_model(machine: type[FaceMachine]) -> None:
    """The same, ten times as long."""
    steps = run(machine, 10 * EXAMPLES)

    assert steps >= 10 * EXECUTED


@MACHINES
def test_the_same_calls_have_the_same_results(machine: type[FaceMachine], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is repeated to the last result, so that what a run found can be found again."""
    logs: list[list[Any]] = [[], []]

    for log in logs:
        monkeypatch.setattr(machine, "log", log)
        run(machine, 8, derandomize=True, phases=[Phase.generate])

    assert len(logs[0]) > 100
    assert logs[0] == logs[1]
