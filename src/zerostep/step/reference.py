"""Proof mode: an unsharded optimizer beside the sharded one, compared after every step.

Two things are compared, on every rank. The sums that the owners hold, brought together, against a plain all-reduce of
the gradients as autograd made them: bit for bit with one or two ranks, and up to the order of a sum with more. And all
parameters after the step against those of the unsharded optimizer, given the same sums: bit for bit with any number.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerostep.comm.transport import Transport
from zerostep.errors import VerificationError
from zerostep.plan.groups import Group
from zerostep.plan.layout import ParamSpec
from zerostep.plan.layout_planner import LayoutPlanner
from zerostep.step.inner_optimizers import InnerOptimizers
from zerostep.tensors import flat_alias

__all__ = ["ReferenceOptimizer"]

logger = logging.getLogger("zerostep")

_ORDER_OF_A_SUM = 1e-6


class ReferenceOptimizer:
    """Copies of all parameters, and an unsharded optimizer over them."""

    def __init__(
        self,
        planner: LayoutPlanner,
        groups: Sequence[Group],
        specs: Sequence[ParamSpec],
        everyone: Transport,
        steps: int,
    ) -> None:
        self._planner, self._everyone, self._left, self._steps = planner, everyone, steps, 0
        self._specs = list(specs)
        self._copies: list[nn.Parameter] = []
        self._local: dict[int, Tensor] = {}
        self._inners = InnerOptimizers([], [], planner.default_class, planner.defaults)
        for group in groups:
            self.add(group, specs)

    def add(self, group: Group, specs: Sequence[ParamSpec]) -> None:
        """Take in a further group; `specs` are those of all parameters."""
        wanted, self._specs = self._planner.settings.master_dtype, list(specs)
        copies = [nn.Parameter(_master(param.detach().clone(), wanted)) for param in group["params"]]
        self._copies += copies
        self._inners.add(group, copies)

    @property
    def done(self) -> bool:
        """Whether everything that was to be compared has been."""
        return self._left <= 0

    def note(self, param: int, grad: Tensor, accumulate: bool) -> None:
        """A gradient as autograd made it; it comes on top of an earlier one if `held`."""
        before = self._local.get(param)
        dense = grad.detach().to_dense()
        self._local[param] = dense.clone() if before is None or not accumulate else before + dense

    def drop(self) -> None:
        """All gradients were dropped."""
        self._local = {}

    def check_sums(self, sums: Mapping[int, Tensor]) -> None:
        """Compare the sums of this step, by parameter, with what a plain all-reduce makes of the noted gradients."""
        dtype = self._planner.settings.reduce_dtype
        for index in sorted(sums):
            mine = self._local.get(index, torch.zeros_like(self._copies[index], dtype=sums[index].dtype))
            mine = mine.to(dtype) if dtype is not None and mine.is_floating_point() else mine
            expected = torch.mul(mine.contiguous(), 1.0 / self._everyone.world_size)
            self._everyone.start_all_reduce(expected).wait()
            self._compare_sum(index, sums[index].reshape(expected.shape), expected)

    def _compare_sum(self, index: int, found: Tensor, expected: Tensor) -> None:
        same = (found == expected) | (found.isnan() & expected.isnan())
        gap = torch.linalg.vector_norm((found - expected).masked_fill(same, 0).flatten())
        exact = self._everyone.world_size <= 2
        size = torch.linalg.vector_norm(expected.masked_fill(~expected.isfinite(), 0).flatten())
        # Each addition may round once more.
        rounding = max(_ORDER_OF_A_SUM, self._everyone.world_size * torch.finfo(expected.dtype).eps)
        if not gap <= (0.0 if exact else rounding * float(size)):
            self._fail(index, f"the reduced gradient is off by {float(gap):.3g} in norm from a plain all-reduce")

    def load(self, saved: Mapping[int, Mapping[str, Any]], chosen: Sequence[Group]) -> None:
        """Take over a loaded state, by parameter, with the options of the groups."""
        self._inners.load({self._copies[index]: entry for index, entry in saved.items()}, chosen)

    def step(self, outer: Sequence[Group], params: Sequence[Tensor], sums: Mapping[int, Tensor]) -> None:
        """Do what an unsharded optimizer does with these sums, from the parameters as they are now."""
        self._inners.push(outer)
        for index, (copy, param) in enumerate(zip(self._copies, params, strict=True)):
            if not _same_bits(copy.detach().to(param.dtype), param):
                copy.data.copy_(param)
            copy.grad = sums[index].reshape(copy.shape).to(copy.dtype) if index in sums else None
        with torch.no_grad():
            for optimizer in self._inners.all:
                optimizer.step()

    def compare(self, params: Sequence[Tensor]) -> None:
        """Compare all parameters after the step."""
        self._steps, self._left = self._steps + 1, self._left - 1
        for index, (copy, param) in enumerate(zip(self._copies, params, strict=True)):
            copy.grad = None
            expected = copy.detach().to(param.dtype)
            if not _same_bits(expected, param):
                different, gap = int((expected != param).sum()), float((expected - param.detach()).abs().max())
                self._fail(index, f"{different} of {param.numel()} elements are off, by up to {gap:.3g}")
        if self.done:
            logger.info("%d steps were compared with an unsharded optimizer: bit-equal", self._steps)

    def _fail(self, index: int, story: str) -> None:
        raise VerificationError(
            f"step {self._steps} differs from the unsharded optimizer, first in parameter {self._specs[index].name!r}: "
            f"{story}. Please report this with the model and the optimizer's options"
        )


def _master(copy: Tensor, dtype: torch.dtype | None) -> Tensor:
    return copy.to(dtype) if dtype is not None and copy.is_floating_point() else copy


def _same_bits(one: Tensor, other: Tensor) -> bool:
    flat = [flat_alias(tensor.detach().contiguous()).view(torch.uint8) for tensor in (one, other)]
    return bool(torch.equal(*flat))
