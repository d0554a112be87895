"""What owning a parameter costs under an optimizer class: the bytes of its state, and the work of its update.

The state is measured by one step of the real class, on meta tensors if it runs on them, otherwise on small CPU tensors,
so no class needs to be known. Work is counted only for classes that multiply matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from zerostep.plan.buckets import Cost
from zerostep.plan.groups import OptimizerClass
from zerostep.plan.layout import ParamSpec
from zerostep.plan.modes import TRAINING, switch

_MATRIX_WORK = (getattr(torch.optim, "Muon", None),)
_KERNELS = ("fused", "foreach", "capturable")
# One size for each dimension, all distinct, and unlikely to be constants of an optimizer.
_DISTINCT_SIZES = (53, 59, 61, 67, 71, 73, 79, 83)


class CostModel:
    """The costs of parameters under one optimizer class, given its constructor's options and a group's own."""

    def __init__(
        self, optimizer_class: OptimizerClass, options: Mapping[str, Any], group: Mapping[str, Any] | None = None
    ) -> None:
        @cache
        def measure(shape: tuple[int, ...], dtype: str) -> int:
            return state_bytes(optimizer_class, options, shape, getattr(torch, dtype), group)

        self._class, self._state_bytes = optimizer_class, measure

    def of(self, spec: ParamSpec) -> Cost:
        """The cost of owning one parameter."""
        if spec.splittable:
            # Splittable means element-wise, so the state of a few elements gives that of all.
            state = spec.numel * self._state_bytes((64,), spec.dtype) // 64
        else:
            state = self._state_bytes(spec.shape, spec.dtype)
        return Cost(state, _work(spec.shape) if self._class in _MATRIX_WORK else 0)


def state_bytes(
    optimizer_class: OptimizerClass,
    options: Mapping[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    group: Mapping[str, Any] | None = None,
    counters: bool = False,
) -> int:
    """The bytes of a parameter's state after one step; zero-dimensional tensors count only with `counters`.

    A class that cannot be run is assumed to keep two numbers for each element, as most do.
    """

    def tensors(shape: tuple[int, ...], device: str) -> list[Tensor]:
        values = _run_step(optimizer_class, options, shape, dtype, group, device).values()
        return [value for value in values if isinstance(value, Tensor) and (value.dim() or counters)]

    with suppress(Exception):  # an optimizer that branches on values does not run on meta tensors
        return sum(value.nbytes for value in tensors(shape, "meta"))
    # Each dimension of the state that has one of the distinct sizes stands for that dimension of the parameter.
    sizes = dict(zip(_DISTINCT_SIZES, shape, strict=False))
    try:
        small = tensors(tuple(sizes) if len(sizes) == len(shape) else shape, "cpu")
    except Exception:
        return 2 * torch.Size(shape).numel() * dtype.itemsize
    return sum(torch.Size(sizes.get(n, n) for n in value.shape).numel() * value.element_size() for value in small)


def fresh_state(
    optimizer_class: OptimizerClass,
    options: Mapping[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    group: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The state of a parameter after one step, on the meta device if possible; empty if the class cannot be run."""
    for device in ("meta", "cpu"):
        with suppress(Exception):
            return _run_step(optimizer_class, options, shape, dtype, group, device)
    return {}


def _run_step(
    optimizer_class: OptimizerClass,
    options: Mapping[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    group: Mapping[str, Any] | None,
    device: str,
) -> dict[str, Any]:
    """The state of one parameter after a step with zero gradients."""
    param = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
    param.grad = torch.zeros_like(param)
    own = {**deepcopy(_without_kernels(group or {})), "params": [param]}
    optimizer = optimizer_class([own], **deepcopy(_without_kernels(options)))
    switch(optimizer, TRAINING)
    optimizer.step()
    return dict(optimizer.state[param])


def _without_kernels(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without the choice of a kernel: it does not change the state, and not all kernels run everywhere."""
    return {key: value for key, value in options.items() if key not in _KERNELS}


def _work(shape: tuple[int, ...]) -> int:
    """The number of multiplications in one orthogonalisation of a matrix, up to a constant factor."""
    return shape[0] * shape[1] * min(shape) if len(shape) == 2 else 0
