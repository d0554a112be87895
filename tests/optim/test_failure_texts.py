"""What every rank says, in every mode, of a step that failed on one rank, and of ranks in different places."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from tests.helpers.pool import Pool
from zerostep import (
    ShardedOptimizer,
    ZeroRedundancyOptimizer,
    hook_with_zero_step,
    hook_with_zero_step_interleaved,
)
from zerostep.errors import StepMismatchError

DEADLINE = 60.0
REMEDY = "; restart from the last checkpoint on all ranks"
OPTIONS: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
HOOKS = {"last": hook_with_zero_step, "each": hook_with_zero_step_interleaved}
MODES = [
    "zero",
    "zero views",
    "overlap last",
    "overlap each",
    "bare scatter",
    "bare all",
    "bare scatter forward",
    "bare scatter backward",
    "bare scatter backward forward",
    "ddp scatter",
    "ddp all",
    "ddp all forward",
]
EVERYWHERE = pytest.mark.parametrize("world", [2, 3])
EACH_MODE = pytest.mark.parametrize("mode", MODES)


class Failing(SGD):
    """Raises `trouble` in place of one of its next calls of `step`."""

    trouble: BaseException | None = None
    # In a list: a number would change once in a step, however many parts it has.
    calls_left: list[int] = []  # noqa: RUF012

    def step(self, closure: Any = None) -> Any:
        self.calls_left = [count - 1 for count in self.calls_left]
        if self.trouble is not None and self.calls_left == [0]:
            raise self.trouble
        return super().step(closure)


class Run:
    """A model and an optimizer after two steps, with what is needed to go back there."""

    def __init__(self, group: ProcessGroup, mode: str) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(*[nn.Linear(9, 9) for _ in range(6)])
        self.rank, self.in_backward = dist.get_rank(group), mode.startswith("overlap")
        self.model, self.optimizer = _built(group, module, mode.split())
        self.iterations = 0
        self.train()
        self.train()
        self.weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.saved = self._state()

    def _state(self) -> dict[str, Any]:
        for to in range(self.optimizer.world_size):
            self.optimizer.consolidate_state_dict(to=to)
            if to == self.optimizer.rank:
                found = self.optimizer.state_dict()
        return found

    def train(self) -> None:
        """One iteration."""
        self.iterations += 1
        batch: Tensor = torch.full((2, 9), 1.0 + self.rank + self.iterations)
        self.optimizer.zero_grad()
        self.model(batch).square().mean().backward()
        if not self.in_backward:
            self.optimizer.step()

    def fail(self, trouble: BaseException | None) -> None:
        """Let the second part of the next update fail on this rank, or the only one where it has one part."""
        inner = self.optimizer.optim if isinstance(self.optimizer, ZeroRedundancyOptimizer) else _inner(self.optimizer)
        assert isinstance(inner, Failing)
        one_part = isinstance(self.optimizer, ZeroRedundancyOptimizer) and not self.in_backward
        inner.trouble, inner.calls_left = trouble, [1 if one_part else 2]

    def restore(self) -> None:
        """Back to the state after two steps."""
        self.fail(None)
        self.optimizer.zero_grad()
        self.model.load_state_dict(self.weights)
        self.optimizer.load_state_dict(self.saved)
        self.optimizer.param_groups[0]["lr"] = 0.1

    def told(self, disturb: Callable[[Run], None]) -> tuple[str, str]:
        """The class and the text of what one of the next iterations raises; all that follows is refused."""
        with pytest.raises((RuntimeError, ArithmeticError, KeyboardInterrupt)) as caught:
            disturb(self)
            for _ in range(2):  # with gather="forward" it is told in the next forward pass
                self.train()
        for attempt in (self.train, self.optimizer.step, lambda: self.optimizer.consolidate_state_dict(to=0)):
            with pytest.raises(RuntimeError, match=r"step \d+ failed on rank \d.*load the last checkpoint"):
                attempt()
        self.restore()
        self.train()
        self.restore()
        notes = "".join(getattr(caught.value, "__notes__", []))
        return type(caught.value).__name__, f"{caught.value}{notes}"


def _inner(optimizer: ShardedOptimizer) -> Any:
    return optimizer._inners.all[0]


def _built(group: ProcessGroup, module: nn.Module, words: list[str]) -> tuple[nn.Module, Any]:
    if words[0] == "zero":
        views = words[-1] == "views"
        return DDP(module, process_group=group), ZeroRedundancyOptimizer(
            module.parameters(), Failing, group, parameters_as_bucket_view=views, **OPTIONS
        )
    if words[0] == "overlap":
        ddp = DDP(module, process_group=group, bucket_cap_mb=0.0005, find_unused_parameters=True)
        zero = ZeroRedundancyOptimizer(module.parameters(), Failing, group, overlap_with_ddp=True, **OPTIONS)
        ddp.register_comm_hook(group, HOOKS[words[-1]](allreduce_hook, ddp, zero))
        return ddp, zero
    model = DDP(module, process_group=group) if words[0] == "ddp" else module
    settings: dict[str, Any] = {
        "reduction": words[1],
        "gather": "forward" if "forward" in words else "step",
        "update": "backward" if "backward" in words else "step",
    }
    return model, ShardedOptimizer(model, Failing, process_group=group, bucket_mb=0.0008, **settings, **OPTIONS)


# A step that fails on one rank.


def _fails(run: Run, trouble: BaseException) -> None:
    if run.rank == 1:
        run.fail(trouble)


def _failing(group: ProcessGroup, mode: str) -> list[tuple[str, str]]:
    run = Run(group, mode)
    troubles = (ArithmeticError("a bad day"), KeyboardInterrupt("stop"))
    return [run.told(partial(_fails, trouble=trouble)) for trouble in troubles]


@EACH_MODE
@EVERYWHERE
def test_a_step_that_fails_on_one_rank_is_told_on_all_with_its_cause(pool: Pool, world: int, mode: str) -> None:
    for rank, told in enumerate(pool.run(_failing, world, mode, deadline=DEADLINE)):
        for (kind, text), cause in zip(told, ("ArithmeticError: a bad day", "KeyboardInterrupt: stop"), strict=True):
            step = 3 if cause.startswith("Arithmetic") else text.split(" of step ")[1][0]
            assert text.endswith(REMEDY) and "Unable to cast" not in text
            if rank != 1:
                assert kind == "RuntimeError"
                assert f"failed on rank {rank}: rank 1 failed in its local update of step {step}: {cause}" in text
            elif "backward" in mode:
                assert text.startswith(cause.split(": ")[1]) and "inside backward failed on rank 1" in text
            else:
                assert cause in text and "on rank 1: " in text


# Ranks that are not in the same place.


def _other_rate(run: Run) -> None:
    if run.rank == 1:
        run.optimizer.param_groups[0]["lr"] = 0.2


def _load_alone(run: Run) -> None:
    if run.rank == 1:
        run.optimizer.load_state_dict(run.saved)


def _displaced(group: ProcessGroup, mode: str) -> list[tuple[str, str]]:
    run = Run(group, mode)
    return [run.told(_other_rate), run.told(_load_alone)]


@EACH_MODE
@EVERYWHERE
def test_ranks_in_different_places_are_named_with_their_values(pool: Pool, world: int, mode: str) -> None:
    others = "rank 0 has" if world == 2 else "ranks 0, 2 have"
    for rank, told in enumerate(pool.run(_displaced, world, mode, deadline=DEADLINE)):
        (first, rates), (second, loads) = told
        assert (first, second) == (StepMismatchError.__name__,) * 2
        assert rates.startswith(f"step 3 failed on rank {rank}: ranks differ in the lr of group 0: ")
        assert f"{others} 0.1, rank 1 has 0.2; change learning rates and other options on all ranks alike" in rates
        assert f"{others} loaded a state dict 2 times, rank 1 has loaded a state dict 3 times; " in loads
        assert rates.endswith(REMEDY) and loads.endswith(REMEDY)


def _step_again(run: Run) -> None:
    if run.rank == 1:
        run.optimizer.step()


def _stepping_again(group: ProcessGroup, mode: str) -> tuple[str, str]:
    return Run(group, mode).told(_step_again)


@pytest.mark.parametrize("mode", ["bare scatter", "bare all", "bare scatter forward"])
@EVERYWHERE
def test_a_step_too_many_is_named(pool: Pool, world: int, mode: str) -> None:
    others = "rank 0 has" if world == 2 else "ranks 0, 2 have"
    for kind, text in pool.run(_stepping_again, world, mode, deadline=DEADLINE):
        assert kind == StepMismatchError.__name__
        assert f"{others} gradients, rank 1 has called step() without any gradient; " in text
        assert "call backward() and step() equally often on all ranks" in text and text.endswith(REMEDY)


def _drop_alone(run: Run) -> None:
    run.optimizer.zero_grad()
    run.model(torch.ones(2, 9)).square().mean().backward()
    if run.rank == 1:
        run.optimizer.zero_grad()
    run.optimizer.step()


def _dropping(group: ProcessGroup, mode: str) -> tuple[str, str]:
    return Run(group, mode).told(_drop_alone)


@pytest.mark.parametrize("mode", ["zero", "zero views"])
@EVERYWHERE
def test_gradients_that_one_rank_has_dropped_are_named(pool: Pool, world: int, mode: str) -> None:
    for kind, text in pool.run(_dropping, world, mode, deadline=DEADLINE):
        assert kind == StepMismatchError.__name__
        assert "rank 1 has called step() without any gradient" in text


def _heads(group: ProcessGroup) -> list[float]:
    """Every head has an optimizer of its own, and each rank's batch uses one head."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
    optimizers = [ShardedOptimizer(model, SGD, model[name].parameters(), process_group=group, lr=0.1) for name in "ab"]
    for _ in range(3):
        model["ab"[dist.get_rank(group) % 2]](torch.ones(2, 3)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return [param.sum().item() for param in model.parameters()]


@EVERYWHERE
def test_a_rank_whose_batch_needs_only_another_optimizer_makes_a_step(pool: Pool, world: int) -> None:
    found = pool.run(_heads, world, deadline=DEADLINE)
    assert all(values == found[0] for values in found)


def _owners_alone(group: ProcessGroup) -> list[float]:
    """Gradients that only the owners of parameters have, and of which one rank has none at all."""
    params = [nn.Parameter(torch.ones(4)) for _ in range(4)]
    zero = ZeroRedundancyOptimizer(params, SGD, group, lr=0.5)
    for param in params:
        if zero.rank == 0 and zero._param_to_rank[param] == 0:
            param.grad = torch.ones(4)
    zero.step()
    return [param.sum().item() for param in params]


@EVERYWHERE
def test_gradients_may_be_reduced_to_owners_alone(pool: Pool, world: int) -> None:
    found = pool.run(_owners_alone, world, deadline=DEADLINE)
    assert all(values == found[0] for values in found) and min(found[0]) == 2.0
