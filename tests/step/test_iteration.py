"""`Iteration`: every state of a step, every transition, and what is refused in each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import integers, none

from zerostep.errors import InterruptedPassError
from zerostep.step.iteration import Iteration, Phase

Transition = Callable[[Iteration], None]

TRANSITIONS: dict[str, Transition] = {
    "begin_pass": Iteration.begin_pass,
    "end_pass": Iteration.end_pass,
    "end_step": Iteration.end_step,
    "restart": lambda iteration: iteration.restart(None),
}

# From a phase, by a transition, to another phase; what is not here is an error of the program.
ALLOWED = {
    (Phase.BETWEEN, "begin_pass"): Phase.BACKWARD,
    (Phase.BETWEEN, "end_step"): Phase.BETWEEN,  # a step of a rank that has nothing to do
    (Phase.BETWEEN, "restart"): Phase.BETWEEN,
    (Phase.BACKWARD, "end_pass"): Phase.REDUCED,
    (Phase.BACKWARD, "end_step"): Phase.BETWEEN,
    (Phase.BACKWARD, "restart"): Phase.BETWEEN,
    (Phase.REDUCED, "begin_pass"): Phase.BACKWARD,
    (Phase.REDUCED, "end_step"): Phase.BETWEEN,
    (Phase.REDUCED, "restart"): Phase.BETWEEN,
}


def _in(phase: Phase) -> Iteration:
    iteration = Iteration()
    if phase is not Phase.BETWEEN:
        iteration.begin_pass()
    if phase is Phase.REDUCED:
        iteration.end_pass()
    assert iteration.phase is phase
    return iteration


@pytest.mark.parametrize("name", TRANSITIONS)
@pytest.mark.parametrize("phase", Phase)
def test_every_transition_from_every_phase(phase: Phase, name: str) -> None:
    iteration = _in(phase)
    if (phase, name) in ALLOWED:
        TRANSITIONS[name](iteration)
        assert iteration.phase is ALLOWED[phase, name]
    else:
        with pytest.raises(AssertionError):
            TRANSITIONS[name](iteration)
        assert iteration.phase is phase
    assert iteration.in_pass == (iteration.phase is Phase.BACKWARD)


def test_the_first_step_is_number_zero() -> None:
    iteration = Iteration()
    assert (iteration.phase, iteration.steps, iteration.passes) == (Phase.BETWEEN, 0, 0)


def test_a_pass_counts_when_it_has_ended() -> None:
    iteration = Iteration()
    for passes in range(3):
        iteration.begin_pass()
        assert iteration.passes == passes
        iteration.end_pass()
        assert iteration.passes == passes + 1
    iteration.end_step()
    assert (iteration.steps, iteration.passes) == (1, 0)


@pytest.mark.parametrize("steps", [None, 0, 7])
@pytest.mark.parametrize("phase", Phase)
def test_a_restart_is_between_two_steps(phase: Phase, steps: int | None) -> None:
    """Whatever was before; the number of steps is that of the loaded state, if it is known."""
    iteration = _in(phase)
    iteration.end_step()
    iteration.begin_pass()
    iteration.restart(steps)
    assert (iteration.phase, iteration.passes) == (Phase.BETWEEN, 0)
    assert iteration.steps == (1 if steps is None else steps)


def test_a_second_pass_is_refused_where_every_pass_is_a_step() -> None:
    iteration = Iteration(one_pass=True)
    iteration.refuse_second_pass()
    iteration.begin_pass()
    iteration.end_pass()
    with pytest.raises(InterruptedPassError, match=r'update="backward".*call step\(\) after each pass.*no_sync\(\)'):
        iteration.refuse_second_pass()
    iteration.end_step()
    iteration.refuse_second_pass()


def test_a_restart_allows_a_pass_again() -> None:
    iteration = Iteration(one_pass=True)
    iteration.begin_pass()
    iteration.end_pass()
    iteration.restart(None)
    iteration.refuse_second_pass()


def test_passes_add_up_where_a_step_has_several() -> None:
    iteration = Iteration()
    for _ in range(3):
        iteration.refuse_second_pass()
        iteration.begin_pass()
        iteration.end_pass()
    assert iteration.passes == 3


class TrainingLoop(RuleBasedStateMachine):
    """Any order of calls that keeps to `ALLOWED`, beside counts of what was called."""

    def __init__(self) -> None:
        super().__init__()
        self.iteration = Iteration()
        self.begun = self.ended = self.steps = 0

    @precondition(lambda self: self.begun == self.ended)
    @rule()
    def begin_pass(self) -> None:
        self.iteration.begin_pass()
        self.begun += 1

    @precondition(lambda self: self.begun > self.ended)
    @rule()
    def end_pass(self) -> None:
        self.iteration.end_pass()
        self.ended += 1

    @rule()
    def end_step(self) -> None:
        self.iteration.end_step()
        self.begun, self.ended, self.steps = 0, 0, self.steps + 1

    @rule(steps=none() | integers(0, 9))
    def restart(self, steps: int | None) -> None:
        self.iteration.restart(steps)
        self.begun, self.ended, self.steps = 0, 0, self.steps if steps is None else steps

    @invariant()
    def agrees(self) -> None:
        assert (self.iteration.steps, self.iteration.passes) == (self.steps, self.ended)
        assert self.iteration.in_pass == (self.begun > self.ended)
        assert (self.iteration.phase is Phase.BETWEEN) == (self.begun == 0)
        assert (self.iteration.phase is Phase.REDUCED) == (self.begun == self.ended > 0)


TestTrainingLoop = TrainingLoop.TestCase
TestTrainingLoop.settings = settings(deadline=None, max_examples=50)
