"""Schedulers, changed options, step hooks and closures with `ShardedOptimizer`."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

from tests.helpers.pool import Pool
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
