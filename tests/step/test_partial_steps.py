"""`PartialSteps`: one step of an inner optimizer in several parts."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from zerostep.step.inner_optimizers import PartialSteps


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


@pytest.mark.parametrize(("keep_all", "counts"), [(False, [1, 0]), (True, [1, 1])])
def test_an_option_changes_once_however_many_parts(keep_all: bool, counts: list[int]) -> None:
    optimizer, params = _optimizer()
    steps = PartialSteps([optimizer], optimizer.param_groups, keep_all)
    steps.step([(0, params[0])])
    steps.step([(0, params[1])])
    assert steps.begun and _counts(optimizer) == [0, 0]
    steps.end()
    assert _counts(optimizer) == counts and optimizer.sizes == [[1, 0], [1, 0]]
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == [
        list(map(id, params[:2])),
        [id(params[2])],
    ]
    assert [param.tolist() for param in params] == [[-1, -1], [-1, -1], [0, 0]]


@pytest.mark.parametrize("keep_all", [False, True])
def test_a_part_without_tensors_steps_only_where_all_groups_change(keep_all: bool) -> None:
    optimizer, _ = _optimizer()
    steps = PartialSteps([optimizer], optimizer.param_groups, keep_all)
    steps.step([])
    steps.end()
    assert steps.begun is keep_all and _counts(optimizer) == [int(keep_all)] * 2


@pytest.mark.parametrize("keep_all", [False, True])
def test_a_part_that_fails_leaves_all_tensors_and_options_in_their_groups(keep_all: bool) -> None:
    optimizer, params = _optimizer()
    params[0].grad = torch.full((2,), torch.nan)
    steps = PartialSteps([optimizer], optimizer.param_groups, keep_all)
    with pytest.raises(ArithmeticError):
        steps.step([(0, params[0])])
    steps.end()
    assert not steps.begun and _counts(optimizer) == [0, 0]
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == [
        list(map(id, params[:2])),
        [id(params[2])],
    ]
