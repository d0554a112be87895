"""The optimizers to choose from, each with one rule for matrices of the blocks and one for the rest, or one for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn, optim
from torch.optim import Optimizer

from zerostep.plan.layout_planner import LayoutPlanner, Settings, model_positions
from zerostep.tools.planner.memory import Memory, TrainingJob, replicated, sharded, whole_parameters

__all__ = ["CHOICES", "SETTINGS", "Choice", "ClassParams", "parts", "predicted"]

SETTINGS = Settings(gather="forward")


@dataclass(frozen=True)
class Choice:
    """An optimizer class with its options; another one may have the matrices."""

    common: type[Optimizer]
    options: Mapping[str, Any]
    matrices: type[Optimizer] | None = None
    matrix_options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ClassParams:
    """Parameters that one class trains."""

    kind: type[Optimizer]
    options: Mapping[str, Any]
    named: Sequence[tuple[str, Tensor]]


CHOICES: Mapping[str, Choice] = {
    "adamw": Choice(optim.AdamW, {"lr": 1e-3}),
    "sgd": Choice(optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "muon": Choice(optim.AdamW, {"lr": 1e-3}, optim.Muon, {"lr": 0.01}),
    "adafactor": Choice(optim.Adafactor, {"lr": 0.01}),
}


def parts(choice: Choice, model: nn.Module) -> list[ClassParams]:
    """Who trains what; matrices first."""
    named = list(model.named_parameters())
    if choice.matrices is None:
        return [ClassParams(choice.common, choice.options, named)]
    inside = [(name, param) for name, param in named if _is_hidden_matrix(name, param)]
    rest = [(name, param) for name, param in named if not _is_hidden_matrix(name, param)]
    return [
        ClassParams(choice.matrices, choice.matrix_options or {}, inside),
        ClassParams(choice.common, choice.options, rest),
    ]


def groups(choice: Choice, model: nn.Module) -> list[dict[str, Any]]:
    """The same as parameter groups of one `ShardedOptimizer`."""
    return [
        {"params": list(part.named)}
        if part.kind is choice.common
        else {"params": list(part.named), "optimizer_class": part.kind, **part.options}
        for part in parts(choice, model)
    ]


def predicted(choice: Choice, model: nn.Module, ranks: int, on_host: bool) -> list[list[Memory]]:
    """What the planner says of plain DDP, the drop-in and `ShardedOptimizer`, for each rank."""
    positions = model_positions(model.parameters())
    planner = LayoutPlanner(choice.common, choice.options, SETTINGS, positions)
    complete = [planner.complete(group) for group in groups(choice, model)]
    job = TrainingJob(
        planner,
        complete,
        names=[name for name, _ in model.named_parameters()],
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        on_host=on_host,
        gradients_are_views=True,
    )
    plain, dropped_in = replicated(job), whole_parameters(job, ranks)
    cut = sharded(job, planner.plan(complete, ranks))
    return [[plain.memory(0), dropped_in.memory(rank), cut.memory(rank)] for rank in range(ranks)]


def _is_hidden_matrix(name: str, param: Tensor) -> bool:
    return name.startswith("blocks.") and param.dim() == 2
