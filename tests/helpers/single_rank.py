"""Parameters and optimizers for tests of `ZeroRedundancyOptimizer` on one rank."""

from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed import ProcessGroup

from tests.helpers.reference import Case, build
from zerostep import ZeroRedundancyOptimizer

Pair = tuple[nn.Module, optim.Optimizer, nn.Module, ZeroRedundancyOptimizer]


def make_pair(group: ProcessGroup, case: Case, **more: Any) -> Pair:
    """Twice the same model, one with the plain optimizer and one with the sharded."""
    one, other = build(case.model), build(case.model)
    zero = ZeroRedundancyOptimizer(other.parameters(), case.kind, process_group=group, **more, **case.options)
    return one, case.optimizer(one.parameters()), other, zero


def leaf_tensor(*values: float) -> Tensor:
    """A tensor that takes gradients."""
    return torch.tensor(values, requires_grad=True)


def make_zero(group: ProcessGroup, params: Any, kind: Any = optim.SGD, **options: Any) -> ZeroRedundancyOptimizer:
    """Our optimizer for these parameters; SGD by default."""
    return ZeroRedundancyOptimizer(params, kind, process_group=group, **options)
