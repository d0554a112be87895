"""`PartialSteps`: one step of an inner optimizer in several parts."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from zerostep.step.inner_optimizers import InnerOptimizers, PartialSteps


class Counting(SGD):
    """Changes an option of every group in every step, and notes which tensors each step had."""

    def __init__(self, groups: Any) -> None:
        super().__init__([{**group, "count": 0} for group in groups], lr=1.0)
        self.sizes = list[list[int]]()

    def step(self, closure: Any = None) -> Any:
        self.sizes.append([len(group["params"]) for group in self.param_groups])
        for group in self.param_groups:
            group["count"] += 1
            if any(bool(param.grad.isnan().any()) for param in group["params"]):
                raise ArithmeticError("not a number")
        return super().step(closure)


def _optimizer() -> tuple[Counting, list[nn.Parameter]]:
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for param in params:
        param.grad = torch.ones(2)
    return Counting([{"params": params[:2]}, {"params": params[2:]}]), params


def _counts(optimizer: Counting) -> list[int]:
    return [group["count"] for group in optimizer.param_groups]


def _steps(optimizer: Counting) -> PartialSteps:
    return PartialSteps([optimizer], optimizer.param_groups)


def test_an_option_changes_once_in_every_group_however_many_parts() -> None:
    optimizer, params = _optimizer()
    steps = _steps(optimizer)
    steps.step([(0, params[0])])
    steps.step([(0, params[1])])
    steps.step_rest()
    assert _counts(optimizer) == [0, 0]
    steps.end()
    assert _counts(optimizer) == [1, 1] and optimizer.sizes == [[1, 0], [1, 0]]
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == [
        list(map(id, params[:2])),
        [id(params[2])],
    ]
    assert [param.tolist() for param in params] == [[-1, -1], [-1, -1], [0, 0]]


def test_options_change_where_no_part_has_tensors() -> None:
    optimizer, _ = _optimizer()
    steps = _steps(optimizer)
    steps.step([])
    assert not optimizer.sizes
    steps.step_rest()
    steps.end()
    assert _counts(optimizer) == [1, 1] and optimizer.sizes == [[0, 0]]


@pytest.mark.parametrize("first", [0, 1])
def test_a_group_takes_its_options_from_a_part_that_had_its_tensors(first: int) -> None:
    class Skipping(Counting):
        """Counts only where there is something to update."""

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["count"] += bool(group["params"])

    _, params = _optimizer()
    optimizer = Skipping([{"params": params[:2]}, {"params": params[2:]}])
    steps = _steps(optimizer)
    for index in (first, 1 - first):
        steps.step([(index, params[2 * index])])
    steps.end()
    assert _counts(optimizer) == [1, 1]


def test_who_cannot_step_without_tensors_keeps_its_options() -> None:
    class Needy(Counting):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["count"] += 1
                group["device"] = group["params"][0].device

    _, params = _optimizer()
    optimizer = Needy([{"params": params}])
    steps = _steps(optimizer)
    steps.step_rest()
    steps.end()
    assert _counts(optimizer) == [0] and len(optimizer.param_groups[0]["params"]) == 3


def test_a_tensor_that_a_step_changes_in_place_changes_once_and_stays_the_user_s() -> None:
    class Halving(Counting):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            for group in self.param_groups:
                group["lr"].mul_(0.5)

    _, params = _optimizer()
    optimizer, rate = Halving([{"params": params}]), torch.tensor(1.0)
    optimizer.param_groups[0]["lr"] = rate
    for expected in (0.5, 0.25):
        steps = _steps(optimizer)
        for param in params:
            steps.step([(0, param)])
        steps.end()
        assert rate.item() == expected and optimizer.param_groups[0]["lr"] is rate
    assert [param.tolist() for param in params] == [[-1.5, -1.5]] * 3


def test_a_part_that_fails_leaves_all_tensors_and_options_in_their_groups() -> None:
    optimizer, params = _optimizer()
    params[0].grad = torch.full((2,), torch.nan)
    steps = _steps(optimizer)
    with pytest.raises(ArithmeticError):
        steps.step([(0, params[0])])
    steps.end()
    assert _counts(optimizer) == [0, 0]
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == [
        list(map(id, params[:2])),
        [id(params[2])],
    ]


class KeepsNumbers(SGD):
    """Counts its steps, and remembers the rates of its groups, outside of the groups."""

    def __init__(self, groups: Any, lr: float = 1.0) -> None:
        super().__init__(groups, lr=lr)
        self.steps, self.bound = 0, torch.zeros(1)
        self.rates = [group["lr"] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        state: Any = self.state
        state.setdefault("k", torch.tensor([0])).add_(1)
        state.setdefault("all", {"k": 0.0})["k"] += 1
        self.steps += 1
        self.bound += 1
        for group, rate in zip(self.param_groups, self.rates, strict=True):
            for param in group["params"]:
                share = self.steps + int(state["k"]) + state["all"]["k"] + float(self.bound)
                param -= rate * share * param.grad


def _numbers(optimizer: KeepsNumbers) -> list[float]:
    state: Any = optimizer.state
    return [optimizer.steps, int(state["k"]), state["all"]["k"], float(optimizer.bound)]


def test_numbers_outside_the_groups_change_once() -> None:
    _, params = _optimizer()
    optimizer = KeepsNumbers([{"params": params[:2]}, {"params": params[2:]}])
    bound = optimizer.bound
    for count in (1, 2):
        steps = PartialSteps([optimizer], optimizer.param_groups)
        for index, param in [(0, params[0]), (0, params[1]), (1, params[2])]:
            steps.step([(index, param)])
        steps.step_rest()
        steps.end()
        assert _numbers(optimizer) == [count] * 4
    assert [param.tolist() for param in params] == [[-12.0, -12.0]] * 3
    assert optimizer.bound is bound


def test_a_class_sees_all_its_groups_in_its_constructor() -> None:
    _, params = _optimizer()
    groups: list[dict[str, Any]] = [
        {"params": params[:1], "lr": 0.1},
        {"params": params[1:2], "optimizer_class": SGD, "lr": 0.2},
        {"params": params[2:], "lr": 0.3},
    ]
    inners = InnerOptimizers(groups, [group["params"] for group in groups], KeepsNumbers, {"lr": 1.0})
    (first, second) = inners.all
    assert isinstance(first, KeepsNumbers) and first.rates == [0.1, 0.3]
    assert [group["lr"] for group in second.param_groups] == [0.2]
    assert [inners.of(index) for index in range(3)] == [first, second, first]
