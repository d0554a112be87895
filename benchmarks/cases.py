"""What is measured: models, shapes and optimizers as frozen data, and how to build them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from zerostep.tools.demo import GPT, GPTShape

SEED = 20

Measure = Literal["training step", "step()", "consolidation"]


@dataclass(frozen=True)
class Tensors:
    """A bare list of parameters: no forward pass, gradients are preset."""

    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Text:
    """A GPT on random bytes."""

    shape: GPTShape
    batch: int


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer class and its options."""

    kind: type[Optimizer]
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Case:
    """One row of questions: a model, its optimizer, what to time and how often."""

    name: str
    title: str
    model: Tensors | Text
    optimizer: OptimizerSpec
    measures: tuple[Measure, ...]
    rounds: int


_ADAMW = OptimizerSpec(AdamW, MappingProxyType({"lr": 1e-3}))

CASES = (
    Case(
        name="small",
        title="300 parameters of 1,000 floats, SGD with momentum",
        model=Tensors(((1000,),) * 300),
        optimizer=OptimizerSpec(SGD, MappingProxyType({"lr": 1e-3, "momentum": 0.9})),
        measures=("step()",),
        rounds=40,
    ),
    Case(
        name="many",
        title="2,000 parameters of 900 to 1,100 floats, AdamW",
        model=Tensors(tuple((900 + 37 * i % 201,) for i in range(2000))),
        optimizer=_ADAMW,
        measures=("step()",),
        rounds=15,
    ),
    Case(
        name="gpt",
        title="GPT of 10.8 million parameters, 4 x 64 bytes per rank, AdamW",
        model=Text(GPTShape(context=64, width=384, heads=6, layers=6), batch=4),
        optimizer=_ADAMW,
        measures=("training step", "step()"),
        rounds=15,
    ),
    Case(
        name="consolidate",
        title="16 parameters of 1,000,000 floats, state of Adam, to rank 0",
        model=Tensors(((1_000_000,),) * 16),
        optimizer=OptimizerSpec(Adam, MappingProxyType({"lr": 1e-3})),
        measures=("consolidation",),
        rounds=5,
    ),
)


def case_named(name: str) -> Case:
    """Return the case of that name."""
    return next(case for case in CASES if case.name == name)


def build(case: Case) -> nn.Module:
    """Build the case's model with the same values at every call; a bare list of tensors comes with gradients."""
    torch.manual_seed(SEED)
    if isinstance(case.model, Text):
        return GPT(case.model.shape)
    tensors = nn.ParameterList(torch.randn(shape) for shape in case.model.shapes)
    for parameter in tensors:
        parameter.grad = torch.randn_like(parameter)
    return tensors


def window(text: Text, rank: int) -> Tensor:
    """Return the batch a rank trains on, the same at every call."""
    random = torch.Generator().manual_seed(SEED + rank)
    return torch.randint(text.shape.vocabulary, (text.batch, text.shape.context + 1), generator=random)
