"""What owning a parameter costs: the bytes of its state, and the work of its update where that is worth a count.

The state is learnt by running the real optimizer, on tensors without memory where it can do without, so any class is
right.
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
# Sizes that no constant of an optimizer is likely to have, one for each dimension.
_TELLING_SIZES = (53, 59, 61, 67, 71, 73, 79, 83)


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
        """What one parameter costs its owner."""
        return Cost(self._state(spec), _work(spec.shape) if self._class in _MATRIX_WORK else 0)

    def _state(self, spec: ParamSpec) -> int:
        if spec.splittable:
            # Element by element: a few are enough to know.
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
    """The bytes of state of a parameter after a step; those of single numbers only with `counters`.

    A class that cannot be run at all is taken to keep two numbers for each element, as most do.
    """
    make = _Maker(optimizer_class, options, group or {}, counters)
    try:
        return sum(value.nbytes for value in make.state(shape, dtype, "meta"))
    except Exception:
        return _from_small(make, shape, dtype)


def fresh_state(
    optimizer_class: Callable[..., Optimizer],
    options: Mapping[str, Any],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    group: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The state of a parameter after a step, its tensors perhaps without memory; nothing if it cannot be found out."""
    make = _Maker(optimizer_class, options, group or {})
    for device in ("meta", "cpu"):
        try:
            return make.entry(shape, dtype, device)
        except Exception:  # an optimizer that looks at its numbers needs some
            continue
    return {}


def _from_small(make: _Maker, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Optimizers that look at their numbers run on small tensors; which size went where tells the rest."""
    sizes = dict(zip(_TELLING_SIZES, shape, strict=False))
    try:
        found = make.state(tuple(sizes) if len(sizes) == len(shape) else shape, dtype, "cpu")
    except Exception:
        return 2 * torch.Size(shape).numel() * dtype.itemsize
    return sum(torch.Size(sizes.get(n, n) for n in value.shape).numel() * value.element_size() for value in found)


class _Maker:
    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        options: Mapping[str, Any],
        group: Mapping[str, Any],
        counters: bool = False,
    ) -> None:
        self._class, self._options, self._group = optimizer_class, _without_kernels(options), _without_kernels(group)
        self._counters = counters

    def state(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[Tensor]:
        """The tensors in the state of one parameter after a step; single numbers only where counters count."""
        tensors = [value for value in self.entry(shape, dtype, device).values() if isinstance(value, Tensor)]
        return [value for value in tensors if value.dim() or self._counters]

    def entry(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> dict[str, Any]:
        """The state of one parameter after a step."""
        param = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        param.grad = torch.zeros_like(param)
        optimizer = self._class([{**deepcopy(self._group), "params": [param]}], **deepcopy(self._options))
        optimizer.step()
        return dict(optimizer.state[param])


def _without_kernels(options: Mapping[str, Any]) -> dict[str, Any]:
    """Which kernel runs makes no difference to the state, but not every kernel runs everywhere."""
    return {key: value for key, value in options.items() if key not in _KERNELS}


def _work(shape: tuple[int, ...]) -> int:
    """Multiplications in one orthogonalisation of a matrix, up to a factor."""
    if len(shape) != 2:
        return 0
    return shape[0] * shape[1] * min(shape)
