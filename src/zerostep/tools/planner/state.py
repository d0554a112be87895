"""The bytes of state of any optimizer class, measured by real steps on meta tensors."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from zerostep.plan.cost import state_bytes
from zerostep.plan.groups import Group, class_of, own_options
from zerostep.plan.layout_planner import LayoutPlanner

# Three lengths that show whether state is linear in the length; common block sizes do not divide the last two.
_LENGTHS = (64, 999, 20011)


class StateModel:
    """The bytes of state that the optimizer of one parameter group keeps after a step, counters included.

    `whole(shape, dtype)` is the state of one tensor; results are cached.
    """

    def __init__(self, planner: LayoutPlanner, group: Group) -> None:
        self._optimizer_class = class_of(group, planner.default_class)
        self._constructor = planner.constructor_options(self._optimizer_class)
        self._options = own_options(group)
        self.whole = lru_cache(maxsize=None)(self._measure)
        self._line = lru_cache(maxsize=None)(self._fit)

    def flat(self, lengths: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the state of flat leaves of these lengths; zero for those without elements."""
        line = self._line(dtype)
        if line is not None:
            return (line[0] * lengths + line[1]) * (lengths > 0)
        distinct, indices = lengths.unique(return_inverse=True)
        sizes = [self.whole((int(length),), dtype) if length else 0 for length in distinct.tolist()]
        return torch.tensor(sizes, dtype=torch.int64)[indices]

    def _measure(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return state_bytes(self._optimizer_class, self._constructor, shape, dtype, self._options, counters=True)

    def _fit(self, dtype: torch.dtype) -> tuple[int, int] | None:
        """Return the bytes for each element and for each leaf; `None` if state is not linear in the length."""
        first, second, third = (self.whole((length,), dtype) for length in _LENGTHS)
        slope, remainder = divmod(second - first, _LENGTHS[1] - _LENGTHS[0])
        constant = first - slope * _LENGTHS[0]
        return (slope, constant) if not remainder and third == slope * _LENGTHS[2] + constant else None
