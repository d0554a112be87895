"""What owning a parameter costs: the bytes of its state, and the work of its update where that is worth a count.

The state is learnt by running the real optimizer on tensors without memory, so any class is right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerostep.bucketing import Cost
from zerostep.layout import ParamSpec

__all__ = ["CostModel", "state_bytes"]

_MATRIX_WORK = (getattr(torch.optim, "Muon", None),)


class CostModel:
    """The costs of parameters under one optimizer class with its options."""

    def __init__(self, optimizer_class: Callable[..., Optimizer], options: Mapping[str, Any]) -> None:
        self._class, self._options = optimizer_class, options
        self._state_bytes = lru_cache(maxsize=None)(self._measure)

    def of(self, spec: ParamSpec) -> Cost:
        """What one parameter costs its owner."""
        return Cost(self._state(spec), _work(spec.shape) if self._class in _MATRIX_WORK else 0)

    def _state(self, spec: ParamSpec) -> int:
        if spec.splittable:
            # Element by element: one is enough to know.
            return spec.numel * self._state_bytes((64,), spec.dtype) // 64
        return self._state_bytes(spec.shape, spec.dtype)

    def _measure(self, shape: tuple[int, ...], dtype: str) -> int:
        return state_bytes(self._class, self._options, shape, getattr(torch, dtype))


def state_bytes(
    optimizer_class: Callable[..., Optimizer], options: Mapping[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> int:
    """The bytes of state of a parameter after a step, without memory for it.

    A class that cannot run without memory is taken to keep two numbers for each element, as most do.
    """
    param = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    param.grad = torch.empty_like(param)
    try:
        optimizer = optimizer_class([param], **deepcopy(_without_kernels(options)))
        optimizer.step()
    except Exception:
        return 2 * param.numel() * param.element_size()
    return sum(value.nbytes for value in optimizer.state[param].values() if isinstance(value, Tensor) and value.dim())


def _without_kernels(options: Mapping[str, Any]) -> dict[str, Any]:
    """Which kernel runs makes no difference to the state, but not every kernel runs without memory."""
    return {key: value for key, value in options.items() if key not in ("fused", "foreach", "capturable")}


def _work(shape: tuple[int, ...]) -> int:
    """Multiplications in one orthogonalisation of a matrix, up to a factor."""
    if len(shape) != 2:
        return 0
    return shape[0] * shape[1] * min(shape)
