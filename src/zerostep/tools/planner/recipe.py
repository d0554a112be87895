"""Optimizer classes and their options, from the command line to parameter groups."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from zerostep.plan.groups import Group, OptimizerClass, class_of, own_options
from zerostep.plan.layout_planner import LayoutPlanner, Settings, model_positions
from zerostep.tools.errors import PlanError
from zerostep.tools.planner.sources import Source, meta_parameter, resolve

Named = tuple[str, nn.Parameter]


@dataclass(frozen=True)
class Rule:
    """An optimizer class (`build`) and the options for its constructor."""

    build: OptimizerClass
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The call of the constructor, as it would be written in Python."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        name = getattr(self.build, "__name__", repr(self.build))
        return f"{name}({given})" if given else name


@dataclass(frozen=True)
class Recipe:
    """The optimizers of a model: one for all parameters, or another one for the matrices of numbered blocks."""

    common: Rule
    matrices: Rule | None = None

    @property
    def title(self) -> str:
        """A description for reports."""
        if self.matrices is None:
            return self.common.title
        return f"{self.matrices.title} for matrices of blocks, {self.common.title} for the rest"

    def planner(self, settings: Settings, source: Source, device: str) -> LayoutPlanner:
        """Return the planner of `ShardedOptimizer`, which plans as if the parameters were on `device`."""
        positions = model_positions(param for _, param in source.params)
        return LayoutPlanner(self.common.build, dict(self.common.options), settings, positions, f"{device}:0")

    def parts(self, named: Iterable[Named]) -> list[tuple[Rule, list[Named]]]:
        """Return the named parameters of each rule; matrices first."""
        matrices, rest = list[Named](), list[Named]()
        for name, param in named:
            hidden = self.matrices is not None and is_hidden_matrix(name, param)
            (matrices if hidden else rest).append((name, param))
        rules = (self.matrices or self.common, matrices), (self.common, rest)
        return [(rule, members) for rule, members in rules if members]

    def groups(self, named: Iterable[Named]) -> list[Group]:
        """Return the parts as parameter groups for one `ShardedOptimizer`."""
        return [
            {"params": members}
            if rule is self.common
            else {"params": members, **rule.options, "optimizer_class": rule.build}
            for rule, members in self.parts(named)
        ]

    def complete_groups(self, source: Source, planner: LayoutPlanner) -> list[Group]:
        """Return parameter groups with all their options; raise `PlanError` if a class does not accept them."""
        return [_complete(group, planner) for group in self.groups(source.params)]


def _complete(group: Group, planner: LayoutPlanner) -> Group:
    build = class_of(group, planner.default_class)
    name = getattr(build, "__name__", build)
    try:
        complete_group = planner.complete(group)
    except Exception as error:
        raise PlanError(f"{name} cannot hold these parameters: {error}: change --optimizer or --option") from error
    trial = {**own_options(complete_group), "params": [meta_parameter((2, 2), torch.float32)]}
    made = build([trial], **planner.constructor_options(build))
    if not isinstance(made, Optimizer):
        raise PlanError(f"{name} makes a {type(made).__name__}: --optimizer must name a torch.optim.Optimizer class")
    return complete_group


def is_hidden_matrix(name: str, param: nn.Parameter) -> bool:
    """Return whether a parameter is a matrix inside a numbered block; embeddings and heads are not."""
    return param.dim() == 2 and any(part.isdigit() for part in name.split("."))


# ---------------------------------------------------------------------- from the command line


def optimizer_class(text: str, option: str = "--optimizer") -> OptimizerClass:
    """Return a class of `torch.optim` by its name, or any class by its import path."""
    if ":" in text:
        build = resolve(text, option)
    else:
        module, _, name = text.rpartition(".")
        build = resolve(f"{module}:{name}", option) if module else getattr(torch.optim, text, None)
    if not callable(build) or build is Optimizer:
        known = ", ".join(sorted(_torch_optimizers()))
        raise PlanError(f"{option} {text} is no optimizer class: write package.module:Class, or one of {known}")
    return build


def _torch_optimizers() -> list[str]:
    members = vars(torch.optim).items()
    classes = [name for name, value in members if isinstance(value, type) and issubclass(value, Optimizer)]
    return classes[1:]


def parse_options(given: Sequence[str], option: str = "--option") -> dict[str, Any]:
    """Parse `name=value` pairs; a value is a Python literal, a dtype such as `torch.float32`, or text."""
    options = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name.isidentifier():
            raise PlanError(f"{option} {text} is not name=value: write for example {option} momentum=0.9")
        options[name] = _value(value, option)
    return options


def _value(text: str, option: str) -> Any:
    if text.startswith("torch."):
        return dtype_named(text, option)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def dtype_named(text: str | None, option: str) -> torch.dtype | None:
    """Return a floating-point dtype by its name, such as `bfloat16` or `bf16`; `None` if no name is given."""
    if not text:
        return None
    short = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "fp64": "float64"}
    dtype = getattr(torch, short.get(text, text.removeprefix("torch.")), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise PlanError(f"{option} {text} is no floating-point dtype: write float32, bfloat16 or float16")
    return dtype
