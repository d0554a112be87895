"""What trains the parameters: optimizer classes, their options, and the groups that have them."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zerostep.plan.groups import Group, OptimizerClass, class_of, own_options
from zerostep.plan.layout import ParamSpec
from zerostep.plan.layout_planner import LayoutPlanner, Settings, model_positions
from zerostep.tools.planner.errors import PlanError
from zerostep.tools.planner.sources import Source, resolve

__all__ = ["Recipe", "Rule", "dtype_named", "optimizer_class", "parse_options"]

Named = tuple[str, nn.Parameter]


@dataclass(frozen=True)
class Rule:
    """An optimizer class and its options."""

    build: OptimizerClass
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The class and what it was given, as one would write it."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        name = getattr(self.build, "__name__", repr(self.build))
        return f"{name}({given})" if given else name


@dataclass(frozen=True)
class Recipe:
    """How all parameters are trained: by one rule, or the matrices of numbered blocks by another."""

    common: Rule
    matrices: Rule | None = None

    @property
    def title(self) -> str:
        """The rules in words."""
        if self.matrices is None:
            return self.common.title
        return f"{self.matrices.title} for matrices of blocks, {self.common.title} for the rest"

    def planner(self, settings: Settings, source: Source, device: str) -> LayoutPlanner:
        """The product's own planning, as if the parameters lay on `device`."""
        positions = model_positions(param for _, param in source.params)
        return _Placed(self.common.build, dict(self.common.options), settings, positions, device)

    def groups(self, source: Source, planner: LayoutPlanner) -> list[Group]:
        """Parameter groups with all their options, from optimizers that are thrown away."""
        wanted: list[Group] = [{"params": list(source.params)}]
        if self.matrices is not None:
            inside = [named for named in source.params if is_hidden_matrix(*named)]
            rest = [named for named in source.params if not is_hidden_matrix(*named)]
            own = {**self.matrices.options, "optimizer_class": self.matrices.build}
            wanted = [group for group in ({"params": inside, **own}, {"params": rest}) if group["params"]]
        return [self._complete(group, planner) for group in wanted]

    def _complete(self, group: Group, planner: LayoutPlanner) -> Group:
        kind = class_of(group, planner.default_class)
        name = getattr(kind, "__name__", kind)
        try:
            found = planner.complete(group)
        except Exception as error:
            raise PlanError(f"{name} cannot hold these parameters: {error}: change --optimizer or --option") from error
        _try(name, kind, found, planner)
        return found


def _try(name: object, kind: OptimizerClass, group: Group, planner: LayoutPlanner) -> None:
    """A class that is no optimizer, or that cannot make a step anywhere, is told now and not guessed at."""
    constructor = planner.defaults if kind is planner.default_class else {}
    found = kind([{**own_options(group), "params": [nn.Parameter(torch.empty(2, 2, device="meta"))]}], **constructor)
    if not isinstance(found, Optimizer):
        raise PlanError(f"{name} makes a {type(found).__name__}: --optimizer must name a torch.optim.Optimizer class")


def is_hidden_matrix(name: str, param: nn.Parameter) -> bool:
    """Whether a parameter is a matrix inside a numbered block; embeddings and heads are not."""
    return param.dim() == 2 and any(part.isdigit() for part in name.split("."))


@dataclass(frozen=True)
class _Placed(LayoutPlanner):
    """A blueprint for parameters without memory, which says where they would lie."""

    device: str = "cuda"

    def _specs(self, group: Group, number: int, first: int) -> list[ParamSpec]:
        return [replace(spec, device=f"{self.device}:0") for spec in super()._specs(group, number, first)]


# ---------------------------------------------------------------------- from words


def optimizer_class(text: str, option: str = "--optimizer") -> OptimizerClass:
    """A class of `torch.optim` by its name, or any by its import path."""
    if ":" in text:
        found = resolve(text, option)
    else:
        module, _, name = text.rpartition(".")
        found = resolve(f"{module}:{name}", option) if module else getattr(torch.optim, text, None)
    if not callable(found) or found is Optimizer:
        known = ", ".join(sorted(_torch_optimizers()))
        raise PlanError(f"{option} {text} is no optimizer class: write package.module:Class, or one of {known}")
    return found


def _torch_optimizers() -> list[str]:
    found = vars(torch.optim).items()
    return [name for name, value in found if isinstance(value, type) and issubclass(value, Optimizer)][1:]


def parse_options(given: Sequence[str], option: str = "--option") -> dict[str, Any]:
    """`name=value` pairs; a value is a Python literal, a dtype such as `torch.float32`, or text."""
    found = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier():
            raise PlanError(f"{option} {text} is not name=value: write for example {option} momentum=0.9")
        found[name] = _value(value, option)
    return found


def _value(text: str, option: str) -> Any:
    if text.startswith("torch."):
        return dtype_named(text, option)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def dtype_named(text: str, option: str) -> torch.dtype:
    """A floating-point dtype by its name, such as `bfloat16` or `bf16`."""
    short = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}
    found = getattr(torch, short.get(text, text.removeprefix("torch.")), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise PlanError(f"{option} {text} is no floating-point dtype: write float32, bfloat16 or float16")
    return found
