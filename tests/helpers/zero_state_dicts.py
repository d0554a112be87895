"""Models, optimizers and state dicts for tests of `ZeroRedundancyOptimizer.state_dict`."""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.helpers.pool import OFFSET
from tests.helpers.reference import OPTIMIZERS, Batch, batches, build
from zerostep import ZeroRedundancyOptimizer

World = int | tuple[int, ...]
StateDict = dict[str, Any]

WORLDS = pytest.mark.parametrize("world", [1, 2, 3, 4, OFFSET], ids=str)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups with different options."""
    params = list(model.parameters())
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.003}]


def zero_pair(
    group: dist.ProcessGroup, name: str = "adamw", seed: int = 0
) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    case = OPTIMIZERS[name]
    model = build(case.model, seed)
    zero = ZeroRedundancyOptimizer(_groups(model), case.kind, process_group=group, **case.options)
    return model, zero


def plain_pair(name: str = "adamw", seed: int = 0) -> tuple[nn.Module, Optimizer]:
    case = OPTIMIZERS[name]
    model = build(case.model, seed)
    return model, case.optimizer(_groups(model))


def same_data(steps: int, name: str = "adamw", start: int = 0) -> list[Batch]:
    """The same batches on all ranks, so that no gradient needs to be reduced."""
    return batches(1, 0, start + steps, OPTIMIZERS[name].model)[start:]


def full_state_dict(zero: ZeroRedundancyOptimizer) -> StateDict:
    """The full state dict on every rank, one consolidation per rank; a copy, independent of the optimizer."""
    for rank in range(zero.world_size):
        zero.consolidate_state_dict(to=rank)
        if rank == zero.rank:
            found = copy.deepcopy(zero.state_dict())
    return found


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested mappings, lists and tuples."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []
