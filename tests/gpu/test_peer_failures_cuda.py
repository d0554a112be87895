"""A rank on NCCL fails while the others go on: they stop with its words, and not in NCCL's time-out."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import SGD

from tests.helpers.cuda_training import DEVICE, SMALL_BUCKETS, nccl_group
from tests.helpers.pool import run_fresh
from zerostep import ShardedOptimizer, ZeroRedundancyOptimizer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
WAYS = ["zero", "bare step", "bare forward", "ddp all"]


class Failing(SGD):
    """Fails while `trouble` is set."""

    trouble = False

    def step(self, closure: Any = None) -> Any:
        if self.trouble:
            raise ArithmeticError("a bad day")
        return super().step(closure)


def _built(group: ProcessGroup, way: str) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(48, 48) for _ in range(6)]).to(DEVICE)
    kind, *words = way.split()
    model = module if kind == "bare" else DDP(module, process_group=group, device_ids=[0])
    if kind == "zero":
        zero = ZeroRedundancyOptimizer(module.parameters(), Failing, group, lr=0.01)
        return model, zero, zero.optim
    settings: dict[str, Any] = {"reduction": "all"} if "all" in words else {"gather": words[0]}
    found = ShardedOptimizer(model, Failing, process_group=group, bucket_mb=SMALL_BUCKETS, lr=0.01, **settings)
    return model, found, found._inners.all[0]


def _train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 48, device=DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()
        torch.cuda.synchronize()


def _one_fails(group: ProcessGroup, way: str) -> str:
    model, optimizer, inner = _built(nccl_group(group), way)
    _train(model, optimizer, 2)
    inner.trouble = dist.get_rank(group) == 1
    with pytest.raises((RuntimeError, ArithmeticError)) as caught:
        _train(model, optimizer, 20)
    text = str(caught.value)
    with pytest.raises(RuntimeError, match="load the last checkpoint"):
        optimizer.consolidate_state_dict(to=0)
    dist.barrier(group)  # over Gloo: the one that has failed lives on until the other has stopped
    return text


@pytest.mark.parametrize("way", WAYS)
def test_the_others_stop_with_the_words_of_the_one_that_failed(way: str) -> None:
    outcomes = run_fresh(_one_fails, 2, way, deadline=120)
    assert [outcome.error for outcome in outcomes] == [None, None]
    first, second = (outcome.result for outcome in outcomes)
    assert "a bad day" in second
    assert "rank 1" in first and "failed" in first
