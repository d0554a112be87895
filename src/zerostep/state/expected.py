"""Which state a parameter will have, for an optimizer that has taken no step yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerostep.comm.codec import dtype_named
from zerostep.plan.cost import fresh_state
from zerostep.plan.layout import ParamSpec
from zerostep.state.param_state import MASTER, is_per_element

__all__ = ["Expected", "GroupOptimizer", "expecting"]

# The length of a trial piece of a parameter that may be cut; no constant of an optimizer is likely to have it.
_TRIAL = 53


@dataclass(frozen=True)
class GroupOptimizer:
    """How the state of a group's parameters comes about."""

    optimizer_class: Callable[..., Optimizer]
    options: Mapping[str, Any]
    group: Mapping[str, Any]
    master_dtype: torch.dtype | None


@dataclass(frozen=True)
class Expected:
    """The tensors of a parameter's state: the dtypes of those that are like it, shapes and dtypes of the others."""

    per_element: Mapping[str, torch.dtype]
    shared: Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def expecting(group_optimizers: Callable[[int], GroupOptimizer]) -> Callable[[ParamSpec], Expected]:
    """A function that finds out, once for each kind of parameter; `recipes` has the recipe of each group."""

    @cache
    def found(group: int, shape: tuple[int, ...], dtype: str) -> Expected:
        return _try(group_optimizers(group), shape, dtype_named(dtype))

    return lambda spec: found(spec.group, (_TRIAL,) if spec.splittable and spec.numel else spec.shape, spec.dtype)


def _try(group_optimizer: GroupOptimizer, shape: tuple[int, ...], dtype: torch.dtype) -> Expected:
    wanted = group_optimizer.master_dtype
    mastered = wanted is not None and dtype.is_floating_point and dtype != wanted
    leaf = torch.empty(shape, dtype=wanted if mastered else dtype, device="meta")
    entry = fresh_state(
        group_optimizer.optimizer_class, group_optimizer.options, shape, leaf.dtype, group_optimizer.group
    )
    tensors = {key: value for key, value in entry.items() if isinstance(value, Tensor)}
    like = {key: value.dtype for key, value in tensors.items() if is_per_element(key, value, leaf)}
    rest = {key: (tuple(value.shape), value.dtype) for key, value in tensors.items() if key not in like}
    return Expected({**like, MASTER: leaf.dtype} if mastered and entry else like, rest)
