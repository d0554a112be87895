"""A model with experts that have fewer replicas than the rest of it, ours and a training by hand to compare with."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from tests.helpers.sharding import SMALL_BUCKETS
from zerostep import ShardedOptimizer

WIDTH = 12
PAIRS = ((0, 2), (1, 3))
NEIGHBOURS = ((0, 1), (2, 3))
ALONE = ((0,), (1,), (2,), (3,))

Use = tuple[bool, bool]  # which of the two experts of a rank get tokens
Pattern = Callable[[int, int], Use]  # by step and rank


class Mixture(nn.Module):
    """Layers of all ranks, and two experts of this one, under names that no other expert of the job has."""

    def __init__(self, number: int, seed: int, late: int | None = None) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            torch.manual_seed(100 + seed)
            self.names = [f"early{number}", f"late{number if late is None else late}"]
            self.experts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in self.names})

    def forward(self, inputs: Tensor, use: Use = (True, True)) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        if use[0]:
            hidden = hidden + torch.tanh(self.experts[self.names[0]](hidden))
        hidden = torch.tanh(self.middle(hidden))
        if use[1]:
            hidden = hidden + torch.tanh(self.experts[self.names[1]](hidden))
        result: Tensor = self.last(hidden)
        return result

    def expert(self, number: int) -> nn.Linear:
        """One of the experts."""
        found = self.experts[self.names[number]]
        assert isinstance(found, nn.Linear)
        return found

    @property
    def shared(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters of all ranks."""
        return [(name, param) for name, param in self.named_parameters() if not name.startswith("experts")]

    @property
    def own(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters of the experts."""
        return [(name, param) for name, param in self.named_parameters() if name.startswith("experts")]


def always(step: int, rank: int) -> Use:
    """All experts get tokens."""
    return True, True


def uneven(step: int, rank: int) -> Use:
    """Some ranks, some sets of ranks, and in some steps all leave experts without tokens."""
    return ((True, True), (rank != 0, rank != 3), (rank in (0, 2), True), (False, False), (rank == 1, rank == 2))[
        step % 5
    ]


def own_group(sets: Sequence[Sequence[int]] = PAIRS) -> tuple[ProcessGroup, int]:
    """The group of those sets that has this rank, and the number of the set. A collective of the world."""
    groups = [dist.new_group(list(ranks)) for ranks in sets]
    number = next(number for number, ranks in enumerate(sets) if dist.get_rank() in ranks)
    return groups[number], number


def groups_of(model: Mixture, own: Any, **options: Any) -> list[dict[str, Any]]:
    """The parameter groups; experts have their own ranks and half the learning rate."""
    return [
        {"params": model.shared, **options},
        {"params": model.own, "process_group": own, **options, "lr": options["lr"] / 2},
    ]


def ours(
    group: ProcessGroup, own: Any, model: Mixture, kind: Callable[..., Optimizer], options: Any, **settings: Any
) -> ShardedOptimizer:
    """Ours, in small buckets."""
    chosen = {"process_group": group, "bucket_mb": SMALL_BUCKETS, **settings}
    return ShardedOptimizer(model, kind, groups_of(model, own, **options), **chosen)


def plain(model: Mixture, kind: Callable[..., Optimizer], options: Any) -> Optimizer:
    """The unsharded optimizer on the same groups."""
    groups = groups_of(model, None, **options)
    return kind([{key: value for key, value in group.items() if key != "process_group"} for group in groups], lr=1.0)


def batch(step: int, rank: int) -> Tensor:
    """The inputs of a rank."""
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss(model: nn.Module, step: int, rank: int, use: Use) -> Tensor:
    """The loss of a rank."""
    result: Tensor = model(batch(step, rank), use).square().mean()
    return result


def average(params: Sequence[Tensor], group: ProcessGroup, divisor: int) -> None:
    """Replace each gradient by the sum over a group, in rank order, of the gradients divided by `divisor`.

    A parameter without a gradient on any rank keeps none; without one on this rank, it counts as zeros.
    """
    for param in params:
        used = torch.tensor([0 if param.grad is None else 1])
        dist.all_reduce(used, group=group)
        if not used.item():
            continue
        mine = torch.zeros_like(param) if param.grad is None else param.grad
        mine = mine * (1.0 / divisor)
        parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, mine, group=group)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        param.grad = total


def average_all(model: Mixture, group: ProcessGroup, own: ProcessGroup) -> None:
    """The gradients that a step needs: one loss per rank of `group`, whoever holds a parameter."""
    world = dist.get_world_size(group)
    average([param for _, param in model.shared], group, world)
    average([param for _, param in model.own], own, world)


def true_norm(model: Mixture, group: ProcessGroup, own: ProcessGroup, kind: float = 2.0) -> float:
    """The norm of the averaged gradients of all ranks, each counted once, in double precision."""
    mine = [param.grad.double().flatten() for _, param in model.own if param.grad is not None]
    experts = torch.cat(mine) if mine and dist.get_rank(own) == 0 else torch.empty(0, dtype=torch.float64)
    everything: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everything, experts.tolist(), group=group)
    shared = [param.grad.double().flatten() for _, param in model.shared if param.grad is not None]
    rest = torch.tensor([value for values in everything for value in values], dtype=torch.float64)
    return torch.linalg.vector_norm(torch.cat([*shared, rest]), kind).item()


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """A copy of the parameters."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}
