"""The owner of each parameter of an optimizer's groups, and checks that the parameters have not changed since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from zerostep.plan.groups import Group, all_params, has_or_gets_grad, param_specs, subgroup
from zerostep.plan.layout import Layout
from zerostep.plan.partition import plan


class Ownership:
    """A layout of whole parameters, together with their tensors."""

    def __init__(self, groups: Sequence[Group], world_size: int, in_order: bool = False) -> None:
        self._groups = [dict(group) for group in groups]
        self.params = all_params(groups)
        specs = param_specs(groups, has_or_gets_grad)
        # By whole sizes: ranks that hold other blocks of a DTensor must choose the same owner, and update it together.
        weighed = [replace(spec, shape=tuple(param.shape)) for spec, param in zip(specs, self.params, strict=True)]
        self.layout: Layout = plan(specs, world_size, in_order, weighed)
        self._trainable = [param.requires_grad for param in self.params]
        self._sent = [has_or_gets_grad(param) for param in self.params]
        self._shapes = [param.shape for param in self.params]
        # Lists of their own, which are compared at once: this is done for every parameter in every step.
        self._dtypes, self._devices = [param.dtype for param in self.params], [param.device for param in self.params]

    @cached_property
    def index_of(self) -> dict[Tensor, int]:
        """The index of each parameter; the first one if it is listed twice."""
        indices: dict[Tensor, int] = {}
        for index, param in enumerate(self.params):
            indices.setdefault(param, index)
        return indices

    @cached_property
    def rank_of(self) -> dict[Tensor, int]:
        """The owner of each parameter."""
        return {param: self.layout.owner_of(index) for param, index in self.index_of.items()}

    @cached_property
    def fingerprint(self) -> int:
        """A number that is equal on two ranks only if they would send the same parameters in the same messages."""
        return int(self.layout.digest()[:15], 16)

    def owned(self, rank: int) -> list[Tensor]:
        """The parameters of `rank` that a step may change, in the same order on all ranks."""
        return [param for param, owner in self.rank_of.items() if owner == rank and has_or_gets_grad(param)]

    def groups_of(self, rank: int) -> list[Group]:
        """The groups, each with the parameters that `rank` owns, the largest first."""
        return [subgroup(group, self._owned_positions(group["params"], rank)) for group in self._groups]

    def _owned_positions(self, params: Sequence[Tensor], rank: int) -> list[int]:
        owned = [position for position, param in enumerate(params) if self.rank_of[param] == rank]
        return sorted(owned, key=lambda position: -params[position].numel())

    def trainability_changed(self) -> bool:
        """Whether `requires_grad` of some parameter has changed."""
        return any(param.requires_grad != was for param, was in zip(self.params, self._trainable, strict=True))

    def sends_others(self) -> bool:
        """Whether a step may change other parameters than before: some were unfrozen, or frozen and dropped."""
        return list(map(has_or_gets_grad, self.params)) != self._sent

    def moved(self) -> bool:
        """Whether some parameter has changed its dtype or device."""
        dtypes, devices = [param.dtype for param in self.params], [param.device for param in self.params]
        return dtypes != self._dtypes or devices != self._devices

    def describe_move(self) -> str:
        """The first parameter that has changed its dtype or device, and how; empty if none has."""
        kinds = zip(self._dtypes, self._devices, strict=True)
        for spec, param, (dtype, device) in zip(self.layout.params, self.params, kinds, strict=True):
            if (param.dtype, param.device) != (dtype, device):
                return f"parameter {spec.name!r} was {dtype} on {device}, and is now {param.dtype} on {param.device}"
        return ""

    def check_shapes(self) -> None:
        """Raise `ValueError` if a parameter has another shape than at first.

        With another size it would change owners, and its state would stay with the old one.
        """
        if [param.shape for param in self.params] == self._shapes:
            return
        for index, (param, shape) in enumerate(zip(self.params, self._shapes, strict=True)):
            if param.shape != shape:
                raise ValueError(
                    f"parameter {index} had shape {tuple(shape)} and now has {tuple(param.shape)}: "
                    "build a new optimizer for parameters of other shapes"
                )

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return self.params[0].device
