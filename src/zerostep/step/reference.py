"""Verification: an unsharded optimizer beside the sharded one, compared after every step, on every rank.

Two comparisons: the owners' sums, gathered, with a plain all-reduce of the gradients that autograd made (bit for bit
with one or two ranks, up to the order of a sum with more); and all parameters after the step with those of the
unsharded optimizer, given the same sums (bit for bit with any number of ranks).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerostep.comm.transport import Transport
from zerostep.errors import VerificationError
from zerostep.plan.groups import Group, own_options
from zerostep.plan.layout import ParamSpec
from zerostep.plan.layout_planner import LayoutPlanner
from zerostep.step.inner_optimizers import InnerOptimizers
from zerostep.step.named_state import NamedState
from zerostep.tensors import flat_alias

logger = logging.getLogger("zerostep")

_ORDER_OF_A_SUM = 1e-6
# Compiled kernels round differently, which Muon, in bfloat16, shows: relative to the longest step of an element.
_ROUNDED_STEP = 0.05


class ReferenceOptimizer:
    """Copies of all parameters, and an unsharded optimizer over them."""

    def __init__(
        self,
        planner: LayoutPlanner,
        groups: Sequence[Group],
        specs: Sequence[ParamSpec],
        everyone: Transport,
        averaged_over: int,
        steps: int,
    ) -> None:
        self._averaged_over = averaged_over
        self._planner, self._everyone, self._left, self._steps = planner, everyone, steps, 0
        self._specs = list(specs)
        self._copies: list[nn.Parameter] = []
        self._local: dict[int, Tensor] = {}
        self._edited = self._several = False
        self._seen: list[Group] = []
        self._before: list[Tensor] = []
        members = [self._copy_params(group) for group in groups]
        self._inners = InnerOptimizers(
            [self._noted(group) for group in groups], members, planner.default_class, planner.defaults
        )

    def add(self, group: Group, specs: Sequence[ParamSpec]) -> None:
        """Add a group; `specs` are those of all parameters."""
        self._specs = list(specs)
        self._inners.add(self._noted(group), self._copy_params(group))

    def _copy_params(self, group: Group) -> list[nn.Parameter]:
        copies = [nn.Parameter(self._as_master(param.detach().clone())) for param in group["params"]]
        self._copies += copies
        return copies

    def _noted(self, group: Group) -> Group:
        """The group with copies of the options: both optimizers may change them in place."""
        self._seen.append(_copied(own_options(group)))
        return {**group, **_copied(own_options(group))}

    def _as_master(self, copy: Tensor) -> Tensor:
        dtype = self._planner.settings.master_dtype
        return copy.to(dtype) if dtype is not None and copy.is_floating_point() else copy

    @property
    def done(self) -> bool:
        """Whether all steps that were to be compared have been."""
        return self._left <= 0

    def note(self, param: int, grad: Tensor, accumulate: bool) -> None:
        """Copy a gradient as autograd made it; with `accumulate`, add it to an earlier one."""
        before = self._local.get(param)
        self._several |= accumulate
        dense = grad.detach().to_dense()
        self._local[param] = dense.clone() if before is None or not accumulate else before + dense

    def drop(self, params: Iterable[int] | None = None) -> None:
        """Drop the gradients of these parameters, or of all."""
        for index in list(self._local) if params is None else params:
            self._local.pop(index, None)
        if not self._local:
            self._edited = self._several = False

    def note_edit(self) -> None:
        """The sums were changed by the user: they cannot be compared until gradients are dropped."""
        self._edited = True

    def check_sums(self, sums: Mapping[int, Tensor]) -> None:
        """Compare the sums of this step, by parameter, with a plain all-reduce of the noted gradients."""
        if self._edited:
            return
        dtype = self._planner.settings.reduce_dtype
        for index in sorted(sums):  # one collective each, in the same order on all ranks
            mine = self._local.get(index, torch.zeros_like(self._copies[index], dtype=sums[index].dtype))
            mine = mine.to(dtype) if dtype is not None and mine.is_floating_point() else mine
            expected = torch.mul(mine.contiguous(), 1.0 / self._averaged_over)
            self._everyone.start_all_reduce(expected).wait()
            self._compare_sum(index, sums[index].reshape(expected.shape), expected)

    def _compare_sum(self, index: int, actual: Tensor, expected: Tensor) -> None:
        same = (actual == expected) | (actual.isnan() & expected.isnan())
        gap = torch.linalg.vector_norm((actual - expected).masked_fill(same, 0).flatten())
        # Two terms have one order, but we average each pass, and the noted gradients are averaged together.
        exact = self._everyone.world_size <= 2 and not self._several
        size = torch.linalg.vector_norm(expected.masked_fill(~expected.isfinite(), 0).flatten())
        # Each addition may round once more.
        rounding = max(_ORDER_OF_A_SUM, self._everyone.world_size * torch.finfo(expected.dtype).eps)
        if not gap <= (0.0 if exact else rounding * float(size)):
            self._fail(index, f"the reduced gradient is off by {float(gap):.3g} in norm from a plain all-reduce")

    def load(self, saved: Mapping[int, Mapping[str, Any]], named: NamedState, chosen: Sequence[Group]) -> None:
        """Replace state, by parameter and by name, and the options of the groups."""
        self._inners.load({self._copies[index]: entry for index, entry in saved.items()}, named, chosen)
        self._seen = [_copied(own_options(group)) for group in chosen]

    def step(self, outer: Sequence[Group], params: Sequence[Tensor], sums: Mapping[int, Tensor]) -> None:
        """Step with these sums, from the parameters as they are now, with the options that the user has changed."""
        self._follow(outer, params)
        if self._planner.settings.compile:
            self._before = [copy.detach().clone() for copy in self._copies]
        for index, copy in enumerate(self._copies):
            copy.grad = sums[index].reshape(copy.shape).to(copy.dtype) if index in sums else None
        with torch.no_grad():
            for optimizer in self._inners.all:
                optimizer.step()

    def _follow(self, outer: Sequence[Group], params: Sequence[Tensor]) -> None:
        """Take over options and values that the user has changed."""
        self._inners.push_options([_changed(now, seen) for now, seen in zip(outer, self._seen, strict=True)])
        for copy, param in zip(self._copies, params, strict=True):
            # Only where the user has set a value: elsewhere a master has bits that the parameter lacks.
            if not _same_bits(copy.detach().to(param.dtype), param):
                copy.data.copy_(param)

    def call(self, outer: Sequence[Group], params: Sequence[Tensor], method: Callable[[Optimizer], Any]) -> None:
        """Call a method of the unsharded optimizers, from the parameters as they are now."""
        self._follow(outer, params)
        for optimizer in self._inners.all:
            method(optimizer)

    def note_options(self, outer: Sequence[Group]) -> None:
        """The options as the sharded optimizer left them: what differs from them later, the user has changed."""
        self._seen = [_copied(own_options(group)) for group in outer]

    def compare(self, outer: Sequence[Group], params: Sequence[Tensor]) -> None:
        """Compare all parameters after the step. `outer` has the options as the step of the sharded one left them."""
        self.note_options(outer)
        self._steps, self._left = self._steps + 1, self._left - 1
        for index, (copy, param) in enumerate(zip(self._copies, params, strict=True)):
            copy.grad = None
            expected = copy.detach().to(param.dtype)
            if not _same_bits(expected, param) and not self._is_close(index, expected, param.detach()):
                different, gap = int((expected != param).sum()), float((expected - param.detach()).abs().max())
                self._fail(index, f"{different} of {param.numel()} elements are off, by up to {gap:.3g}")
        if self.done:
            how = "equal but for the rounding of compiled kernels" if self._planner.settings.compile else "bit-equal"
            logger.info("%d steps were compared with an unsharded optimizer: %s", self._steps, how)

    def _is_close(self, index: int, expected: Tensor, actual: Tensor) -> bool:
        """Whether a compiled update differs from another one by no more than its kernels may round."""
        if not self._planner.settings.compile or not expected.is_floating_point():
            return False
        steps = (expected - self._before[index].to(expected.dtype)).abs()
        longest = steps.masked_fill(~steps.isfinite(), 0).max()
        allowed = _ROUNDED_STEP * longest + 2 * torch.finfo(expected.dtype).eps * expected.abs()
        same = (expected == actual) | (expected.isnan() & actual.isnan())
        return bool((same | ((expected - actual).abs() <= allowed)).all())

    def _fail(self, index: int, description: str) -> None:
        raise VerificationError(
            f"step {self._steps} differs from the unsharded optimizer, first in parameter {self._specs[index].name!r}: "
            f"{description}. Please report this with the model and the optimizer's options"
        )


def _changed(now: Group, seen: Group) -> Group:
    """Copies of the options that the user has changed; what a step changes, each optimizer changes by itself."""
    options = own_options(now)
    return _copied({key: value for key, value in options.items() if key not in seen or not _equal(value, seen[key])})


def _copied(options: Group) -> Group:
    return {key: _copy(value) for key, value in options.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    try:
        return deepcopy(value)
    except Exception:  # what cannot be copied is the same in both
        return value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and _same_bits(one, other.to(one.device))
    # By the text, too: NaN is not equal to itself, and 1 is equal to True.
    return type(one) is type(other) and repr(one) == repr(other)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return bool(torch.equal(*(flat_alias(each.detach().contiguous()).view(torch.uint8) for each in (one, other))))
