"""`ShardedOptimizer` for a model, and plain trainings to compare it with bit for bit."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW, Optimizer

from tests.helpers.reference import Batch, assert_same_bits, assert_same_state_dict, batches, build
from zerostep import ShardedOptimizer

Values = dict[str, Tensor]

SMALL_BUCKETS = 0.0003  # megabytes: the models here have several buckets
OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
MOMENTUM: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}


def sharded(
    group: ProcessGroup, model: nn.Module, kind: Callable[..., Optimizer] = AdamW, params: Any = None, **options: Any
) -> ShardedOptimizer:
    """Ours, in small buckets; `OPTIONS` for AdamW."""
    defaults = OPTIONS if kind is AdamW else {}
    return ShardedOptimizer(
        model, kind, params, **{"process_group": group, "bucket_mb": SMALL_BUCKETS, **defaults, **options}
    )


def in_ddp(group: ProcessGroup, model: nn.Module, **options: Any) -> DDP:
    """A module in DDP, in small buckets."""
    return DDP(model, process_group=group, **{"bucket_cap_mb": SMALL_BUCKETS, **options})


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """A model with the same parameters on every rank and in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return make()


def series(group: ProcessGroup, count: int, model: str = "mlp", seed: int = 7) -> list[Batch]:
    """The batches of this rank."""
    return batches(seed, dist.get_rank(group), count, model)


def backward(model: nn.Module, batch: Batch, *args: Any) -> None:
    """One backward pass."""
    mse_loss(model(batch[0], *args), batch[1]).backward()


def values(model: nn.Module) -> Values:
    """A copy of the parameters, by their own names."""
    found = model.module if isinstance(model, DDP) else model
    return {name: param.detach().clone() for name, param in found.named_parameters()}


def whole_state(optimizer: Optimizer) -> dict[str, Any]:
    """The whole state, on every rank."""
    if not isinstance(optimizer, ShardedOptimizer):
        return optimizer.state_dict()
    for to in range(optimizer.world_size):
        optimizer.consolidate_state_dict(to=to)
        if to == optimizer.rank:
            found = optimizer.state_dict()
    return found


def without_masters(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict as an optimizer has it that keeps no masters."""
    entries = {key: {name: x for name, x in entry.items() if name != "master"} for key, entry in state["state"].items()}
    assert entries != state["state"], "no masters"
    return {**state, "state": entries}


def unnamed(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict without the names of parameters."""
    groups = [{key: value for key, value in group.items() if key != "param_names"} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def gap(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest difference between tensors of one name, relative to the largest element of theirs."""
    assert list(ours) == list(theirs)
    found = [_gap(ours[name], theirs[name]) for name in ours if theirs[name].numel()]
    return torch.tensor(found, dtype=torch.float64).max().item()


def _gap(a: Tensor, b: Tensor) -> float:
    wide = torch.complex128 if b.is_complex() else torch.float64
    most = b.detach().to(wide).abs().max().item() or 1.0
    return (a.detach().to(wide) - b.detach().to(wide)).abs().max().item() / most


def sum_in_rank_order(group: ProcessGroup, params: Iterable[Tensor]) -> None:
    """Replace local gradients by their mean over the ranks, each scaled first, added in the order of the ranks."""
    grads = [param.grad for param in params if param.grad is not None]
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        _sum_in_rank_order(group, [grad for grad in grads if grad.dtype == dtype])


def _sum_in_rank_order(group: ProcessGroup, grads: list[Tensor]) -> None:
    world = dist.get_world_size(group)
    mine = torch.cat([grad.reshape(-1) for grad in grads]) * (1.0 / world)
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine, group=group)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    for grad, found in zip(grads, total.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(found.view(grad.shape))


# Two sides of a comparison.

WAYS = ("bare scatter", "bare all", "wrapped scatter", "wrapped all")
# The optimizer gets the bare module, which is in DDP already, or is put into it afterwards.
FOUND = ("inner scatter", "inner all", "later scatter", "later all")
SCATTERED = [way for way in WAYS if "scatter" in way]
Loop = Callable[[nn.Module, Any, list[Batch]], object]


@dataclass(frozen=True)
class Contest:
    """The same training with plain DDP and a plain optimizer, and in several ways with ours."""

    build: Callable[[], nn.Module] = build
    kind: Callable[..., Optimizer] = AdamW
    options: dict[str, Any] = field(default_factory=lambda: dict(OPTIONS))
    ddp: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    groups: Callable[[nn.Module], Any] = lambda model: list(model.named_parameters())
    ways: Sequence[str] = WAYS
    batches: str = "mlp"
    close: float = 0.0  # how far apart the two may be, relatively; zero means equal in every bit

    def plain(self, group: ProcessGroup) -> tuple[DDP, Optimizer]:
        """Plain DDP and the plain optimizer."""
        model = self.build()
        return in_ddp(group, model, **self.ddp), self.kind(self.groups(model), **self.options)

    def sharded(self, group: ProcessGroup, way: str) -> tuple[nn.Module, ShardedOptimizer]:
        """The same model with our optimizer."""
        bare, when = self.build(), way.split()[0]
        model = in_ddp(group, bare, **self.ddp) if when in ("wrapped", "inner") else bare
        options = {"bucket_mb": SMALL_BUCKETS, "reduction": way.split()[1], **self.ours, **self.options}
        given = model if when == "wrapped" else bare
        optimizer = ShardedOptimizer(given, self.kind, self.groups(bare), process_group=group, **options)
        return in_ddp(group, bare, **self.ddp) if when == "later" else model, optimizer

    def run(self, group: ProcessGroup, loop: Loop, steps: int = 4, with_state: bool = True) -> None:
        """Run `loop(model, optimizer, batches)` for all, and compare what it returns, the parameters and the state."""
        data = series(group, steps, self.batches)
        plain = self.plain(group)
        expected = loop(*plain, data)
        start = values(self.build())
        assert not all(torch.equal(value, start[name]) for name, value in values(plain[0]).items()), "nothing happens"
        for way in self.ways:
            ours = self.sharded(group, way)
            found = loop(*ours, data)
            ours[1].synchronize()
            self._compare(way, values(ours[0]), values(plain[0]))
            assert self.close or found == expected, f"{way}: {found} and {expected}"
            if with_state and not self.close:
                assert_same_state_dict(whole_state(ours[1]), plain[1].state_dict())

    def _compare(self, way: str, ours: Values, plain: Values) -> None:
        try:
            if self.close:
                assert gap(ours, plain) < self.close, f"{gap(ours, plain)} apart"
            else:
                assert_same_bits(ours, plain)
        except AssertionError as error:
            raise AssertionError(f"{way}: {error}") from None


def no_sync(model: nn.Module, optimizer: Optimizer) -> AbstractContextManager[None]:
    """Suspend the sum of gradients, in DDP or in our optimizer."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.no_sync()
    assert isinstance(model, DDP)
    return model.no_sync()


class Ordered:
    """A bare model and a plain optimizer, which sees gradients that were summed in the order of the ranks."""

    def __init__(
        self, group: ProcessGroup, model: nn.Module | None = None, make: Callable[..., Optimizer] | None = None
    ) -> None:
        self.group, self.model = group, build() if model is None else model
        named = list(self.model.named_parameters())
        self.optimizer = AdamW(named, **OPTIONS) if make is None else make(named)

    def train(self, batch: Batch) -> None:
        """One step."""
        self.optimizer.zero_grad()
        backward(self.model, batch)
        sum_in_rank_order(self.group, self.model.parameters())
        self.optimizer.step()
