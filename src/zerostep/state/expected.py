"""Describe the state that a parameter will have after the first step, for an optimizer that has not stepped yet."""

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

# The length of the trial tensor for a splittable parameter; no optimizer is likely to keep another tensor of this size.
_TRIAL_LENGTH = 53


@dataclass(frozen=True)
class GroupOptimizer:
    """How to build the optimizer of a group: its class, the class's options, the group's options, the master dtype."""

    optimizer_class: Callable[..., Optimizer]
    options: Mapping[str, Any]
    group: Mapping[str, Any]
    master_dtype: torch.dtype | None


@dataclass(frozen=True)
class ExpectedState:
    """The tensors of a parameter's state: dtypes of the per-element ones, shapes and dtypes of the shared ones."""

    per_element: Mapping[str, torch.dtype]
    shared: Mapping[str, tuple[tuple[int, ...], torch.dtype]]

    @property
    def exists(self) -> bool:
        """Whether there is any state besides a master."""
        return bool(self.shared or self.per_element.keys() - {MASTER})


def state_predictor(group_optimizer: Callable[[int], GroupOptimizer]) -> Callable[[ParamSpec], ExpectedState]:
    """Return a function that gives a parameter's expected state; it tries each group, shape and dtype once."""

    @cache
    def predict(group: int, shape: tuple[int, ...], dtype: str) -> ExpectedState:
        return _try_step(group_optimizer(group), shape, dtype_named(dtype))

    return lambda spec: predict(
        spec.group, (_TRIAL_LENGTH,) if spec.splittable and spec.numel else spec.shape, spec.dtype
    )


def _try_step(optimizer: GroupOptimizer, shape: tuple[int, ...], dtype: torch.dtype) -> ExpectedState:
    master_dtype = optimizer.master_dtype
    has_master = master_dtype is not None and dtype.is_floating_point and dtype != master_dtype
    leaf = torch.empty(shape, dtype=master_dtype if has_master else dtype, device="meta")
    entry = fresh_state(optimizer.optimizer_class, optimizer.options, shape, leaf.dtype, optimizer.group)
    tensors = {key: value for key, value in entry.items() if isinstance(value, Tensor)}
    per_element = {key: value.dtype for key, value in tensors.items() if is_per_element(key, value, leaf)}
    shared = {key: (tuple(value.shape), value.dtype) for key, value in tensors.items() if key not in per_element}
    return ExpectedState({**per_element, MASTER: leaf.dtype} if has_master and entry else per_element, shared)
