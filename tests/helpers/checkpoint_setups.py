"""Models and optimizers in every mode, for tests that save in one and load in another."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD, Adafactor, AdamW, Muon

import zerostep
from tests.helpers.reference import assert_same_bits, batches, build, train
from tests.helpers.sharding import SMALL_BUCKETS, in_ddp
from zerostep import ShardedOptimizer, ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved

Pair = tuple[nn.Module, Any]

ADAMW: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


def _hooked(group: ProcessGroup, model: nn.Module, params: Any, kind: Any, hook: Any, **options: Any) -> Pair:
    zero = ZeroRedundancyOptimizer(params, kind, process_group=group, overlap_with_ddp=True, **options)
    ddp = in_ddp(group, model)
    ddp.register_comm_hook(group, hook(allreduce_hook, ddp, zero))
    return ddp, zero


def _zero(group: ProcessGroup, model: nn.Module, params: Any, kind: Any, view: bool, **options: Any) -> Pair:
    found = ZeroRedundancyOptimizer(params, kind, process_group=group, parameters_as_bucket_view=view, **options)
    return in_ddp(group, model), found


def sharded_pair(group: ProcessGroup, model: nn.Module, params: Any, kind: Any, **options: Any) -> Pair:
    options = {"bucket_mb": SMALL_BUCKETS, **options}
    return model, ShardedOptimizer(model, kind, params, process_group=group, **options)


def _wrapped(group: ProcessGroup, model: nn.Module, params: Any, kind: Any, **options: Any) -> Pair:
    ddp = in_ddp(group, model)
    return ddp, ShardedOptimizer(ddp, kind, params, process_group=group, bucket_mb=SMALL_BUCKETS, **options)


WAYS: dict[str, Callable[..., Pair]] = {
    "elements": partial(sharded_pair, partition="elements"),
    "parameters": partial(sharded_pair, partition="parameters"),
    "auto": sharded_pair,
    "forward": partial(sharded_pair, gather="forward", bucket_mb=25.0),
    "wrapped": _wrapped,
    "zero": partial(_zero, view=False),
    "view": partial(_zero, view=True),
    "hook": partial(_hooked, hook=hook_with_zero_step),
    "interleaved": partial(_hooked, hook=hook_with_zero_step_interleaved),
}


@dataclass(frozen=True)
class Setup:
    """A model and an optimizer for it, without the mode in which its state is held."""

    kind: Any = AdamW
    options: dict[str, Any] = field(default_factory=lambda: dict(ADAMW))
    build: Callable[[int], nn.Module] = lambda seed: build("mlp", seed)
    params: Callable[[nn.Module], Any] = lambda model: list(model.named_parameters())
    batches: str = "mlp"

    def make(self, group: ProcessGroup, way: str, seed: int = 0, **more: Any) -> Pair:
        """A module and an optimizer on this rank."""
        model = self.build(seed)
        return WAYS[way](group, model, self.params(model), self.kind, **{**self.options, **more})

    def train(self, pair: Pair, group: ProcessGroup, steps: int = 2) -> None:
        """Some steps with data of this rank's own."""
        train(*pair, batches(3, dist.get_rank(group), steps, self.batches))


def _matrices_first(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    matrices = [item for item in named if item[1].dim() == 2]
    others = [item for item in named if item[1].dim() != 2]
    return [{"params": matrices, "optimizer_class": Muon, "lr": 0.02}, {"params": others}]


SETUPS = {
    "adamw": Setup(),
    "momentum": Setup(SGD, {"lr": 0.05, "momentum": 0.9}),
    "adafactor": Setup(Adafactor, {"lr": 0.02}),
    "muon and adamw": Setup(params=_matrices_first),
}


def whole(optimizer: Any) -> dict[str, Any]:
    """The whole state on group rank 0, in `torch.optim`'s format without names; elsewhere this rank's options."""
    optimizer.consolidate_state_dict(to=0)
    found = optimizer.state_dict() if optimizer.rank == 0 else {"state": {}, "param_groups": optimizer.param_groups}
    optimizer.release_state_dict()
    groups = [{k: v for k, v in group.items() if k not in _UNCOMPARED} for group in found["param_groups"]]
    return {"state": found["state"], "param_groups": groups}


_UNCOMPARED = ("params", "param_names", "optimizer_class")


def weights(model: nn.Module) -> dict[str, Any]:
    """A copy of the state dict of the module itself."""
    found = model.module if isinstance(model, DDP) else model
    return {key: x.clone() if isinstance(x, Tensor) else x for key, x in found.state_dict().items()}


def same_weights(a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    tensors = [{key: x for key, x in each.items() if isinstance(x, Tensor)} for each in (a, b)]
    assert_same_bits(*tensors)
    assert {k: x for k, x in a.items() if k not in tensors[0]} == {k: x for k, x in b.items() if k not in tensors[1]}


class Odd(nn.Module):
    """One parameter of every kind that could be forgotten."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)

        def fresh(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=random, dtype=torch.float64).to(dtype))

        self.scalar, self.single = fresh(), fresh(1)
        self.empty = fresh(0, 3)
        self.conv = nn.Parameter(fresh(3, 2, 2, 3).detach().to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(fresh(5, 4).detach().t())
        self.frozen = fresh(4, 2).requires_grad_(False)
        self.unused = fresh(7)
        self.tied = self.conv
        self.norm = nn.BatchNorm1d(2)
        self.imaginary = nn.Parameter(torch.randn(5, generator=random, dtype=torch.complex64))
        self.wide = fresh(3, 3, dtype=torch.float64)
        self.low = fresh(9, dtype=torch.float16)
        self.brain = fresh(11, dtype=torch.bfloat16)
        self.register_buffer("table", torch.randn(6, generator=random)[::2])  # not dense
        self.counts = [seed]

    def get_extra_state(self) -> dict[str, Any]:
        """Not a tensor."""
        return {"counts": self.counts, "when": (1, None)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Back again."""
        self.counts = state["counts"]

    def forward(self, x: Tensor) -> Tensor:
        """A number that depends on all parameters but two."""
        self.norm(x.view(-1, 1) * torch.ones(1, 2))
        used = [param for name, param in self.named_parameters() if param.requires_grad and name != "unused"]
        parts = [((param.abs() if param.is_complex() else param).double() * x.mean()).square().sum() for param in used]
        return torch.stack(parts).sum()


def save_extra(group: ProcessGroup, path: str, extra: Any) -> None:
    pair = SETUPS["adamw"].make(group, "auto")
    zerostep.save(path, pair[1], extra=[extra, dist.get_rank(group)] if extra == "own" else extra)
