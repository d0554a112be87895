"""Schedulers, changed options, step hooks and closures with `ShardedOptimizer`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

from tests.helpers.pool import Pool
from tests.helpers.probed_optimizers import Group, ScheduleFree
from tests.helpers.reference import Batch, build, train
from tests.helpers.sharding import OPTIONS, Contest, backward, series, sharded, values


def _scheduled(make: Callable[[Any], Any]) -> Callable[..., list[float]]:
    def loop(model: nn.Module, optimizer: Any, data: list[Batch]) -> list[float]:
        scheduler = make(optimizer)
        rates = []
        for batch in data:
            train(model, optimizer, [batch])
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    return loop


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: StepLR(optimizer, 2, 0.5),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.05, total_steps=8),
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 1.0 / (1 + step)),
}


def _schedulers(group: ProcessGroup, name: str) -> None:
    Contest(ours={"gather": "forward"}).run(group, _scheduled(SCHEDULERS[name]), steps=6)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rates_and_momenta_follow_a_scheduler(pool: Pool, name: str) -> None:
    pool.run(_schedulers, 2, name)


def _poked(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    for number, batch in enumerate(data):
        optimizer.param_groups[0].update(lr=0.02 / (number + 1), weight_decay=0.01 * number, betas=(0.8, 0.9))
        train(model, optimizer, [batch])


def _rate_as_tensor(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    optimizer.param_groups[0]["lr"] = rate = torch.tensor(0.02)
    for batch in data:
        train(model, optimizer, [batch])
        rate.mul_(0.5)


def _options_in_groups(group: ProcessGroup) -> None:
    Contest().run(group, _poked)
    Contest(options={**OPTIONS, "foreach": False}).run(group, _rate_as_tensor, with_state=False)


def test_options_that_users_change_count_at_once(pool: Pool) -> None:
    pool.run(_options_in_groups, 2)


def _implementations(group: ProcessGroup) -> None:
    for options in ({"foreach": True}, {"foreach": False}):
        Contest(options={**OPTIONS, **options}).run(group, lambda *args: train(*args), steps=6)
    # The fused kernel rounds differently at the end of a tensor, and a cut makes more ends.
    Contest(options={**OPTIONS, "fused": True}, close=1e-6).run(group, lambda *args: train(*args), steps=6)


def test_every_implementation_of_an_optimizer_equals_plain(pool: Pool) -> None:
    pool.run(_implementations, 2)


def _hooked(group: ProcessGroup, gather: str) -> None:
    model = build()
    optimizer = sharded(group, model, gather=gather)
    calls: list[str] = []
    start = values(model)
    optimizer.register_step_pre_hook(lambda *_: calls.append(f"before {_moved(model, start)}"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for batch in series(group, 2):
        backward(model, batch)
        optimizer.step()
    assert calls == ["before False", "after", "before True", "after"]


def _moved(model: nn.Module, start: Mapping[str, Tensor]) -> bool:
    return any(not torch.equal(value, start[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("gather", ["step", "forward"])
def test_step_hooks_run_once_around_a_step(pool: Pool, gather: str) -> None:
    pool.run(_hooked, 2, gather)


def _with_closure(model: nn.Module, optimizer: Any, data: list[Batch]) -> list[float]:
    losses = []
    for batch in data:
        calls = list[int]()

        def closure(batch: Batch = batch, calls: list[int] = calls) -> Tensor:
            calls.append(1)
            optimizer.zero_grad()
            loss = mse_loss(model(batch[0]), batch[1])
            loss.backward()
            return loss

        with torch.no_grad():
            losses.append(optimizer.step(closure).item())
        assert calls == [1]
    return losses


def _closures(group: ProcessGroup, gather: str) -> None:
    Contest(ours={"gather": gather}).run(group, _with_closure)


@pytest.mark.parametrize("gather", ["step", "forward"])
def test_closures_run_once_and_first(pool: Pool, gather: str) -> None:
    pool.run(_closures, 2, gather)


def _swapped_step(model: nn.Module, optimizer: Any, data: list[Batch]) -> None:
    """Frameworks put a function of their own in the place of `step`."""
    inner, calls = optimizer.step, list[int]()

    def step(*args: Any) -> Any:
        calls.append(1)
        return inner(*args)

    optimizer.step = step
    train(model, optimizer, data)
    assert len(calls) == len(data)


def _swapped(group: ProcessGroup) -> None:
    Contest().run(group, _swapped_step)


def test_step_may_be_replaced(pool: Pool) -> None:
    pool.run(_swapped, 2)


# Options that a step changes by itself.


class Counting(ScheduleFree):
    """As before, with a tensor that it changes in place."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.setdefault("rate", torch.tensor(lr))

    def update(self, group: Group, params: Sequence[Tensor]) -> None:
        with_gradient = [param for param in params if param.grad is not None]
        group["lr"] = float(group["rate"])
        super().update(group, with_gradient)
        group["rate"].mul_(0.75)


def _in_two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """One group of a single element: all ranks but one own nothing of it."""
    named = dict(model.named_parameters())
    smallest = min(named, key=lambda name: named[name].numel())
    others = [param for name, param in named.items() if name != smallest]
    return [{"params": [named[smallest]]}, {"params": others, "rate": torch.tensor(0.05)}]


def _changed_options(model: nn.Module, optimizer: Any, data: list[Batch]) -> list[Any]:
    groups = list[Any]()
    for number, batch in enumerate(data):
        if number == 2:
            optimizer.param_groups[0]["rate"].fill_(0.02)
        train(model, optimizer, [batch])
        groups += [(group["count"], group["total"], float(group["rate"])) for group in optimizer.param_groups]
    return groups


class SmallNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = build(), nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.inner(inputs) * self.scale
        return result


def _changing(group: ProcessGroup, verify: int) -> None:
    contest = Contest(build=SmallNet, kind=Counting, options={}, groups=_in_two_groups, ours={"verify": verify})
    contest.run(group, _changed_options, steps=5)


@pytest.mark.parametrize("verify", [0, 5])
@pytest.mark.parametrize("world", [1, 2])
def test_options_that_a_step_changes_change_once_on_all_ranks(pool: Pool, world: int, verify: int) -> None:
    pool.run(_changing, world, verify)


def _added_later(group: ProcessGroup) -> list[int]:
    """All ranks must have the same options for a further group to be taken."""
    model = SmallNet()
    first, later = _in_two_groups(model)
    optimizer = sharded(group, model, Counting, params=[first])
    train(model, optimizer, series(group, 3))
    optimizer.add_param_group(later)
    train(model, optimizer, series(group, 2))
    return [each["count"] for each in optimizer.param_groups]


def test_a_rank_without_leaves_has_the_options_of_the_others(pool: Pool) -> None:
    assert pool.run(_added_later, 3) == [[5, 2]] * 3
