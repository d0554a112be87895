"""A closure that raises ends a call of `step()` before anything was exchanged: on all ranks, or all are told."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import ProcessGroup

import zerostep
from tests.helpers.checkpoint_setups import SETUPS, Pair
from tests.helpers.pool import Pool
from tests.helpers.reference import batches
from zerostep import StepMismatchError

WAYS = ["elements", "parameters", "forward", "wrapped", "zero", "view", "hook", "interleaved"]
# Overlap mode steps inside backward, where DDP wraps what is raised.
ERRORS = (StepMismatchError, RuntimeError)


class BadBatchError(Exception):
    """What a closure raises."""


class Loop:
    """A training by closures; each call of `step()` is an attempt, which may fail before or behind its backward."""

    def __init__(self, group: ProcessGroup, way: str) -> None:
        self.rank = dist.get_rank(group)
        self.pair: Pair = SETUPS["adamw"].make(group, way)
        self.inputs, self.losses = batches(3, self.rank, 1)[0][0], 0

    @property
    def optimizer(self) -> Any:
        return self.pair[1]

    def attempt(self, fails: bool = False, fails_behind: bool = False) -> None:
        """One call of `step()`; an error of the closure is caught, as a loop does that skips bad batches."""

        def closure() -> float:
            if fails:
                raise BadBatchError
            self.optimizer.zero_grad()
            self.pair[0](self.inputs).square().sum().backward()
            if fails_behind:
                raise BadBatchError
            self.losses += 1
            return 0.0

        with suppress(BadBatchError):
            self.optimizer.step(closure)


def _trained(group: ProcessGroup, way: str) -> Loop:
    loop = Loop(group, way)
    for _ in range(2):
        loop.attempt()
    return loop


def _on_one_rank(group: ProcessGroup, way: str) -> str:
    loop = _trained(group, way)
    with pytest.raises(ERRORS) as caught:
        for number in range(3):
            loop.attempt(fails=loop.rank == 1 and number == 0)
        loop.optimizer.consolidate_state_dict(to=0)
    with pytest.raises(RuntimeError, match="load the last checkpoint"):
        loop.optimizer.consolidate_state_dict(to=0)
    return str(caught.value)


@pytest.mark.parametrize("way", WAYS)
def test_a_closure_that_fails_on_one_rank_is_told_to_all(pool: Pool, way: str) -> None:
    for text in pool.run(_on_one_rank, 3, way):
        assert "ranks 0, 2 are in call 3 of step(), rank 1 is in call 4 of step(); a closure has failed" in text
        assert "let a closure fail on all ranks or on none" in text


def _on_all_ranks(group: ProcessGroup, way: str) -> None:
    loop = _trained(group, way)
    for number in range(4):
        loop.attempt(fails=number in (0, 1))
    loop.optimizer.consolidate_state_dict(to=0)
    assert loop.losses == 4 and loop.optimizer.optimizer_view().step == 4


@pytest.mark.parametrize("way", WAYS)
def test_a_closure_that_fails_on_all_ranks_changes_nothing(pool: Pool, way: str) -> None:
    pool.run(_on_all_ranks, 2, way)


def _before_a_load(group: ProcessGroup, way: str, path: Path) -> None:
    loop = _trained(group, way)
    zerostep.save(path, loop.optimizer)
    loop.attempt(fails=True)
    if loop.rank == 1:
        loop.attempt(fails=True)
    zerostep.load(path, loop.optimizer)
    for _ in range(2):
        loop.attempt()
    loop.optimizer.consolidate_state_dict(to=0)


@pytest.mark.parametrize("way", ["elements", "zero", "hook"])
def test_what_failed_before_a_load_does_not_count(pool: Pool, tmp_path: Path, way: str) -> None:
    pool.run(_before_a_load, 2, way, tmp_path / "saved")


def _behind_backward(group: ProcessGroup, way: str) -> None:
    loop = _trained(group, way)
    loop.attempt(fails_behind=loop.rank == 1)
    for _ in range(2):
        loop.attempt()
    loop.optimizer.consolidate_state_dict(to=0)
    assert loop.optimizer.optimizer_view().step == 5


@pytest.mark.parametrize("way", ["hook", "interleaved"])
def test_a_closure_that_fails_when_its_step_is_made_changes_nothing(pool: Pool, way: str) -> None:
    pool.run(_behind_backward, 2, way)
