"""Complete parameter groups and a layout for the sharded optimizer, from the user's classes, options and settings.

Groups get all the options of their optimizer class from an instance that is thrown away. Whether a group's parameters
may be cut comes from `probe`, what they cost from `cost`; `buckets` makes the layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerostep.plan.buckets import Cost, plan_buckets
from zerostep.plan.cost import CostModel
from zerostep.plan.groups import Group, OptimizerClass, all_params, class_of, own_options, param_specs
from zerostep.plan.layout import Layout, ParamSpec
from zerostep.plan.probe import is_elementwise, refuse_coupled

# Number of buckets, least and most bytes of one, as measured: few and small ones on the host, where messages are slow;
# more and larger ones on an accelerator, where kernel launches are.
_HOST_BUCKETS = (4, 1 << 20, 5 << 20)
_ACCELERATOR_BUCKETS = (8, 25 << 20, 100 << 20)
# The least bytes of a rank's part of a bucket on the host: a message costs as much time as so many bytes or more.
_HOST_PART = 64 << 10
# On an accelerator every collective takes some time, however small: the least bucket, as a fraction of the usual one.
_LEAST_FRACTION = 12


@dataclass(frozen=True)
class Settings:
    """The user's choices for the sharded optimizer; see its arguments."""

    partition: Literal["auto", "elements", "parameters"] = "auto"
    reduction: Literal["scatter", "all"] = "scatter"
    gather: Literal["step", "forward"] = "step"
    update: Literal["step", "backward"] = "step"
    master_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    bucket_mb: float | None = None
    compile: bool = False

    def check(self) -> None:
        """Raise `ValueError` for a value that is not allowed."""
        for name, hint in get_type_hints(Settings).items():
            known, value = get_args(hint), getattr(self, name)
            if get_origin(hint) is Literal and value not in known:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; got {value!r}")
        if not isinstance(self.compile, bool):
            raise ValueError(f"compile must be True or False, got {self.compile!r}")
        if self.update == "backward" and self.reduction == "all":
            raise ValueError('update="backward" keeps no gradients, so reduction="all" has nothing to show: drop one')
        for name, dtype in (("master_dtype", self.master_dtype), ("reduce_dtype", self.reduce_dtype)):
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name} must be a floating-point dtype or None, got {dtype!r}")
        wanted = 1.0 if self.bucket_mb is None else self.bucket_mb
        if not isinstance(wanted, (int, float)) or not 0 < wanted < math.inf:
            raise ValueError(f"bucket_mb must be a positive number of megabytes, got {self.bucket_mb!r}")


def model_positions(params: Iterable[Tensor]) -> dict[Tensor, int]:
    """The position of each parameter in the order of the model."""
    return {param: position for position, param in enumerate(params)}


@dataclass(frozen=True)
class LayoutPlanner:
    """Completes parameter groups and plans their layout.

    `default_class` and its options `defaults` are for groups that name no class of their own. `positions` gives the
    order of the model, which is the reverse of backward's; the order of the groups may be any other. With `device`, it
    plans as if all parameters were there.
    """

    default_class: OptimizerClass
    defaults: Mapping[str, Any]
    settings: Settings
    positions: Mapping[Tensor, int] = field(default_factory=dict)
    device: str | None = None

    def complete(self, group: Group) -> Group:
        """The group with all options of its optimizer class, taken from an instance that is thrown away."""
        complete = Optimizer([group], {}).param_groups[0]
        optimizer_class = class_of(complete, self.default_class)
        if not callable(optimizer_class):
            raise TypeError(f"optimizer_class must be an optimizer class, got {optimizer_class!r}")
        constructor_options = self.constructor_options(optimizer_class)
        trial = optimizer_class([{**own_options(complete), "params": list(complete["params"])}], **constructor_options)
        complete.update(own_options(trial.param_groups[-1]))
        refuse_coupled(optimizer_class, constructor_options, own_options(complete))
        return complete

    def plan(self, groups: Sequence[Group], world_size: int, group_offset: int = 0, param_offset: int = 0) -> Layout:
        """The layout of complete groups.

        The offsets are the numbers of groups and parameters of an earlier layout that this one is to extend.
        """
        specs, costs = list[ParamSpec](), list[Cost]()
        for group_index, group in enumerate(groups, start=group_offset):
            group_specs = self._specs(group, group_index, param_offset + len(specs))
            optimizer_class = class_of(group, self.default_class)
            cost_model = CostModel(optimizer_class, self.constructor_options(optimizer_class), own_options(group))
            specs += group_specs
            costs += [cost_model.of(spec) for spec in group_specs]
        params = all_params(groups)
        itemsizes = [param.element_size() for param in params]
        # Parameters that the model does not list come behind all others.
        end = len(self.positions)
        positions = [self.positions.get(param, end + index) for index, param in enumerate(params)]
        bucket_bytes = self._bucket_bytes(specs, itemsizes, world_size)
        least_bytes = self._least_bytes(bucket_bytes, world_size, _on_host(specs))
        return plan_buckets(specs, world_size, bucket_bytes, itemsizes, costs, positions, least_bytes)

    def _bucket_bytes(self, specs: Sequence[ParamSpec], itemsizes: Sequence[int], world_size: int) -> int:
        if self.settings.bucket_mb is not None:
            return max(1, int(self.settings.bucket_mb * 2**20))
        total = sum(spec.numel * size for spec, size in zip(specs, itemsizes, strict=True) if spec.trainable)
        on_host = _on_host(specs)
        count, least, most = _HOST_BUCKETS if on_host else _ACCELERATOR_BUCKETS
        wanted = min(max(total // count, least), most)
        return max(wanted, _HOST_PART * world_size) if on_host else wanted

    def _least_bytes(self, bucket_bytes: int, world_size: int, on_host: bool) -> int:
        if not on_host:
            return bucket_bytes // _LEAST_FRACTION
        return _HOST_PART * world_size if self.settings.bucket_mb is None else 0

    def _specs(self, group: Group, group_index: int, first_index: int) -> list[ParamSpec]:
        splittable = self._is_splittable(class_of(group, self.default_class), own_options(group))
        changes: dict[str, Any] = {"splittable": splittable, "group": group_index} | (
            {"device": self.device} if self.device else {}
        )
        specs = [replace(spec, **changes) for spec in param_specs([group])]
        if "param_names" in group:
            return specs
        return [replace(spec, name=f"param.{index}") for index, spec in enumerate(specs, start=first_index)]

    def _is_splittable(self, optimizer_class: OptimizerClass, group_options: Group) -> bool:
        if self.settings.partition == "auto":
            return is_elementwise(optimizer_class, self.constructor_options(optimizer_class), group_options)
        return self.settings.partition == "elements"

    def constructor_options(self, optimizer_class: OptimizerClass) -> Mapping[str, Any]:
        """The keyword arguments for the constructor of a class: the defaults belong to the default class alone."""
        return self.defaults if optimizer_class is self.default_class else {}


def _on_host(specs: Sequence[ParamSpec]) -> bool:
    return all(spec.device.startswith("cpu") for spec in specs)
