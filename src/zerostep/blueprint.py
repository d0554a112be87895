"""From what the user asks for to groups with all their options, and a layout of their parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from zerostep.bucketing import Cost, fill
from zerostep.costs import CostModel
from zerostep.groups import Group, all_params, param_specs
from zerostep.inners import InnerOptimizers, OptimizerClass, class_of, own_options
from zerostep.layout import Layout, ParamSpec
from zerostep.splitting import is_elementwise, is_separable

__all__ = ["Blueprint", "Settings"]

_HOST_BUCKET = 5 << 20
_LEAST_BUCKET, _MOST_BUCKET, _BUCKETS = 25 << 20, 100 << 20, 32


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


def _one_of(name: str, value: Any, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}; got {value!r}")


@dataclass(frozen=True)
class Blueprint:
    """The optimizer class that groups have if they name no other, its options, and the settings."""

    common: OptimizerClass
    defaults: Mapping[str, Any]
    settings: Settings

    def complete(self, group: Group) -> Group:
        """A group with the options that its class completes, from an optimizer that is thrown away."""
        found = Optimizer([group], {}).param_groups[0]
        kind = class_of(found, self.common)
        if not callable(kind):
            raise TypeError(f"optimizer_class must be an optimizer class, got {kind!r}")
        trial = InnerOptimizers([found], [found["params"]], self.common, self.defaults)
        trial.pull([found])
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
            kind = class_of(group, self.common)
            model = CostModel(kind, self._constructor(kind), own_options(group))
            specs += known
            costs += [model.of(spec) for spec in known]
        sizes = [param.element_size() for param in all_params(groups)]
        return fill(specs, world_size, self._bucket_bytes(specs, sizes), sizes, costs)

    def _bucket_bytes(self, specs: Sequence[ParamSpec], sizes: Sequence[int]) -> int:
        """As measured: small on the host, where messages are slow; fewer on an accelerator, where launches are."""
        if self.settings.bucket_mb is not None:
            return max(1, int(self.settings.bucket_mb * 2**20))
        if all(spec.device.startswith("cpu") for spec in specs):
            return _HOST_BUCKET
        total = sum(spec.numel * size for spec, size in zip(specs, sizes, strict=True) if spec.trainable)
        return min(max(total // _BUCKETS, _LEAST_BUCKET), _MOST_BUCKET)

    def _specs(self, group: Group, number: int, first: int) -> list[ParamSpec]:
        splittable = self._splits(class_of(group, self.common), own_options(group))
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
        return self.defaults if kind is self.common else {}
