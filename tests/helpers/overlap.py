"""Training in overlap mode and with plain DDP, for side-by-side comparison."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import AdamW, Optimizer

from tests.helpers.reference import Batch, assert_same_bits, batches, build
from zerostep import ZeroRedundancyOptimizer, hook_with_zero_step, hook_with_zero_step_interleaved

Hook = Callable[[Any, GradBucket], Future[Tensor]]
Values = dict[str, Tensor]

HOOKS = {"sequential": hook_with_zero_step, "interleaved": hook_with_zero_step_interleaved}
EACH_HOOK = pytest.mark.parametrize("hook", HOOKS)
EACH_GRADIENT_MODE = pytest.mark.parametrize("views", [False, True], ids=["copied", "views"])
OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


def in_ddp(group: ProcessGroup, model: nn.Module | None = None, **options: Any) -> DDP:
    """The model in DDP, with small buckets."""
    return DDP(build() if model is None else model, process_group=group, **{"bucket_cap_mb": 0.0003, **options})


def plain_optimizer(ddp: DDP, kind: type[Optimizer] = AdamW, **options: Any) -> Optimizer:
    """A plain optimizer behind the plain all-reduce hook."""
    ddp.register_comm_hook(ddp.process_group, allreduce_hook)
    return kind(ddp.parameters(), **(options or OPTIONS))


def overlapped(
    ddp: DDP, hook: str, kind: type[Optimizer] = AdamW, wrapped: Hook = allreduce_hook, **options: Any
) -> ZeroRedundancyOptimizer:
    """Our optimizer in overlap mode, behind one of `HOOKS`."""
    zero = ZeroRedundancyOptimizer(
        ddp.parameters(), kind, ddp.process_group, overlap_with_ddp=True, **(options or OPTIONS)
    )
    ddp.register_comm_hook(ddp.process_group, HOOKS[hook](wrapped, ddp, zero, shard_buckets=True))
    return zero


def backward(ddp: DDP, batch: Batch, *args: Any) -> None:
    mse_loss(ddp(batch[0], *args), batch[1]).backward()


def train(ddp: DDP, zero: Optimizer, series: Iterable[Batch]) -> None:
    """A step for each batch; ours has stepped inside backward already."""
    for batch in series:
        zero.zero_grad()
        backward(ddp, batch)
        if not isinstance(zero, ZeroRedundancyOptimizer) or not zero._overlap_with_ddp:
            zero.step()


def rank_batches(group: ProcessGroup, count: int) -> list[Batch]:
    """The batches of this rank."""
    return batches(5, dist.get_rank(group), count)


def values_of(ddp: DDP) -> Values:
    return {name: param.detach().clone() for name, param in ddp.named_parameters()}


def gradients_of(ddp: DDP) -> Values:
    return {name: param.grad.clone() for name, param in ddp.named_parameters() if param.grad is not None}


def assert_same(ours: DDP, plain: DDP) -> None:
    assert_same_bits(ours.named_parameters(), plain.named_parameters())
    assert_same_bits(gradients_of(ours), gradients_of(plain))


def state_on_every_rank(optimizer: Optimizer) -> dict[str, Any]:
    """The whole state, on every rank."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer.state_dict()
    for to in range(optimizer.world_size):
        optimizer.consolidate_state_dict(to=to)
        if to == optimizer.rank:
            found = optimizer.state_dict()
    return found


def assert_equal_on_all_ranks(results: list[Values]) -> None:
    assert len(results) > 1
    for other in results[1:]:
        assert_same_bits(other, results[0])


@contextmanager
def logged_warnings() -> Iterator[list[str]]:
    """The warnings that the library logs inside."""
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zerostep").addHandler(handler)
    yield found
    logging.getLogger("zerostep").removeHandler(handler)


class Branches(nn.Module):
    """A trunk and three branches, of which each forward pass says which it takes."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.trunk = nn.Embedding(13, 6)
            self.branches = nn.ModuleDict({name: nn.Linear(6, 3) for name in "abc"})

    def forward(self, words: Tensor, taken: str) -> Tensor:
        """The sum of the branches taken."""
        hidden = self.trunk(words).mean(1)
        total: Tensor = hidden[:, :3].clone()
        for name in taken:
            total = total + self.branches[name](hidden)
        return total
