"""State sizes predicted without memory equal those that a real step makes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from tests.helpers.reference import ELEMENTWISE, OPTIMIZERS
from zerostep.plan.buckets import Cost
from zerostep.plan.cost import CostModel, state_bytes
from zerostep.plan.groups import own_options
from zerostep.plan.layout import ParamSpec

NAMES = pytest.mark.parametrize("name", OPTIMIZERS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
SHAPE = (12, 20)


def _stepped(optimizer: Optimizer) -> Optimizer:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def _real(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, dict[str, Any]]:
    """The bytes after a real step, and the options as a parameter group has them."""
    param = nn.Parameter(torch.ones(shape, dtype=dtype))
    optimizer = _stepped(OPTIMIZERS[name].optimizer([param]))
    tensors = [value for value in optimizer.state[param].values() if isinstance(value, Tensor) and value.dim()]
    return sum(tensor.nbytes for tensor in tensors), own_options(optimizer.param_groups[0])


@NAMES
@DTYPES
def test_state_bytes_are_those_of_a_real_step(name: str, dtype: torch.dtype) -> None:
    case = OPTIMIZERS[name]
    assert state_bytes(case.kind, case.options, SHAPE, dtype) == _real(name, SHAPE, dtype)[0]


@NAMES
def test_the_options_of_a_complete_group_give_the_same_answer(name: str) -> None:
    expected, options = _real(name, SHAPE, torch.float32)
    assert state_bytes(OPTIMIZERS[name].kind, {}, SHAPE, torch.float32, options) == expected


def test_what_a_scheduler_adds_to_a_group_makes_no_difference() -> None:
    group = {"lr": 0.1, "momentum": 0.9, "initial_lr": 0.1}
    assert state_bytes(optim.SGD, {}, SHAPE, torch.float32, group) == 4 * 240


@pytest.mark.parametrize("kernel", ["fused", "foreach", "capturable"])
def test_the_choice_of_a_kernel_makes_no_difference(kernel: str) -> None:
    options = {"lr": torch.tensor(0.1), "amsgrad": True, kernel: True}
    assert state_bytes(optim.Adam, options, SHAPE, torch.float32) == 3 * 4 * 240


def test_options_are_not_changed() -> None:
    rate = torch.tensor(0.1)
    state_bytes(optim.AdamW, {"lr": rate}, SHAPE, torch.float32)
    assert rate.item() == pytest.approx(0.1)


class _Refuses(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                raise RuntimeError(f"cannot update {param.grad}")


def test_a_class_that_cannot_run_is_taken_to_keep_two_numbers() -> None:
    assert state_bytes(_Refuses, {}, SHAPE, torch.bfloat16) == 2 * 2 * 240


def _spec(shape: tuple[int, ...], splittable: bool, dtype: str = "float32") -> ParamSpec:
    return ParamSpec("p", shape, dtype, splittable=splittable)


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("shape", [(12, 20), (1,), (1000,), (0,)], ids=str)
def test_a_splittable_parameter_costs_the_same_as_a_whole_one(name: str, shape: tuple[int, ...]) -> None:
    model = CostModel(ELEMENTWISE[name].kind, ELEMENTWISE[name].options)
    assert model.of(_spec(shape, True)) == model.of(_spec(shape, False))


def test_only_matrices_under_muon_have_work() -> None:
    muon, adam = CostModel(optim.Muon, {}), CostModel(optim.Adam, {})
    assert muon.of(_spec((4, 10), False)) == Cost(4 * 40, 4 * 10 * 4)
    assert muon.of(_spec((10, 4), False)).work == 10 * 4 * 4
    assert adam.of(_spec((4, 10), False)) == Cost(2 * 4 * 40, 0)


def test_each_shape_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[tuple[int, ...]]()

    def count(kind: Any, options: Any, shape: tuple[int, ...], dtype: torch.dtype, group: Any) -> int:
        tried.append(shape)
        return 64

    monkeypatch.setattr("zerostep.plan.cost.state_bytes", count)
    model = CostModel(optim.Adam, {})
    for shape in ((3, 4), (3, 4), (5,), (3, 4)):
        model.of(_spec(shape, False))
        model.of(_spec(shape, True))
    assert sorted(tried) == [(3, 4), (5,), (64,)]
