"""What owning a parameter costs under an optimizer class: the bytes of its state, and the work of its update.

The state is measured by one step of the real class, on meta tensors if it runs on them, otherwise on small CPU tensors,
so no class needs to be known. Work is counted only for classes that multiply matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerostep.plan.buckets import Cost
from zerostep.plan.layout import ParamSpec

__all__ = ["CostModel", "fresh_state", "state_bytes"]

_MATRIX_WORK = (getattr(torch.optim, "Muon", None),)
_KERNELS = ("fused", "foreach", "capturable")
# One size for each dimension, all distinct, and unlikely to be constants of an optimizer.
_DISTINCT_SIZES = (53, 59, 61, 67, 71, 73, 79, 83)


class CostModel:
    """The costs of parameters under one optimizer class, given its constructor's options and a group's own."""

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        options: Mapping[str, Any],
        group: Mapping[str, Any] | None = None,
    ) -> None:
        self._class, self._options, self._group = optimizer_class, options, group or {}
        self._state_bytes = lru_cache(maxsize=None)(self._measure)

    def of(self, spec: ParamSpec) -> Cost:
        """The cost of owning one parameter."""
        return Cost(self._state(spec), _work(spec.shape) if self._class in _MATRIX_WORK else 0)

    def _state(self, spec: ParamSpec) -> int:
        if spec.splittable:
            # Splittable means element-wise, so the state of a few elements gives that of all.
            return spec.numel * self._state_bytes((64,), spec.dtype) // 64
        return self._state_bytes(spec.shape, spec.dtype)

    def _measure(self, shape: tuple[int, ...], dtype: str) -> int:
        return state_bytes(self._class, self._options, shape, getattr(torch, dtype), self._group)


def state_bytes(
    optimizer_class: Callable[..., Optimizer],
    options: Mapping[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    group: Mapping[str, Any] | None = None,
    counters: bool = False,
) -> int:
    """The bytes of a parameter's state after one step; zero-dimensional tensors count only with `counters`.

    A class that cannot be run is assumed to keep two numbers for each element, as most do.
    """
    one_step = _OneStep(optimizer_class, options, group or {}, counters)
    try:
        return sum(value.nbytes for value in one_step.tensors(shape, dtype, "meta"))
    except Exception:
        return _bytes_from_small(one_step, shape, dtype)


def fresh_state(
    optimizer_class: Callable[..., Optimizer],
    options: Mapping[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    group: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The state of a parameter after one step, on the meta device if possible; empty if the class cannot be run."""
    one_step = _OneStep(optimizer_class, options, group or {})
    for device in ("meta", "cpu"):
        try:
            return one_step.state(shape, dtype, device)
        except Exception:  # an optimizer that branches on values does not run on meta tensors
            continue
    return {}


def _bytes_from_small(one_step: _OneStep, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The bytes of state from a step on a small CPU tensor, for optimizers that do not run on meta tensors.

    Each dimension of the state that has one of the distinct sizes stands for that dimension of the parameter.
    """
    sizes = dict(zip(_DISTINCT_SIZES, shape, strict=False))
    try:
        tensors = one_step.tensors(tuple(sizes) if len(sizes) == len(shape) else shape, dtype, "cpu")
    except Exception:
        return 2 * torch.Size(shape).numel() * dtype.itemsize
    return sum(torch.Size(sizes.get(n, n) for n in value.shape).numel() * value.element_size() for value in tensors)


class _OneStep:
    """One step of an optimizer class on one parameter with zero gradients."""

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        options: Mapping[str, Any],
        group: Mapping[str, Any],
        counters: bool = False,
    ) -> None:
        self._class, self._options, self._group = optimizer_class, _without_kernels(options), _without_kernels(group)
        self._counters = counters

    def tensors(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
        """The tensors in the state of the parameter; zero-dimensional ones only if counters count."""
        tensors = [value for value in self.state(shape, dtype, device).values() if isinstance(value, Tensor)]
        return [value for value in tensors if value.dim() or self._counters]

    def state(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> dict[str, Any]:
        """The state of the parameter after the step."""
        param = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        param.grad = torch.zeros_like(param)
        optimizer = self._class([{**deepcopy(self._group), "params": [param]}], **deepcopy(self._options))
        optimizer.step()
        return dict(optimizer.state[param])


def _without_kernels(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options without the choice of a kernel: it does not change the state, and not all kernels run everywhere."""
    return {key: value for key, value in options.items() if key not in _KERNELS}


def _work(shape: tuple[int, ...]) -> int:
    """The number of multiplications in one orthogonalisation of a matrix, up to a constant factor."""
    if len(shape) != 2:
        return 0
    return shape[0] * shape[1] * min(shape)
