"""Models, optimizers and comparisons for tests of `ShardedOptimizer` on a CUDA device."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, AdamW, Muon, Optimizer

from tests.helpers.reference import assert_same_bits
from zerostep import ShardedOptimizer

STEPS = 8
DEADLINE = 60
LATE = 20_000_000  # cycles: about ten milliseconds
SMALL_BUCKETS = 0.02  # megabytes: about two layers
DEVICE = torch.device("cuda", 0)

Group = dict[str, Any]


def _layers(*widths: int, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    found: list[nn.Module] = []
    for wide, next_wide in pairwise(widths):
        found += [nn.Linear(wide, next_wide, bias=bias), nn.Tanh()]
    return nn.Sequential(*found[:-1]).to(DEVICE)


class _Late(nn.Module):
    """What comes behind it comes late, in both directions."""

    def forward(self, inputs: Tensor) -> Tensor:
        torch.cuda._sleep(LATE)
        result = inputs * 1.0
        if result.requires_grad:
            result.register_hook(lambda grad: torch.cuda._sleep(LATE))
        return result


def _with_late_kernels() -> nn.Module:
    layers = list(MODELS["even"]().children())
    return nn.Sequential(*layers[:4], _Late(), *layers[4:])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "even": lambda: _layers(48, 48, 48, 48, 48, 48, 4),
    "odd": lambda: _layers(48, 37, 11, 53, 7, 3),
    "gain": lambda: _gain(),
    "late": lambda: _with_late_kernels(),
    "matrices": lambda: _layers(48, 37, 48, 11, 4, bias=False),
}


def inputs_of(group: ProcessGroup, steps: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    return [torch.randn(4, 48, generator=generator).to(DEVICE) for _ in range(steps)]


@dataclass(frozen=True)
class Recipe:
    """A model, an optimizer class, its options, and perhaps another class for matrices."""

    kind: type[Optimizer]
    options: Group
    model: str = "even"
    matrices: Group = field(default_factory=dict)

    def build(self) -> nn.Module:
        return MODELS[self.model]()

    def groups(self, model: nn.Module) -> list[Group]:
        named = list(model.named_parameters())
        if not self.matrices:
            return [{"params": named}]
        matrices = [each for each in named if each[1].dim() == 2]
        others = [each for each in named if each[1].dim() != 2]
        return [{"params": matrices, **self.matrices}, {"params": others}]

    def plain(self, model: nn.Module) -> list[Optimizer]:
        """One for each class."""
        found = []
        for group in self.groups(model):
            kind = group.pop("optimizer_class", self.kind)
            found.append(kind([group], **(self.options if kind is self.kind else {})))
        return found


ADAMW = Recipe(AdamW, {"lr": 0.01, "weight_decay": 0.1})
RECIPES = {
    "sgd": Recipe(SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": ADAMW,
    "adamw fused": Recipe(AdamW, {"lr": 0.01, "fused": True}),
    "adamw of odd sizes": Recipe(AdamW, {"lr": 0.01}, "odd"),
    "adamw, late": Recipe(AdamW, {"lr": 0.01}, "late"),
    "muon": Recipe(Muon, {"lr": 0.02}, "matrices"),
    "muon and adamw": Recipe(AdamW, {"lr": 0.01}, matrices={"optimizer_class": Muon, "lr": 0.02}),
}


@dataclass(frozen=True)
class Way:
    """One way to put a model and the optimizer together."""

    wrapped: bool = False
    reduction: str = "scatter"
    gather: str = "step"

    def ours(self, group: ProcessGroup, recipe: Recipe, **options: Any) -> tuple[nn.Module, ShardedOptimizer]:
        bare = recipe.build()
        model = in_ddp(group, bare) if self.wrapped else bare
        found: Group = {"bucket_mb": SMALL_BUCKETS, "reduction": self.reduction, "gather": self.gather, **options}
        groups = recipe.groups(bare)
        return model, ShardedOptimizer(model, recipe.kind, groups, process_group=group, **found, **recipe.options)


WAYS = [Way(*each) for each in product((False, True), ("scatter", "all"), ("step", "forward"))]


def in_ddp(group: ProcessGroup, model: nn.Module) -> DDP:
    return DDP(model, process_group=group, bucket_cap_mb=SMALL_BUCKETS)


def backward(model: nn.Module, inputs: Tensor) -> None:
    model(inputs).square().sum().backward()


def train(model: nn.Module, optimizers: Sequence[Optimizer], inputs: Tensor) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    backward(model, inputs)
    for optimizer in optimizers:
        optimizer.step()


def values_of(model: nn.Module) -> dict[str, Tensor]:
    torch.cuda.synchronize()
    found = model.module if isinstance(model, DDP) else model
    return {name: param.detach().cpu() for name, param in found.named_parameters()}


def assert_same(excerpt: object, ours: nn.Module, twin: nn.Module) -> None:
    try:
        assert_same_bits(values_of(ours), values_of(twin))
    except AssertionError as error:
        raise AssertionError(f"{excerpt}: {error}") from None


def nccl_group(group: ProcessGroup) -> ProcessGroup:
    """The same ranks. NCCL refuses two of them on one GPU of one host, so each says that it is a host of its own."""
    os.environ.setdefault("NCCL_HOSTID", f"rank-{dist.get_rank()}")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    ranks = dist.get_process_group_ranks(group)
    found = dist.new_group(ranks, backend="nccl", use_local_synchronization=True)
    assert found is not None
    return found


class _Gain(nn.Module):
    """A single number, and behind it a norm and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.first, self.norm, self.last = nn.Linear(48, 1024), nn.LayerNorm(1024), nn.Linear(1024, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.last(self.norm(self.gain * self.first(inputs)))
        return found


def _gain() -> nn.Module:
    torch.manual_seed(0)
    return _Gain().to(DEVICE)
