"""The bytes of state of any optimizer class, learnt from real steps on tensors without memory."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from zerostep.plan.cost import state_bytes
from zerostep.plan.groups import Group, class_of, own_options
from zerostep.plan.layout_planner import LayoutPlanner

__all__ = ["StateModel"]

# Where state grows with length in a straight line, any three lengths show it; sizes of blocks do not divide these.
_LENGTHS = (64, 999, 20011)


class StateModel:
    """The state of a group's parameters after a step, counters included."""

    def __init__(self, planner: LayoutPlanner, group: Group) -> None:
        self._kind = class_of(group, planner.default_class)
        self._constructor = planner.defaults if self._kind is planner.default_class else {}
        self._options = own_options(group)
        self.whole = lru_cache(maxsize=None)(self._measure)
        self._line = lru_cache(maxsize=None)(self._fit)

    def flat(self, lengths: Tensor, dtype: torch.dtype) -> Tensor:
        """The state of one-dimensional leaves of these lengths; nothing for those without elements."""
        line = self._line(dtype)
        if line is not None:
            return (line[0] * lengths + line[1]) * (lengths > 0)
        distinct, places = lengths.unique(return_inverse=True)
        found = [self.whole((int(n),), dtype) if n else 0 for n in distinct.tolist()]
        return torch.tensor(found, dtype=torch.int64)[places]

    def _measure(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return state_bytes(self._kind, self._constructor, shape, dtype, self._options, counters=True)

    def _fit(self, dtype: torch.dtype) -> tuple[int, int] | None:
        """Bytes for each element and for each leaf, if it is that simple."""
        first, second, third = (self.whole((length,), dtype) for length in _LENGTHS)
        slope, rest = divmod(second - first, _LENGTHS[1] - _LENGTHS[0])
        constant = first - slope * _LENGTHS[0]
        return (slope, constant) if not rest and third == slope * _LENGTHS[2] + constant else None
