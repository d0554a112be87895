"""From what the user asks for to groups with all their options, and a layout of their parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerostep.plan.buckets import Cost, fill
from zerostep.plan.cost import CostModel
from zerostep.plan.groups import Group, OptimizerClass, all_params, class_of, own_options, param_specs
from zerostep.plan.layout import Layout, ParamSpec
from zerostep.plan.probe import is_elementwise, is_separable

__all__ = ["LayoutPlanner", "Settings", "in_order"]

# How many buckets of at least and at most how many bytes, as measured: few and small on the host, where messages are
# slow; more and larger ones on an accelerator, where launches are.
_HOST_BUCKETS = (4, 1 << 20, 5 << 20)
_ACCELERATOR_BUCKETS = (32, 25 << 20, 100 << 20)


@dataclass(frozen=True)
class Settings:
    """How the user wants it."""

    partition: Literal["auto", "elements", "parameters"] = "auto"
    reduction: Literal["scatter", "all"] = "scatter"
    gather: Literal["step", "forward"] = "step"
    master_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    bucket_mb: float | None = None

    def check(self) -> None:
        """`ValueError` for a value that means nothing."""
        _one_of("partition", self.partition, ("auto", "elements", "parameters"))
        _one_of("reduction", self.reduction, ("scatter", "all"))
        _one_of("gather", self.gather, ("step", "forward"))
        for name, dtype in (("master_dtype", self.master_dtype), ("reduce_dtype", self.reduce_dtype)):
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"{name} must be a floating-point dtype or None, got {dtype!r}")
        wanted = 1.0 if self.bucket_mb is None else self.bucket_mb
        if not isinstance(wanted, (int, float)) or not 0 < wanted < math.inf:
            raise ValueError(f"bucket_mb must be a positive number of megabytes, got {self.bucket_mb!r}")


def in_order(params: Iterable[Tensor]) -> dict[Tensor, int]:
    """The place of each parameter of a model."""
    return {param: place for place, param in enumerate(params)}


def _one_of(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; got {value!r}")


@dataclass(frozen=True)
class LayoutPlanner:
    """The optimizer class that groups have if they name no other, its options, the settings, and the model's order.

    Groups divide parameters by what is done to them; backward comes by the place of each in the model.
    """

    default_class: OptimizerClass
    defaults: Mapping[str, Any]
    settings: Settings
    order: Mapping[Tensor, int] = field(default_factory=dict)

    def complete(self, group: Group) -> Group:
        """A group with the options that its class completes, from an optimizer that is thrown away."""
        found = Optimizer([group], {}).param_groups[0]
        kind = class_of(found, self.default_class)
        if not callable(kind):
            raise TypeError(f"optimizer_class must be an optimizer class, got {kind!r}")
        trial = kind([{**own_options(found), "params": list(found["params"])}], **self._constructor(kind))
        found.update(own_options(trial.param_groups[-1]))
        if not is_separable(kind, self._constructor(kind), own_options(found)):
            raise ValueError(
                f"{getattr(kind, '__name__', kind)} looks at all parameters at once, so its work cannot be divided "
                "among ranks with the same result: use it without sharding"
            )
        return found

    def plan(self, groups: Sequence[Group], world_size: int, first_group: int = 0, first_param: int = 0) -> Layout:
        """A layout of complete groups, numbered from `first_group` on, with parameters from `first_param` on."""
        specs, costs = list[ParamSpec](), list[Cost]()
        for number, group in enumerate(groups, start=first_group):
            known = self._specs(group, number, first_param + len(specs))
            kind = class_of(group, self.default_class)
            model = CostModel(kind, self._constructor(kind), own_options(group))
            specs += known
            costs += [model.of(spec) for spec in known]
        params = all_params(groups)
        sizes = [param.element_size() for param in params]
        behind = len(self.order)
        places = [self.order.get(param, behind + number) for number, param in enumerate(params)]
        return fill(specs, world_size, self._bucket_bytes(specs, sizes), sizes, costs, places)

    def _bucket_bytes(self, specs: Sequence[ParamSpec], sizes: Sequence[int]) -> int:
        if self.settings.bucket_mb is not None:
            return max(1, int(self.settings.bucket_mb * 2**20))
        total = sum(spec.numel * size for spec, size in zip(specs, sizes, strict=True) if spec.trainable)
        on_host = all(spec.device.startswith("cpu") for spec in specs)
        count, least, most = _HOST_BUCKETS if on_host else _ACCELERATOR_BUCKETS
        return min(max(total // count, least), most)

    def _specs(self, group: Group, number: int, first: int) -> list[ParamSpec]:
        splittable = self._splits(class_of(group, self.default_class), own_options(group))
        found = [replace(spec, splittable=splittable, group=number) for spec in param_specs([group])]
        if "param_names" in group:
            return found
        return [replace(spec, name=f"param.{first + place}") for place, spec in enumerate(found)]

    def _splits(self, kind: OptimizerClass, options: Group) -> bool:
        if self.settings.partition == "auto":
            return is_elementwise(kind, self._constructor(kind), options)
        return self.settings.partition == "elements"

    def _constructor(self, kind: OptimizerClass) -> Mapping[str, Any]:
        """What the constructor of a class is given beside its groups."""
        return self.defaults if kind is self.default_class else {}
