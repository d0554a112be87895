"""The optimizers of the demo, each with its options; and their memory as the planner predicts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer

from zerostep.plan.layout_planner import LayoutPlanner, Settings, model_positions
from zerostep.tools.planner.memory import Memory, TrainingJob, replicated, sharded, whole_parameters
from zerostep.tools.planner.recipe import split_matrices

__all__ = ["CHOICES", "SETTINGS", "Choice", "ClassParams", "groups", "parts", "predicted"]

SETTINGS = Settings(gather="forward")


@dataclass(frozen=True)
class Choice:
    """An optimizer class with its options, and possibly another one for the matrices of the blocks."""

    common: type[Optimizer]
    options: Mapping[str, Any]
    matrices: type[Optimizer] | None = None
    matrix_options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ClassParams:
    """The named parameters that one optimizer class trains, and its options."""

    optimizer_class: type[Optimizer]
    options: Mapping[str, Any]
    named: Sequence[tuple[str, nn.Parameter]]


CHOICES: Mapping[str, Choice] = {
    "adamw": Choice(optim.AdamW, {"lr": 1e-3}),
    "sgd": Choice(optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "muon": Choice(optim.AdamW, {"lr": 1e-3}, optim.Muon, {"lr": 0.01}),
    "adafactor": Choice(optim.Adafactor, {"lr": 0.01}),
}


def parts(choice: Choice, model: nn.Module) -> list[ClassParams]:
    """Return the parameters of a model by optimizer class; matrices first."""
    named = list(model.named_parameters())
    if choice.matrices is None:
        return [ClassParams(choice.common, choice.options, named)]
    matrices, rest = split_matrices(named)
    return [
        ClassParams(choice.matrices, choice.matrix_options or {}, matrices),
        ClassParams(choice.common, choice.options, rest),
    ]


def groups(choice: Choice, model: nn.Module) -> list[dict[str, Any]]:
    """Return the parts as parameter groups for one `ShardedOptimizer`."""
    return [
        {"params": list(part.named)}
        if part.optimizer_class is choice.common
        else {"params": list(part.named), "optimizer_class": part.optimizer_class, **part.options}
        for part in parts(choice, model)
    ]


def predicted(choice: Choice, model: nn.Module, ranks: int, on_host: bool) -> list[list[Memory]]:
    """Return the planned memory of each rank: of plain DDP, the drop-in and `ShardedOptimizer`."""
    positions = model_positions(model.parameters())
    planner = LayoutPlanner(choice.common, choice.options, SETTINGS, positions)
    complete_groups = [planner.complete(group) for group in groups(choice, model)]
    job = TrainingJob(
        planner,
        complete_groups,
        names=[name for name, _ in model.named_parameters()],
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        on_host=on_host,
        gradients_are_views=True,
    )
    plain, drop_in = replicated(job), whole_parameters(job, ranks)
    divided = sharded(job, planner.plan(complete_groups, ranks))
    return [[plain.memory(0), drop_in.memory(rank), divided.memory(rank)] for rank in range(ranks)]
